"""The making of a stage's parameters: by the model's own code, from a checkpoint, or empty."""
