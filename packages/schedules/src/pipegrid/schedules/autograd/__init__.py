"""Backward in two halves, and what it needs of torch's autograd."""
