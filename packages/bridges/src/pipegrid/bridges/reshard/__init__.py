"""The reshard plan: which rank sends which box of a tensor to which rank. Pure; no torch."""
