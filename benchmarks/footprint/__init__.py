"""The memory of a peer, beside that of the same training alone."""
