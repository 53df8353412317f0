"""A model into stages of least bottleneck: costs, limits, the exact cut, branch and bound."""
