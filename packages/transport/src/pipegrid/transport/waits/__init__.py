"""How this process waits for works and ends them: one lock around polls, and aborts of groups."""
