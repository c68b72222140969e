"""One span's log in scalars: where it stands, what an entry adds to it, and the limits that follow from that."""
