"""Catching up and repairing differences: donors, majorities, transfers, comparisons."""
