"""Hugging Face models under every kind of schedule: the gradients of the whole model in one process, in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pipegrid.bridges import EdgeOptions, MultiModulePipelineCommunicator
from pipegrid.schedules import (
    GradientError,
    PipelineConfig,
    clip_grad_norm_,
    describe_steps,
    get_forward_backward_func,
    stage_places,
)
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.training import compile_layers, pipeline_stage, tie_stage_parameters
from stages_kit.gradients import named_in, require_gradients
from stages_kit.models import WORDS, batch_of, llama, next_words

from .kit.jobs import LAYOUTS, grid_of, made, stages_on
from .kit.parallel import sequence_parallel, sharded, tensor_parallel
from .kit.vlm import VISION, Tower, after_image, read_images, seen_and_text

MICROBATCHES, ROWS = 5, 2
SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v", "dualpipe_v")
VARIANTS = ("plain", "tied", "ragged", "checkpointed", "compiled", "compiled aot", "compiled split", "frozen")
SPREAD = {
    "fsdp": 1,
    "fsdp tied": 1,
    "fsdp ragged checkpointed": 1,
    "fsdp by itself": 1,
    "tp": 2,
    "tp tied": 2,
    "sequence parallel": 2,
    "fsdp tp": 2,
    "fsdp tp per microbatch": 2,
}
"""Parallel layers and their tp size; ``by itself``: FSDP2 gathers and reduces in each forward and backward."""


def microbatch(number, lane, *, ragged):
    """Texts of a lane; lengths within a microbatch differ, and with ``ragged`` its longest as well."""
    generator = torch.Generator().manual_seed(100 * number + lane)
    length = 4 + number % 3 if ragged else 6
    ids = torch.randint(1, WORDS, (ROWS, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(2, length + 1, (ROWS, 1), generator=generator)).long()
    return {"input_ids": ids, "attention_mask": mask}


def next_word_loss(batch, output):
    """The sum over predicted words, and how many they are; the sum as a number."""
    loss, count = next_words(output, batch)
    return loss, count, loss.item()


def freeze(model):
    """The embedding and the first layer, where a stage has them."""
    for name, module in model.named_modules():
        if name in ("model.embed_tokens", "model.layers.0"):
            module.requires_grad_(False)


def prepared(stages, variant, grid):
    """The stages of this rank, compiled, frozen or spread as ``variant`` says."""
    words, mesh = variant.split(), grid.to_device_mesh(["tp", "dp"])
    shards = mesh["dp"]
    if "hybrid" in words:  # two replicas of shards (HSDP)
        _, dp, pp = grid.shape
        names = ("pp", "replicate", "shard")
        shards = init_device_mesh("cpu", (pp, 2, dp // 2), mesh_dim_names=names)["replicate", "shard"]
    for stage in stages:
        if "checkpointed" in words:
            stage.whole.activation_checkpointing_enable({"use_reentrant": False})
        if "compiled" in words:
            whole = {"compiled": "eager", "compiled aot": "aot_eager"}.get(variant)
            compile_layers(stage, compile="whole" if whole else "split", backend=whole or "aot_eager")
        if "frozen" in words:
            freeze(stage)
        if "tp" in words:
            tensor_parallel(stage, mesh["tp"])
        if "parallel" in words:
            sequence_parallel(stage, mesh["tp"])
        if "fsdp" in words:
            sharded(stage, shards)
    return stages


@torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
def require_a_step(ranks, schedule, variant, dp):
    tp = SPREAD.get(variant, 1)
    grid, groups = grid_of(tp=tp, dp=dp, pp=ranks.world_size // dp // tp)
    lane = grid.coords(dist.get_rank())["dp"]
    make = llama(tie_word_embeddings="tied" in variant)
    stages = prepared(stages_on(grid, make, schedule), variant, grid)
    ragged = "ragged" in variant
    ties = tie_stage_parameters(stages[0].ties, stages, grid)
    config = PipelineConfig(
        pipeline_dtype=torch.float64,
        calculate_per_token_loss=True,
        deadline=40.0,
        variable_seq_lengths=ragged,
        tied_parameters=ties,
        shard=("microbatch" if "microbatch" in variant else "step")
        if "fsdp" in variant and "itself" not in variant
        else None,
        prefetch=0,
    )
    communicator = MultiModulePipelineCommunicator(
        {"language": grid}, {"language": []}, config, stage_placement={"language": stages[0].placement}
    )
    for stage in stages:
        stage.config = config

    def forward_step(batches, stage):
        batch = next(batches)
        return stage(**batch), partial(next_word_loss, batch)

    infos = get_forward_backward_func(schedule=schedule)(
        forward_step_func=forward_step,
        data_iterator=[(microbatch(m, lane, ragged=ragged) for m in range(MICROBATCHES)) for _ in stages],
        model=stages,
        num_microbatches=MICROBATCHES,
        p2p_communicator=communicator,
        pg_collection=groups,
    )
    whole = made(make)()
    if variant == "frozen":
        freeze(whole)
    tokens = 0
    for m in range(MICROBATCHES):
        for other in range(dp):
            batch = microbatch(m, other, ragged=ragged)
            loss, count, info = next_word_loss(batch, whole(**batch))
            loss.backward()
            tokens += count
            if other == lane and infos:
                assert infos[m] == pytest.approx(info, rel=1e-12)
    for parameter in whole.parameters():
        if parameter.grad is not None:
            parameter.grad /= tokens
    require_gradients(named_in(stages), whole)
    assert {each.name for each in ties} <= set(dict(whole.named_parameters(remove_duplicate=False)))
    norm = torch.stack([p.grad.norm() for p in whole.parameters() if p.grad is not None]).norm()
    clipped = clip_grad_norm_(nn.ModuleList(stages), groups, 1e9)
    torch.testing.assert_close(clipped, norm, rtol=1e-10, atol=0.0)
    assert bool(infos) == any(stage.is_last for stage in stages)
    halves = schedule in ("zero_bubble_h1", "zero_bubble_v", "dualpipe_v")
    whole_at_i = "runs whole at I" in describe_steps(stages)
    assert whole_at_i == (variant == "compiled aot" and halves and any(not stage.is_first for stage in stages))
    communicator.destroy()


REPRESENTATIVE = [
    ("interleaved_1f1b", "tied", 2),
    ("zero_bubble_h1", "ragged", 2),
    ("zero_bubble_v", "tied", 2),
    ("zero_bubble_v", "fsdp", 2),
    ("interleaved_1f1b", "fsdp tied", 2),
    ("interleaved_1f1b", "fsdp tp per microbatch", 2),  # pp 1
    ("zero_bubble_v", "fsdp hybrid", 4),
]
# What no replica has a part in: on the two ranks of one.
OF_A_REPLICA = [
    ("1f1b", "tied"),
    ("dualpipe_v", "checkpointed"),
    ("1f1b", "compiled"),
    ("zero_bubble_v", "compiled split"),
    ("zero_bubble_v", "sequence parallel"),  # pp 1
]
# Dynamo looks at the gradient of what arrived, which is no leaf of its graph.
QUIET = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
MATRIX = [(name, variant) for name in SCHEDULES for variant in VARIANTS]
SPREAD_MATRIX = [(name, variant) for name in SCHEDULES for variant in SPREAD]


@pytest.mark.few(3)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("schedule", "variant", "dp"), REPRESENTATIVE)
def test_a_step_has_the_gradients_of_one_process(ranks, schedule, variant, dp):
    require_a_step(ranks, schedule, variant, dp)


@pytest.mark.few(1)
@QUIET
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("schedule", "variant"), OF_A_REPLICA)
def test_a_step_of_a_replica_has_the_gradients_of_one_process(ranks, schedule, variant):
    require_a_step(ranks, schedule, variant, 1)


@QUIET
@pytest.mark.nightly
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("schedule", "variant"), MATRIX)
def test_every_schedule_has_the_gradients_of_one_process(ranks, schedule, variant):
    require_a_step(ranks, schedule, variant, ranks.world_size // 2)


# Of torch's own, where FSDP2 shards a DTensor over one rank.
@pytest.mark.filterwarnings("ignore:To construct DTensor from torch.Tensor:UserWarning")
@pytest.mark.nightly
@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize(("schedule", "variant"), SPREAD_MATRIX)
def test_every_schedule_of_spread_layers_has_the_gradients_of_one_process(ranks, schedule, variant):
    """pp 2; with tp 2, dp 1 on four ranks and dp 2 on eight, without it dp 2 and dp 4."""
    require_a_step(ranks, schedule, variant, ranks.world_size // 2 // SPREAD[variant])


@pytest.mark.nightly
@pytest.mark.ranks(8)
@pytest.mark.parametrize("variant", ["fsdp hybrid", "fsdp hybrid tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_of_hybrid_shards_has_the_gradients_of_one_process(ranks, schedule, variant):
    """pp 2 with dp 4: two replicas of two shards."""
    require_a_step(ranks, schedule, variant, 4)


@pytest.mark.ranks(2)
def test_layers_sharded_over_other_ranks_than_the_replicas_are_an_error_before_the_first_message(ranks):
    """Over the two stages of a pipeline, which hold different layers."""
    grid, groups = grid_of(dp=1, pp=2)
    stage = pipeline_stage(llama(), LAYOUTS[2], dist.get_rank())
    sharded(stage, grid.to_device_mesh(["dp", "pp"])["pp"])
    stage.config = PipelineConfig(variable_seq_lengths=True, shard="step", deadline=10.0)
    communicator = MultiModulePipelineCommunicator({"language": grid}, {"language": []}, stage.config)
    assert describe_steps(stage) == ""
    with pytest.raises(GradientError, match="by fully_shard over a mesh of 2 ranks, of which 1 are of its 1 replica"):
        get_forward_backward_func(schedule="1f1b")(
            forward_step_func=lambda batches, stage: (stage(next(batches)), None),
            data_iterator=None,
            model=stage,
            num_microbatches=2,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
    communicator.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("schedule", "frozen"),
    [
        ("zero_bubble_v", False),
        pytest.param("1f1b", True, marks=pytest.mark.nightly),
        pytest.param("zero_bubble_h1", True, marks=pytest.mark.nightly),
        pytest.param("dualpipe_v", True, marks=pytest.mark.nightly),
    ],
)
def test_a_vision_tower_before_a_language_model(ranks, schedule, frozen):
    places = stage_places(schedule, 2)
    grids = {
        "images": HyperCommGrid([1, 2], ["dp", "pp"]),
        "language": HyperCommGrid([1, 2], ["dp", "pp"], rank_offset=2),
    }
    name = "images" if dist.get_rank() < 2 else "language"
    grids[name].create_pgs(["dp", "pp"])
    config = PipelineConfig(
        pipeline_dtype=torch.float64, calculate_per_token_loss=True, deadline=40.0, variable_seq_lengths=True
    )
    communicator = MultiModulePipelineCommunicator(
        grids,
        {"images": ["language"]},
        config,
        dim_mapping={"b": 0, "s": 1, "h": 2},
        edges={("images", "language"): EdgeOptions(backward=not frozen)},
        stage_placement={"images": (0, 1), "language": places},
    )
    torch.manual_seed(5)
    tower = Tower().double().requires_grad_(not frozen)
    language = llama()().double()
    place = grids[name].coords(dist.get_rank())["pp"]
    if name == "images":
        stages = pipeline_stage(
            tower, "Ee|e*3L", [place], names=VISION, module=name, output=nn.Identity(), config=config
        )
    else:
        numbers = [stage for stage, where in enumerate(places) if where == place]
        stages = pipeline_stage(language, LAYOUTS[len(places)], numbers, module=name, config=config)

    def batches():
        for m in range(MICROBATCHES):
            yield {**microbatch(m, 0, ragged=True), **batch_of("clip", seed=m, rows=ROWS)}

    def forward_step(microbatches, stage):
        batch = next(microbatches)
        if stage.module == "images":
            return stage(batch["pixel_values"]), None

        def loss_of(output):
            loss, count = after_image(output, batch)
            return loss, count, loss.item()

        return read_images(stage, batch), loss_of

    infos = get_forward_backward_func(schedule=schedule)(
        forward_step_func=forward_step,
        data_iterator={name: [batches() for _ in stages]},
        model={name: stages},
        num_microbatches=MICROBATCHES,
        p2p_communicator=communicator,
        pg_collection={name: ProcessGroupCollection.from_grid(grids[name])},
    )
    found = {parameter: parameter.grad for stage in stages for parameter in stage.parameters()}
    for parameter in found:
        parameter.grad = None
    tokens = 0
    for batch in batches():
        output = language(**seen_and_text(language.model.embed_tokens, tower(batch["pixel_values"]), batch))
        loss, count = after_image(output, batch)
        loss.backward()
        tokens += count
    for parameter, gradient in found.items():
        if parameter.requires_grad and parameter.grad is None:  # the norm of the pooled token, which nothing reads
            assert gradient is None or not gradient.any()
        elif parameter.requires_grad:
            torch.testing.assert_close(gradient, parameter.grad / tokens, rtol=1e-10, atol=1e-12)
        else:
            assert gradient is None
    assert bool(infos) == any(stage.module == "language" and stage.is_last for stage in stages)
    communicator.destroy()
