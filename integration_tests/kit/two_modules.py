"""An encoder before a language model, on their own numbers of replicas; on ranks, and in one process."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.schedules import WithLoss
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, replica_samples

from .data import coins, normal
from .models import Part, call, chain_in_one_process, config_for, counted_loss

MICROBATCHES, BATCH, WIDTH = 3, 4, 5
NAMES = ("images", "language")


def microbatch(index):
    return normal(index, BATCH, 2, WIDTH)


def weights(index):
    """Tokens that count, per sample: uneven between microbatches and replicas."""
    return coins(50 + index, BATCH, 2)


class TwoModules:
    """This rank's part of a step."""

    def __init__(self, ranks, lanes, **options):
        self.grids = {
            "images": HyperCommGrid([lanes[0], 1], ["dp", "pp"]),
            "language": HyperCommGrid([lanes[1], 1], ["dp", "pp"], rank_offset=lanes[0]),
        }
        self.name = "images" if ranks.rank < lanes[0] else "language"
        self.device = ranks.device
        self.config = config_for(ranks, deadline=30, check_replicas=True, **options)
        for grid in self.grids.values():
            grid.create_pg("dp")
        self.groups = ProcessGroupCollection.from_grid(self.grids[self.name])
        self.communicator = MultiModulePipelineCommunicator(self.grids, {"images": ["language"]}, self.config)
        self.stage = Part(NAMES.index(self.name), WIDTH, self.config).to(ranks.device)
        self.share = replica_samples(BATCH, self.grids[self.name])

    def step(self, indices, *, own_loss=None):
        per_token = self.config.calculate_per_token_loss

        def forward(iterator, model):
            index = next(iterator)
            part = slice(self.share.start, self.share.stop)
            if self.name == "images":
                output = model(microbatch(index)[part].to(self.device))
                carried = {"images": output}
                return (carried if own_loss is None else WithLoss(carried, own_loss(output))), None
            counted = weights(index)[part].to(self.device)
            return model(model.received["images"]), partial(counted_loss, counted=counted, per_token=per_token)

        return call(
            model=self.stage,
            count=len(indices),
            data_iterator=iter(indices),
            forward_step_func=forward,
            p2p_communicator=self.communicator,
            pg_collection=self.groups,
        )

    def own(self, whole):
        """This rank's module of `of_one_process`."""
        return whole[NAMES.index(self.name)].to(self.device)

    def close(self):
        self.communicator.destroy()
        dist.barrier()


def of_one_process(steps, *, per_token):
    """Both modules with the gradients of ``steps``, the numbers of their microbatches."""
    whole = [Part(0, WIDTH), Part(1, WIDTH)]
    for indices in steps:
        divisor = sum(int(weights(index).sum()) for index in indices) if per_token else len(indices)
        for index in indices:
            loss = partial(counted_loss, counted=weights(index), per_token=per_token)
            chain_in_one_process(whole, [microbatch(index)], divisor, loss)
    return whole


def norm_of(modules):
    """Of all gradients; of a parameter that two modules share once."""
    unique = {id(parameter): parameter.grad for module in modules for parameter in module.parameters()}
    return torch.cat([gradient.flatten().cpu() for gradient in unique.values()]).norm()
