"""The training state of a rank, under the names of the whole model."""
