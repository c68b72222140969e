"""What travels and what is kept: frames, records and messages, and the rules that any reader can check."""
