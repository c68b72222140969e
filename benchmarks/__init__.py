"""Benchmarks: systems measured in turn within one run, with medians and their spread."""
