"""The rules of the protocol: values and state machines without clock, randomness or I/O."""
