"""What a peer holds in memory, beside the same training alone."""
