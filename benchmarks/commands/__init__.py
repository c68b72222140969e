"""The benchmark commands: options in, tables and figures out."""
