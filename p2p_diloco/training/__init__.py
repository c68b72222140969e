"""Model, optimiser and the inner loop that trains here; nothing in it knows of a swarm."""
