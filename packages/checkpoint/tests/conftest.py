"""Fixtures; the kit's silence transformers before it is imported."""

from __future__ import annotations

import multiprocessing

import pytest

from stages_kit.fixtures import _no_deprecated_call_of_transformers, _one_thread  # noqa: F401 -- fixtures


@pytest.fixture(scope="session")
def context():
    """Processes are forked by a server that has imported what runs in them, torch with it: seconds of each."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["packages.checkpoint.tests.test_checkpoint_lock"])
    return made


def pytest_configure(config):
    """Ranks are forked with the model that most tests use: its import takes seconds."""
    config.addinivalue_line("ranks_preload", "transformers.models.llama.modeling_llama")
