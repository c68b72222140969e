"""The chaos benchmark: how much of a run's training is kept while its peers fail."""
