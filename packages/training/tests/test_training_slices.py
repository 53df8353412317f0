"""Hugging Face models over slices of a sequence (Seq1F1B): loss and gradients of whole sequences in one process."""

from __future__ import annotations

import re
import sys

import pytest
import torch
import torch.distributed as dist
import transformers
from attrs import evolve
from torch.nn import functional as F

from pipegrid.schedules import PipelineConfig, Slice, get_forward_backward_func
from pipegrid.schedules.runtime import PipelineError
from pipegrid.stages import tested_versions
from pipegrid.stages.transformers_compat import cache_name, require_known_names
from pipegrid.training import (
    CutError,
    DropoutMasks,
    Names,
    compile_layers,
    pipeline_stage,
    sequence_slices,
    tie_stage_parameters,
)
from pipegrid.transport import P2PCommunicator
from stages_kit.gradients import named_in, require_gradients
from stages_kit.models import MAKERS, WORDS, batch_of, llama, phi3, text_model

from .kit.jobs import grid_of, made, stages_on
from .kit.layered import Layered

LENGTHS = (3, 1, 3)
FAMILIES = ("llama", "llama tied", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox", "opt")


def rank_setup(ranks, make, schedule):
    """This rank's stages under a step function of ``schedule``; a function that runs one step on slices."""
    grid, groups = grid_of(dp=1, pp=ranks.world_size)
    stages = stages_on(grid, make, schedule)
    ties = tie_stage_parameters(stages[0].ties, stages, grid)
    config = PipelineConfig(pipeline_dtype=torch.float64, variable_seq_lengths=True, tied_parameters=ties)
    for stage in stages:
        stage.config = config
    communicator = P2PCommunicator(groups.pp, config, placement=stages[0].placement)

    def run(slices, forward_step):
        return get_forward_backward_func(schedule=schedule, num_slices=len(LENGTHS))(
            forward_step_func=forward_step,
            data_iterator=[iter(slices) for _ in stages],
            model=stages,
            num_microbatches=len(slices) // len(LENGTHS),
            p2p_communicator=communicator,
            pg_collection=groups,
        )

    return stages, run


def own_loss(batches, stage):
    """The sum over labels in float64; the loss of transformers is in float32."""
    batch = dict(next(batches))
    labels, count = batch.pop("shift_labels"), batch.pop("num_items_in_batch")

    def loss_func(output):
        loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return loss / count, loss.item() / int(count)

    return stage(**batch), loss_func


def model_loss(batches, stage):
    return stage(**next(batches)), lambda output: (output.loss, output.loss.item())


def whole_model(make, batches, loss_of):
    whole, losses = made(make)(), []
    for batch in batches:
        loss = loss_of(whole, batch)
        (loss / len(batches)).backward()
        losses.append(loss.item())
    return whole, torch.tensor(losses)


def exact(whole, batch):
    batch = dict(batch)
    labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    logits = whole(**batch).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def require_a_family(ranks, name, schedule, *, checkpointed=False):
    make = MAKERS[name]
    stages, run = rank_setup(ranks, make, schedule)
    runs = []
    if checkpointed:
        for stage in stages:
            stage.whole.activation_checkpointing_enable({"use_reentrant": False})
            for layer in map(stage.get_submodule, stage.layers):
                first = next(module for module in layer.modules() if not list(module.children()))
                first.register_forward_pre_hook(lambda *_: runs.append(1))
    batches = [batch_of(name, seed=seed) for seed in range(3)]
    whole, losses = whole_model(make, batches, exact)
    slices = [part for batch in batches for part in sequence_slices(batch, LENGTHS)]
    infos = run(slices, own_loss)
    require_gradients(named_in(stages), whole, 1e-6 if "gemma" in name else 1e-10)  # Gemma's norms are in float32
    if stages[-1].is_last:
        parts = torch.tensor(infos).view(3, len(LENGTHS)).sum(1)
        torch.testing.assert_close(parts, losses, rtol=1e-6, atol=0.0)
    if checkpointed:
        assert len(runs) == 2 * len(slices) * sum(len(stage.layers) for stage in stages)
    assert all(stage.current_slice is None for stage in stages)


@pytest.mark.thorough
@pytest.mark.ranks(2)
def test_families_in_slices_have_the_gradients_of_whole_sequences(ranks):
    """Full and sliding attention, rotary and learned positions, padded texts."""
    for name in ("llama tied", "gemma3", "gpt2"):
        require_a_family(ranks, name, "seq1f1b")


@pytest.mark.ranks(2)
def test_checkpointed_layers_in_slices(ranks):
    require_a_family(ranks, "llama", "seq1f1b_interleaved", checkpointed=True)


@pytest.mark.nightly
@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["seq1f1b", "seq1f1b_interleaved", "seq1f1b_zero_bubble"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_slices_under_every_schedule(ranks, name, schedule):
    require_a_family(ranks, name, schedule)


@pytest.mark.nightly
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_slices_with_checkpointed_layers(ranks, name):
    if name == "gpt2":  # its model gives checkpointed layers no cache
        with pytest.raises(PipelineError, match=r"transformer\.h\.\d has not read the keys and values"):
            require_a_family(ranks, name, "seq1f1b", checkpointed=True)
    else:
        require_a_family(ranks, name, "seq1f1b", checkpointed=True)


@pytest.mark.ranks(2)
def test_the_loss_of_the_model_over_slices_is_its_mean(ranks):
    """Means of microbatches, and the mean over all tokens of the step; the model's loss is in float32."""
    make = llama(attention_dropout=0.0)
    batches = [batch_of("llama", seed=seed) for seed in range(2)]
    stages, run = rank_setup(ranks, make, "seq1f1b")
    whole, losses = whole_model(make, batches, lambda model, batch: model(**batch).loss)
    infos = run([part for batch in batches for part in sequence_slices(batch, LENGTHS)], model_loss)
    require_gradients(named_in(stages), whole, 1e-5)
    if infos:
        torch.testing.assert_close(torch.tensor(infos).view(2, 3).sum(1), losses, rtol=1e-5, atol=0.0)

    def summed(data, stage):
        part = next(data)
        return stage(**part), lambda output: (output.loss, (part["shift_labels"] != -100).sum(), None)

    for stage in stages:
        stage.zero_grad()
        stage.config = evolve(stage.config, calculate_per_token_loss=True)
    run([part for batch in batches for part in sequence_slices(batch, LENGTHS, num_items_in_batch=1)], summed)
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    whole.zero_grad()
    for batch, count in zip(batches, counts, strict=True):
        (whole(**batch).loss * (count / sum(counts))).backward()
    require_gradients(named_in(stages), whole, 1e-5)


def slices_of(stage, **given):
    """The forwards of the two slices of a microbatch, as the runtime runs them."""
    kept, results = {}, []
    for index in range(2):
        stage.current_slice = part = Slice(index, 2, kept, True)
        results.append(stage(**{name: value[index] for name, value in given.items()}))
        part.close()
    return results


def ids_of(*lengths):
    return [torch.randint(1, WORDS, (2, length), generator=torch.Generator().manual_seed(7)) for length in lengths]


def test_a_slice_is_refused_what_would_see_other_tokens():
    stage = pipeline_stage(llama(), "EttttL", 0)
    ids = ids_of(3, 4)
    with pytest.raises(CutError, match="labels was given for a slice; slices take"):
        slices_of(stage, input_ids=ids, labels=ids)
    with pytest.raises(CutError, match="position_ids without attention_mask"):
        slices_of(stage, input_ids=ids, position_ids=[torch.arange(3)[None], torch.arange(4)[None]])
    with pytest.raises(CutError, match="attention_mask has 4 axes"):
        slices_of(stage, input_ids=ids, attention_mask=[torch.ones(2, 1, 3, 3), torch.ones(2, 1, 4, 7)])
    with pytest.raises(CutError, match="cache_position was given for a slice; slices take input_ids"):
        slices_of(stage, input_ids=ids, cache_position=[torch.arange(3), torch.arange(4)])
    with pytest.raises(TypeError, match="num_items_in_batch"):
        slices_of(stage, input_ids=ids, shift_labels=ids)
    with pytest.raises(CutError, match="DropoutMasks draws the masks of whole microbatches"):
        DropoutMasks(seed=1).apply(stage)
        slices_of(stage, input_ids=ids)


def test_models_that_do_not_run_in_slices():
    """In both directions, another loss, compiled layers, and a model without a cache."""
    with pytest.raises(CutError, match="takes no past_key_values"):
        slices_of(pipeline_stage(Layered(), "Et|tttL", 0, names=Names("layers")), ids=ids_of(3, 4))
    with pytest.raises(CutError, match="takes no past_key_values"):
        slices_of(pipeline_stage(MAKERS["t5"], "E" + "e" * 4 + "t" * 4 + "L", 0), input_ids=ids_of(3, 4))
    stage = pipeline_stage(llama(), "EttttL", 0)
    stage.get_submodule(stage.layers[0]).self_attn.is_causal = False
    with pytest.raises(CutError, match="self_attn attends in both directions"):
        slices_of(stage, input_ids=ids_of(3, 4))
    stage = pipeline_stage(llama(output_router_logits=True), "EttttL", 0)
    with pytest.raises(CutError, match="output_router_logits"):
        slices_of(stage, input_ids=ids_of(3, 4))
    for how in ("whole", "split"):
        stage = pipeline_stage(llama(), "EttttL", 0)
        compile_layers(stage, compile=how, backend="eager" if how == "whole" else "aot_eager")
        with pytest.raises(CutError, match="is compiled"):
            slices_of(stage, input_ids=ids_of(3, 4))
    stage = pipeline_stage(llama(), "EttttL", 0)
    stage.get_submodule(stage.layers[1]).forward = lambda hidden, **kwargs: hidden
    with pytest.raises(CutError, match=r"model\.layers\.1 has not read the keys and values of earlier slices"):
        slices_of(stage, input_ids=ids_of(3, 4))


@pytest.mark.parametrize(
    "make",
    [
        llama(max_position_embeddings=5, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        phi3,
    ],
)
def test_frequencies_that_change_with_the_length_of_a_text(make):
    stage = pipeline_stage(make, "EttttL", 0)
    slices_of(stage, input_ids=ids_of(3, 2))
    with pytest.raises(CutError, match="whose frequencies depend on .* above 5 tokens; slices reach 7"):
        slices_of(stage, input_ids=ids_of(3, 4))


def test_layers_with_another_state_than_keys_and_values():
    kinds = ["conv", "full_attention"] * 2
    for number in (0, 1):
        stage = pipeline_stage(text_model("Lfm2ForCausalLM", "Lfm2Config", layer_types=kinds), "Ett|ttL", number)
        stage.set_input_tensor([torch.zeros(2, 3, 16)])
        with pytest.raises(CutError, match="a layer of the kind conv keeps another state"):
            slices_of(stage, input_ids=ids_of(3, 4))


def test_batches_are_cut_along_their_tokens():
    batch = batch_of("llama")
    parts = sequence_slices(batch, LENGTHS)
    assert [part["input_ids"].shape[1] for part in parts] == list(LENGTHS)
    labels = torch.cat([part["shift_labels"] for part in parts], dim=1)
    assert torch.equal(labels[:, :-1], batch["labels"][:, 1:])
    assert (labels[:, -1] == -100).all()
    assert all(part["num_items_in_batch"] == (batch["labels"][:, 1:] != -100).sum() for part in parts)
    with pytest.raises(CutError, match=r"lengths\[1\]"):
        sequence_slices(batch, (7, 0))
    with pytest.raises(RuntimeError, match="split_sizes to sum exactly to 7"):
        sequence_slices(batch, (3, 3))


@pytest.mark.ranks(2)
def test_an_error_of_a_slice_is_that_of_the_step(ranks):
    _, run = rank_setup(ranks, llama(), "seq1f1b")
    batch = batch_of("llama")
    raw = [{"input_ids": ids, "labels": ids} for ids in batch["input_ids"].split(LENGTHS, dim=1)]
    with pytest.raises(PipelineError, match="labels was given for a slice; .* as sequence_slices makes them"):
        run(raw, model_loss)
    dist.barrier()


# -- Names of transformers, on stand-ins of its releases.


def mask_before(config, inputs_embeds, past_key_values=None): ...


def mask_after(config, inputs_embeds, cache=None): ...


class Before(torch.nn.Module):
    def forward(self, hidden, past_key_values=None, **kwargs): ...


class After(torch.nn.Module):
    def forward(self, hidden, cache=None, **kwargs): ...


class Without(torch.nn.Module):
    def forward(self, hidden, **kwargs): ...


def whole_with(kind, *layers):
    made = kind()
    made.layers = torch.nn.ModuleList(layer() for layer in layers)
    return made


@pytest.mark.parametrize(
    ("whole", "layers", "mask_function", "name"),
    [
        (Before, (Before, Without), mask_before, "past_key_values"),
        (After, (After, Without), mask_after, "cache"),
        (Before, (Before,), mask_after, "past_key_values"),  # a model of its own file, written before 5.24
        (After, (After,), mask_before, None),  # XLM before 5.24: another thing
        (Without, (After,), mask_after, None),
    ],
)
def test_the_argument_for_keys_and_values_is_that_of_the_model_and_its_layers(whole, layers, mask_function, name):
    assert cache_name(whole_with(whole, *layers), mask_function) == name


@pytest.mark.parametrize(("whole", "layer"), [(Before, After), (After, Before)])
def test_a_layer_that_would_take_the_cache_into_its_kwargs_is_an_error(whole, layer):
    model = whole_with(whole, whole, layer)
    with pytest.raises(CutError, match=rf"layers\.1 \({layer.__name__}\) takes .* not read .* transformers \d"):
        cache_name(model, mask_after)


def test_another_name_for_the_cache_is_an_error_with_the_version():
    with pytest.raises(CutError, match=r"create_causal_mask of transformers \d.* takes none of cache, past_key_values"):
        cache_name(whole_with(Before), lambda config, key_values: None)


def test_a_renamed_attribute_is_an_error_with_the_version(monkeypatch):
    before = torch.get_rng_state()
    require_known_names.__wrapped__()
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.delattr(transformers.Qwen2VLModel, "get_rope_index")
    with pytest.raises(CutError, match=r"Qwen2VLModel of transformers \d.* has no get_rope_index"):
        require_known_names.__wrapped__()


def log_a_deprecation():
    logger = transformers.logging.get_logger("transformers.modeling_utils")
    with pytest.raises(DeprecationWarning, match="`a` is deprecated"):
        logger.warning_once("`a` is deprecated, use `b`")
    logger.warning("a warning of another kind")


def test_a_deprecation_that_transformers_logs_is_an_error_in_tests():
    log_a_deprecation()


@pytest.mark.ranks(2)
def test_a_deprecation_that_transformers_logs_is_an_error_in_tests_on_ranks(ranks):
    assert ranks.world_size == 2
    log_a_deprecation()


@pytest.mark.parametrize(
    ("torch_version", "version", "told"),
    [
        ("2.13.0+cpu", "5.24.1", ""),
        (
            "2.13.0+cpu",
            "5.25.0.dev0",
            r"not tested with transformers 5\.25\.0\.dev0 \(tested: 5\.0 to 5\.24\)",
        ),
        ("2.9.1", "4.57.0", r"tested with torch 2\.9\.1 \(tested: .*\) and transformers 4\.57\.0 \(tested: .*\)"),
    ],
)
def test_a_version_outside_of_what_was_tested_is_one_line_when_a_stage_is_made(
    torch_version, version, told, monkeypatch, capfd
):
    monkeypatch.setattr(tested_versions, "TESTED", {"torch": ("2.11", "2.13"), "transformers": ("5.0", "5.24")})
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # it replaces itself at an import
    tested_versions.say_untested_versions.cache_clear()
    for stage in (0, 1):
        pipeline_stage(llama(), "Et|tttL", stage)
    assert re.fullmatch(rf".*{told}.*\n" if told else "", capfd.readouterr().err)
