"""Memory for long vectors: slabs that are reused, and the heap settings of a peer's process."""
