"""One line: what a run will ask of it, what it carries, and what follows for this peer's part in averaging."""
