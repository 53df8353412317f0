"""What the tests of the variable-TP communicator have in common."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.distributed as dist

from pipegrid.bridges import VTPCommunicator, VTPTopology
from pipegrid.core.edge import Direction, Edge
from pipegrid.transport.config import P2PConfig

F, B = Direction.FORWARD, Direction.BACKWARD


config = partial(P2PConfig, pipeline_dtype=torch.float64, deadline=30.0, open_deadline=30.0, batch_p2p_comm=False)


def make(tp_sizes, *, settings=None, label="vtp", **topology):
    return VTPCommunicator(VTPTopology(tp_sizes, **topology), config(**(settings or {})), label=label)


def tensor(shape, seed=0):
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(whole, comm, stage, axis=0):
    """What this rank holds of a tensor at the boundaries of ``stage``: all of it, or its part of the sequence."""
    held = comm.topology.replica(comm.replica)[stage]
    return whole.chunk(held.parts, axis)[held.ranks.index(comm.rank)] if held.parts > 1 else whole


def both_ways(pair, shapes, *, flags=(False, False), **settings):
    """Tensors of ``shapes`` there and back across a boundary of ``pair`` tp sizes, on the first ranks of the world."""
    a, b = pair
    if dist.get_rank() >= a + b:
        return
    # Ranks that this pair does not need wait for the others in the construction of a later one.
    settings = {"variable_seq_lengths": True, "open_deadline": 600.0, **settings}
    ranks = [range(a), range(a, a + b)]
    comm = make(pair, settings=settings, label=f"{pair}-{flags}", ranks=ranks, sequence_parallel=flags)
    edge = Edge(0, 1)
    for seed, shape in enumerate(shapes):
        there, back = tensor(shape, seed), tensor(shape, 1000 + seed)
        if comm.stage == 0:
            sending = comm.isend(part(there, comm, 0), edge=edge, direction=F)
            got, expected = comm.irecv(edge=edge, direction=B).result(), part(back, comm, 0)
        else:
            receiving = comm.irecv(edge=edge, direction=F, shapes=part(there, comm, 1).shape)
            got, expected = receiving.result(), part(there, comm, 1)
            assert receiving.result() is got
            sending = comm.isend(part(back, comm, 1), edge=edge, direction=B)
        assert got.requires_grad
        assert got.is_leaf
        assert torch.equal(got, expected), (pair, shape, flags)
        sending.wait()
    comm.close()


def uneven(a, b):
    """Shapes whose sizes nothing divides, some with fewer elements than there are ranks."""
    return [(7, 3, 5), (13,), (1, 1), (a * b + 1, 2), (0, 3)]


def cuttable(a, b):
    """Shapes whose first axis both sides can cut."""
    return [(math.lcm(a, b), 3, 5), (3 * math.lcm(a, b), 1)]
