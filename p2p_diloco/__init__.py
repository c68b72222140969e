"""Peer-to-peer decentralized trainer: islands that never wait, no server in the middle, the same bytes everywhere."""
