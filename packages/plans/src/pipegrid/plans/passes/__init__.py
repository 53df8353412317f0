"""Passes from plan to plan: communication, gathered parameters, activations on the host."""
