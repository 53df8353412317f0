"""Variable tensor parallelism: stages of one pipeline with different tensor-parallel sizes."""
