"""Process groups of the fake: the legacy backend, nccl2, and their end."""
