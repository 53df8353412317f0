"""The values that cross the boundaries of a cut, from one traced forward of the whole model."""
