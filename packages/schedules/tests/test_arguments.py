"""Public names of the running half, given what they do not take: a typed error names argument or value, and a remedy.

`CALLS` lists the public functions and classes with a call that is right and, per argument, the kind of value that it
takes; `WRONG` lists for each kind values that are none. The planning half has `test_planning_mistakes.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipegrid.schedules
from pipegrid.schedules import (
    Costs,
    GradientError,
    LossScaler,
    Monitor,
    PipelineConfig,
    PipelineRuntime,
    Plan,
    PlanError,
    StepArgumentError,
    TiedParameters,
    Timeline,
)
from pipegrid.transport import Edge

from .kit.of_job import OfJob, Sending

public = pipegrid.schedules
PLAN = public.one_f_one_b(2, 3)
LOWERED = public.lower(PLAN)
SIMULATION = public.simulate(PLAN)
TIMELINE = public.timeline(PLAN)
EDGE = Edge(0, 1)


class Scalar:
    """An integer of another library."""

    def __index__(self):
        return 2

    __int__ = __float__ = __index__

    def __repr__(self):
        return "other.int64(2)"


# Values that are wrong for each kind of argument. What begins with "maybe" may be None.

NUMBERLESS = [None, "4", b"4", [], {}, [4], object(), torch.ones(2), Plan, print]
NO_COUNT = [*NUMBERLESS, 2.0, float("nan"), True, -1, torch.tensor(2.0)]
NO_NUMBER = [*NUMBERLESS, float("nan"), True]
NO_LIST = [None, 3, 2.5, True, "x", b"x", object(), torch.tensor(3), Plan, print]

WRONG = {
    "count": [*NO_COUNT, 0],
    "index": NO_COUNT,
    "number": NO_NUMBER,
    "positive": [*NO_NUMBER, 0, -1.0],
    "cost": ["4", b"4", [], {}, ["4"], object(), True, float("nan"), -1.0, float("inf"), torch.tensor(2.0), Scalar()],
    "limit": [*NO_NUMBER[1:2], -1.0, float("nan"), True, torch.tensor(2.0), {}, object()],
    "plan": [None, 3, True, "x", [], {}, [PLAN], object(), torch.ones(2), Plan, public.gpipe, TIMELINE],
    "graph": [None, 2.5, "x", [], {}, {"a": 1}, object(), torch.ones(2), PLAN],
    "costs": [3, 2.5, True, "x", [], {}, [1.0], object(), torch.ones(2), Costs],
    "timeline": [None, 3, 2.5, True, "x", b"x", [], {}, [3], [None], object(), torch.ones(2), Timeline, PLAN],
    "source": [None, 3, "x", [], [PLAN], {}, object(), Plan, public.gpipe, torch.ones(2)],
    "text": [None, 3, 2.5, True, b"x", [], {}, object(), torch.ones(2), PLAN],
    "word": [None, 3, True, b"x", [], {}, "neither", object(), torch.ones(2)],
    "path": [None, 3, True, b"x", [], {}, object(), torch.ones(2)],
    "integers": [*NO_LIST, [None], ["x"], [2.5], [True], {"a": 3}, torch.ones(2)],
    "names": [*NO_LIST, [None], [3], [True], {3: "a"}, torch.ones(2)],
    "edges": [*NO_LIST, [None], [3], ["0>1"], [(0, 1)], {"a": 3}],
    "parts": [*NO_LIST, [None], [3], ["x"], {"a": 3}, torch.ones(2)],
    "rows": [*NO_LIST, [None], [3], torch.ones(2)],
    "placement": [*NO_LIST, [None], ["x"], [[None]], [[0.5]], [2.5], torch.ones(2)],
    "mapping": [3, 2.5, True, "x", b"x", [], [3], object(), torch.ones(2), print],
    "function": [3, 2.5, True, "x", b"x", [], {}, torch.ones(2), object()],
    "flag": [None, 3, 0, "x", [], object(), torch.ones(2)],
    "module": [None, 3, True, "x", [], {}, object(), torch.ones(2), nn.Linear],
    "modules": [None, 3, True, "x", b"x", [3], [None], {"a": 3}, object(), torch.ones(2), nn.Linear, print],
    "groups": [None, 3, True, "x", [], object(), torch.ones(2), print],
    "communicator": [3, True, "x", [], {}, object(), torch.ones(2), PLAN, SimpleNamespace(total_stages=None)],
    "monitor": [3, True, "x", [], {}, object(), torch.ones(2), Monitor, print],
    "list": NO_LIST,
    "payload": [3, 2.5, True, "x", [3], {"a": 3}, object(), Plan, print],
    "store": [None, 3, True, "x", (), {}, object(), torch.ones(2)],
    "functions": [3, 2.5, True, "x", b"x", [3], {}, object(), torch.ones(2)],
    "name": [None, 3, True, b"x", "two words", "", [], {}, object(), torch.ones(2)],
    "other": [None, 3, True, "x", [], object(), torch.ones(2)],
}
MAYBE = {f"maybe {kind}": [value for value in values if value is not None] for kind, values in WRONG.items()}


class Call:
    """A right call of ``function`` with ``arguments``, pairs of a kind and a value; wrong ones raise ``errors``."""

    def __init__(self, function, errors, **arguments):
        self.function, self.errors = function, errors
        self.kinds = {name: kind for name, (kind, _) in arguments.items()}
        self.right = {name: value for name, (_, value) in arguments.items()}


def linear(*_, **__):
    return nn.Linear(2, 2)


class Model(nn.Linear):
    config = PipelineConfig(pipeline_dtype=torch.float32)


class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.output_layer = nn.Linear(2, 2)
        self.embedding_activation_buffer, self.grad_output_buffer = [], []


def forward_step_func(data_iterator, model):
    return model(torch.ones(1, 2)), lambda output: (output.sum(), {})


def groups():
    return SimpleNamespace(dp=None, dp_cp=None, tp=None, cp=None, pp=None)


def watch(**arguments):
    Monitor(**arguments).close()


def accumulate(modules):
    for handle in public.accumulate_in_main_grad(modules):
        handle.remove()


def backward(output_tensor, **arguments):
    if output_tensor == "an output":
        output_tensor = torch.ones(2, requires_grad=True) * 2
    public.backward_step(output_tensor=output_tensor, model_type=None, config=PipelineConfig(), **arguments)


STEP = {
    "model": ("module", Model(2, 2)),
    "forward_step_func": ("function", forward_step_func),
    "num_microbatches": ("count", 2),
    "pg_collection": ("maybe groups", None),
}
UNUSED = {"data_iterator": None, "seq_length": 1, "micro_batch_size": 1}
ONE_STAGE = OfJob(total_stages=1, current_stage=0)

CALLS = {
    "convert_schedule_table_to_order": Call(
        lambda **arguments: public.convert_schedule_table_to_order(schedule_table=[(0, 0)], **arguments),
        StepArgumentError,
        num_warmup_microbatches=("index", 1),
        num_model_chunks=("count", 1),
    ),
    "get_pp_rank_microbatches": Call(
        public.get_pp_rank_microbatches,
        StepArgumentError,
        num_microbatches=("count", 2),
        num_model_chunks=("count", 2),
        microbatch_group_size_per_vp_stage=("maybe count", 2),
        p2p_communicator=("maybe communicator", OfJob(total_stages=2, current_stage=0)),
    ),
    "get_schedule_table": Call(
        public.get_schedule_table,
        StepArgumentError,
        num_microbatches=("count", 2),
        num_model_chunks=("count", 2),
        microbatch_group_size_per_vp_stage=("count", 2),
    ),
    "get_tensor_shapes": Call(
        lambda **arguments: public.get_tensor_shapes(tp_group=None, cp_group=None, **arguments),
        StepArgumentError,
        seq_length=("count", 4),
        micro_batch_size=("count", 1),
        decoder_seq_length=("maybe count", None),
        config=("other", SimpleNamespace(hidden_size=4, sequence_parallel=True)),
    ),
    "step_plan": Call(
        lambda **arguments: public.step_plan(num_microbatches=2, **arguments),
        PlanError,
        graph=("graph", public.chain(2)),
        placement=("maybe placement", None),
        frozen=("names", ()),
    ),
    "with_reduce": Call(public.with_reduce, PlanError, plan=("plan", LOWERED), tied=("mapping", {"t": [0, 1]})),
    "forward_backward_no_pipelining": Call(
        lambda **arguments: public.forward_backward_no_pipelining(**UNUSED, **arguments),
        (StepArgumentError, GradientError),
        **STEP,
    ),
    "forward_backward_pipelining_without_interleaving": Call(
        lambda **arguments: public.forward_backward_pipelining_without_interleaving(**UNUSED, **arguments),
        (StepArgumentError, GradientError),
        **STEP,
        p2p_communicator=("communicator", ONE_STAGE),
    ),
    "forward_backward_pipelining_with_interleaving": Call(
        lambda **arguments: public.forward_backward_pipelining_with_interleaving(**UNUSED, **arguments),
        (StepArgumentError, GradientError),
        **STEP | {"model": ("module", [Model(2, 2), Model(2, 2)])},
        p2p_communicator=("communicator", OfJob(total_stages=2, current_stage=0)),
    ),
    "get_forward_backward_func": Call(
        public.get_forward_backward_func, StepArgumentError, pp_size=("count", 2), vp_size=("maybe count", None)
    ),
    "reduce_gradients": Call(
        public.reduce_gradients,
        (GradientError, StepArgumentError),
        modules=("modules", linear()),
        collections=("groups", groups()),
        num_tokens=("maybe number", None),
    ),
    "clip_grad_norm_": Call(
        lambda **arguments: public.clip_grad_norm_(max_norm=1.0, **arguments),
        (GradientError, StepArgumentError),
        modules=("modules", linear()),
        collections=("groups", groups()),
    ),
    "LossScaler.unscale": Call(LossScaler().unscale, StepArgumentError, modules=("modules", linear())),
    "unscale_gradients_": Call(
        public.unscale_gradients_,
        (GradientError, StepArgumentError),
        modules=("modules", linear()),
        scale=("positive", 2.0),
    ),
    "accumulate_in_main_grad": Call(accumulate, (GradientError, StepArgumentError), modules=("modules", [])),
    "zero_main_grads": Call(public.zero_main_grads, StepArgumentError, modules=("modules", linear())),
    "Monitor": Call(
        watch,
        StepArgumentError,
        store=("other", dist.HashStore()),
        rank=("index", 0),
        ranks=("integers", [0]),
        deadline=("maybe positive", None),
        interval=("positive", 0.5),
        device=("maybe other", None),
        first_deadline=("maybe positive", 1.0),
    ),
    "clear_embedding_activation_buffer": Call(
        lambda model: public.clear_embedding_activation_buffer(
            PipelineConfig(defer_embedding_wgrad_compute=True), model, is_last_stage=True
        ),
        GradientError,
        model=("module", Output()),
    ),
    "PipelineRuntime": Call(
        PipelineRuntime,
        (StepArgumentError, StepArgumentError),
        plan=("plan", LOWERED),
        stages=("mapping", {0: SimpleNamespace(forward=print)}),
        communicator=("maybe other", Sending()),
        hooks=("list", ()),
        deadline=("maybe positive", None),
        loss_scale=("function", lambda loss: loss),
    ),
    "position_of": Call(lambda plan: public.position_of(plan, [0]), StepArgumentError, plan=("plan", PLAN)),
    "backward_step": Call(
        backward,
        StepArgumentError,
        input_tensor=("payload", None),
        output_tensor=("payload", "an output"),
        output_tensor_grad=("payload", torch.ones(2)),
    ),
    "TiedParameters": Call(
        TiedParameters,
        GradientError,
        name=("text", "t"),
        stages=("integers", (0, 1)),
    ),
    "tie_parameters": Call(
        lambda **arguments: public.tie_parameters(copies={}, **arguments),
        GradientError,
        name=("text", "t"),
        stages=("integers", [0, 1]),
    ),
}

ARGUMENTS = [(name, argument) for name, call in CALLS.items() for argument in call.kinds]


@pytest.fixture(autouse=True)
def in_a_folder(process_group, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [name for name in CALLS if not name.endswith("_with_interleaving")])
def test_the_right_call_is_right(name):
    CALLS[name].function(**CALLS[name].right)


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_what_is_not_taken_is_refused_by_name(name, argument):
    call = CALLS[name]
    for value in (WRONG | MAYBE)[call.kinds[argument]]:
        with pytest.raises(call.errors) as refused:
            call.function(**{**call.right, argument: value})
            pytest.fail(f"{name}({argument}={value!r}) was taken")
        text = str(refused.value)
        assert argument in text or repr(value) in text, f"{name}({argument}={value!r}): {text}"
        assert "; " in text or ": " in text, f"{name}({argument}={value!r}) has no remedy: {text}"


# What becomes of a plan that nobody has verified


UNVERIFIED = {
    "a missing receive": ("1RECV_F0<0", "1F0", 1),
    "a missing receive of a gradient": ("0RECV_B1<1", "0B1", 0),
    "a missing forward": ("0F2", "0SEND_F2>1", 0),
}


@pytest.mark.parametrize("what", UNVERIFIED)
def test_a_plan_that_lacks_something_is_refused_before_anything_is_sent(what, network):
    lacks, wants, position = UNVERIFIED[what]
    text = public.to_text(public.lower(public.gpipe(2, 3)))
    assert lacks in text
    plan = public.from_text(text.replace(f"[{lacks}]", "").replace(f"{lacks} ", "").replace(f" {lacks}", "", 1))
    stages = {position: SimpleNamespace(forward=print)}
    with pytest.raises(PlanError, match=rf"position {position}") as refused:
        PipelineRuntime(plan, stages, network.communicator(2, position))
    assert wants in str(refused.value)
    assert network.messages == 0


def test_sizes_of_torch_become_integers():
    assert public.gpipe(torch.tensor(2), torch.tensor(3)) == public.gpipe(2, 3)
