"""Runs a verified plan on real stages."""
