"""How a training script spreads the layers of a stage over ranks: FSDP2, tensor and sequence parallelism."""

from __future__ import annotations

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def tensor_parallel(stage, mesh):
    """The projections of each layer are cut by columns, those after them by rows."""
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for name in stage.layers:
        parallelize_module(stage.get_submodule(name), mesh, plan)


def sequence_parallel(stage, mesh):
    """The same, with residuals and norms on parts of the sequence; whole between layers."""
    gathered = {
        "input_kwarg_layouts": {"hidden_states": Shard(1)},
        "desired_input_kwarg_layouts": {"hidden_states": Replicate()},
    }
    plan = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(**gathered),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{name: ColwiseParallel() for name in COLUMNS},
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ROWS},
    }
    for name in stage.layers:
        layer = stage.get_submodule(name)
        parallelize_module(layer, mesh, plan)
        whole = PrepareModuleInputOutput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            use_local_input=True,
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
        )
        parallelize_module(layer, mesh, whole)


def sharded(stage, mesh):
    """Each layer, and the rest of the stage, over its replicas; tied parameters stay whole."""
    tied = {
        stage.get_parameter(name) for tie in stage.ties for name in tie.names if name in dict(stage.named_parameters())
    }
    for name in stage.layers:
        fully_shard(stage.get_submodule(name), mesh=mesh)
    fully_shard(stage, mesh=mesh, ignored_params=tied)
