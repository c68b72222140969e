"""The log of one span in scalars: its tip, how an entry advances it, and the limits derived from it."""
