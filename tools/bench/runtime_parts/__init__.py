"""The parts of `tools/bench/runtime.py`."""
