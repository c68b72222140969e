"""The rules: values and state machines without clock, randomness or I/O."""
