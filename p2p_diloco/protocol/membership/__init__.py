"""Who takes part: rosters and their ballots, heartbeats, reachability, and who owns which span."""
