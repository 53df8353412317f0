"""A pipelined step has the gradients of one process: chains, graphs of modules, every kind of loss."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attrs import field, frozen
from torch import nn

from autograd_kit.gradients import difference, gradients_of
from pipegrid.core.graph import ModuleGraph
from pipegrid.plans.generators import multi_module_1f1b
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.megatron.config import PipelineConfig
from pipegrid.schedules.megatron.shapes import AnnouncedShapes
from pipegrid.schedules.megatron.step import infos_of
from pipegrid.schedules.megatron.step_functions import (
    StepArgumentError,
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from pipegrid.schedules.runtime import PipelineError
from pipegrid.transport.errors import P2PUsageError

from ..kit.hooks import Hook, noting
from ..kit.models import WIDTH, Part, call, forward_step, mean_loss, token_loss, uneven
from ..kit.stages import differentiate, stages_of
from ..kit.threads import in_threads


def leave_sums(models, num_tokens, pg_collection):
    """The reference below leaves sums as well."""


LOSSES = {"mean": mean_loss, "tokens": token_loss}


@frozen
class Case:
    graph: ModuleGraph
    microbatches: int
    loss: str = "mean"
    config: PipelineConfig = field(factory=PipelineConfig)
    empty: tuple[int, ...] = ()


def reference(case: Case, parts: list[Part]) -> list[object]:
    """The same step in one process: gradients are left in ``parts``; returns the infos of every microbatch."""
    infos = []

    def loss(output, _):
        scalar, *tokens, info = LOSSES[case.loss](output)
        infos.append(info)
        if case.config.calculate_per_token_loss:
            return scalar
        return scalar / (tokens[0] if tokens else 1) / case.microbatches

    plan = multi_module_1f1b(case.graph, case.microbatches)
    differentiate(plan, stages_of(case.graph, parts, data=uneven, loss=loss))
    return infos


def graph_step(iterator, model, *, loss, module):
    output, loss = forward_step(iterator, model, data=uneven, loss=loss)
    return output if module is None else {module: output}, loss


own_step = partial(forward_step, data=uneven)
pipelined = partial(call, forward_backward_pipelining_without_interleaving, forward_step_func=own_step)


def build(case: Case) -> list[Part]:
    return [Part(stage, case.config, layers=0 if stage in case.empty else 1) for stage in range(case.graph.num_stages)]


def run(case: Case, network, **options):
    """One pipelined step, a thread per stage; the parts with their gradients, and what each rank returned."""
    parts, loss = build(case), LOSSES[case.loss]
    options["count"] = case.microbatches
    if len(case.graph.modules) == 1:
        return parts, network.calls(pipelined, parts, forward_step_func=partial(own_step, loss=loss), **options)
    functions = []
    for stage, part in enumerate(parts):
        communicator = network.communicator(max(case.graph.distance_to_sink) + 1, 0, case.graph, (stage,))
        outgoing = any(edge.source == stage for edge in case.graph.stage_edges)
        step = partial(graph_step, loss=loss, module=case.graph.module_of(stage)[0] if outgoing else None)
        functions.append(
            partial(pipelined, model=part, forward_step_func=step, p2p_communicator=communicator, **options)
        )
    return parts, in_threads(functions)


CHAINS = [
    Case(ModuleGraph({"model": stages}), microbatches, loss, PipelineConfig(**config))
    for stages in (2, 3, 4)
    for microbatches in (1, stages, 3 * stages)
    for loss, config in (
        ("mean", {}),
        ("mean", {"deallocate_pipeline_outputs": True}),
        ("tokens", {}),
        ("tokens", {"calculate_per_token_loss": True, "finalize_model_grads_func": leave_sums}),
    )
]
GRAPHS = [
    Case(ModuleGraph(modules, edges), microbatches)
    for microbatches in (1, 5)
    for modules, edges in (
        ({"images": 2, "audio": 1, "language": 2}, {"images": ["language"], "audio": ["language"]}),
        ({"images": 1, "language": 1, "generator": 2}, {"images": ["language"], "language": ["generator"]}),
        ({"images": 1, "one": 2, "two": 1}, {"images": ["one", "two"]}),
        ({"encoder": 1, "middle": 2, "language": 1}, {"encoder": ["middle", "language"], "middle": ["language"]}),
    )
]


@pytest.mark.parametrize("case", [*CHAINS, *GRAPHS], ids=str)
def test_gradients_and_infos_are_those_of_one_process(case, network):
    parts, returned = run(case, network)
    expected = build(case)
    infos = reference(case, expected)
    assert difference(gradients_of(parts), gradients_of(expected)) < 1e-10
    if len(case.graph.sinks) == 1:
        assert returned == [[]] * (len(parts) - 1) + [infos]


@pytest.mark.parametrize("empty", [(0,), (1,), (2,), (0, 1)])
def test_an_empty_stage_passes_its_input_on(empty, network):
    case = Case(ModuleGraph({"model": 3}), 4, empty=empty)
    parts, _ = run(case, network)
    expected = build(case)
    reference(case, expected)
    assert difference(gradients_of(parts), gradients_of(expected)) < 1e-10


def test_forward_only_returns_the_infos_and_leaves_no_gradient(network):
    case = Case(ModuleGraph({"model": 3}), 5)
    parts, returned = run(case, network, forward_only=True)
    assert returned[-1] == reference(case, build(case))
    assert all(parameter.grad is None for part in parts for parameter in part.parameters())
    assert network.messages == 2 * 5


def test_infos_are_in_order_of_microbatches_in_whichever_order_a_plan_runs_them():
    """As where routes bring units of another replica between those of this one; slices of a unit stay in order."""
    first, second = ([(2, "d"), (0, "a"), (1, "b"), (1, "c")], [(1, "f"), (0, "e")])
    stages = {stage: SimpleNamespace(infos=infos) for stage, infos in enumerate((first, second))}
    assert infos_of(SimpleNamespace(stages=stages)) == list("abcdef")


def test_a_step_sends_one_message_per_hop_and_microbatch(network):
    run(Case(ModuleGraph({"model": 4}), 6), network)
    assert network.messages == 3 * 6 * 2
    assert all(lane.empty() for lane in network.lanes.values())


def test_without_a_pipeline_the_gradients_are_the_same():
    case = Case(ModuleGraph({"model": 1}), 5)
    (part,), (expected,) = build(case), build(case)
    infos = call(model=[part], count=5, forward_step_func=own_step)
    assert infos == reference(case, [expected])
    assert difference(gradients_of([part]), gradients_of([expected])) < 1e-10


def test_the_sync_hooks_are_called_once_around_the_last_backward():
    calls = []

    def finalize(models, num_tokens, pg_collection):
        calls.append(("finalize", len(models), num_tokens, pg_collection))

    no_sync = partial(noting, calls, "no_sync", "sync")
    watch = Hook(lambda action: calls.append(str(action)), lambda action: calls.append(f"{action} done"))
    config = PipelineConfig(no_sync_func=no_sync, finalize_model_grads_func=finalize, hooks=(watch,))
    call(model=Part(0, config), count=2)
    assert calls == [
        "no_sync",
        *("0F0", "0F0 done", "0B0", "0B0 done"),
        *("0F1", "sync", "0F1 done", "0B1", "0B1 done"),
        ("finalize", 1, None, None),
    ]


def test_a_window_of_microbatches_checkpoints_partially(network):
    seen = []

    def step(iterator, model, checkpoint):
        if model is parts[0]:
            seen.append(checkpoint)
        return forward_step(iterator, model)

    config = PipelineConfig(num_microbatches_with_partial_activation_checkpoints=1)
    parts = [Part(stage, config) for stage in range(2)]
    network.calls(pipelined, parts, forward_step_func=step)
    assert seen == [False, True, False, True]


def test_announced_shapes_are_adjusted_from_those_of_the_config_and_checked(network):
    asked = []

    def adjust(received, sent):
        asked.append((received, sent))
        return [(3, 1, WIDTH)], [(3, 1, WIDTH)]

    config = PipelineConfig(hidden_size=WIDTH)
    case = Case(ModuleGraph({"model": 3}), 4, config=config)
    # As a sequence of 3 tokens of 1 sample.
    rows = torch.ones(3, 1, WIDTH, dtype=torch.float64)
    common = {"seq_length": 6, "forward_step_func": partial(forward_step, data=lambda _: rows)}
    network.calls(pipelined, build(case), adjust_tensor_shapes_fn=adjust, **common)
    assert asked == [([(6, 1, WIDTH)], [(6, 1, WIDTH)])] * 3
    with pytest.raises(
        PipelineError, match=r"stage 0 sends tensors of shapes \[\(3, 1, 4\)\] for microbatch 0, but adj"
    ):
        pipelined(
            model=build(case)[0],
            p2p_communicator=network.communicator(3, 0),
            adjust_tensor_shapes_fn=lambda r, s: (r, s),
            **common,
        )
    with pytest.raises(StepArgumentError, match=r"returned 3; expected \(receive shapes, send shapes\)"):
        pipelined(
            model=build(case)[0],
            p2p_communicator=network.communicator(3, 0),
            adjust_tensor_shapes_fn=lambda r, s: 3,
            **common,
        )
    graph = ModuleGraph({"images": 1, "language": 1}, {"images": ["language"]})
    with pytest.raises(StepArgumentError, match="has one list of shapes, and the modules of a graph have one each"):
        refused(p2p_communicator=network.communicator(2, 0, graph, (0,)), adjust_tensor_shapes_fn=adjust)


def test_announced_shapes_are_those_of_every_tensor_or_any():
    shapes = AnnouncedShapes(((2, 3), ()), ((2, 3),))
    shapes.check([torch.ones(2, 3), torch.ones(7)], sent=False, stage=1, microbatch=4)
    with pytest.raises(StageOutputError, match=r"stage 1 received tensors of shapes \[\(2, 3\)\] for microbatch 4"):
        shapes.check(torch.ones(2, 3), sent=False, stage=1, microbatch=4)


def test_a_failed_forward_says_where_the_rank_stood():
    def step(iterator, model):
        if next(iterator) == 2:
            raise KeyError("no such sample")
        return model(uneven(0)), mean_loss

    with pytest.raises(
        PipelineError, match=r"stage 0, microbatch 2: KeyError: 'no such sample'\n.* step 5 of 8: 0F2\n.* rebuild"
    ):
        call(model=Part(0, PipelineConfig()), forward_step_func=step)


def refused(**arguments):
    """A call with these arguments beside good ones."""
    return pipelined(**{"model": Part(0, PipelineConfig()), **arguments})


def test_a_stage_of_a_chain_that_returns_none_is_named_before_the_next_stage_reads_data(network):
    with pytest.raises(PipelineError, match="StageOutputError: stage 0 returned None for microbatch 0; .* stage 1"):
        refused(
            p2p_communicator=network.communicator(2, 0),
            forward_step_func=lambda iterator, model: (None, mean_loss),
        )


def test_bad_arguments_are_named(network):
    communicator = network.communicator(2, 0)
    with pytest.raises(StepArgumentError, match="p2p_communicator is None; it must be a Communicator"):
        refused()
    with pytest.raises(StepArgumentError, match="config.hidden_size is None; it must be"):
        refused(p2p_communicator=communicator, adjust_tensor_shapes_fn=lambda r, s: (r, s))
    with pytest.raises(StepArgumentError, match="num_microbatches is 0; it must be an integer of at least 1"):
        refused(p2p_communicator=communicator, num_microbatches=0)
    with pytest.raises(StepArgumentError, match="model is a list of 2: without interleaving a rank has one chunk"):
        refused(p2p_communicator=communicator, model=[nn.Linear(1, 1), nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="`config` of model Linear is None"):
        refused(p2p_communicator=communicator, model=nn.Linear(1, 1))
    graph = ModuleGraph({"images": 1, "language": 1}, {"images": ["language"]})
    both = network.communicator(2, 0, graph, (0, 1))
    with pytest.raises(StepArgumentError, match=r"runs the modules \['images', 'language'\]; give model as a dict"):
        refused(p2p_communicator=both)
    one, other = (Part(0, PipelineConfig()) for _ in range(2))
    with pytest.raises(StepArgumentError, match=r"model has entries for \['images'\]; this rank runs"):
        refused(p2p_communicator=both, model={"images": one})
    with pytest.raises(StepArgumentError, match=r"data_iterator has entries for \['audio'\]; this rank runs"):
        refused(p2p_communicator=both, model={"images": one, "language": one}, data_iterator={"audio": iter(())})
    other.config = PipelineConfig(deadline=1.0)
    with pytest.raises(StepArgumentError, match="the models on this rank have different configs"):
        refused(p2p_communicator=both, model={"images": one, "language": other})
    with pytest.raises(StepArgumentError, match=r"holds the stages \[\('images', 0\), \('images', 1\)\]; this step"):
        refused(p2p_communicator=network.communicator(2, 0, ModuleGraph({"images": 2, "text": 1}), (0, 1)))
    with pytest.raises(StepArgumentError, match="this rank holds no stage of any module"):
        refused(p2p_communicator=network.communicator(2, 0, graph, ()))


@pytest.mark.parametrize("bad", [0, -3, "2", 2.0, None, True])
def test_a_number_of_microbatches_is_an_integer(bad, network):
    with pytest.raises(StepArgumentError, match=f"^num_microbatches is {bad!r}; it must be an integer of at least 1$"):
        refused(p2p_communicator=network.communicator(2, 0), num_microbatches=bad)


def test_a_forward_step_that_cannot_be_called_as_it_will_be_is_refused(network):
    communicator = network.communicator(2, 0)
    with pytest.raises(StepArgumentError, match=r"forward_step_func is 5, .* as f\(data_iterator, model\)"):
        refused(p2p_communicator=communicator, forward_step_func=5)
    name = "num_microbatches_with_partial_activation_checkpoints"
    part = Part(0, PipelineConfig(**{name: 1}))
    with pytest.raises(
        StepArgumentError, match=r"as f\(data_iterator, model, checkpoint_activations_microbatch\): too many"
    ):
        refused(p2p_communicator=communicator, model=part, forward_step_func=lambda iterator, model: None)
    part.config = SimpleNamespace(**{name: "a"})
    with pytest.raises(P2PUsageError, match=rf"^config\.{name} is 'a'; it must be an integer of at least 0"):
        refused(p2p_communicator=communicator, model=part)
    assert network.messages == 0


def test_one_more_forward_in_flight_is_had_from_interleaving_alone(network):
    part = Part(0, PipelineConfig(overlap_moe_expert_parallel_comm=True))
    with pytest.raises(
        StepArgumentError,
        match="1f1b has no pairs; these do: interleaved_1f1b",
    ):
        refused(p2p_communicator=network.communicator(2, 0), model=part)


def test_the_step_function_follows_the_pipeline_size():
    assert get_forward_backward_func(1) is forward_backward_no_pipelining
    assert get_forward_backward_func(4) is forward_backward_pipelining_without_interleaving
    assert get_forward_backward_func(4, 1) is forward_backward_pipelining_without_interleaving
    assert get_forward_backward_func(pg_collection=SimpleNamespace(pp=None)) is forward_backward_no_pipelining
    for bad in (0, -3, "2", 2.0, True):
        with pytest.raises(StepArgumentError, match=f"^pp_size is {bad!r}; it must be an integer of at least 1$"):
            get_forward_backward_func(pp_size=bad)
        with pytest.raises(StepArgumentError, match=f"^vp_size is {bad!r}; it must be an integer of at least 1$"):
            get_forward_backward_func(pp_size=2, vp_size=bad)
    with pytest.raises(StepArgumentError, match="size is unknown.*Pass pp_size=.* with a `pp` group"):
        get_forward_backward_func(pg_collection=SimpleNamespace(dp=None))
    with pytest.raises(StepArgumentError, match="Pass pp_size"):
        get_forward_backward_func()


def test_an_evaluation_takes_numbers_as_losses_and_any_sequence_as_data():
    model = nn.Linear(2, 1)
    model.config = PipelineConfig(pipeline_dtype=torch.float32)
    seen = []

    def step(data, module):
        seen.append(data)
        return module(torch.ones(1, 2)), lambda output: (3.0, {"value": output.item()})

    infos = call(model=[model], count=2, forward_step_func=step, data_iterator=range(100), forward_only=True)
    assert len(infos) == 2
    assert seen == [range(100)] * 2
