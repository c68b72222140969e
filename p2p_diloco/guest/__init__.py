"""A guest's limits: hours, traffic of a month, sensors of the machine, and what its owner asks for."""
