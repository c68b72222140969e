"""The rounds of a run: contributions, means, entries, and how they reach all peers."""
