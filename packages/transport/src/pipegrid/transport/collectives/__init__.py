"""Collectives beside the lanes: waited for up to a deadline, and gathers."""
