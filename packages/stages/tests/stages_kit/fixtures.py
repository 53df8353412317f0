"""For tests with models of transformers: no network, one thread, quiet, and no call that it will drop."""

from __future__ import annotations

import logging
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
