"""What the tests of this package share: no network, one thread, quiet transformers."""

from __future__ import annotations

import multiprocessing
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def context():
    """Processes are forked by a server that has imported what runs in them, torch with it: seconds of each."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(
        [f"packages.training.tests.test_training_{name}" for name in ("checkpoint_lock", "restart")]
    )
    return made


def pytest_configure(config):
    """Ranks are forked with the model that most tests use: its import takes seconds."""
    config.addinivalue_line("ranks_preload", "transformers.models.llama.modeling_llama")
