"""MultiModulePipelineCommunicator on real ranks, against the same modules in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from attrs import evolve

from pipegrid.bridges import EdgeOptions, MultiModulePipelineCommunicator, VTPCommunicator, VTPTopology
from pipegrid.bridges.bridge.communicator import BridgeCommunicator
from pipegrid.bridges.errors import MissingTensorError
from pipegrid.bridges.multimodule.dict_api import _prepare_tensor_for_comm, _restore_tensor_from_comm
from pipegrid.bridges.multimodule.rank_modules import ModuleChain
from pipegrid.core.edge import Direction, Edge
from pipegrid.core.graph import ModuleGraphError
from pipegrid.core.lanes import LaneSharing, PositionLane
from pipegrid.reshard import Replicate
from pipegrid.reshard.errors import BridgeError, ShapeError
from pipegrid.topology import HyperCommGrid
from pipegrid.transport import P2PLaneDeadError
from pipegrid.transport.config import P2PConfig
from pipegrid.transport.errors import P2PUsageError
from pipegrid.transport.protocol import PipelineCommunicator
from reshard_kit.grids import grid, share

CONFIG = P2PConfig(deadline=20.0, open_deadline=20.0)
F, B = Direction.FORWARD, Direction.BACKWARD
make = partial(MultiModulePipelineCommunicator, config=CONFIG)


# -- how long the pipeline is -------------------------------------------------------------------------

OMNI = {
    "image": grid(0, tp=2, pp=2),
    "audio": grid(4, pp=1, dp=2),
    "llm": grid(6, pp=3),
    "generator": grid(9, pp=2),
}
FLOW = {"image": ["llm"], "audio": ["llm"], "llm": ["generator"], "generator": []}
total = MultiModulePipelineCommunicator.compute_total_pipeline_stages


def test_stages_on_the_longest_path():
    assert total(FLOW, OMNI) == 2 + 3 + 2
    assert [total(FLOW, OMNI, rank=rank) for rank in range(11)] == [1, 1, 2, 2, 1, 1, 3, 4, 5, 6, 7]


def test_a_rank_of_several_modules_counts_the_longest_unless_one_is_named():
    grids = {"enc": grid(0, dp=2), "llm": grid(0, pp=2)}
    flow = {"enc": ["llm"], "llm": []}
    assert total(flow, grids, rank=1) == 3
    assert total(flow, grids, rank=1, module_name="enc") == 1


@pytest.mark.parametrize(
    ("flow", "keywords", "text"),
    [
        ({"a": ["b"], "b": ["a"]}, {}, "cycle: . -> . -> ."),
        ({"a": ["b"]}, {"rank": 7}, "rank 7 is in none"),
        ({"a": ["b"]}, {"rank": 0, "module_name": "b"}, r"rank 0 is in none of the modules \['b'\]"),
        ({"a": ["c"], "b": []}, {}, r"names modules \['a', 'b', 'c'\], the grid map \['a', 'b'\]"),
        ({"a": "b"}, {}, r"what 'a' feeds is 'b'; it must be a list"),
        ({"a": []}, {}, r"names modules \['a'\], the grid map \['a', 'b'\]"),
    ],
)
def test_what_has_no_length_is_a_value_error(flow, keywords, text):
    with pytest.raises(ValueError, match=text):
        total(flow, {"a": grid(0), "b": grid(1)}, **keywords)
    with pytest.raises(ModuleGraphError, match="no terminal node"):
        total({}, {})


def test_tensors_for_peers_that_speak_3d_only():
    two, three = torch.zeros(2, 3), torch.zeros(2, 3, 4)
    assert _prepare_tensor_for_comm(two).shape == (2, 3, 1)
    assert _prepare_tensor_for_comm(three) is three
    assert _prepare_tensor_for_comm(None) is None
    assert _restore_tensor_from_comm(None) is None
    assert [t.shape for t in _restore_tensor_from_comm(_prepare_tensor_for_comm([two, three]))] == [(2, 3), (2, 3, 4)]


# -- the verbs against one process --------------------------------------------------------------------


def weight(name, stage):
    """A stage is a multiplication by its own number, so that gradients tell the way they came."""
    return 1.0 + (sum(map(ord, name)) % 7) + stage


def reference(flow, depths, batch, order):
    """Loss and input gradients of the whole graph in one process; sinks add their outputs up."""
    leaves, outputs = {}, {}
    for name in order:
        feeding = [outputs[src] for src in order if name in flow[src]]
        if not feeding:
            leaves[name] = batch[name].clone().requires_grad_()
            feeding = [leaves[name]]
        value = sum(feeding)
        for stage in range(depths[name]):
            value = value * weight(name, stage)
        outputs[name] = value
    loss = sum((outputs[name] ** 2).sum() for name in order if not flow[name])
    loss.backward()
    return outputs, {name: leaf.grad for name, leaf in leaves.items()}


def one_microbatch(comm, flow, batch):
    """Forward and backward of the whole graph through the six verbs, as this rank sees it."""
    arrived = comm.recv_forward()
    grids, outputs, inputs = comm.module_to_grid_map, {}, {}
    for name, info in comm.rank_module_map.items():
        if info.is_source_stage:
            inputs[name] = {"input": share(batch[name], grids[name], comm.rank).clone().requires_grad_()}
        elif info.pp_rank == 0:
            inputs[name] = {src: arrived[src] for src in flow if name in flow[src]}
        else:
            inputs[name] = {name: arrived[name]}
        outputs[name] = sum(inputs[name].values()) * weight(name, info.pp_rank)
    comm.send_forward(outputs)
    grads = comm.recv_backward()
    for name, info in comm.rank_module_map.items():
        if info.is_terminal_stage:
            (outputs[name] ** 2).sum().backward()
        else:
            outputs[name].backward(grads[name])
    back = {}
    for name, info in comm.rank_module_map.items():
        if not info.is_source_stage:
            back.update({key: value.grad for key, value in inputs[name].items()})
    comm.send_backward(back)
    return outputs, {name: held["input"].grad for name, held in inputs.items() if "input" in held}


JOBS = {
    "encoder dp2 to language dp1": ({"enc": grid(0, dp=2), "llm": grid(2)}, {"enc": ["llm"]}, 3),
    "encoder dp1 to language dp2": ({"enc": grid(0), "llm": grid(1, dp=2)}, {"enc": ["llm"]}, 3),
    "branches of unequal depth": (
        {"image": grid(0, pp=2), "audio": grid(2), "llm": grid(3, tp=1, pp=2)},
        {"image": ["llm"], "audio": ["llm"]},
        5,
    ),
    "two destinations": ({"enc": grid(0, dp=2), "one": grid(2), "two": grid(3, dp=2)}, {"enc": ["one", "two"]}, 5),
    "diamond with a skip edge": (
        {"enc": grid(0), "mid": grid(1, pp=2), "llm": grid(3, dp=2)},
        {"enc": ["mid", "llm"], "mid": ["llm"]},
        5,
    ),
    "encoders on the same ranks": (
        {"image": grid(0, dp=2), "audio": grid(0, tp=2), "llm": grid(2, pp=2)},
        {"image": ["llm"], "audio": ["llm"]},
        4,
    ),
    "encoder, language, generator": (
        {"enc": grid(0, dp=2), "llm": grid(2, pp=2), "gen": grid(4, dp=2)},
        {"enc": ["llm"], "llm": ["gen"]},
        6,
    ),
}


# On a serial device, sends of a farther module before those of the nearest one are a deadlock that gloo hides.
SERIAL = "diamond with a skip edge"


@pytest.mark.parametrize(
    "job",
    [
        *(pytest.param(name, marks=pytest.mark.ranks(job[2])) for name, job in JOBS.items()),
        pytest.param(
            SERIAL, marks=pytest.mark.ranks(5, backend="fake_nccl", fake_nccl="serial"), id=f"serial {SERIAL}"
        ),
    ],
)
def test_the_gradient_of_the_graph_is_that_of_one_process(job):
    grids, edges, _ = JOBS[job]
    flow = {name: edges.get(name, []) for name in grids}
    comm = make(grids, flow)
    assert isinstance(comm, PipelineCommunicator)
    depths = {name: comm.graph.depth(name) for name in grids}
    for microbatch in range(2):
        generator = torch.Generator().manual_seed(microbatch)
        batch = {name: torch.randn(4, 2, 3, generator=generator, dtype=torch.float64) for name in grids}
        whole, gradients = reference(flow, depths, batch, comm.graph.order)
        outputs, mine = one_microbatch(comm, flow, batch)
        for name, info in comm.rank_module_map.items():
            if info.pp_rank == info.pp_size - 1:
                assert torch.equal(outputs[name], share(whole[name], grids[name], comm.rank))
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, share(gradients[name], grids[name], comm.rank), rtol=1e-13, atol=0)
    comm.destroy()
    comm.destroy()
    with pytest.raises(P2PLaneDeadError, match="make a new one"):
        comm.recv_forward()


@pytest.mark.ranks(3)
def test_shapes_can_be_renewed_between_two_steps():
    grids = {"a": grid(dp=1), "b": grid(1, pp=2)}
    comm = make(grids, {"a": ["b"], "b": []})
    for rows in (2, 3):
        for edge in (Edge(0, 1), Edge(1, 2)):
            if edge.source in comm.stages:
                comm.isend(torch.ones(rows, 2, 2), edge=edge, direction=F).wait()
            if edge.destination in comm.stages:
                assert comm.irecv(edge=edge, direction=F).result().shape == (rows, 2, 2)
        comm.renew_shapes()
    comm.destroy()


@pytest.mark.ranks(2)
def test_an_edge_declares_its_shape():
    grids = {"a": grid(dp=1), "b": grid(1, dp=1)}
    edges = {("a", "b"): EdgeOptions(shape=(None, 16, 64))}
    comm = make(grids, {"a": ["b"], "b": []}, edges=edges)
    if comm.rank == 0:
        with pytest.raises(ShapeError, match=r"bridge a>b: rank 0 sends shape \(2, 17, 64\), which is 17 on axis 1"):
            comm.isend(torch.zeros(2, 17, 64), edge=Edge(0, 1), direction=F)
        comm.isend(torch.zeros(2, 16, 64), edge=Edge(0, 1), direction=F).wait()
    else:
        assert comm.irecv(edge=Edge(0, 1), direction=F).result().shape == (2, 16, 64)
    comm.destroy()


@pytest.mark.ranks(5)
def test_where_each_rank_stands():
    grids = {"image": grid(0, pp=2), "audio": grid(2), "llm": grid(3, pp=2)}
    comm = make(grids, {"image": ["llm"], "audio": ["llm"], "llm": []})
    rank = dist.get_rank()
    assert comm.total_stages == 4
    assert comm.current_stage == [0, 1, 0, 2, 3][rank]
    assert comm.stages == (rank,)
    assert comm.is_pp_first_stage == (rank in {0, 2})
    assert comm.is_pp_last_stage == (rank == 4)
    assert comm.is_current_rank_in_grid(grids["llm"]) == (rank in {3, 4})
    assert comm._is_source_module("audio")
    assert comm._is_sink_module("llm")
    (info,) = comm.rank_module_map.values()
    assert isinstance(info.p2p_communicator, ModuleChain)
    assert (info.pp_rank, info.pp_size) == [(0, 2), (1, 2), (0, 1), (0, 2), (1, 2)][rank]
    assert len(info.bridge_comms_as_src_module) == [0, 1, 1, 0, 0][rank]
    assert len(info.bridge_comms_as_dest_module) == [0, 0, 0, 2, 0][rank]
    edges = [edge for edge in comm.graph.stage_edges if rank in (edge.source, edge.destination)]
    assert [talk.peer for talk in comm.neighbours(edges)] == [[1], [0, 3], [3], [1, 2, 4], [3]][rank]
    comm.destroy()


@pytest.mark.ranks(3)
def test_the_combined_verbs_meet_without_buffers():
    """1F1B in strict mode, where every batch is waited for before the next action."""
    strict = P2PConfig(deadline=20.0, open_deadline=20.0, strict=True)
    grids = {"enc": grid(0, dp=2), "llm": grid(2)}
    comm = MultiModulePipelineCommunicator(grids, {"enc": ["llm"], "llm": []}, strict)
    value = [torch.full((1, 1, 1), float(10 * step + dist.get_rank())) for step in range(4)]
    if "enc" in comm.rank_module_map:
        comm.send_forward({"enc": value[0]}, is_last_stage=False)
        for step in range(1, 4):
            grads = comm.send_forward_recv_backward({"enc": value[step]})
            assert torch.equal(grads["enc"], 2 * value[step - 1])
        assert torch.equal(comm.recv_backward(tensor_shape={"enc": (1, 1, 1)})["enc"], 2 * value[3])
    else:
        got = comm.recv_forward(tensor_shape={"enc": (2, 1, 1)})
        for _ in range(3):
            got = comm.send_backward_recv_forward({"enc": 2 * got["enc"].detach()})
        comm.send_backward({"enc": 2 * got["enc"].detach()})
    comm.destroy()


@pytest.mark.ranks(5, backend="fake_nccl", fake_nccl="serial")
def test_1f1b_over_branches_of_unequal_depth_on_one_stream_with_shared_communicators():
    """With separate ones audio sends a microbatch before it receives the gradient which comes first."""
    grids, flow, _ = JOBS["branches of unequal depth"]
    config = P2PConfig(deadline=20.0, open_deadline=20.0, communicators="shared")
    comm = MultiModulePipelineCommunicator(grids, {name: flow.get(name, []) for name in grids}, config)
    (name,) = comm.rank_module_map
    microbatches, warmup, held = 4, comm.total_stages - comm.current_stage - 1, []

    def outputs(step):
        return {} if comm.is_pp_last_stage else {name: torch.full((1, 1, 1), float(step))}

    def check(grads, step):
        assert [grad.item() for grad in grads.values()] == [step] * (not comm.is_pp_last_stage)

    for step in range(warmup):
        held.append(comm.recv_forward())
        comm.send_forward(outputs(step))
    held.append(comm.recv_forward())
    for step in range(warmup, microbatches):
        check(comm.send_forward_recv_backward(outputs(step)), step - warmup)
        if step + 1 < microbatches:
            held.append(comm.send_backward_recv_forward(held.pop(0)))
        else:
            comm.send_backward(held.pop(0))
    for step in range(microbatches - warmup, microbatches):
        check(comm.recv_backward(), step)
        comm.send_backward(held.pop(0))
    comm.destroy()


@pytest.mark.ranks(4)
def test_edges_differ_in_axes_dtype_and_strategy():
    grids = {"vision": grid(0, dp=2), "speech": grid(2), "llm": grid(3)}
    flow = {"vision": ["llm"], "speech": ["llm"], "llm": []}
    comm = make(
        grids,
        flow,
        module_output_ndim={"vision": 2},
        edges={("speech", "llm"): EdgeOptions(comm_dtype=torch.bfloat16, strategy="leader", tensor_ndim=4)},
    )
    if "vision" in comm.rank_module_map:
        comm.send_forward({"vision": torch.full((3, 2), float(dist.get_rank()), dtype=torch.float64)})
        assert comm.recv_backward()["vision"].shape == (3, 2)
    elif "speech" in comm.rank_module_map:
        comm.send_forward({"speech": torch.ones(1, 1, 1, 1)})
        assert comm.recv_backward()["speech"].dtype is torch.float32
    else:
        got = comm.recv_forward()
        assert got["vision"].dtype is torch.float64
        assert got["vision"][:, 0].tolist() == [0.0] * 3 + [1.0] * 3
        assert got["speech"].shape == (1, 1, 1, 1)
        comm.send_backward({name: tensor.detach() for name, tensor in got.items()})
    comm.destroy()


@pytest.mark.ranks(4)
def test_a_frozen_module_has_no_backward_anywhere():
    grids = {"enc": grid(0, pp=2), "llm": grid(2), "aux": grid(3)}
    flow = {"enc": ["llm"], "aux": ["llm"], "llm": []}
    comm = make(grids, flow, edges={("enc", "llm"): EdgeOptions(backward=False)})
    value = torch.ones(2, 1, 1)
    if "llm" in comm.rank_module_map:
        got = comm.recv_forward()
        assert not got["enc"].requires_grad
        assert got["aux"].requires_grad
        comm.send_backward({"aux": got["aux"].detach()})
    else:
        name = next(iter(comm.rank_module_map))
        arrived = comm.recv_forward()
        comm.send_forward({name: arrived.get(name, value).detach()})
        assert set(comm.recv_backward()) == ({"aux"} if name == "aux" else set())
        comm.send_backward({})
    comm.destroy()


@pytest.mark.ranks(2)
def test_microbatches_without_images_and_unused_inputs_stay_in_step():
    config = P2PConfig(deadline=20.0, open_deadline=20.0, variable_seq_lengths=True)
    grids = {"enc": grid(0), "llm": grid(1)}
    comm = MultiModulePipelineCommunicator(grids, {"enc": ["llm"], "llm": []}, config)
    for rows in (2, 0, 3):
        if "enc" in comm.rank_module_map:
            comm.send_forward({"enc": torch.ones(rows, 2, 2)})
            assert torch.equal(comm.recv_backward()["enc"], torch.zeros(rows, 2, 2))
        else:
            assert comm.recv_forward()["enc"].shape == (rows, 2, 2)
            comm.send_backward({"enc": None})
    comm.destroy()


@pytest.mark.ranks(3)
def test_calls_that_do_not_fit_this_rank():
    grids = {"enc": grid(0), "llm": grid(1, pp=2)}
    comm = make(grids, {"enc": ["llm"], "llm": []})
    if comm.rank == 0:
        with pytest.raises(MissingTensorError, match=r"has tensors for \['llm'\]; it needs \['enc'\]"):
            comm.send_forward({"llm": torch.ones(1, 1, 1)})
        with pytest.raises(KeyError, match="it needs"):
            comm.send_forward({})
        with pytest.raises(ShapeError, match="exchanges dicts by module name, got a tensor"):
            comm.send_forward(torch.ones(1, 1, 1))
        with pytest.raises(BridgeError, match="is_last_stage=True on rank 0"):
            comm.send_forward({"enc": torch.ones(1, 1, 1)}, is_last_stage=True)
        with pytest.raises(BridgeError, match=r"no edge 1>2 ends at rank 0"):
            comm.irecv(edge=Edge(1, 2), direction=F)
    else:
        with pytest.raises(BridgeError, match="no edge 0>2 ends at"):
            comm.irecv(edge=Edge(0, 2), direction=F)
        with pytest.raises(BridgeError, match="is_first_stage=True"):
            comm.recv_forward(is_first_stage=True)
    if comm.rank == 2:
        with pytest.raises(BridgeError, match=r"no edge 0>1 ends at rank 2"):
            comm.irecv(edge=Edge(0, 1), direction=F)
    comm.destroy()


@pytest.mark.ranks(1)
def test_declarations_that_contradict_each_other():
    grids = {"enc": grid(0), "mid": grid(0), "llm": grid(0)}
    flow = {"enc": ["mid"], "mid": ["llm"], "llm": []}
    with pytest.raises(BridgeError, match=r"options for edges \[\('enc', 'llm'\)\]"):
        make(grids, flow, edges={("enc", "llm"): EdgeOptions()})
    with pytest.raises(BridgeError, match="no gradient ever reaches 'mid'"):
        make(grids, flow, edges={("mid", "llm"): EdgeOptions(backward=False)})
    with pytest.raises(BridgeError, match=r"placements names modules \['llmm'\]"):
        make(grids, flow, placements={"llmm": {"ep": Replicate()}})
    with pytest.raises(BridgeError, match="stages on places"):
        make(grids, flow, stage_placement={"llm": (0, 1)})
    with pytest.raises(ModuleGraphError, match="cycle"):
        make(grids, {"enc": ["mid"], "mid": ["enc"], "llm": []})


@pytest.mark.ranks(3)
def test_lanes_that_the_plan_does_not_use_are_not_opened():
    """An evaluation: activations alone, between modules and inside of one."""
    grids = {"enc": grid(dp=1), "llm": grid(1, tp=1, pp=2)}
    used = [(Edge(0, 1), F), (Edge(1, 2), F)]
    comm = MultiModulePipelineCommunicator(grids, {"enc": ["llm"]}, CONFIG, traffic=used)
    assert comm.communicators == (1, 2, 1)[comm.rank]
    if comm.rank < 2:
        with torch.no_grad():
            comm.isend(torch.full((1, 2, 2), float(comm.rank)), edge=Edge(comm.rank, comm.rank + 1), direction=F)
    if comm.rank:
        got = comm.irecv(edge=Edge(comm.rank - 1, comm.rank), direction=F).result()
        assert torch.equal(got, torch.full((1, 2, 2), comm.rank - 1.0))
    if comm.rank == 0:
        with pytest.raises(BridgeError, match="has no lanes for gradients, which its plan does not use"):
            comm.irecv(edge=Edge(0, 1), direction=B)
    if comm.rank == 2:
        with pytest.raises(BridgeError, match="no backward lane at rank 2, .* or traffic= leaves it out"):
            comm.isend(torch.zeros(1, 2, 2), edge=Edge(1, 2), direction=B)
    dist.barrier()
    comm.destroy()


@pytest.mark.ranks(1)
def test_traffic_names_edges_that_there_are():
    with pytest.raises(BridgeError, match="traffic has edges 3>4; the stages are joined by 0>1"):
        MultiModulePipelineCommunicator(
            {"a": grid(dp=1), "b": grid(dp=1)}, {"a": ["b"]}, CONFIG, traffic=[(Edge(3, 4), F)]
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["bridge", "modules", "vtp"])
def test_communicators_that_a_proof_found_are_for_no_bridge(kind):
    """A bridge has several lanes for one of the plan's: nothing is opened, on either rank."""
    config = P2PConfig(open_deadline=20.0, communicators=LaneSharing([[PositionLane(0, 1, F)]]))
    grids = {"enc": grid(0), "llm": grid(1)}
    before = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(P2PUsageError, match="which are for a P2PCommunicator"):
        if kind == "bridge":
            BridgeCommunicator(grids["enc"], grids["llm"], config=config)
        elif kind == "modules":
            MultiModulePipelineCommunicator(grids, {"enc": ["llm"], "llm": []}, config)
        else:
            VTPCommunicator(VTPTopology((1, 1)), config)
    assert len(dist.distributed_c10d._world.pg_map) == before


