"""Two modules on four ranks: torchrun --nproc-per-node 4 docs/examples/two_modules.py."""

import torch
import torch.distributed as dist

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.schedules import PipelineConfig, clip_grad_norm_, get_forward_backward_func
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection, data_lane

dist.init_process_group("gloo")
images = HyperCommGrid([2, 1], ["dp", "pp"])  # ranks 0 and 1: two data lanes
language = HyperCommGrid([1, 2], ["dp", "pp"], rank_offset=2)  # ranks 2 and 3: two stages
if images.is_current_rank_in_grid():
    name, grid = "images", images
else:
    name, grid = "language", language
images.create_pg("dp")
groups = ProcessGroupCollection.from_grid(grid)
lane, lanes = data_lane(grid)
config = PipelineConfig(pipeline_dtype=torch.float32)
pipe = MultiModulePipelineCommunicator({"images": images, "language": language}, {"images": ["language"]}, config)


class Stage(torch.nn.Linear):
    def set_input_tensor(self, received):  # activations by source module
        self.received = list(received.values())


def loss_func(y):
    loss = y.square().mean()
    return loss, loss.item()


def forward_step(batches, stage):
    x = stage.received[0] if stage.received else next(batches)
    y = torch.tanh(stage(x))
    output = y if pipe.is_pp_last_stage else {name: y}  # for the next module, by the name of this one
    return output, loss_func


torch.manual_seed(0)  # replicas start alike
stage = Stage(8, 8)
stage.config = config
optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
train_step = get_forward_backward_func(pp_size=pipe.total_stages)
sizes = {"num_microbatches": 8, "seq_length": 6, "micro_batch_size": 4}
for step in range(20):
    batch = torch.randn(8, 4, 6, 8, generator=torch.Generator().manual_seed(step))  # the same on every rank
    mine = iter(batch.chunk(lanes, dim=1)[lane])  # this rank's share of every microbatch
    losses = train_step(
        forward_step_func=forward_step,
        data_iterator=mine,
        model=stage,
        p2p_communicator=pipe,
        pg_collection=groups,
        **sizes,
    )
    norm = clip_grad_norm_(stage, groups, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if losses and step % 5 == 0:
        print(f"step {step}: loss {sum(losses) / 8:.4f}, gradient norm {norm:.4f}")
pipe.destroy()
dist.destroy_process_group()
