"""A run that was recorded, made again in one process."""
