"""Bytes between peers: links, identities, the directory; over libp2p or in memory."""
