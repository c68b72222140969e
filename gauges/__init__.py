"""Measures of the code itself: its size and shape, the ways through it, and how many mistakes its tests find."""
