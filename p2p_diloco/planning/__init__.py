"""What is decided before a run begins: what it will need, how long its rounds are, how long a step takes here."""
