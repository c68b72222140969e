"""The view of a peer and of a swarm for people: status, events, live table, report."""
