"""A group of the fake in the form from which torch splits new groups."""

from __future__ import annotations

from typing import Any

from pipegrid.fake_nccl.torch_compat import SPLITS_BACKENDS, BackendBase


class SplitSource(BackendBase):  # type: ignore[misc]  # torch's stubs have no such class
    """A backend around a group: torch 2.15 splits backends, and the groups of the fake are process groups."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    @property
    def supports_splitting(self) -> bool:
        """Whether new groups are split from this one."""
        return bool(self._group.supports_splitting)

    def perform_nocolor_split(self, device: Any) -> None:
        """Take part in a split as a rank that the new group leaves out."""
        self._group.perform_nocolor_split(device)

    def eager_connect_single_device(self, device: Any) -> None:
        """Connect before the first use."""
        self._group.eager_connect_single_device(device)


def split_source(group: Any) -> Any:
    """The object that torch asks for the splits of ``group``: a `SplitSource`, or the group itself."""
    return SplitSource(group) if SPLITS_BACKENDS else group
