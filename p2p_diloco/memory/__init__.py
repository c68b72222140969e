"""Memory for long vectors: used again, given back, laid out by rule."""
