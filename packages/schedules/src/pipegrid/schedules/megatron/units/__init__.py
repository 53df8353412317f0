"""Microbatches by home replica, where replicas differ: their numbers, their data, and routes that ranks agree on."""
