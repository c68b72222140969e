"""Planning a run: its cost, the length of its rounds, the time of an inner step on this machine."""
