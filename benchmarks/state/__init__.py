"""The bench of joining: the whole state, from many donors, over the real transport."""
