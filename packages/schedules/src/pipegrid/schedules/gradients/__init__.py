"""Gradients beside the schedule: reduction, norms, tied parameters, loss scale."""
