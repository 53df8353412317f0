"""A pipeline whose stages hand on values past others: found in the first step, which is compared with one process."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from torch import nn

from pipegrid.schedules import PipelineConfig, recording_from_json
from pipegrid.stages import Names
from pipegrid.topology import HyperCommGrid
from pipegrid.training import Pipeline
from stages_kit.gradients import named_in, require_gradients
from stages_kit.skipping_models import (
    BLOCKS,
    EXPERTS,
    HYPER,
    SEVERAL,
    UNET,
    BlockResiduals,
    Experts,
    HyperConnections,
    SeveralTokens,
    UNet,
)


class Tied(nn.Module):
    """The table of the embedding is read again at the end."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(20, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(8))

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return nn.functional.linear(hidden, self.embed.weight)


JOBS = {
    "blocks": (BlockResiduals, "Et|t|t|t|t|t|t|tL", BLOCKS, {"ids": torch.arange(40).reshape(8, 5) % 20}),
    "tied": (
        Tied,
        "Et|t|t|t|t|t|t|tL",
        Names("layers", embedding=("embed",)),
        {"ids": torch.arange(40).reshape(8, 5) % 20},
    ),
    "unet": (UNet, "Et|t|t|t|t|t|t|L", UNET, {"image": torch.linspace(-1, 1, 256).reshape(8, 2, 16).double()}),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("job", "schedule"),
    [("blocks", "interleaved_1f1b"), ("blocks", "zero_bubble_v"), ("unet", "dualpipe_v"), ("tied", "zero_bubble_v")],
)
def test_the_first_step_finds_them_and_is_that_of_one_process(ranks, job, schedule):
    make, layout, names, batch = JOBS[job]

    def made():
        torch.manual_seed(0)
        return make().double()

    grid = HyperCommGrid([4], ["pp"])
    config = PipelineConfig(variable_seq_lengths=True, check=True)
    loss = lambda output, _: output.square().mean()
    with Pipeline(
        made, layout, grid, schedule=schedule, names=names, config=config, loss=loss, num_microbatches=4
    ) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(pipeline.step(batch).item())  # the first one is compared, and the first update
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0] > losses[1] > losses[2]
        assert pipeline.evaluate(batch).item() < losses[2]
        assert "past others" in pipeline.describe()
        assert pipeline.communicator.job.graph.skips


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("job", "schedule"), [("blocks", "interleaved_1f1b"), ("tied", "1f1b"), ("unet", "dualpipe_v")]
)
def test_a_value_comes_to_each_host_once_and_is_forwarded_there(ranks, job, schedule):
    """Two hosts of two ranks; in 1F1B, two stages each have eight layers between them."""
    make, layout, names, batch = JOBS[job]
    layout = "Ett|tt|tt|ttL" if schedule == "1f1b" else layout
    host = f"host {ranks.rank // 2}"
    with Pipeline(
        lambda: torch.manual_seed(0) and make().double(),
        layout,
        HyperCommGrid([4], ["pp"]),
        schedule=schedule,
        names=names,
        config=PipelineConfig(variable_seq_lengths=True, check=False),
        loss=lambda output, _: output.square().mean(),
        num_microbatches=4,
        host=host,
    ) as pipeline:
        for _ in range(2):
            pipeline.step(batch)
        text = pipeline.describe()
        crossing, straight = re.search(r"\n  (.+) of that between hosts, (.+) if each went straight", text).groups()
        # The last stage alone takes the table; in a V a U-Net's values stay on their ranks.
        assert (crossing == straight) == (job != "blocks"), (crossing, straight)
        found = re.findall(r"of stage (\d+) to stages .*, by ([\d>, ]+)$", text, re.MULTILINE)
        assert found
        places = pipeline.stages["model"][0]._carrier.placement
        for source, ways in found:
            edges = [tuple(map(int, way.split(">"))) for way in ways.split(", ")]
            hosts = [places[at] // 2 for at in range(len(places))]
            crossing = [edge for edge in edges if hosts[edge[0]] != hosts[edge[1]]]
            assert len(crossing) <= 1, (source, ways)
        grads = named_in(pipeline.stages["model"])
        whole = make_whole(make)
        for _ in range(2):
            for part in range(4):
                piece = {name: value.chunk(4)[part] for name, value in batch.items()}
                (whole(**piece).square().mean() / 4).backward()
        require_gradients(grads, whole)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("schedule", "layout"),
    [("1f1b", "Ett|tt|tt|ttL"), ("interleaved_1f1b", "Et|t|t|t|t|t|t|tL"), ("dualpipe_v", "Et|t|t|t|t|t|t|tL")],
)
def test_hyper_connections_are_one_hop_of_several_tensors(ranks, schedule, layout):
    batch = {"ids": torch.arange(40).reshape(8, 5) % 20}
    with Pipeline(
        lambda: make_whole(HyperConnections),
        layout,
        HyperCommGrid([4], ["pp"]),
        schedule=schedule,
        names=HYPER,
        config=PipelineConfig(variable_seq_lengths=True, check=False),
        loss=lambda output, _: output.square().mean(),
        num_microbatches=8,
    ) as pipeline:
        pipeline.step(batch)
        assert not pipeline.communicator.job.graph.skips
        whole = make_whole(HyperConnections)
        whole(**batch).square().mean().backward()
        require_gradients(named_in(pipeline.stages["model"]), whole)


