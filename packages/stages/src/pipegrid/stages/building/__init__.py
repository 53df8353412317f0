"""How the parameters of a stage come to be: by the model's own code, from a checkpoint, or empty."""
