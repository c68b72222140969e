"""Swarms without machines: the real rules played over a heap of virtual time, every disaster replayable from its seed."""
