"""Goodput under failures: what a failure costs a swarm, and a model of large numbers of chips."""
