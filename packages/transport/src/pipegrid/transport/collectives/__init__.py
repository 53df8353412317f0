"""Collectives beside the lanes: gathers, and waits with a deadline."""
