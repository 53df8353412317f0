"""The named schedules under one roof: what the command line, `compare` and `greedy` choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from attrs import frozen

from pipegrid.schedules.arguments import require, require_integer
from pipegrid.schedules.errors import PlanError
from pipegrid.schedules.generators import (
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    u_shape,
    v_half,
    v_min,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from pipegrid.schedules.plan.plan import Plan


@frozen
class Schedule:
    """A named schedule of a chain, and the chunks it comes in.

    ``make(positions, microbatches, chunks, stages)``: ``stages`` counts where any number of chunks will do
    (the last round may then leave positions out). ``chunks`` is the number per position (of a U, on its first),
    or None for any.
    ``trains`` is False for forwards alone.
    """

    name: str
    make: Callable[[int, int, int, int | None], Plan]
    chunks: int | None = None
    trains: bool = True

    def plan(
        self,
        num_positions: int,
        num_microbatches: int,
        num_chunks: int | None = None,
        *,
        num_stages: int | None = None,
    ) -> Plan:
        """The schedule's plan of computes; without ``num_chunks``, its own number (2 where any will do).

        Raises:
            PlanError: a number of chunks that the schedule does not come in, or a size below 1.
        """
        if num_chunks is None:
            num_chunks = 2 if self.chunks is None else self.chunks
        require_integer("num_chunks", num_chunks, error=PlanError)
        if self.chunks is not None and num_chunks != self.chunks:
            raise PlanError(
                f"{self.name} has {self.chunks} chunk{'s' if self.chunks > 1 else ''} per position, not "
                f"{num_chunks}; leave the number out, or choose interleaved_1f1b or looped_bfs"
            )
        return self.make(num_positions, num_microbatches, num_chunks, num_stages)


_ALL = (
    Schedule("gpipe", lambda p, m, *_: gpipe(p, m), 1),
    Schedule("1f1b", lambda p, m, *_: one_f_one_b(p, m), 1),
    Schedule("interleaved_1f1b", lambda p, m, v, s: interleaved_1f1b(p, m, num_chunks=v, num_stages=s)),
    Schedule("looped_bfs", lambda p, m, v, s: looped_bfs(p, m, num_chunks=v, num_stages=s)),
    Schedule("zero_bubble_h1", lambda p, m, *_: zero_bubble_h1(p, m), 1),
    Schedule("zero_bubble_h2", lambda p, m, *_: zero_bubble_h2(p, m), 1),
    Schedule("zero_bubble_v", lambda p, m, *_: zero_bubble_v(p, m), 2),
    Schedule("v_half", lambda p, m, *_: v_half(p, m), 2),
    Schedule("v_min", lambda p, m, *_: v_min(p, m), 2),
    Schedule("dualpipe_v", lambda p, m, *_: dualpipe_v(p, m), 2),
    Schedule("u_shape", lambda p, m, *_: u_shape(p, m), 2),
    Schedule("forward_only", lambda p, m, v, s: forward_only(p, m, num_chunks=v, num_stages=s), trains=False),
)

SCHEDULES: Mapping[str, Schedule] = MappingProxyType({schedule.name: schedule for schedule in _ALL})
"""Every named schedule of a chain, by name."""


def find_schedule(name: str, num_chunks: int | None = None) -> Schedule:
    """The schedule called ``name``; dashes and capitals do not matter, and ``one_f_one_b`` is ``1f1b``.

    With more than one chunk asked for, ``1f1b`` is ``interleaved_1f1b``: 1F1B in chunks is what that is.

    Raises:
        PlanError: no schedule is called that; the names are listed.
    """
    require("name", name, str, f"the schedules are {', '.join(SCHEDULES)}", error=PlanError)
    if num_chunks is not None:
        require_integer("num_chunks", num_chunks, error=PlanError)
    wanted = name.lower().replace("-", "_")
    wanted = {"one_f_one_b": "1f1b", "interleaved": "interleaved_1f1b"}.get(wanted, wanted)
    if wanted not in SCHEDULES:
        raise PlanError(f"there is no schedule {name!r}; the schedules are {', '.join(SCHEDULES)}")
    if wanted == "1f1b" and num_chunks is not None and num_chunks > 1:
        wanted = "interleaved_1f1b"
    return SCHEDULES[wanted]
