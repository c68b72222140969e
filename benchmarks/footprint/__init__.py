"""Benchmark of a peer's memory, compared with the same training alone."""
