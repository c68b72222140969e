"""What each benchmark does when it is asked for: options in, tables and figures out."""
