"""Training while exchanging: what an exchange costs the inner steps, beside what waits for it."""
