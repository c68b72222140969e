"""The application: the command line, and the training of language models on texts. The library imports none of it."""
