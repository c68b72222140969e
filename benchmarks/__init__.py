"""Measurements: side by side, in one interleaved run, medians with their spread."""
