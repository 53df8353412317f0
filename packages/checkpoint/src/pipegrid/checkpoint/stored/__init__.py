"""A checkpoint on the disk."""
