"""Fixtures of several files."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest

from .kit import warm_python

# Forked ranks find their function by name.
sys.path.insert(0, str(Path(__file__).parents[1]))

# What they run; and pytest, of which some of these take parts.
JOBS = ("restart", "survive", "survive_models", "survive_handover", "survive_bridge")
PRELOAD = ("pytest", "torch._dynamo", *(f"integration_tests.{name}_ranks" for name in JOBS))


@pytest.fixture(scope="session")
def context():
    """Ranks are forked by a server that has imported their jobs, and what an optimizer imports: seconds of each rank.

    A process has one such server, so it has the jobs of all files.
    """
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(PRELOAD))
    return made


@pytest.fixture(scope="session")
def warm_client(tmp_path_factory, pytestconfig):
    """An interpreter that has imported torch already, and what the ranks of the pool are forked with."""
    modules = ["torch", *(name for name in pytestconfig.getini("ranks_preload") if name in sys.modules)]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}  # read at an import
    server, client = warm_python.start(tmp_path_factory.mktemp("warm"), modules, **quiet)
    with server:
        yield client
        server.stdin.close()


@pytest.fixture
def warm_ranks(warm_client, monkeypatch):
    """In this test torchrun starts ranks that have imported torch already."""
    monkeypatch.setenv("PYTHON_EXEC", str(warm_client))


@pytest.fixture
def device(ranks, monkeypatch):
    """The device of the fake NCCL; its streams stand for those of CUDA."""
    from pipegrid.transport import streams

    monkeypatch.setattr(streams, "cuda", ranks.fake_device.streams)
    monkeypatch.setattr(streams, "types", {"cpu"})
    return ranks.fake_device
