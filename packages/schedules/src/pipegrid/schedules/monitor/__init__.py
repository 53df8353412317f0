"""Deadlines, plan positions and failures of all ranks, watched from a thread beside the step."""
