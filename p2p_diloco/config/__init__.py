"""What all peers agree on, what is private to a machine, and how both are written down: files, invites, keys."""
