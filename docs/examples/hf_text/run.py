"""A tiny Llama learns a verse on four processes, goes on in another layout, and recites it: `python run.py`."""

import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from pipegrid.topology import HyperCommGrid
from pipegrid.training import Pipeline

FOLDER = sys.argv[-1]  # of the run: shared by its ranks
VERSE = "the fog comes on little cat feet. it sits looking over harbor and city on silent haunches and then moves on. "
CHARACTERS = sorted(set(VERSE))
TEXT = torch.tensor([CHARACTERS.index(one) for one in VERSE * 3])
SAMPLES = [{"input_ids": TEXT[at : at + 64], "labels": TEXT[at : at + 64]} for at in range(len(VERSE) * 2)]


def make_model():
    torch.manual_seed(0)  # the values of one process, on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(CHARACTERS), **sizes))


def train(layout, schedule, dp, until):
    grid = HyperCommGrid([dp, 4 // dp], ["dp", "pp"])
    with Pipeline(make_model, layout, grid, schedule=schedule, num_microbatches=4) as pipeline:
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
        found = pipeline.load(FOLDER, optimizer)  # None at the first start
        if found:
            scheduler.load_state_dict(found.data["lr"])
        sampler = DistributedSampler(SAMPLES, pipeline.replicas, pipeline.replica)
        loader = DataLoader(SAMPLES, batch_size=16, sampler=sampler, drop_last=True)
        for epoch in range(found.data["epochs"] if found else 0, until):
            sampler.set_epoch(epoch)
            for batch in loader:
                loss = pipeline.step(batch)  # the mean of all replicas
                pipeline.clip(1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"{schedule}, epoch {epoch}: loss {loss:.3f}", flush=True)
        pipeline.save(FOLDER, optimizer, step=until * len(loader), data={"epochs": until, "lr": scheduler.state_dict()})
        loss = pipeline.evaluate(batch)
        tokens = pipeline.generate({"input_ids": TEXT[None, :16]}, max_new_tokens=80)
        if dist.get_rank() == 0:
            print(f"loss {loss:.3f}: {VERSE[:16]}{''.join(CHARACTERS[token] for token in tokens[0])}", flush=True)


if not dist.is_torchelastic_launched():  # torchrun --nproc-per-node 4 run.py FOLDER
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    sys.exit(subprocess.call([sys.executable, *torchrun, sys.argv[0], tempfile.mkdtemp()]))
dist.init_process_group("gloo")
train("Ett|ttL", "1f1b", dp=2, until=8)
train("Et|t|t|tL", "zero_bubble_v", dp=2, until=16)  # two stages on each rank, first and last on one
dist.destroy_process_group()
