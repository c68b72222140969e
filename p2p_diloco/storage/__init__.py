"""Everything that a peer keeps on a disk."""
