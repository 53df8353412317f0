"""One event loop for all gloo groups of a set of lanes.

Torch gives every gloo group a device of its own, whose thread handles the group's connections. A stage has four
lanes or more, and a message would wake a thread here and one there; on one loop, what has come meanwhile is handled
in the same waking. Connections stay apart, so that one that is closed takes no other lane with it.

The only place of this package that touches private names of torch: a test pins them. Torch makes gloo groups
without options; a backend of another name, registered the public way, takes them.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

BACKEND = "gloo_on_one_loop"
# Torch's own variable: which network interfaces gloo uses.
_INTERFACES = "GLOO_SOCKET_IFNAME"
# Of each group's threads for collectives, which lanes have no use for; none is not possible.
_THREADS = 1


class Loop:
    """The devices that groups are made on; the options of `BACKEND`."""

    def __init__(self) -> None:
        gloo = dist.ProcessGroupGloo
        names = [name for name in os.environ.get(_INTERFACES, "").split(",") if name]
        made = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
        self._devices = made
        self._made: dict[str, Any] = {}

    def make_group(self, options: Any) -> Any:
        """What torch calls for a group of `BACKEND`."""
        chosen: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
        chosen._devices, chosen._threads, chosen._timeout = self._devices, _THREADS, options.timeout  # noqa: SLF001
        chosen.global_ranks_in_group, chosen.group_name = options.global_ranks_in_group, options.group_id
        backend = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, chosen)
        self._made[options.group_id] = backend
        return backend

    def take_backend(self, group: ProcessGroup) -> Any:
        """What is behind a group that was made here; once.

        Its ``send`` and ``recv`` are the group's, without torch's dispatcher in between, which has nothing to choose
        there and takes longer than all that a lane does itself.
        """
        return self._made.pop(group.group_name)


def one_loop() -> tuple[str, Loop]:
    """A backend's name and options for groups of lanes: gloo, on a loop that they share."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, lambda options, loop: loop.make_group(options), True, ["cpu"])
    return BACKEND, Loop()
