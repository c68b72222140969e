"""`python -m release`: build the archives of a release, check them, and try them out in empty environments."""
