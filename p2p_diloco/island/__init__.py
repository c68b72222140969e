"""One island: the model, its text and the inner loop that trains here and never waits for the network."""
