"""Benchmark of joining: a newcomer fetches the whole state from several donors over the real transport."""
