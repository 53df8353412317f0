"""For the tests of every package: settings of hypothesis, name lookups, and what the fake NCCL stands for."""

import os
from importlib.util import find_spec

import pytest

# The process of a TCPStore looks up the name of each that connects, and answers nobody meanwhile: where no name server
# answers, 5 s and more at a time, which is beyond deadlines of tests. Read by glibc; ranks and scripts inherit it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# The contract session has tests without properties, and no hypothesis.
if find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # Time never decides a test: on a fresh machine the first text drawn builds a table for a second. Half of the
    # examples that hypothesis draws by default are enough for one run of many; each night draws others.
    slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("pipegrid", slow, max_examples=50)
    settings.register_profile("night", slow, max_examples=200, derandomize=False)
    settings.load_profile("pipegrid")


@pytest.fixture(autouse=True)
def _fake_nccl2_is_known_as_nccl2(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake NCCL in mode nccl2 or lazy has that backend's record in the table, where its name is not known."""
    if request.node.get_closest_marker("ranks") is None or find_spec("pipegrid.transport") is None:
        return
    device = request.getfixturevalue("ranks").fake_device
    if device is not None and device.nccl2 is not None:
        import attrs

        from pipegrid.transport.backends import kinds

        like = kinds.kind_of("nccl-lazy" if device.lazy else "nccl2")
        kind = attrs.evolve(like, name="fake_nccl", devices=("cpu",), options=False)
        monkeypatch.setitem(kinds._KINDS, "fake_nccl", kind)  # noqa: SLF001 -- as torch made it
