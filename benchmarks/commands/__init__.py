"""Benchmark commands: they take options, and print tables or write figures."""
