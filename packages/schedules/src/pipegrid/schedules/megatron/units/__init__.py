"""Microbatches by home replica, where replicas differ: numbers, data, stages, routes that ranks agree on."""
