"""What a pytest item says of itself, the same in the pytest process and on every rank."""

from __future__ import annotations

import pytest

from pipegrid.testing.faults import Fault


def name_in_file(item: pytest.Item) -> str:
    """The item's name below its file, classes and parameters included.

    A whole node id would not do: for files outside the root directory it depends on what else was collected.
    """
    chain = item.listchain()
    inside = [node for node in chain if not isinstance(node, pytest.Session | pytest.Directory | pytest.File)]
    return "::".join(node.name for node in inside)


def faults_of(item: pytest.Item) -> list[Fault]:
    """The faults that the test's ``fault`` marks plan, the innermost mark's first.

    Raises:
        FaultError: a mark that plans no possible fault.
    """
    return [Fault(*mark.args, **mark.kwargs) for mark in item.iter_markers("fault")]
