"""Membership: rosters and their ballots, heartbeats, reachability, and the owners of spans."""
