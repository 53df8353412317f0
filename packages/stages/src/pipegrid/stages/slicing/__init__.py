"""Stages that run a microbatch in slices of its sequence: what is cut, and the keys and values between them."""
