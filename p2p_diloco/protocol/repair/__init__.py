"""Catching up, and putting right what differs: donors, majorities, transfers, comparisons."""
