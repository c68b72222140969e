"""What people see of a peer and of a swarm: status, events, live table, report."""
