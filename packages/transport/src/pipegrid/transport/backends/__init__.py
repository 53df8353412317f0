"""What differs between backends: how a transfer starts and how its end is learned."""