@pytest.mark.ranks(4)
def test_a_step_with_them_is_recorded(ranks):
    make, layout, names, batch = JOBS["blocks"]
    path = ranks.shared_path / "run.json"
    with Pipeline(
        lambda: make_whole(make),
        layout,
        HyperCommGrid([4], ["pp"]),
        schedule="interleaved_1f1b",
        names=names,
        config=PipelineConfig(variable_seq_lengths=True, check=False),
        loss=lambda output, _: output.square().mean(),
        num_microbatches=4,
    ) as pipeline:
        first = pipeline.step(batch)
        pipeline.record(path)
        assert pipeline.step(batch) == first
        assert recording_from_json(path.read_text()).plan == pipeline.plan(4)
        ranks.barrier()  # all have read it


def make_whole(make):
    torch.manual_seed(0)
    return make().double()


@pytest.mark.ranks(4)
def test_replicas_whose_stages_hand_on_values(ranks):
    make, _, names, batch = JOBS["blocks"]
    grid = HyperCommGrid([2, 2], ["dp", "pp"])
    with Pipeline(
        lambda: torch.manual_seed(0) and make().double(),
        "Ettt|tt|t|ttL",
        grid,
        schedule="zero_bubble_v",
        names=names,
        config=PipelineConfig(variable_seq_lengths=True, check=True),
        loss=lambda output, _: output.square().mean(),
        num_microbatches=2,
    ) as pipeline:
        own = {name: value.chunk(2)[pipeline.replica] for name, value in batch.items()}
        assert pipeline.step(own).item() > 0
        assert pipeline.communicator.job.graph.skips


WORDS, IMAGE = 40, 9


def deepstack():
    """A Qwen3-VL of 8 layers, whose first three take features of images that its vision tower makes on the way."""
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    wide = {"hidden_size": 32, "intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": rope}
    tower = {"depth": 3, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 64}
    config = transformers.Qwen3VLConfig(
        text_config=wide | heads | {"vocab_size": WORDS, "num_hidden_layers": 8, "pad_token_id": 0},
        vision_config=wide | tower | {"deepstack_visual_indexes": [0, 1, 2]},
        image_token_id=IMAGE,
        video_token_id=10,
        vision_start_token_id=8,
        vision_end_token_id=7,
    )
    return transformers.Qwen3VLForConditionalGeneration(config).double()


