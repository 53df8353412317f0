"""What a step function keeps between calls, and the reduction that starts inside the last backward."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autograd_kit.gradients import assert_same_gradients, gradients_of
from pipegrid.gradients.reduction.buckets import Bucket
from pipegrid.gradients.reduction.tied import TieMark
from pipegrid.plans.passes import lowering
from pipegrid.plans.plan import Plan
from pipegrid.plans.verify.verify import verify
from pipegrid.schedules import (
    ActionKind,
    DisagreementError,
    PipelineConfig,
    PipelineError,
    PipelineRuntime,
    Recorder,
    accumulate_in_main_grad,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)
from pipegrid.schedules.megatron import place, prepared
from pipegrid.schedules.megatron.call import CHECKPOINTS
from pipegrid.schedules.megatron.stage import MegatronStage
from pipegrid.schedules.runtime import preflight
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.transport import P2PCommunicator
from plan_kit.groups import Groups

from ..kit.hooks import Hook, noting
from ..kit.models import Part, call, forward_step, in_one_process, mean_loss, microbatch, step_on

MICROBATCHES = 4


def model_of(config=None, *, seed=0, layers=2):
    return Part(seed, config or PipelineConfig(), layers=layers)


def alone(model, **options):
    return call(model=model, count=MICROBATCHES, **options)


def test_the_first_call_makes_two_plans_and_one_proof(constructions, monkeypatch):
    """The plan of computes and the lowered one; the runtime takes the proof of the latter."""
    proofs = []
    for module in (lowering, place, preflight):
        monkeypatch.setattr(module, "verify", lambda plan, **options: proofs.append(plan) or verify(plan, **options))
    place._step_proof.cache_clear()
    model = model_of()
    alone(model)
    assert (constructions["Plan"], len(proofs)) == (2, 1)
    alone(model)
    assert (constructions["Plan"], len(proofs)) == (2, 1)


@pytest.fixture
def constructions(monkeypatch):
    """How often each class was made."""
    made = {}
    for kind in (PipelineRuntime, MegatronStage, Plan, prepared.PreparedStep):
        original = kind.__init__

        def counting(self, *args, _original=original, _name=kind.__name__, **kwargs):
            made[_name] = made.get(_name, 0) + 1
            _original(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", counting)
    return made


def test_the_second_call_constructs_nothing(constructions, monkeypatch):
    model = model_of()
    first = alone(model)
    alone(model, forward_only=True)
    made = dict(constructions)
    assert made["PipelineRuntime"] == made["PreparedStep"] == 2
    with monkeypatch.context() as patch:
        for name in ("gradient_policy", "required_ties", "PreparedStep", "MegatronStage"):
            patch.setattr(prepared, name, None)
        assert alone(model) == first
        alone(model, forward_only=True)
    assert constructions == made
    alone(model, num_microbatches=2)
    assert constructions["PipelineRuntime"] == 3
    alone(model_of())
    assert constructions["PipelineRuntime"] == 4
    alone(model)
    assert constructions["PipelineRuntime"] == 4, "another plan or model does not push the first one out"


def test_what_a_call_brings_is_read_anew():
    """Config, iterator and functions belong to a call, also where the runtime is that of the one before."""
    scales = []

    def scaled(loss):
        scales.append(loss.item())
        return loss * 2

    model = model_of(PipelineConfig(grad_scale_func=lambda loss: loss))
    alone(model)
    once = model.layers[0].weight.grad.clone()
    model.zero_grad()
    model.config = PipelineConfig(grad_scale_func=scaled)
    alone(model)
    assert len(scales) == MICROBATCHES
    assert torch.equal(model.layers[0].weight.grad, once * 2)
    seen = []

    model.config = PipelineConfig(hooks=(Hook(lambda action: seen.append(action.kind)),))
    alone(model)
    assert seen == [ActionKind.F, ActionKind.B] * MICROBATCHES
    model.config = PipelineConfig()
    alone(model)
    assert len(seen) == 2 * MICROBATCHES


def _freeze(model):
    model.layers[0].requires_grad_(False)
    alone(model)
    assert model.layers[0].weight.grad is None
    assert model.layers[1].weight.grad is not None
    model.zero_grad()
    model.layers[0].requires_grad_(True)


def _replace_a_layer(model):
    model.layers[0] = nn.Linear(4, 4).double()


def _number_a_layer(model):
    model.layers[1].current_microbatch = None
    alone(model)
    assert model.layers[1].current_microbatch == MICROBATCHES - 1
    model.zero_grad()


def _replace_the_input_function(model):
    seen = []
    model.set_input_tensor = seen.append
    alone(model)
    assert len(seen) == MICROBATCHES
    model.zero_grad()


def _move_to_float32(model):
    model.layers.float()
    alone(model, forward_step_func=partial(forward_step, data=lambda index: microbatch(index).float()))
    assert model.layers[0].weight.grad.dtype == torch.float32
    model.zero_grad()
    model.layers.double()


def _wrap_a_layer(model):
    model.layers[0] = nn.Sequential(model.layers[0], nn.Tanh())


def _assign_parameters(model):
    other = model_of(seed=5)
    model.load_state_dict(other.state_dict(), assign=True)


def _parametrize(model):
    nn.utils.parametrizations.weight_norm(model.layers[0])


def _hook_a_layer(model):
    model.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)


def _step_with_a_new_optimizer(model):
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    "change", [_wrap_a_layer, _assign_parameters, _parametrize, _hook_a_layer, _step_with_a_new_optimizer]
)
def test_a_change_of_the_model_is_followed(change):
    """Gradients are those of the same model, changed, in a plain loop."""
    model = model_of()
    alone(model)
    alone(model)
    change(model)
    model.zero_grad()
    in_one_process([model], map(microbatch, range(MICROBATCHES)), MICROBATCHES)
    expected = gradients_of(model)
    model.zero_grad()
    alone(model)
    assert expected
    torch.testing.assert_close(gradients_of(model), expected, rtol=1e-12, atol=1e-15)


def test_a_change_of_the_config_is_followed():
    """Another value of each option that a step of one stage reads; the runtime is then another."""
    model, seen = model_of(), []

    def forward(iterator, model, *checkpoint):
        seen.append(checkpoint)
        return forward_step(iterator, model)

    for options in (
        {CHECKPOINTS: 1},
        {"deadline": 5.0},
        {"grad_scale_func": lambda loss: 2 * loss},
        {"overlap_grad_reduce": False},
        {"deallocate_pipeline_outputs": True},
        {"aux_loss_scalers": None},
        {"param_sync_func": list},
        {"grad_sync_func": list},
    ):
        before = len(prepared._STEPS.get(model, ()))
        model.config = PipelineConfig(**options)
        seen.clear()
        alone(model, forward_step_func=forward)
        assert seen == [(False,) if CHECKPOINTS in options else ()] * MICROBATCHES
        assert len(prepared._STEPS[model]) == before + 1


@pytest.mark.parametrize(("numbers", "configs"), [(20, 15), pytest.param(300, 1, marks=pytest.mark.nightly)])
def test_three_hundred_keys_keep_few_runtimes(constructions, numbers, configs):
    model = model_of()
    for number, config in itertools.product(range(1, numbers + 1), range(configs)):
        model.config = PipelineConfig(deadline=60.0 + config)
        alone(model, num_microbatches=number, data_iterator=iter(range(number)))
        model.zero_grad()
    assert constructions["PreparedStep"] == 300
    assert len(prepared._STEPS[model]) == prepared._KEPT
    kinds = (PipelineRuntime, prepared.PreparedStep, MegatronStage)
    counts = {kind: sum(type(each) is kind for each in gc.get_objects()) for kind in kinds}
    for number in range(1, 31):
        alone(model, num_microbatches=number, data_iterator=iter(range(number)))
    gc.collect()
    after = {kind: sum(type(each) is kind for each in gc.get_objects()) for kind in kinds}
    assert all(after[kind] <= counts[kind] for kind in kinds)


def test_another_collection_is_another_step_and_the_same_one_is_not(constructions):
    model = model_of()
    alone(model, pg_collection=Groups())
    alone(model, pg_collection=Groups())
    assert constructions["PreparedStep"] == 1
    alone(model, pg_collection=None)
    assert constructions["PreparedStep"] == 2


def test_an_evaluation_inside_a_step_is_refused():
    """Of another prepared step of the same model: they share its inputs and its communicator."""
    model = model_of()
    alone(model, forward_only=True)

    def forward(iterator, model):
        with pytest.raises(PipelineError, match="a step function inside a step, at position 0"):
            alone(model, forward_only=True)
        return forward_step(iterator, model)

    alone(model, forward_step_func=forward)


@pytest.mark.parametrize(
    "change", [_freeze, _replace_a_layer, _number_a_layer, _replace_the_input_function, _move_to_float32]
)
def test_gradients_after_a_change_of_the_model_are_those_of_a_new_one(change):
    model = model_of()
    alone(model)
    model.zero_grad()
    change(model)
    alone(model)
    other = model_of()
    other.load_state_dict(model.state_dict())
    alone(other)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize(
    ("of", "values", "text"),
    [
        ("layers.0.weight", {"sequence_parallel": True}, "nothing sums it over tp"),
        (
            "layers.0.weight",
            {"tied": TieMark("embedding", over_replicas=False)},
            "is tied as 'embedding', which config.tied_parameters does not have",
        ),
        ("config", {"enable_autocast": True, "autocast_dtype": torch.float64}, "autocast_dtype is torch.float64"),
        ("config", {"overlap_moe_expert_parallel_comm": True}, "1f1b has no pairs"),
        ("config", {"calculate_per_token_loss": True}, "nothing sums and divides them"),
        ("config", {"tied_parameters": None}, "config.tied_parameters is None; it must be a list"),
        ("config", {"hooks": None}, "config.hooks is None; it must be a list"),
        ("config", {"hooks": (None,)}, r"config.hooks\[0\] is None; it must be a hook with before"),
        ("config", {"grad_scale_func": 2.0}, "config.grad_scale_func is 2.0; it must be a function"),
        ("config", {"no_sync_func": [None, "x"]}, "config.no_sync_func is .* it must be a function, a list"),
        ("config", {"deadline": 9.0, "grad_bucket_bytes": 0}, "config.grad_bucket_bytes is 0; it must be"),
        ("", {"stage_of_layout": (1, 7)}, "is stage 1 of the 7 of its layout"),
    ],
)
def test_what_a_first_call_checks_is_checked_after_a_change(of, values, text):
    """Of the model, or of a config that can change, such as a training framework's own."""
    model = model_of(SimpleNamespace(pipeline_dtype=torch.float64))
    alone(model)
    alone(model)
    for name, value in values.items():
        setattr(attrgetter(of)(model) if of else model, name, value)
    with pytest.raises(ValueError, match=text):
        alone(model)


