"""Plans for measured costs under a memory cap."""
