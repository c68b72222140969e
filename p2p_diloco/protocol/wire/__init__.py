"""Everything that travels and is kept: frames, records and messages, and the rules that any reader can check."""
