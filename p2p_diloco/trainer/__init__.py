"""One peer's story: the only place where network and training meet."""
