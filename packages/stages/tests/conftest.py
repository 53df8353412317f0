"""Fixtures; the kit's silence transformers before it is imported."""

from __future__ import annotations

from stages_kit.fixtures import _no_deprecated_call_of_transformers, _one_thread  # noqa: F401 -- fixtures


def pytest_configure(config):
    """Ranks are forked with the model that most tests use: its import takes seconds."""
    config.addinivalue_line("ranks_preload", "transformers.models.llama.modeling_llama")
