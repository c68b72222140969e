"""One peer, put together: the only place where network and training meet."""
