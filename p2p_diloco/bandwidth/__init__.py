"""Bandwidth of one peer: forecast, measured rate, and the share of averaging that follows from both."""
