"""Settings of hypothesis for the tests of every package."""

from importlib.util import find_spec

# The contract session has tests without properties, and no hypothesis.
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # Time never decides a test: on a fresh machine the first text drawn builds a table for a second.
    settings.register_profile("pipegrid", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("pipegrid")
