"""All that peers send and store: frames, records and messages, and the rules that any reader can check."""
