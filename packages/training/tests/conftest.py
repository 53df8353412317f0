"""What the tests of this package share: no network, one thread, quiet transformers, and no call that it will drop."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch


class Deprecations(logging.Handler):
    """Raises where transformers logs that a call is deprecated, as its other deprecations raise by `filterwarnings`."""

    def emit(self, record):
        if "deprecated" in record.getMessage():
            raise DeprecationWarning(record.getMessage())


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_deprecated_call_of_transformers():
    """In ranks as well. A module of tests imports transformers at its head: the import sets up the logger."""
    if "transformers" not in sys.modules:
        yield
        return
    logger = logging.getLogger("transformers")
    level, handlers = logger.level, logger.handlers
    logger.setLevel(logging.WARNING)
    logger.handlers = [Deprecations()]
    yield
    logger.handlers = handlers
    logger.setLevel(level)


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
