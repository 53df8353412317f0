"""`Ranks`, the value of the `ranks` fixture: one rank's view of its test."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import define, evolve, field

from pipegrid.testing.faults import Fault, InjectedFault, check_rank
from pipegrid.testing.hosts import set_wire
from pipegrid.testing.messages import Channel, FaultFired, FaultPlanned, PositionReport
from pipegrid.testing.wire import Wire

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from pipegrid.fake_nccl import FakeDevice


@define(eq=False, repr=False)
class Ranks:
    """One rank's view of the test that runs on all of them.

    Attributes:
        rank: this process's rank in the default group, from 0.
        world_size: the number of ranks.
        backend: ``gloo``, ``nccl``, ``fake_nccl`` or ``staged`` (CUDA tensors over gloo).
        device: of this rank's tensors: ``cpu``, or GPU ``rank % device_count``.
        deadline: seconds that the test has.
        strict_sends: the ``--strict-sends`` setting; the code under test waits for each batch of sends before the next
            action, so that a wrong order hangs on gloo as on GPUs.
        host: 0, or with ``hosts=2`` 0 on host a and 1 on host b.
        shared_path: an empty directory that all ranks of this test share.
        store: a ``torch.distributed`` store for the test's own keys, apart from the default group's; a file, which
            ranks on both hosts reach whatever the wire does.
        fake_device: with ``fake_nccl``, the fake GPU: launches in order, violations, entries that have not ended.

    Examples:
        >>> import pytest
        >>> @pytest.mark.ranks(4)
        ... def test_every_rank_has_a_device(ranks: Ranks) -> None:
        ...     assert ranks.world_size == 4 and ranks.device.type == "cpu"
    """

    rank: int
    world_size: int
    backend: str
    device: torch.device
    deadline: float
    strict_sends: bool
    host: int
    shared_path: Path
    store: Store
    fake_device: FakeDevice | None
    _channel: Channel = field(alias="channel")
    _faults: list[Fault] = field(alias="faults", factory=list)
    _reached: Counter[str] = field(init=False, factory=Counter)
    _barriers: int = field(init=False, default=0)
    _began: float = field(init=False, factory=time.monotonic)

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.world_size}, {self.backend}>"

    def barrier(self) -> None:
        """Wait for every rank, through the store: no process group is used, so none needs to work."""
        key = f"barrier/{self._barriers}"
        self._barriers += 1
        if self.store.add(f"{key}/arrived", 1) == self.world_size:
            self.store.set(f"{key}/open", "1")
        # The pytest process enforces the deadline; the store's own limit only has to be later.
        self.store.wait([f"{key}/open"], timedelta(seconds=self.deadline + 60))

    def report_position(self, position: object) -> None:
        """Report this rank's position; a failure or a passed deadline prints the last one of each rank."""
        self._channel.send(PositionReport(text=str(position)))

    def reach(self, point: object) -> None:
        """Report ``point`` as this rank's position, and carry out the faults planned there.

        Pass it as the hook that runs before each action: ``before=ranks.reach``.

        Raises:
            InjectedFault: a ``raise`` fault was planned here.
        """
        text = str(point)
        self.report_position(text)
        if self.fake_device is not None:
            self.fake_device.mark(text)
        nth = self._reached[text]
        self._reached[text] += 1
        elapsed = time.monotonic() - self._began
        for fault in list(self._faults):
            if (fault.at == text and fault.nth == nth) or (fault.after is not None and elapsed >= fault.after):
                self._faults.remove(fault)
                self._channel.send(FaultFired(fault))
                if fault.kind in ("kill", "stop"):
                    os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
                elif fault.seconds is not None:
                    time.sleep(fault.seconds)
                else:
                    raise InjectedFault(f"injected fault: {fault}, raised at {text!r}")

    def plan_fault(self, fault: Fault) -> None:
        """Plan ``fault`` from inside the test. Every rank may call it alike; the fault's own rank acts on it."""
        check_rank(fault, self.world_size)
        if fault.rank != self.rank:
            return
        if fault.after is None:
            self._faults.append(fault)
        elif fault.kind == "raise":
            # Counted from the test's start from here on.
            self._faults.append(evolve(fault, after=fault.after + time.monotonic() - self._began))
        else:
            self._channel.send(FaultPlanned(fault))

    def set_wire(self, wire: Wire, *, after: float = 0.0) -> None:
        """Change the wire between two hosts, ``after`` seconds from now; any rank may, also when the wire is cut.

        Returns when the change has happened, or is planned: `CUT`, ``Wire(to_a=False)``, and ``Wire()``, a whole one.
        """
        set_wire(self.shared_path.parent, wire, after)

    def pending_faults(self) -> tuple[Fault, ...]:
        """The faults of this rank that have not happened yet, those by time that the pytest process holds excepted."""
        return tuple(self._faults)
