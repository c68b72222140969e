"""Vector work on one span: contribute, reduce, follow an entry, replace, serve."""