@pytest.mark.ranks(5)
def test_the_lanes_of_a_module_have_the_verbs_of_its_pipeline(ranks):
    """A pipeline of three places on ranks with gaps, by the communicator of its rank alone."""
    grids = {"enc": grid(0, dp=2), "llm": HyperCommGrid([3], ["pp"], ranks=[0, 2, 4]), "gen": grid(3)}
    config = evolve(CONFIG, pipeline_dtype=torch.float32)
    comm = MultiModulePipelineCommunicator(grids, {"enc": ["llm"], "llm": ["gen"], "gen": []}, config)
    llm = comm.rank_module_map.get("llm")
    if llm is not None:
        chain = llm.p2p_communicator
        first, last = chain.is_pp_first_stage, chain.is_pp_last_stage
        assert (chain.current_stage, chain.total_stages) == (llm.pp_rank, 3) == (ranks.rank // 2, 3)
        assert (first, last) == (comm.is_module_pp_first_stage("llm"), comm.is_module_pp_last_stage("llm"))
        assert (first, last) == (ranks.rank == 0, ranks.rank == 4)
        if first or last:
            wrong = chain.recv_forward if first else partial(chain.send_forward, torch.zeros(1))
            with pytest.raises(
                P2PUsageError, match=r"(recv_prev|send_next) has no lane in module 'llm' at place [02] of"
            ):
                wrong()
        x = chain.recv_forward([2], first)
        x = torch.zeros(2) if x is None else x + 1
        grad = chain.send_forward_recv_backward(x, [2], last)
        grad = x.detach() if grad is None else 2 * grad
        chain.send_backward(grad, first)
        assert x.tolist() == [ranks.rank / 2] * 2
        assert grad.tolist() == [2.0 ** (3 - ranks.rank // 2)] * 2
    else:
        with pytest.raises(BridgeError, match=r"this rank is not in module 'llm'; it is in \['(enc|gen)'\]"):
            comm.is_module_pp_last_stage("llm")
    comm.destroy()
