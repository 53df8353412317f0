"""The control channel of two ranks: headers, the cause of an end, and the cut of the connection. Always on a CPU.

Facts of gloo with torch 2.11 to 2.15, pinned by `test_transport_torch_facts`: ``is_completed()`` of a transfer stays
False until ``wait()``; a second ``wait()`` blocks; a ``wait()`` that times out closes the connection of the pair, at
both ends and for all transfers; ``abort()`` and ``shutdown()`` wake no waiter; a send whose work is dropped is never
delivered; a message longer than the posted buffer ends the process, a shorter one arrives silently; a send is done when
its receive is posted, whatever its size.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
from attrs import define, field

Work = Any

_HEADER_BYTES = 512  # the last one tells that all have come
_LENGTH_BYTES = 4
_FIRST_BYTES = _HEADER_BYTES - _LENGTH_BYTES - 1
_NOTICE_BYTES = 2048
_NOTICE_SECONDS, _POLL_SECONDS = 0.05, 0.001
HEADER, _NOTICE, STEP, _REST, CONTROL_TAGS = 0, 1, 2, 3, 6  # STEP: what a rank runs; _REST: added to a first part's
_NEVER_SENT = 2**30  # a tag of no message
FOREVER = timedelta(days=36_500)
"""The bound of a wait that only the other side ends, as every wait of gloo has a bound and closes its pair past it.

A hundred years: gloo adds the bound to the date in nanoseconds, which 64 bits hold until the year 2262.
"""


def timedelta_of(seconds: float | None) -> timedelta:
    """A timeout for torch, which has none for "no timeout"."""
    return FOREVER if seconds is None else max(timedelta(seconds=seconds), timedelta(milliseconds=1))


def cut_connection(group: Any, peer: int) -> None:
    """Cut the gloo connection of ``group`` to its rank ``peer``, by the one thing that does: a wait that times out."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def cut_all_connections(group: Any) -> None:
    """Cut the gloo connections of ``group`` to all its ranks; the first cut closes the others as well."""
    for peer in range(group.size()):
        if peer != group.rank():
            cut_connection(group, peer)


@define(eq=False)
class PostedHeader:
    """The receive of the next header of a ``kind`` of lane ``index``, on ``wire``; it has any length."""

    wire: ControlWire
    index: int
    kind: int = HEADER
    _first: bytearray = field(init=False)
    _work: Work = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._first = bytearray(_HEADER_BYTES)
        self._work = self.wire.receive(self._first, self.index, self.kind)

    def look(self) -> bytes | None:
        """Its first part; None before that has come. Looks at memory only."""
        if not self._first[-1]:
            return None
        length = int.from_bytes(self._first[:_LENGTH_BYTES], "big")
        return bytes(self._first[_LENGTH_BYTES : _LENGTH_BYTES + min(length, _FIRST_BYTES)])

    def take(self, timeout: timedelta) -> bytes:
        """Wait for it; a RuntimeError where the connection is gone, or it did not come."""
        self._work.wait(timeout)
        length = int.from_bytes(self._first[:_LENGTH_BYTES], "big")
        data = bytes(self._first[_LENGTH_BYTES : _LENGTH_BYTES + min(length, _FIRST_BYTES)])
        if len(data) < length:
            rest = bytearray(length - len(data))
            self.wire.receive(rest, self.index, self.kind + _REST).wait(timeout)
            data += rest
        return data


@define(eq=False)
class ControlWire:
    """One end of a control channel."""

    group: Any  # moves headers and end notices; with gloo, payloads as well
    peer: int  # the other rank, as rank in the group
    _notice: Work = None
    _notice_buffer: bytearray = field(factory=lambda: bytearray(_NOTICE_BYTES))
    _watched: bool = False

    def send_header(self, data: bytes, index: int, kind: int = HEADER) -> list[Work]:
        """Start sending a header of lane ``index``; the works must be kept until it is read."""
        first = bytearray(len(data).to_bytes(_LENGTH_BYTES, "big") + data[:_FIRST_BYTES])
        first.extend(bytes(_HEADER_BYTES - 1 - len(first)) + b"\1")
        works = [self._send(first, index, kind)]
        if rest := data[_FIRST_BYTES:]:
            works.append(self._send(bytearray(rest), index, kind + _REST))
        return works

    def exchange(self, mine: bytes, index: int, timeout: timedelta) -> bytes:
        """Send ``mine``, of any length, to the other side and return its message."""
        sent = self.send_header(mine, index)
        theirs = PostedHeader(self, index).take(timeout)
        for work in sent:
            work.wait(timeout)
        return theirs

    def _send(self, data: bytearray, index: int, kind: int) -> Work:
        return self.group.send([torch.frombuffer(data, dtype=torch.uint8)], self.peer, index * CONTROL_TAGS + kind)

    def receive(self, data: bytearray, index: int, kind: int) -> Work:
        """Post the receive of ``data``: a part of a message of that ``kind``."""
        return self.group.recv([torch.frombuffer(data, dtype=torch.uint8)], self.peer, index * CONTROL_TAGS + kind)

    # ---- End notices: why the other side ended its lanes

    def expect_end_notice(self) -> None:
        """Post the receive of the other side's end notice. Once."""
        if self._notice is None:
            self._notice = self.receive(self._notice_buffer, 0, _NOTICE)

    def post_end_notice(self, kind: str, text: str) -> Work | None:
        """Start telling the other side the kind and the cause of an end; None where the connection is gone."""
        data = f"{kind}\n{text}".encode(errors="backslashreplace")[: _NOTICE_BYTES - 1]
        try:
            return self._send(bytearray(data.ljust(_NOTICE_BYTES - 1, b" ") + b"\n"), 0, _NOTICE)
        except RuntimeError:  # which tells the other side as well
            return None

    def has_end_notice(self) -> bool:
        """Whether an end notice has come. Looks at memory only."""
        return self._notice_buffer[-1] != 0

    def watch(self) -> None:
        """Hold this thread until an end notice comes; a RuntimeError where the connection was closed."""
        self._watched = True
        self._notice.wait(FOREVER)

    def end_notice(self) -> tuple[str, str] | None:
        """Kind and text of the other side's end notice; None where it has not come in a moment. Only on an end."""
        limit = time.monotonic() + _NOTICE_SECONDS
        # Not by a wait: one that times out would cut the connections to other members before they know the cause.
        while not self.has_end_notice() and not self._watched and time.monotonic() < limit:
            time.sleep(_POLL_SECONDS)
        if not self.has_end_notice():
            return None
        # Cut by bytes, so the last character may be incomplete.
        kind, _, text = bytes(self._notice_buffer).decode(errors="ignore").partition("\n")
        return kind, text.rstrip()

    def cut(self) -> None:
        """Cut the connection: every gloo transfer under way, here and on the other side, ends with an error."""
        cut_connection(self.group, self.peer)
