"""The table of named schedules, from which the command line, `compare` and `greedy` choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from pipegrid.core.fields import Count, checked_arguments, nearest, shown
from pipegrid.plans.errors import PlanError
from pipegrid.plans.generators.controllable_memory import v_half, v_min
from pipegrid.plans.generators.looped import forward_only, interleaved_1f1b, interleaved_zero_bubble, looped_bfs
from pipegrid.plans.generators.one_stage import gpipe, one_f_one_b, zero_bubble_h1, zero_bubble_h2
from pipegrid.plans.generators.sliced import seq1f1b, seq1f1b_interleaved, seq1f1b_zero_bubble
from pipegrid.plans.generators.u_shaped import u_shape
from pipegrid.plans.generators.v_shaped import dualpipe_v, zero_bubble_v
from pipegrid.plans.plan import Plan


@frozen
class Schedule:
    """A named schedule of a chain.

    ``function(num_positions, num_microbatches)`` makes its plan. ``chunks``: the stages per position that it is for (of
    a U, on its first position); None: any number, and the function takes ``num_chunks`` and ``num_stages``. ``trains``:
    False for forwards alone. ``sliced``: may cut microbatches along the sequence; the function takes ``num_slices``.
    ``pairs``: may run forwards and backwards together; the function takes ``overlap``.
    """

    name: str
    function: Callable[..., Plan]
    chunks: int | None
    source: str
    trains: bool = True
    sliced: bool = False
    pairs: bool = False

    @checked_arguments(PlanError)
    def plan(
        self,
        num_positions: int,
        num_microbatches: int,
        num_chunks: Count | None = None,
        *,
        num_stages: int | None = None,
        num_slices: Count | None = None,
        overlap: bool = False,
    ) -> Plan:
        """The schedule's plan of computes; ``num_chunks`` is by default its own (2 where any will do).

        ``num_stages`` may be smaller than positions x chunks: the last round then leaves positions out.
        """
        require_slices(self, num_slices or 1)
        if overlap and not self.pairs:
            paired = ", ".join(other.name for other in SCHEDULES.values() if other.pairs)
            raise PlanError(f"{self.name} has no pairs of a forward and a backward; these do: {paired}")
        options: dict[str, Any] = {"num_slices": num_slices or 1} if self.sliced else {}
        options |= {"overlap": True} if overlap else {}
        if self.chunks is None:
            options |= {"num_chunks": num_chunks or 2, "num_stages": num_stages}
            return self.function(num_positions, num_microbatches, **options)
        if num_chunks not in (None, self.chunks):
            raise PlanError(f"num_chunks is {num_chunks}; {self.name} has {self.chunks} per position")
        plan = self.function(num_positions, num_microbatches, **options)
        if num_stages not in (None, plan.num_stages):
            own = f"{self.name} has {plan.num_stages} on {num_positions} positions"
            raise PlanError(f"num_stages is {num_stages}; {own}")
        return plan


def require_slices(known: Schedule, num_slices: int) -> None:
    """Raise for slices in a schedule of whole microbatches."""
    if num_slices > 1 and not known.sliced:
        sliced = ", ".join(other.name for other in SCHEDULES.values() if other.sliced)
        raise PlanError(f"{known.name} does not cut microbatches into {num_slices} slices; these do: {sliced}")


_SEQ1F1B = "Sun et al. 2024"
_ALL = (
    Schedule("gpipe", gpipe, 1, "Huang et al. 2019, section 2.3"),
    Schedule("1f1b", one_f_one_b, 1, "Narayanan et al. 2021, section 2.2.1"),
    Schedule("interleaved_1f1b", interleaved_1f1b, None, "Narayanan et al. 2021, section 2.2.2", pairs=True),
    Schedule("interleaved_zero_bubble", interleaved_zero_bubble, None, "Qi et al. 2023, section 2.1, over chunks"),
    Schedule("looped_bfs", looped_bfs, None, "Lamy-Poirier 2023, section 4"),
    Schedule("zero_bubble_h1", zero_bubble_h1, 1, "Qi et al. 2023, section 2.1"),
    Schedule("zero_bubble_h2", zero_bubble_h2, 1, "Qi et al. 2023, section 2.2"),
    Schedule("zero_bubble_v", zero_bubble_v, 2, "Qi et al. 2023, section 6", pairs=True),
    Schedule("v_half", v_half, 2, "Qi et al. 2024, section 4"),
    Schedule("v_min", v_min, 2, "Qi et al. 2024, section 4"),
    Schedule("dualpipe_v", dualpipe_v, 2, "DeepSeek-AI 2024, section 3.2.1; Qi et al. 2025", pairs=True),
    Schedule("u_shape", u_shape, 2, "Vepakomma et al. 2018; the order is ours"),
    Schedule("seq1f1b", seq1f1b, 1, _SEQ1F1B, sliced=True),
    Schedule("seq1f1b_interleaved", seq1f1b_interleaved, None, _SEQ1F1B, sliced=True),
    Schedule("seq1f1b_zero_bubble", seq1f1b_zero_bubble, 1, f"{_SEQ1F1B}; Qi et al. 2023, section 2.1", sliced=True),
    Schedule("forward_only", forward_only, None, "the forwards of interleaved_1f1b", trains=False),
)
SCHEDULES: Mapping[str, Schedule] = MappingProxyType({schedule.name: schedule for schedule in _ALL})
"""Every named schedule of a chain, by name."""

_SYNONYMS = {"one_f_one_b": "1f1b", "interleaved": "interleaved_1f1b"}


@checked_arguments(PlanError)
def find_schedule(name: str, num_chunks: Count | None = None) -> Schedule:
    """The schedule called ``name``: ``One-F-One-B`` is ``1f1b``, and with more than one chunk ``interleaved_1f1b``."""
    wanted = str(name).lower().replace("-", "_")
    wanted = _SYNONYMS.get(wanted, wanted)
    if wanted not in SCHEDULES:
        near = nearest(wanted, SCHEDULES)
        raise PlanError(f"there is no schedule {shown(name)}{near}; the schedules are {', '.join(SCHEDULES)}")
    return SCHEDULES["interleaved_1f1b" if wanted == "1f1b" and (num_chunks or 1) > 1 else wanted]
