"""One span in vectors: contributed, averaged, followed, replaced and served, on the threads that do such work."""
