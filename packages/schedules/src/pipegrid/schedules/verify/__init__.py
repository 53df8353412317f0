"""The proof that a plan runs: every action once, dependencies met, lanes in order, no deadlock."""
