"""A barrier of a group's members, at a store, before they create it: all pass, or all learn who is missing.

Backends disagree about a missing member (gloo waits and then names a store key; NCCL notices at the first
collective), hence a barrier of our own. It also agrees on the group's sequence number: the store counts how
often exactly these members have passed it, so ranks with different histories agree, and the count ends with the
world whose store it is. No torch.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from attrs import frozen

from pipegrid.topology.addresses import address_towards, server_of
from pipegrid.topology.bounded_calls import SilentStoreError, bounded, reason_to_give_up
from pipegrid.topology.errors import GroupCreationTimeoutError, GroupStoreError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOOK = 0.5  # seconds between two looks for a reason to give up
_SHOWN = 16  # ranks of a group that an error lists
_GRACE = 1.8  # seconds past the deadline in which a store must have answered; a FileStore takes one more than asked


@frozen
class Rendezvous:
    """The end of ``rank`` at the barrier of the members of group ``label``; ``timeout`` is the deadline of each."""

    store: Store
    ranks: Sequence[int]
    rank: int
    label: str
    timeout: timedelta

    def hosts(self, key: str, sequence: int) -> Iterator[tuple[str, str]]:
        """The names and addresses of the other members' hosts, from their arrival records under ``key``."""
        for other in self.ranks:
            if other != self.rank:
                record = f"{key}/{sequence}/arrived/{other}"
                name, address = json.loads(bounded(self.store.get, record, seconds=_GRACE, name="pipegrid-hosts"))
                yield str(name), str(address)

    @property
    def members(self) -> str:
        """The ranks, for errors."""
        return _abbreviated(self.ranks)

    def meet(self, key: str, *, step: str = "come") -> int:
        """Wait until all members have arrived; return how often they had passed the barrier ``key`` before.

        Four short store operations per member, whatever the size of the group. They run in a thread of their own: a
        store whose host has stopped answers no operation, and torch's timeouts do not end the call then. ``step`` is
        the verb of the error: what the missing ranks did not do.

        Raises:
            GroupCreationTimeoutError: some members did not arrive in time, which it names, or `giving_up` has a
                reason; this rank has withdrawn from the barrier then, so the same members can try again.
            GroupStoreError: the store did not answer.
        """
        limit = self.timeout.total_seconds() + _GRACE
        name, why = f"pipegrid meeting {self.label}", reason_to_give_up()
        try:
            return bounded(self._meet, key, step, why, seconds=limit, name=name, patience=0.0)
        except SilentStoreError as error:
            raise GroupStoreError(
                f"rank {self.rank} waited {limit:g} s to create group {self.label!r} of ranks {self.members}, and the "
                "store of the default process group did not answer"
            ) from error
        except GroupCreationTimeoutError:
            raise
        except BaseException as error:
            error.add_note(f"rank {self.rank} was creating group {self.label!r} of ranks {self.members}")
            raise

    def _meet(self, key: str, step: str, why: Callable[[], str]) -> int:
        store, ranks, timeout = self.store, self.ranks, self.timeout
        sequence = store.add(f"{key}/sequence", 0)
        here = f"{key}/{sequence}"
        arrived = f"{here}/arrived/{self.rank}"
        # For `hosts`: the name of this host, and its address towards the store's host.
        store.set(arrived, json.dumps([socket.gethostname(), address_towards(server_of(store))]))
        if store.add(f"{here}/count", 1) == len(ranks):
            # Before any member goes on: the next barrier of these members must find the new number.
            store.add(f"{key}/sequence", 1)
            store.set(f"{here}/complete", "1")
            return sequence
        start = time.monotonic()
        try:
            _wait(store, f"{here}/complete", timeout, why)
        except RuntimeError as error:
            reason = why()
            # Stores differ in the error they raise at the deadline; an earlier one is about the store itself.
            if not reason and time.monotonic() - start < 0.9 * timeout.total_seconds():
                raise
            # The counter decides who was too late, so that either all members go on or none does.
            if store.add(f"{here}/count", -1) + 1 < len(ranks):
                absent = [other for other in ranks if not store.check([f"{here}/arrived/{other}"])]
                gone = [other for other in absent if store.check([f"{here}/gone/{other}"])]
                missing = [other for other in absent if other not in set(gone)]
                store.set(f"{here}/gone/{self.rank}", "1")
                store.delete_key(arrived)
                if reason:
                    raise GroupCreationTimeoutError(
                        f"rank {self.rank} gave up group {self.label!r} of ranks {self.members}: {reason}"
                    ) from error
                late = f"ranks {_abbreviated(gone)} came and gave up before"
                also = f" ({late})" if gone else ""
                fault = f"ranks {_abbreviated(missing)} did not {step}{also}" if missing else late
                raise GroupCreationTimeoutError(
                    f"rank {self.rank} waited {timeout.total_seconds():g} s to create group {self.label!r} of ranks "
                    f"{self.members}, but {fault}. Every member must create the group with the same label and "
                    "options, and all ranks must create their groups in creation_order"
                ) from error
            store.add(f"{here}/count", 1)
            store.wait([f"{here}/complete"], timeout)
        return sequence

    def not_connected(self, key: str) -> GroupCreationTimeoutError:
        """The error where all members arrived and not all connected; those that did are recorded under ``key``."""

        def look() -> list[int]:
            return [other for other in self.ranks if self.store.check([f"{key}/0/arrived/{other}"])]

        try:
            found = bounded(look, seconds=_GRACE, name=f"pipegrid meeting {self.label}", patience=0.0)
            said = f"ranks {_abbreviated(found)} have connected" if found else "none has connected"
        except RuntimeError:
            said = "the store does not answer"
        return GroupCreationTimeoutError(
            f"rank {self.rank} waited {self.timeout.total_seconds():g} s for the backend to connect group "
            f"{self.label!r} of ranks {self.members}; all of them had come, {said}. A rank that has died, or hangs in "
            "its driver, holds up the others there; look at the output of each"
        )


def _abbreviated(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"[{shown}]" if len(ranks) <= _SHOWN else f"[{shown}, ... {len(ranks)} in all]"


def _wait(store: Store, key: str, timeout: timedelta, why: Callable[[], str]) -> None:
    """Wait for a key, and look at ``why`` again and again where it may have a text."""
    end = time.monotonic() + timeout.total_seconds()
    while True:
        left, began = end - time.monotonic(), time.monotonic()
        turn = left if why is str else min(left, _LOOK)
        try:
            store.wait([key], timedelta(seconds=max(turn, 0.001)))
        except RuntimeError:
            if why() or turn >= left or time.monotonic() - began < 0.9 * turn:
                raise
        else:
            return
