"""Texts as people have them: what is read, how it becomes tokens, and the files of its tokenizer."""
