"""Bandwidth of one peer: forecast, measured rate and the share that it sets (formula: `protocol/round/traffic.py`)."""
