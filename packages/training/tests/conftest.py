"""What the tests of this package share: no network, one thread, quiet transformers."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def pytest_configure(config):
    """Ranks are forked with the model that most tests use: its import takes seconds."""
    config.addinivalue_line("ranks_preload", "transformers.models.llama.modeling_llama")
