"""Whole pipelines over a communicator: gradients equal to those of one process, forward and backward never mixed."""

import pytest
import torch
import torch.distributed as dist

from pipegrid.transport import Edge, P2PCommunicator

from .stages import BACKWARD, FORWARD, config, in_turn, on_one_stream

WIDTH, ROWS = 4, 3


def layer(stage):
    torch.manual_seed(stage)
    made = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    return torch.nn.Sequential(made, torch.nn.Tanh())


def batch(microbatch):
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + microbatch))


def reference(stages, microbatches):
    """Gradients of every layer when one process runs them all."""
    whole = torch.nn.Sequential(*map(layer, range(stages)))
    for microbatch in range(microbatches):
        (whole(batch(microbatch)) ** 2).sum().backward()
    return [[parameter.grad for parameter in one.parameters()] for one in whole]


MODES = pytest.mark.parametrize(
    "settings",
    [
        {"batch_p2p_comm": True},
        {"batch_p2p_comm": False},
        {"communicators": "shared"},
        {"communicators": "shared", "batch_p2p_comm": False},
        {"strict": True},
        {"strict": True, "batch_p2p_comm": False},
        {"variable_seq_lengths": True},
    ],
    ids=["batched", "unbatched", "shared", "shared-unbatched", "strict", "strict-unbatched", "variable"],
)


class Stages:
    """The layers that lie on this rank, and what each of them keeps between forward and backward."""

    def __init__(self, mine):
        self.layers = {stage: layer(stage) for stage in mine}
        self.kept = {}

    def forward(self, stage, microbatch, x):
        y = self.layers[stage](x)
        self.kept[stage, microbatch] = x, y
        return y.detach()

    def backward(self, stage, microbatch, gradient):
        x, y = self.kept.pop((stage, microbatch))
        if gradient is None:
            (y**2).sum().backward()
        else:
            y.backward(gradient)
        return x.grad

    def assert_gradients(self, expected):
        assert not self.kept
        for stage, one in self.layers.items():
            for parameter, gradient in zip(one.parameters(), expected[stage], strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.few(6)
@MODES
@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["edges", "verbs"])
def test_two_stages_of_two_chunks(ranks, settings, by):
    # Next and previous are one rank. Each half of the ring carries activations of one edge and gradients of another
    # at the same time: with shared ordering they would be taken for each other, which float64 gradients would tell.
    microbatches, stages = 4, 4
    communicator = P2PCommunicator(dist.group.WORLD, config(pipeline_dtype=torch.float64, **settings))
    me = ranks.rank
    mine = Stages([me, me + 2])
    edges = [Edge(stage, stage + 1) for stage in range(stages - 1)]

    def tick_by_verbs(sends, receives):
        """The same with the verb of all four directions; two edges lie each way at once, the third one follows."""
        out = {(edge, way): payload for payload, edge, way in sends}
        received = {}
        for edges_now in (edges[:2], edges[2:]):
            ahead = next((edge for edge in edges_now if edge.source % 2 == me), None)
            behind = next((edge for edge in edges_now if edge.destination % 2 == me), None)
            received[behind, FORWARD], received[ahead, BACKWARD] = (
                communicator.send_forward_backward_recv_forward_backward(
                    out.get((ahead, FORWARD)),
                    out.get((behind, BACKWARD)),
                    (behind, FORWARD) in receives,
                    (ahead, BACKWARD) in receives,
                    (ROWS, WIDTH),
                )
            )
        return {key: received[key] for key in receives}

    def tick_by_edges(sends, receives):
        """One batch of messages: (payload, edge, direction) out, (edge, direction) in."""
        with communicator.lanes.batch(by_lane=on_one_stream(ranks)):  # both send first
            out = [communicator.isend(payload, edge=edge, direction=way) for payload, edge, way in sends]
            into = {key: communicator.irecv(edge=key[0], direction=key[1]) for key in receives}
        received = {key: handle.result() for key, handle in into.items()}
        for handle in out:
            handle.wait()
        return received

    tick = tick_by_verbs if by == "verbs" else tick_by_edges
    # Wave after wave: at tick t stage s has microbatch t - s forward, and 2 * stages - 1 - s ticks later backward.
    arrived = {}
    for t in range(microbatches + 2 * stages):
        forwards = {s: t - s for s in range(stages) if 0 <= t - s < microbatches}
        backwards = {s: m for s in range(stages) if 0 <= (m := t - (2 * stages - 1 - s)) < microbatches}
        sends, receives = [], []
        for stage, microbatch in forwards.items():
            if stage % 2 == me:
                x = batch(microbatch) if stage == 0 else arrived.pop((edges[stage - 1], FORWARD))
                y = mine.forward(stage, microbatch, x)
                if stage < stages - 1:
                    sends.append((y, edges[stage], FORWARD))
            elif stage < stages - 1:
                receives.append((edges[stage], FORWARD))
        for stage, microbatch in backwards.items():
            if stage % 2 == me:
                gradient = None if stage == stages - 1 else arrived.pop((edges[stage], BACKWARD))
                back = mine.backward(stage, microbatch, gradient)
                if stage > 0:
                    sends.append((back, edges[stage - 1], BACKWARD))
            elif stage > 0:
                receives.append((edges[stage - 1], BACKWARD))
        with in_turn(ranks, communicator):
            arrived |= tick(sends, receives)
    mine.assert_gradients(reference(stages, microbatches))
    communicator.close()


