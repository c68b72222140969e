"""Vectors to bytes and back: float32, bfloat16, int8, int4; same sizes, bytes and values on all machines."""
