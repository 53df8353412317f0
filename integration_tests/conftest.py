"""Fixtures of several files."""

from __future__ import annotations

import pytest


@pytest.fixture
def device(ranks, monkeypatch):
    """The device of the fake NCCL; its streams stand for those of CUDA."""
    from pipegrid.transport import streams

    monkeypatch.setattr(streams, "cuda", ranks.fake_device.streams)
    monkeypatch.setattr(streams, "types", {"cpu"})
    return ranks.fake_device
