"""The built-in training of a language model on a text."""