def seen(seed):
    """Two texts, one of them with an image of a size of its own."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(12, WORDS, (2, 10), generator=generator)
    high = 4 + 4 * (seed % 2)
    ids[0, 1 : 1 + high] = IMAGE
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(4 * high, 96, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, high, 4]]),
        "mm_token_type_ids": (ids == IMAGE).int(),
    }


def next_words(output, batch):
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("1f1b", "Et|t|tt|ttttL"),
        pytest.param("interleaved_1f1b", "Et|t|t|t|t|t|t|tL", marks=pytest.mark.thorough),
        pytest.param("zero_bubble_v", "Et|t|t|t|t|t|t|tL", marks=pytest.mark.thorough),
        pytest.param("dualpipe_v", "E|t|t|tt|t|t|t|tL", marks=pytest.mark.thorough),
    ],
)
def test_vision_and_language_with_features_for_the_layers_of_later_stages(ranks, schedule, layout):
    batches = [seen(number) for number in range(8)]
    with Pipeline(
        deepstack,
        layout,
        HyperCommGrid([4], ["pp"]),
        schedule=schedule,
        config=PipelineConfig(variable_seq_lengths=True, check=True),
        loss=next_words,
    ) as pipeline:
        pipeline.step(batches)
        assert "past others" in pipeline.describe()
        whole = deepstack()
        for batch in batches:
            (next_words(whole(**batch), batch) / len(batches)).backward()
        require_gradients(named_in(pipeline.stages["model"]), whole)


def several_tokens(tied):
    torch.manual_seed(1)
    return SeveralTokens(8, tied=tied).double()


def labelled(seed):
    """Two texts with padding of another length in each microbatch."""
    ids = torch.randint(1, 20, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "labels": ids.masked_fill(torch.arange(9) >= 4 + seed % 5, -100)}


def next_and_further(logits, batch):
    """The sum over all next tokens, and for each token further on a fifth of its own; how many next tokens are."""
    cross_entropy, labels = nn.functional.cross_entropy, batch["labels"]
    losses = [
        cross_entropy(one[:, : -further - 1].flatten(0, 1), labels[:, further + 1 :].flatten(), reduction="sum")
        for further, one in enumerate(logits)
    ]
    return losses[0] + 0.2 * (losses[1] + losses[2]), (labels[:, 1:] != -100).sum()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("1f1b", "Etttt|tt|ttmm|L"),
        ("1f1b", "Etttt|tttt|mm|L"),
        ("interleaved_1f1b", "Ett|t|t|t|t|t|t|mmL"),
        ("zero_bubble_v", "Ett|t|t|t|t|tt|mm|L"),
    ],
)
def test_layers_that_predict_tokens_further_on(ranks, schedule, layout, tied):
    batches = [labelled(number) for number in range(8)]
    with Pipeline(
        lambda: several_tokens(tied),
        layout,
        HyperCommGrid([4], ["pp"]),
        schedule=schedule,
        names=SEVERAL,
        config=PipelineConfig(variable_seq_lengths=True, check=True),
        loss=next_and_further,
        forward=lambda stage, batch: stage(batch["ids"]),
    ) as pipeline:
        pipeline.step(batches)
        whole = several_tokens(tied)
        found = [next_and_further(whole(batch["ids"]), batch) for batch in batches]
        (sum(loss for loss, _ in found) / sum(count for _, count in found)).backward()
        require_gradients(named_in(pipeline.stages["model"]), whole)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("1f1b", "Ett|tt|tt|ttL"),
        ("interleaved_1f1b", "Et|t|t|t|t|t|t|tL"),
        ("zero_bubble_v", "Et|t|t|t|t|t|t|tL"),
        ("dualpipe_v", "Et|t|t|t|t|t|t|tL"),
    ],
)
def test_a_loss_of_the_routers_of_all_layers(ranks, schedule, layout):
    def made():
        torch.manual_seed(1)
        return Experts(8).double()

    def loss_of(output, batch):
        words, routers = output
        return nn.functional.cross_entropy(words.flatten(0, 1), batch["ids"].flatten()) + routers

    batches = [{"ids": torch.arange(10).reshape(2, 5).add(3 * number) % 20} for number in range(8)]
    with Pipeline(
        made,
        layout,
        HyperCommGrid([4], ["pp"]),
        schedule=schedule,
        names=EXPERTS,
        config=PipelineConfig(variable_seq_lengths=True, check=True),
        loss=loss_of,
    ) as pipeline:
        pipeline.step(batches)
        whole = made()
        for batch in batches:
            (loss_of(whole(**batch), batch) / len(batches)).backward()
        require_gradients(named_in(pipeline.stages["model"]), whole)
