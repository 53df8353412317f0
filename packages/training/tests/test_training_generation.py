"""Tokens of a pipeline are those of Hugging Face's own generate, greedy and drawn."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pipegrid.bridges import MultiModulePipelineCommunicator
from pipegrid.schedules import PipelineConfig, PipelineError, stage_places
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.training import GenerationError, Names, Sampling, generate, pipeline_stage
from stages_kit.models import MAKERS, WORDS, llama, text_model

from .compatibility_families import FAMILIES
from .kit.jobs import LAYOUTS, grid_of, made
from .kit.vlm import VISION, Tower, image_batch, language_with, read_images, seen_and_text

NEW, ROWS = 9, 3
DRAWN = Sampling(temperature=0.7, top_k=9, top_p=0.8, seed=5)
CASES = [
    ("llama", "1f1b", None, 2),
    ("gpt2", "1f1b", DRAWN, 2),
    ("llama tied", "zero_bubble_v", Sampling(seed=5), 2),
    *(
        pytest.param(name, schedule, sampling, 3, marks=pytest.mark.nightly)
        for name in ("llama", "gpt2", "qwen3", "mistral", "gemma3", "opt", "gpt_neox")
        for schedule in ("1f1b", "interleaved_1f1b")
        for sampling in (None, DRAWN)
    ),
]


def prompts(lane, number):
    """Texts of unequal lengths, padded on the left as generation needs."""
    generator = torch.Generator().manual_seed(10 * lane + number)
    length = 4 + number
    ids = torch.randint(1, WORDS, (ROWS, length), generator=generator)
    mask = (torch.arange(length) >= torch.randint(0, length - 1, (ROWS, 1), generator=generator)).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def of_hugging_face(whole, batch, sampling, number, **options):
    whole.eval()
    drawn = {}
    if sampling is not None:
        torch.manual_seed(sampling.seed + number)
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p}
    found = whole.generate(**batch, max_new_tokens=NEW, do_sample=bool(drawn), **drawn, **options)
    return found if "input_ids" not in batch else found[:, batch["input_ids"].shape[1] :]


@pytest.mark.few(1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "schedule", "sampling", "microbatches"), CASES)
def test_tokens_are_those_of_one_process(ranks, name, schedule, sampling, microbatches):
    places = stage_places(schedule, 2)
    grid, groups = grid_of(dp=2, pp=2)
    lane = grid.coords(ranks.rank)["dp"]
    config = PipelineConfig(deadline=60.0, variable_seq_lengths=True, pipeline_dtype=torch.float64)
    communicator = MultiModulePipelineCommunicator(
        {"language": grid}, {"language": []}, config, stage_placement={"language": places}
    )
    whole = made(MAKERS[name])()
    with torch.no_grad():  # words that follow from the prompt, not the same one at every place
        for parameter in whole.parameters():
            parameter.mul_(4)
    stages = pipeline_stage(whole, LAYOUTS[len(places)], grid, schedule=schedule, config=config)
    end = of_hugging_face(whole, prompts(0, 0), None, 0, eos_token_id=None, pad_token_id=0)[0, 3].item()
    found = generate(
        forward_step_func=lambda batches, stage: (stage(**next(batches)), None),
        data_iterator=[(prompts(lane, number) for number in range(microbatches)) for _ in stages],
        model=stages,
        num_microbatches=microbatches,
        max_new_tokens=NEW,
        p2p_communicator=communicator,
        pg_collection=groups,
        schedule=schedule,
        sampling=sampling,
        eos_token_id=end,
    )
    assert all(stage.training and stage.kv_caches is None for stage in stages)
    for number, tokens in enumerate(found):
        batch = prompts(lane, number)
        of_job = lane * microbatches + number
        expected = of_hugging_face(whole, batch, sampling, of_job, eos_token_id=end, pad_token_id=0)
        assert torch.equal(tokens, expected)
        assert len(tokens.unique()) > 2
    communicator.destroy()
    dist.barrier()


def test_every_microbatch_of_the_job_draws_for_itself():
    """Equal logits on two replicas of two microbatches; equal lanes draw alike."""
    logits, device = torch.zeros(64, WORDS), torch.device("cpu")
    sampling = Sampling(seed=5)
    drawn = [
        sampling.draw(logits, generator)
        for lane in (0, 1, 1)
        for generator in sampling.generators(2, device, lane=lane)
    ]
    assert len({tuple(tokens.tolist()) for tokens in drawn[:4]}) == 4
    assert all(torch.equal(one, other) for one, other in zip(drawn[2:4], drawn[4:], strict=True))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; leave Sampling out for the greatest logit"),
        ({"top_p": 1.5}, "top_p is 1.5; it is a probability above 0, at most 1"),
        ({"top_k": 0}, "top_k is 0; it must be"),
    ],
)
def test_a_way_to_draw_that_draws_nothing_is_a_clear_error(options, text):
    with pytest.raises(GenerationError, match=text):
        Sampling(**options)


@pytest.mark.ranks(2)
def test_what_cannot_generate_is_one_line_before_anything_is_sent(ranks):
    grid, groups = grid_of(pp=2)
    arguments = {
        "forward_step_func": lambda batches, stage: (stage(**next(batches)), None),
        "data_iterator": iter([prompts(0, 0)]),
        "num_microbatches": 1,
        "max_new_tokens": 2,
        "pg_collection": groups,
    }
    for config, model, text in (
        (
            PipelineConfig(deadline=10.0),
            pipeline_stage(MAKERS["llama"], "Et|tttL", ranks.rank),
            "variable_seq_lengths=True",
        ),
        (
            PipelineConfig(deadline=10.0, variable_seq_lengths=True),
            torch.nn.Linear(2, 2),
            "that pipeline_stage.* has made",
        ),
        (
            PipelineConfig(deadline=10.0, variable_seq_lengths=True),
            pipeline_stage(MAKERS["t5"], "Eeee|ettttL", ranks.rank),
            "encoder and a decoder",
        ),
        (
            PipelineConfig(deadline=10.0, variable_seq_lengths=True),
            pipeline_stage(MAKERS["vit"], "Et|tttL", ranks.rank),
            r"ViTModel has no next token \(its can_generate\(\) is False\)",
        ),
        (
            PipelineConfig(deadline=10.0, variable_seq_lengths=True),
            pipeline_stage(
                text_model("RwkvForCausalLM", "RwkvConfig"), "Et|tttL", ranks.rank, names=Names("rwkv.blocks")
            ),
            "the forward of RwkvForCausalLM takes no past_key_values",
        ),
    ):
        communicator = MultiModulePipelineCommunicator({"language": grid}, {"language": []}, config)
        with pytest.raises(GenerationError, match=text) as failure:
            generate(**arguments, model=model, p2p_communicator=communicator)
        assert "\n" not in str(failure.value)
        communicator.destroy()
    config = PipelineConfig(deadline=10.0, variable_seq_lengths=True)
    communicator = MultiModulePipelineCommunicator({"language": grid}, {"language": []}, config)
    stage = pipeline_stage(MAKERS["llama"], "Et|tttL", ranks.rank, config=config)
    arguments |= {"model": stage, "p2p_communicator": communicator}
    for change, text in (
        ({"pg_collection": ProcessGroupCollection()}, "no pp group of module 'language', over which its last stage"),
        ({"module": "llm"}, "module is 'llm'; the graph has the modules language"),
        ({"pad_token_id": None}, "pad_token_id is None; it must be an integer"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '<'; it must be an integer"),
        ({"eos_token_id": [3, 2.5]}, r"eos_token_id is 2.5; it must be an integer"),
        ({"eos_token_id": 2.5}, r"eos_token_id is 2.5; it must be an integer"),
        ({"sampling": 0.7}, "sampling is 0.7; it must be a Sampling"),
    ):
        with pytest.raises(GenerationError, match=text):
            generate(**arguments | change)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    scaled = pipeline_stage(
        llama(max_position_embeddings=4, rope_parameters=rope), "Et|tttL", ranks.rank, config=config
    )
    with pytest.raises(PipelineError, match="above 4 tokens; prompt and new tokens are 5"):
        generate(**arguments | {"model": scaled})
    communicator.destroy()
    communicator = MultiModulePipelineCommunicator({"language": grid}, {"language": []}, config)
    arguments |= {"p2p_communicator": communicator}
    crossing = pipeline_stage(FAMILIES["Gemma 3n, text"].make, "Et|tttL", ranks.rank, config=config)
    with pytest.raises(
        PipelineError, match=r"shared_kv_states\['sliding_attention'\]\[0\].* that this step does not have"
    ):
        generate(**arguments | {"model": crossing, "data_iterator": iter([prompts(0, 0)])})
    communicator.destroy()
    communicator = MultiModulePipelineCommunicator({"language": grid}, {"language": []}, config)
    arguments |= {"p2p_communicator": communicator}
    kinds = ["conv", "full_attention"] * 2
    with_states = pipeline_stage(text_model("Lfm2ForCausalLM", "Lfm2Config", layer_types=kinds), "Et|tttL", ranks.rank)
    with pytest.raises(GenerationError, match="a layer of the kind conv keeps another state than keys and values"):
        generate(**arguments | {"model": with_states})
    batch = prompts(0, 0)
    on_the_right = {"input_ids": batch["input_ids"], "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0], [1] * 4])}
    with pytest.raises(PipelineError, match="row 1 of the prompts is padded on the right"):
        generate(**arguments | {"data_iterator": iter([on_the_right])})
    communicator.destroy()


@pytest.mark.ranks(4)
def test_an_encoder_gives_its_images_once(ranks):
    """Vision on one lane for two of a language model: the first token sees the images, later steps are its own."""
    grids = {
        "vision": HyperCommGrid([2, 1], ["dp", "pp"]),
        "language": HyperCommGrid([1, 2], ["dp", "pp"], rank_offset=2),
    }
    name = "vision" if ranks.rank < 2 else "language"
    grids[name].create_pgs(["dp", "pp"])
    config = PipelineConfig(deadline=60.0, variable_seq_lengths=True, calculate_per_token_loss=True)
    communicator = MultiModulePipelineCommunicator(grids, {"vision": ["language"]}, config)
    torch.manual_seed(5)
    tower, language = Tower().double(), language_with(5).double()
    runs = []
    if name == "vision":
        tower.register_forward_hook(lambda *_: runs.append(1))
        model = pipeline_stage(tower, "EeeeeL", 0, names=VISION, module=name, output=torch.nn.Identity(), config=config)
    else:
        model = pipeline_stage(language, "Et|tttL", grids[name].coords(ranks.rank)["pp"], module=name, config=config)
    lane = grids[name].coords(ranks.rank)["dp"] if name == "vision" else slice(None)

    def forward_step(batches, stage):
        batch = next(batches)
        if stage.module == "vision":
            return stage(batch["pixel_values"].chunk(2)[lane]), None
        return read_images(stage, batch), None

    found = generate(
        forward_step_func=forward_step,
        data_iterator=iter([image_batch(number) for number in range(2)]),
        model=model,
        num_microbatches=2,
        max_new_tokens=NEW,
        p2p_communicator=communicator,
        pg_collection=ProcessGroupCollection.from_grid(grids[name]),
    )
    assert len(found) == (2 if name == "language" else 0)
    assert len(runs) == (2 if name == "vision" else 0)
    for number, tokens in enumerate(found):
        batch = image_batch(number)
        inputs = seen_and_text(language.model.embed_tokens, tower(batch["pixel_values"]), batch)
        assert torch.equal(tokens, of_hugging_face(language, inputs, None, number, pad_token_id=0))
    communicator.destroy()
    dist.barrier()