def test_a_module_compiled_in_place_makes_another_runtime(constructions):
    """Its first step is then a first step again, with a deadline for the compilation."""
    model = model_of()
    alone(model)
    model.layers[0].compile(backend="eager")
    alone(model)
    alone(model)
    assert constructions["PipelineRuntime"] == 2


def test_what_others_write_on_a_parameter_makes_none(constructions):
    """As torch.compile of 2.15 does in its first call."""
    model = model_of()
    for note in (None, "unguarded"):
        model.layers[0].weight.of_another_library = note
        alone(model)
        vars(model.layers[0].weight).clear()
        alone(model)
    assert constructions["PipelineRuntime"] == 1


def test_autocast_is_that_of_the_call():
    model = model_of()
    seen = []
    model.layers[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    for enabled in (False, True, False):
        model.config = PipelineConfig(enable_autocast=enabled, autocast_dtype=torch.bfloat16)
        alone(model)
        alone(model)
    assert seen == ([False] * 2 * MICROBATCHES + [True] * 2 * MICROBATCHES + [False] * 2 * MICROBATCHES)


def test_a_model_that_is_dropped_goes_at_once():
    """Also where its config and hooks hold it: nothing that outlives a call does."""
    gc.collect()
    gc.disable()
    try:
        model = model_of()

        model.config = PipelineConfig(
            hooks=(Hook(lambda action, model=model: None),), grad_scale_func=lambda loss, model=model: loss
        )
        alone(model)
        held = len(prepared._STEPS)
        model.config = None  # the cycle of this test's own making
        gone = weakref.ref(model)
        del model
        assert gone() is None
        assert len(prepared._STEPS) == held - 1
    finally:
        gc.enable()


def test_a_failed_runtime_is_not_kept(constructions):
    model = model_of()
    with pytest.raises(RuntimeError, match="its data ended|boom|StopIteration|ended"):
        alone(model, data_iterator=iter([]))
    alone(model)
    assert constructions["PipelineRuntime"] == 2


def test_the_order_of_no_sync_grad_sync_and_finalize_is_the_frameworks():
    events = []

    model = model_of(
        PipelineConfig(
            no_sync_func=partial(noting, events, "enter", "exit"),
            grad_sync_func=lambda _: events.append("grad sync"),
            finalize_model_grads_func=lambda *_, **__: events.append("finalize"),
        )
    )
    model.layers[0].weight.register_hook(lambda _: events.append("backward"))
    alone(model, num_microbatches=1)
    assert events == ["enter", "exit", "backward", "finalize"]
    events.clear()
    alone(model, num_microbatches=3)
    assert events == ["enter", "backward", "backward", "exit", "backward", "finalize"]


def test_a_second_thread_leaves_the_running_step_alone():
    model, errors = model_of(), []

    def meanwhile():
        with pytest.raises(PipelineError, match=r"inside a step, at position 0, step \d of 8: 0F\d: a model runs one"):
            alone(model)
        errors.append(None)

    def forward(iterator, model):
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
        return forward_step(iterator, model)

    expected = alone(model)
    assert alone(model, forward_step_func=forward) == expected
    assert len(errors) == MICROBATCHES


@pytest.mark.ranks(2)
def test_a_hook_on_one_replica_alone_is_a_new_runtime_and_no_new_comparison(ranks):
    """Its small all-reduce would meet the other lane's reduction, at which gloo ends the process."""
    model = model_of(PipelineConfig(deadline=20)).to(ranks.device)

    def gradient():
        model.zero_grad()
        alone(model, forward_step_func=step_on(ranks.rank, ranks.device), pg_collection=Groups(dp=dist.group.WORLD))
        return model.layers[0].weight.grad

    once = gradient()
    model.config = PipelineConfig(deadline=20, hooks=(Recorder(),) if ranks.rank == 0 else ())
    assert torch.equal(gradient(), once)


def _freeze_a_layer(model):
    model.layers[0].requires_grad_(False)


def _add_a_layer(model):
    model.unused = nn.Linear(4, 4).to(model.layers[0].weight)


def _train_in_float32(model):
    model.layers[0].float()
    model.layers[0].register_forward_pre_hook(lambda _, inputs: inputs[0].float())
    model.layers[0].register_forward_hook(lambda module, inputs, output: output.double())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", [_freeze_a_layer, _add_a_layer, _train_in_float32])
def test_replicas_compare_again_what_they_train_where_it_has_changed(ranks, change):
    """On one replica alone it is an error on both: with buffers of two sizes gloo ends a process."""
    model = model_of(PipelineConfig(deadline=60)).to(ranks.device)

    def step():
        step_on_a_lane = step_on(ranks.rank, ranks.device)
        alone(model, forward_step_func=step_on_a_lane, pg_collection=Groups(dp=dist.group.WORLD))

    step()
    torch.manual_seed(7)
    change(model)
    step()
    model.config = PipelineConfig(deadline=2)
    if ranks.rank == 1:
        model.layers[1].requires_grad_(False)
        with pytest.raises(DisagreementError, match="what rank 1 trains of module 'model'"):
            step()
    else:
        with pytest.raises(PipelineError, match="what rank 1 trains of module 'model'|within the deadline of 2 s"):
            step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_buckets_start_in_the_last_backward_that_touches_them(ranks, main_grad, monkeypatch):
    """The last layer's bucket before the first layer's gradient; behind a layer without one, after it."""
    events = []
    start = Bucket.start

    def starting(bucket):
        events.append(("start", names[id(bucket.parameters[0])]))
        start(bucket)

    monkeypatch.setattr(Bucket, "start", starting)
    model = model_of(PipelineConfig(grad_bucket_bytes=1), layers=3).to(ranks.device)
    model.unused = nn.Linear(2, 2).double().to(ranks.device)
    if main_grad:
        accumulate_in_main_grad(model, dtype=torch.float64)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def watch(module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda _: events.append(("backward", "layers.0")))

    model.layers[0].register_forward_hook(watch)

    def forward(iterator, model):
        x = microbatch(next(iterator), ranks.rank).to(ranks.device)
        y = model(x)
        if ranks.rank == 1:
            y = y + model.unused(x[:, :2]).sum()
        return y, mean_loss

    for _ in range(2):
        events.clear()
        alone(model, forward_step_func=forward, pg_collection=Groups(dp=dist.group.WORLD))
    last = len(events) - 1 - events[::-1].index(("backward", "layers.0"))
    order = [what for kind, what in events if kind == "start"]
    assert order == list(names.values())[::-1]
    assert (("start", "layers.2.weight") in events[:last]) == (ranks.rank == 1)
    assert ("start", "layers.0.weight") in events[last:]
    reference = model_of(layers=3).to(ranks.device)
    for lane in range(2):
        unused = nn.Linear(2, 2).double()
        unused.load_state_dict({key: value.cpu() for key, value in model.unused.state_dict().items()})
        for index in range(MICROBATCHES):
            x = microbatch(index, lane)
            y = reference(x.to(ranks.device))
            if lane == 1:
                y = y + unused(x[:, :2]).sum().to(ranks.device)
            (2 * y.square().mean() / MICROBATCHES / 2).backward()
    for mine, other in zip(model.layers.parameters(), reference.layers.parameters(), strict=True):
        found = mine.main_grad if main_grad else mine.grad
        torch.testing.assert_close(found, other.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.ranks(4)
def test_a_layer_frozen_on_one_rank_alone_ends_the_step_of_all_soon(ranks):
    """dp 2 x pp 2: the other stage has no lane that differs, and would wait for messages up to the deadline."""
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    pp, _ = grid.create_pgs(["pp", "dp"])
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=60)
    communicator, model = P2PCommunicator(pp, config), model_of(config).to(ranks.device)
    model.layers[0].requires_grad_(ranks.rank > 0)
    began = time.monotonic()
    with pytest.raises(
        (DisagreementError, PipelineError), match=r"rank 0: .* of 20 elements .*; rank 1: .* of 40 elements"
    ):
        call(
            forward_backward_pipelining_without_interleaving,
            model=model,
            count=MICROBATCHES,
            forward_step_func=step_on(0, ranks.device),
            p2p_communicator=communicator,
            pg_collection=ProcessGroupCollection.from_grid(grid),
        )
    assert time.monotonic() - began < 30
    communicator.close()


@pytest.mark.ranks(4)
def test_chunks_reduce_as_their_last_backwards_end(ranks):
    """dp 2 x pp 2, two chunks on each rank: the later chunk's gradients travel while the first one is at work."""
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    pp, _ = grid.create_pgs(["pp", "dp"])
    here = grid.coords(ranks.rank)
    config = PipelineConfig(pipeline_dtype=torch.float64, deadline=30, check_replicas=True)
    communicator = P2PCommunicator(pp, config)
    chunks = [model_of(config, seed=here["pp"] + 2 * chunk).to(ranks.device) for chunk in range(2)]
    steps = 2
    for _ in range(steps):
        call(
            forward_backward_pipelining_with_interleaving,
            model=chunks,
            count=MICROBATCHES,
            forward_step_func=step_on(here["dp"], ranks.device),
            p2p_communicator=communicator,
            pg_collection=ProcessGroupCollection.from_grid(grid),
        )
    parts = [model_of(seed=stage) for stage in range(4)]
    data = [microbatch(index, lane) for lane in range(2) for index in range(MICROBATCHES)]
    in_one_process(parts, data, len(data) / steps)
    assert_same_gradients(chunks, [parts[here["pp"]], parts[here["pp"] + 2]])
    communicator.close()
