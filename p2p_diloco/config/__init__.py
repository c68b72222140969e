"""Configuration: the signed manifest of a run, the settings of a machine, run files, invites and keys."""
