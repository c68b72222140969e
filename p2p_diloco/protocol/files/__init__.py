"""Fetching a text that is named by its digest: which piece to ask of which peer. Pure."""
