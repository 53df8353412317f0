"""Waits of this process for works, and their ends: one lock around polls, and aborts of groups."""
