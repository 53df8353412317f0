"""The mistakes of a user's first hour with jobs: each is one typed error that names the value and the rule."""

import pytest

from pipegrid.planner import (
    Device,
    Job,
    JobError,
    Layers,
    ModuleCosts,
    Network,
    NoFitError,
    Training,
    dry_run,
    parse_job,
    plan,
    read_job,
)


def decoders(count=4, **options):
    return Layers("decoder", count, **{"flops": 1e12} | options)


def job(**options):
    given = {
        "modules": (ModuleCosts("language", (decoders(),), 1e6),),
        "global_batch": 4,
        "device": Device(1e14, 80e9),
        "links": Network(1e9, 1e9),
    }
    return Job(**given | options)


def planned(gpus=2, *, memory=None, limit=200, of=None, **options):
    return plan(job(**options) if of is None else of, gpus=gpus, memory=memory, limit=limit)


MISTAKES = {
    "no GPUs": (lambda: planned(0), "gpus is 0; it must be an integer of at least 1"),
    "GPUs as text": (lambda: planned("4"), "gpus is '4'; it must be an integer of at least 1"),
    "no simulations": (lambda: planned(limit=0), "limit is 0; it must be an integer of at least 1"),
    "an unknown unit": (lambda: planned(memory="80gb"), "memory is '80gb'; .* or a text such as \"80GB\""),
    "memory below zero": (lambda: planned(memory=-1), "memory is -1; it must be a number of bytes"),
    "no memory": (lambda: planned(device=Device(1e14)), "device.memory is missing; give it in the job, or memory="),
    "a path for a job": (
        lambda: planned(of="job.toml"),
        r"job is 'job.toml'; it must be a Job, such as read_job",
    ),
    "a dict for a job": (lambda: planned(of={"modules": []}), "job is {'modules': .*it must be a Job"),
    "a dict for a text": (lambda: parse_job({"modules": []}), "text is {'modules': .*it must be the job's text"),
    "no file": (lambda: read_job("/nowhere.toml"), "/nowhere.toml: .*No such file"),
    "TOML for JSON": (lambda: parse_job("a = 1", form="json"), "not JSON: .*line 1 column 1"),
    "a kind that is none": (
        lambda: Layers("attention", flops=1),
        "Layers.kind is 'attention'; it must be 'embedding' or",
    ),
    "no layers in a group": (lambda: decoders(0), "Layers.count is 0; it must be an integer of at least 1"),
    "FLOPs as text": (lambda: decoders(flops="1e12"), "Layers.flops is '1e12'; it must be a finite number"),
    "FLOPs below zero": (lambda: decoders(flops=-1), "Layers.flops is -1; it must be a finite number of at least 0"),
    "no costs": (lambda: decoders(flops=None), "the decoder layers have neither of flops and seconds; give one"),
    "seconds as a dict": (
        lambda: decoders(flops=None, seconds={"F": 1}),
        r"Layers.seconds is {'F': 1} \(dict\); it must be Measured\(F, I, W\)",
    ),
    "layers alone": (
        lambda: ModuleCosts("m", decoders(), 1),
        "ModuleCosts.layers is Layers.* it must be a list or tuple",
    ),
    "layers as dicts": (
        lambda: ModuleCosts("m", [{"count": 1}], 1),
        r"ModuleCosts.layers\[0\] is {'count': 1} .* must be Layers",
    ),
    "a tp that is one size": (
        lambda: ModuleCosts("m", (decoders(),), 1, tp=2),
        "ModuleCosts.tp is 2; it must be a list or tuple",
    ),
    "a module alone": (
        lambda: job(modules=ModuleCosts("m", (decoders(),), 1)),
        "Job.modules is ModuleCosts.* a list or tuple",
    ),
    "no device": (lambda: job(device=None), "Job.device is None; it must be a Device"),
    "a device's name": (lambda: job(device="H100"), "Job.device is 'H100'; it must be a Device"),
    "a device that does nothing": (lambda: Device(0), "Device.flops is 0; it must be a finite number above 0"),
    "links as a pair": (lambda: job(links=(1e9, 1e9)), "Job.links is .* it must be a Network"),
    "an edge that is no list": (
        lambda: job(edges=["images", "language"]),
        r"Job.edges\[0\] is 'images'; it must be a pair of names",
    ),
    "an edge of three": (lambda: job(edges=[("a", "b", "c")]), r"Job.edges\[0\] is .* it must be a pair of names"),
    "a result for a choice": (lambda: dry_run(planned()), "choice is Planned.* it must be a Choice, such as plan"),
    "JSON without an end": (lambda: parse_job("[" * 100_000, form="json"), "not JSON: brackets nest too deeply"),
    "an edge to nothing": (lambda: job(edges=[("language", "sound")]), "edges: .*unknown module 'sound'"),
    "a schedule alone": (
        lambda: Training(schedules="1f1b"),
        "Training.schedules is '1f1b'; it must be a list or tuple",
    ),
    "a schedule that is none": (
        lambda: Training(schedules=["1f2b"]),
        "schedules\\[0\\] is '1f2b' .did you mean '1f1b'.*; it must be a",
    ),
    "no batch": (lambda: job(global_batch=0), "Job.global_batch is 0; it must be an integer of at least 1"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_first_mistake_is_a_typed_error_that_names_value_and_rule(what):
    call, text = MISTAKES[what]
    with pytest.raises(JobError, match=text):
        call()


def test_a_batch_of_more_microbatches_than_are_planned_ends_at_once():
    with pytest.raises(NoFitError, match=r"no microbatch size of 1000000007 samples .* at most 65536 microbatches"):
        planned(16, global_batch=1_000_000_007)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (ModuleCosts("m", (decoders(2),), 1, tp=(4,)), "gpus is 2; the smallest grids that the modules allow take 4"),
        (ModuleCosts("m", (decoders(2),), 1, dp=(3,)), "modules: no grids at all: .* no dp divides global_batch"),
    ],
)
def test_sizes_that_no_grid_has_are_no_fit(module, text):
    with pytest.raises(NoFitError, match=text):
        planned(modules=(module,))
