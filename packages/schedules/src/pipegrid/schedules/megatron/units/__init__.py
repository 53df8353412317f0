"""Microbatches by home replica, where replicas differ: their numbers, data and stages, and routes that ranks agree on."""
