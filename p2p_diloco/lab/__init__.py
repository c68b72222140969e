"""Swarms without machines: the real rules over a heap of virtual time, every disaster replayable from its seed."""