@pytest.mark.few(6)
@MODES
@pytest.mark.ranks(2, 4)
def test_one_forward_one_backward_with_the_blocking_verbs(ranks, settings):
    microbatches = 6
    communicator = P2PCommunicator(dist.group.WORLD, config(pipeline_dtype=torch.float64, **settings))
    me, stages = communicator.current_stage, communicator.total_stages
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    mine, shape = Stages([me]), (ROWS, WIDTH)
    warmup = min(stages - me - 1, microbatches)
    with in_turn(ranks, communicator):
        for microbatch in range(warmup):
            x = batch(microbatch) if first else communicator.recv_forward(shape, first)
            communicator.send_forward(mine.forward(me, microbatch, x), last)
        x = communicator.recv_forward(shape, first) if warmup < microbatches else None
        for microbatch in range(warmup, microbatches):
            y = mine.forward(me, microbatch, batch(microbatch) if first else x)
            gradient = communicator.send_forward_recv_backward(y, shape, last)
            back = mine.backward(me, microbatch - warmup, gradient)
            if microbatch < microbatches - 1:
                x = communicator.send_backward_recv_forward(back, shape, first)
            else:
                communicator.send_backward(back, first)
        for microbatch in range(microbatches - warmup, microbatches):
            gradient = communicator.recv_backward(shape, last)
            communicator.send_backward(mine.backward(me, microbatch, gradient), first)
    mine.assert_gradients(reference(stages, microbatches))
    communicator.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("settings", [{}, {"strict": True}], ids=["buffered", "strict"])
def test_a_u_shape_ends_where_it_began(ranks, settings):
    # Stages 0, 1, 2 and, on the first rank again, 3: labels and loss stay with the inputs.
    communicator = P2PCommunicator(dist.group.WORLD, config(pipeline_dtype=torch.float64, **settings))
    me, stages = ranks.rank, 4
    mine = Stages([0, 3] if me == 0 else [me])
    for microbatch in range(3):
        for stage in range(stages):
            if stage % 3 != me:
                continue
            x = batch(microbatch)
            if stage > 0:
                x = communicator.irecv(edge=Edge(stage - 1, stage), direction=FORWARD).result()
            y = mine.forward(stage, microbatch, x)
            if stage < stages - 1:
                communicator.isend(y, edge=Edge(stage, stage + 1), direction=FORWARD).wait()
        for stage in reversed(range(stages)):
            if stage % 3 != me:
                continue
            gradient = None
            if stage < stages - 1:
                gradient = communicator.irecv(edge=Edge(stage, stage + 1), direction=BACKWARD).result()
            back = mine.backward(stage, microbatch, gradient)
            if stage > 0:
                communicator.isend(back, edge=Edge(stage - 1, stage), direction=BACKWARD).wait()
    mine.assert_gradients(reference(stages, 3))
    communicator.close()
