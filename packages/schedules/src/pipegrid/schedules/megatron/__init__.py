"""The step functions with Megatron's names: build the plan, run it."""
