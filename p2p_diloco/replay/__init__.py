"""Replaying a recorded run in one process."""
