"""Detection of silent ranks, and whether they are all ranks of one host. No torch.

Each rank writes its place again every other second, though it has not changed. A rank that has waited for a quarter of
its deadline reads the places of all ranks, and notes by its own clock when each has changed last: clocks of several
hosts differ.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from pipegrid.monitor.control import Control, ControlStore
from pipegrid.topology.addresses import address_towards, is_here
from pipegrid.transport.collectives.differences import listed

HEARTBEAT_SECONDS = 2.0
_SILENT_SECONDS = 2.5 * HEARTBEAT_SECONDS
_PART = 4  # of the deadline, after which a rank that waits begins to listen


@frozen
class _Host:
    name: str
    address: str
    has_store: bool


@define(eq=False)
class LastSeen:
    """The last signs of life of the other ranks and of the control store, as one rank has read them."""

    control: Control  # the control store, whose calls have a short deadline
    server: str  # the host of the store, as its clients name it; empty where that is not known
    clock: Callable[[], float] = time.monotonic  # in seconds; tests move it
    _hosts: dict[int, _Host] = field(factory=dict, init=False)
    _changed: dict[int, tuple[bytes, float]] = field(factory=dict, init=False)  # since the rank waits
    _listened: float | None = field(default=None, init=False)
    _answered: float | None = field(default=None, init=False)
    _before: float = field(default=0.0, init=False)  # how long it had waited when it began to listen
    _silent: bool = field(default=False, init=False)  # the store

    def introduce(self, store: ControlStore) -> None:
        """Publish this rank's host. Called before its first step, with a ``store`` that may take its time."""
        own = [socket.gethostname(), address_towards(self.server), is_here(self.server)]
        store.set(f"host/{self.control.rank}", json.dumps(own))

    def answered(self) -> None:
        """Note that the store has answered; ask it once for the hosts of all ranks."""
        self._answered, self._silent = self.clock(), False
        if not self._hosts and len(said := self.control.read("host")) == len(self.control.ranks):
            self._hosts = {rank: _Host(*json.loads(text)) for rank, text in said.items()}

    def unanswered(self) -> None:
        """Note that the store has not answered."""
        self._silent = True

    def listen(self, waited: float, deadline: float | None) -> None:
        """Read the places of all ranks now and then, once this rank has ``waited`` for a part of its ``deadline``."""
        now = self.clock()
        if deadline is None or waited < deadline / _PART:
            self._changed.clear()  # what it has not read meanwhile is no silence
            self._listened = None
        elif self._listened is None or now - self._listened >= HEARTBEAT_SECONDS / 2:
            self._before = waited if self._listened is None else self._before
            self._listened = now
            for rank, text in self.control.read("position").items():
                if rank not in self._changed or self._changed[rank][0] != text:
                    self._changed[rank] = text, self.clock()

    def silence(self) -> str:
        """The silent hosts or ranks, and for how long, in words; empty where none is."""
        now = self.clock()
        if self._silent:
            return "" if self._answered is None else self._of_store(now - self._answered)
        silent = {rank: now - since for rank, (_, since) in self._changed.items() if rank != self.control.rank}
        silent = {rank: seconds for rank, seconds in silent.items() if seconds > _SILENT_SECONDS}
        if not silent:
            return ""
        whole = [host for host in dict.fromkeys(self._hosts.values()) if set(self._ranks_on(host)) <= set(silent)]
        parts = [f"{host.name}, {listed(self._ranks_on(host))}," for host in whole]
        alone = [(rank, host) for rank in sorted(silent) if (host := self._hosts.get(rank)) not in whole]
        parts += [f"rank {rank}{'' if host is None else f' on {host.name}'}" for rank, host in alone]
        long = max(seconds + self._age(rank) for rank, seconds in silent.items())
        where = "its network or the host" if whole else "its process was stopped, or has ended"
        return f"nothing heard of {' and '.join(parts)} for {long:.0f} s; {where}"

    def _of_store(self, seconds: float) -> str:
        found = [rank for rank, host in self._hosts.items() if host.has_store]
        if not found or self.control.rank in found:
            return f"the control store has not answered for {seconds:.0f} s; its process has stopped or ended"
        name = self._hosts[found[0]].name
        return (
            f"nothing heard of {name}, {listed(found)}, which has the control store, for {seconds:.0f} s; its network "
            "or the host, or the process of the store"
        )

    def _age(self, rank: int) -> float:
        """Seconds from the rank's last publication until this one began to read; 0 where clocks differ by more."""
        text, since = self._changed[rank]
        age = time.time() - float(json.loads(text)[1]) - (self.clock() - since)
        return age if 0 < age < self._before + 2 * HEARTBEAT_SECONDS else 0.0

    def _ranks_on(self, host: _Host) -> Sequence[int]:
        return [rank for rank, each in self._hosts.items() if each == host]
