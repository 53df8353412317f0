"""The package's face, and what it may import."""

import subprocess
import sys

import pytest

import pipegrid.testing


def test_public_names():
    assert pipegrid.testing.__all__ == ["CUT", "Fault", "InjectedFault", "Ranks", "Wire"]
    assert pipegrid.testing.Wire(to_a=False, to_b=False) == pipegrid.testing.CUT
    for name in ("Fault", "FaultError", "HostsError", "InjectedFault", "PoolError", "Ranks", "Wire"):
        assert getattr(pipegrid.testing, name).__name__ == name


def test_the_pytest_process_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import pipegrid.testing.plugin\n"
        "from pipegrid.testing import Fault, FaultError, InjectedFault, PoolError, Ranks\n"
        "print(Fault('kill', rank=1, at='F 0'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "kill on rank 1 at 'F 0'\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'pipegrid\.testing' has no attribute 'Rank'"):
        pipegrid.testing.Rank  # noqa: B018
