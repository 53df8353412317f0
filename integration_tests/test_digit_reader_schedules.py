"""The digit reader on every placement and by every schedule: the plans, and the gradients of one process."""

from __future__ import annotations

import contextlib

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from digit_reader import listener, modules
from digit_reader.check import first_step_difference, largest_difference
from digit_reader.command_line import parse_options
from digit_reader.job import build_job
from digit_reader.modules import DEFAULTS, LANGUAGE
from digit_reader.options import num_stages
from digit_reader.samples import Samples
from digit_reader.strips import Split, load_scans
from pipegrid.bridges import ModuleGraph
from pipegrid.core.edge import Edge
from pipegrid.schedules import Costs, fitting_schedules, simulate, stage_places, step_plan, verify

SEPARATE = ModuleGraph({"images": 1, "signal": 2, LANGUAGE: 2}, [("images", LANGUAGE), ("signal", LANGUAGE)])


# --- the plans


def separate(pp, vpp, name):
    """Both encoders on ranks of their own, the signal's in two stages: graph and placement."""
    graph = ModuleGraph({**dict(SEPARATE.modules), LANGUAGE: num_stages(name, pp, vpp)}, SEPARATE.edges)
    return graph, (*((stage,) for stage in range(3)), *((3 + place,) for place in stage_places(name, pp, vpp)))


def colocated(pp, vpp, name):
    """The image encoder on all ranks of the language model: graph, placement, and what is a collective."""
    graph = ModuleGraph({"images": 1, LANGUAGE: num_stages(name, pp, vpp)}, [("images", LANGUAGE)])
    placement = (tuple(range(pp)), *((place,) for place in stage_places(name, pp, vpp)))
    return graph, placement, (Edge(0, 1),) if pp > 1 else ()


@given(st.data(), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9))
def test_every_fitting_schedule_has_a_proof_on_every_placement(data, pp, vpp, microbatches):
    name = data.draw(st.sampled_from(fitting_schedules(vpp)))
    graph, placement = separate(pp, vpp, name)
    plan = step_plan(graph, microbatches, placement=placement, schedule=name)
    verify(plan, lanes="shared")
    graph, placement, collectives = colocated(pp, vpp, name)
    plan = step_plan(graph, microbatches, placement=placement, collectives=collectives, schedule=name)
    verify(plan, lanes="shared")


@pytest.mark.parametrize("name", fitting_schedules(1))
def test_encoders_do_not_lengthen_a_step_beyond_their_first_and_last_microbatch(name):
    """A forward of 1 and a backward of 2 for each stage of the longest way through the encoders, and no bubble more."""
    graph, placement = separate(2, 1, name)
    places = stage_places(name, 2, 1)
    placement_alone = tuple((place,) for place in places)
    alone = step_plan(ModuleGraph({LANGUAGE: len(places)}), 8, placement=placement_alone, schedule=name)
    whole = step_plan(graph, 8, placement=placement, schedule=name)
    assert simulate(whole, Costs()).makespan <= simulate(alone, Costs()).makespan + 2 * (1 + 2)


def test_an_encoder_on_its_own_ranks_holds_one_microbatch_more_than_the_stage_it_feeds():
    graph, placement = separate(2, 1, "zero_bubble_h1")
    live = verify(step_plan(graph, 8, placement=placement, schedule="zero_bubble_h1")).peak_live
    assert live[0] == live[2] == live[3] + 1
    assert live[1] == live[2] + 1


def test_the_pure_half_counts_the_layers_of_the_signals_encoder_right():
    assert len(listener.NAMES) == modules.SIGNAL_LAYERS


# --- on ranks


def options_of(*arguments, dtype="float64"):
    return parse_options([*arguments, "--dtype", dtype, "--batch", "16", "--microbatches", "4", "--deadline", "30"])


def difference(options, ranks, *, strict):
    """What `--check` measures."""
    options, device = evolve(options, backend=ranks.backend), ranks.device
    samples = Samples(Split.TRAIN, options.seed, load_scans(Split.TRAIN))
    job = build_job(options, samples, device, strict=strict)
    with contextlib.closing(job.monitor):
        found = first_step_difference(job, samples)
    job.communicator.destroy()
    return found


PLACES = {
    f"{placement}, {'+'.join(encoders)}": ["--placement", placement, "--modules", ",".join(encoders)]
    for placement, encoders in DEFAULTS
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "place",
    [
        *(pytest.param(place, marks=pytest.mark.ranks(4)) for place in PLACES),
        # Modules that share ranks reduce early, over groups that span positions, in the midst of others' messages.
        pytest.param(
            "colocated, images+signal",
            marks=pytest.mark.ranks(4, backend="fake_nccl", fake_nccl="serial"),
            id="colocated on one serial stream",
        ),
    ],
)
def test_every_placement_has_the_gradients_of_one_process(ranks, place):
    found = difference(options_of(*PLACES[place]), ranks, strict=True)
    assert found < 1e-12


SCHEDULES = [
    *(
        pytest.param(name, vpp, "separate", id=f"{name}-{vpp}-separate")
        for name, vpp in [
            ("zero_bubble_h1", 1),
            ("zero_bubble_h2", 1),
            ("gpipe", 1),
            ("u_shape", 1),
            ("1f1b", 2),
            ("interleaved_1f1b", 2),
            ("looped_bfs", 2),
            ("zero_bubble_v", 2),
            ("v_half", 2),
            ("v_min", 2),
            ("dualpipe_v", 2),
        ]
    ),
    pytest.param("zero_bubble_h1", 1, "colocated", id="zero_bubble_h1-1-colocated"),
    pytest.param("dualpipe_v", 2, "mixed", id="dualpipe_v-2-mixed"),
    pytest.param("interleaved_1f1b", 3, "mixed", id="interleaved_1f1b-3-mixed"),
]


@pytest.mark.few(6)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "vpp", "placement"), SCHEDULES)
def test_every_schedule_has_the_gradients_of_one_process(ranks, name, vpp, placement):
    language = {"colocated": "dp=2,pp=2"}.get(placement, "pp=2")
    options = options_of("--schedule", name, "--placement", placement, "--language", f"{language},vpp={vpp}")
    found = difference(options, ranks, strict=True)
    assert found < 1e-12


@pytest.mark.ranks(4)
def test_a_gradient_that_is_off_is_noticed(ranks):
    options = options_of("--placement", "mixed", dtype="float32")
    samples = Samples(Split.TRAIN, options.seed, load_scans(Split.TRAIN))
    job = build_job(options, samples, ranks.device)
    with contextlib.closing(job.monitor):
        assert first_step_difference(job, samples) < 1e-5
        if "signal" in job.modules:  # on ranks 2 and 3 alone; all ranks are told
            next(job.modules["signal"].parameters()).grad.mul_(1.001)
        assert largest_difference(job, samples, range(options.batch)) > 5e-4
    job.communicator.destroy()


@pytest.mark.nightly
@pytest.mark.ranks(4)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "vpp"), [(name, vpp) for vpp in (1, 2, 3) for name in fitting_schedules(vpp)])
def test_every_schedule_on_every_placement(ranks, name, vpp, place, strict):
    language = f"dp=2,pp=2,vpp={vpp}" if "colocated" in place else f"pp=2,vpp={vpp}"
    options = options_of(*PLACES[place], "--schedule", name, "--language", language)
    assert difference(options, ranks, strict=strict) < 1e-12
