"""One peer from its start to its end: what joins a model and its training to a node."""
