"""Computes on positions as numbers: the problem, its network of passes, and what plays orders and patterns of it."""
