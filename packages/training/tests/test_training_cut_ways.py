"""What models do between their layers, in stages: writes in place, dicts, parts by two names, devices of others."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from pipegrid.schedules import PipelineConfig
from pipegrid.stages import find_names
from pipegrid.topology import HyperCommGrid
from pipegrid.training import CutError, Names, Pipeline, check_stages, pipeline_stage, prove_cut
from stages_kit.models import WORDS

WIDTH = 8
IDS = torch.randint(3, WORDS, (3, 6), generator=torch.Generator().manual_seed(1))
NAMES = Names("blocks")


class Block(nn.Module):
    """A residual layer; no backward reads what it returns, so that the model may write to it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(hidden))


class Model(nn.Module):
    """Embedding, layers, head; `body` is what the ways below change."""

    block = Block

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids), ids))

    def body(self, hidden, ids):
        for block in self.blocks:
            hidden = self.between(block(hidden), ids)
        return hidden

    def between(self, hidden, ids):
        return hidden


def equal(kind, layout="Ett|ttL", names=NAMES, **options):
    """The report of `check_stages` in float64, which raises unless stages are the model."""
    return check_stages(lambda: kind().double(), layout, {"ids": IDS}, names=names, **options)


# -- in place ---------------------------------------------------------------------------------------------------


class Preactivated(Block):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, hidden):
        return super().forward(self.act(hidden))


class Adding(Block):
    def forward(self, hidden):
        hidden += self.linear(hidden.clone())
        return hidden


class ReluFirst(Model):
    block = Preactivated


class AddsToItsInput(Model):
    block = Adding


class Adds(Model):
    def between(self, hidden, ids):
        hidden += 0.1
        return hidden


class Masks(Model):
    def between(self, hidden, ids):
        hidden[ids < 20] = 0.0
        return hidden


class Part(Model):
    def between(self, hidden, ids):
        hidden[..., :3] *= 2
        return hidden


class Drops(Model):
    def between(self, hidden, ids):
        return F.dropout(hidden, 0.3, self.training, inplace=True)


class ScalesTheEmbedding(Model):
    def body(self, hidden, ids):
        hidden *= WIDTH**0.5
        return super().body(hidden, ids)


class WritesItsBatch(Model):
    def forward(self, ids):
        ids.add_(1).remainder_(WORDS)
        return super().forward(ids)


IN_PLACE = (ReluFirst, AddsToItsInput, Adds, Masks, Part, Drops, ScalesTheEmbedding, WritesItsBatch)


@pytest.mark.parametrize("layout", ["Ett|ttL", "E|tt|tt|L"])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_writes_in_place_give_the_gradients_of_one_process(kind, layout):
    assert equal(kind, layout).holds


def test_only_where_the_model_writes_do_stages_copy_what_arrives():
    for kind, writes in ((Model, False), (Adds, True), (ReluFirst, True), (WritesItsBatch, True)):
        first, last = pipeline_stage(kind(), "Ett|ttL", [0, 1], names=NAMES)
        first.embed.weight.requires_grad_(False)
        arrived = first(ids=IDS.clone()).detach()
        last.set_input_tensor([arrived])
        with torch.no_grad():
            before = arrived.clone()
            last(ids=IDS.clone())
        assert torch.equal(arrived, before)
        assert last._run.needs.writes == writes


class Twice(Model):
    """Hands on its hidden state by two names, and writes to one of them."""

    def body(self, hidden, ids):
        stream = hidden, hidden
        for block in self.blocks:
            made = block(stream)
            stream = self.between(made, ids)
        return stream[1]


class Doubling(Block):
    def forward(self, stream):
        made = super().forward(stream[0])
        return made, made


class WritesWhatIsSentTwice(Twice):
    block = Doubling

    def between(self, stream, ids):
        stream[0].add_(0.1)
        return stream


class ReadsAView(Model):
    """Reads what its layers write through a view that it made before them."""

    block = Adding

    def body(self, hidden, ids):
        flat = hidden.view(-1, WIDTH)
        super().body(hidden, ids)
        return flat.view(hidden.shape)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (WritesWhatIsSentTwice, r"sends twice .* is written by add_ in the model \(test_training_cut_ways.py:"),
        (ReadsAView, r"stage 1 computes view\(.*\) in the model \(test_training_cut_ways.py:"),
    ],
)
def test_writes_to_memory_that_stages_do_not_share_are_named_with_their_line(kind, text):
    with pytest.raises(CutError, match=text):
        prove_cut(kind(), "Ett|ttL", {"ids": IDS}, names=NAMES).require()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [ReluFirst, Masks, WritesItsBatch])
def test_a_step_on_two_ranks_with_writes_in_place_is_that_of_one_process(kind, ranks):
    whole, batch = kind().double(), {"ids": IDS[:2].repeat(2, 1)}
    config = PipelineConfig(pipeline_dtype=torch.float64, variable_seq_lengths=True)
    whole(batch["ids"].clone()).square().mean().backward()
    grid = HyperCommGrid([2], ["pp"])
    with Pipeline(
        lambda: kind().double(),
        "Ett|ttL",
        grid,
        num_microbatches=2,
        loss=lambda logits, batch: logits.square().mean(),
        names=NAMES,
        config=config,
    ) as pipeline:
        pipeline.step(batch)
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-9, atol=1e-12, msg=name)


# -- dicts --------------------------------------------------------------------------------------------------------


class Streaming(Block):
    def forward(self, stream):
        hidden = super().forward(stream["hidden"])
        return {"hidden": hidden, "sum": stream["sum"] + hidden.mean(-1)}


class Dicts(Model):
    """Its layers take and return a dict."""

    block = Streaming

    def body(self, hidden, ids):
        stream = {"hidden": hidden, "sum": hidden.mean(-1)}
        for block in self.blocks:
            stream = block(stream)
        return stream["hidden"] + stream["sum"][..., None]


@pytest.mark.parametrize("layout", ["Ett|ttL", "E|tt|tt|L"])
def test_a_dict_between_layers_is_sent_as_a_tuple_is(layout):
    assert equal(Dicts, layout).holds


def test_a_dict_from_another_module_is_told_from_one_between_layers():
    first, last = pipeline_stage(Model(), "Ett|ttL", [0, 1], names=NAMES)
    last.set_input_tensor({"images": first(ids=IDS).detach()})
    with pytest.raises(CutError, match="has received from 'images', and its own module is None"):
        last(ids=IDS)


# -- parts of other stages ----------------------------------------------------------------------------------------


class Asks(Model):
    """Asks parts of other stages for devices, dtypes and shapes."""

    def between(self, hidden, ids):
        head, words = self.head.weight, self.embed.weight
        zeros = torch.zeros(WIDTH, device=head.device, dtype=words.dtype) + torch.zeros_like(head).sum()
        made = hidden + zeros + words.new_zeros(head.shape[1]).to(head)
        return made.to(next(self.head.parameters()).device).type_as(words) * len(list(self.head.parameters()))


def test_devices_and_dtypes_of_parts_on_other_stages_are_readable():
    assert equal(Asks).holds


def test_values_of_parts_on_other_stages_are_an_error():
    class Reads(Model):
        def between(self, hidden, ids):
            return hidden * self.head.weight.to(hidden.dtype).mean()

    first, _ = pipeline_stage(Reads(), "Ett|ttL", [0, 1], names=NAMES)
    with pytest.raises(CutError, match="head.weight is on stage 1, and stage 0 uses it"):
        first(ids=IDS)
    first.proofs = None
    with pytest.raises(CutError, match="reads a parameter of another stage"):
        first(ids=IDS)


def test_a_copy_of_a_stage_has_ghosts_of_its_own():
    first = pipeline_stage(Asks(), "Ett|ttL", 0, names=NAMES)
    other = copy.deepcopy(first.whole)
    assert other.head.run is other.head.weight.run is not first.whole.head.run
    assert first.to(torch.bfloat16).whole.head.weight.dtype == torch.bfloat16
    assert other.head.weight.dtype == torch.float32
    assert isinstance(other.head.weight, nn.Parameter)


class Aliased(Model):
    """Its embedding by a second name, registered behind the layers; prompts in a dict of modules, as PEFT has them."""

    def __init__(self):
        super().__init__()
        self.words = self.embed
        self.prompts = nn.ModuleDict({"default": nn.Embedding(2, WIDTH)})

    def forward(self, ids):
        prompts = self.prompts["default"].weight.sum(0) + self.prompts["default"](ids % 2)
        return self.head(self.body(self.words(ids) + prompts, ids))


@pytest.mark.parametrize("embedding", [("prompts",), ("prompts", "words")])
def test_a_part_by_two_names_is_run_under_either(embedding):
    assert equal(Aliased, names=Names("blocks", embedding=embedding)).holds


class Prompted(nn.Module):
    """Embeds its ids itself, and puts prompts before them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.base_model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, vocab_size=WORDS))
        self.word_embeddings = self.base_model.get_input_embeddings()
        self.prompt_encoder = nn.ModuleDict({"default": nn.Embedding(2, 16)})

    def forward(self, input_ids=None, inputs_embeds=None):
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        prompts = self.prompt_encoder["default"].weight.expand(len(inputs_embeds), -1, -1)
        return self.base_model(inputs_embeds=torch.cat([prompts, inputs_embeds], dim=1)).logits


def test_prompts_before_the_words_are_those_of_one_process():
    assert check_stages(lambda: Prompted().double(), "Ett|ttL", {"input_ids": IDS}).holds


# -- what is kept, and what is drawn ------------------------------------------------------------------------------


class Table(nn.Module):
    """Made in its first forward, and kept."""

    table = None

    def forward(self, hidden):
        if self.table is None:
            self.table = torch.arange(hidden.shape[1], dtype=hidden.dtype).cos()[:, None]
        return hidden * self.table


class Rotated(Block):
    def forward(self, hidden):
        return super().forward(self.table(hidden))


class Rotates(Model):
    """Its layers share a module that keeps a table."""

    block = Rotated

    def __init__(self):
        super().__init__()
        table = Table()
        for block in self.blocks:
            block.table = table


def test_a_table_that_a_shared_module_keeps_is_made_on_each_stage():
    assert equal(Rotates).holds


class DropsLayers(Model):
    def body(self, hidden, ids):
        for block in self.blocks:
            if not self.training or self.kept():
                hidden = block(hidden)
        return hidden

    def kept(self):
        return torch.rand(()) < 0.9


class DropsLayersByNumber(DropsLayers):
    def kept(self):
        return torch.rand(1).item() > 0.1


class KeepsLayers(DropsLayers):
    def kept(self):
        return not torch.rand(()) < 0.1


@pytest.mark.parametrize("kind", [DropsLayers, DropsLayersByNumber, KeepsLayers])
def test_layers_that_a_model_leaves_out_at_random_are_an_error_in_training_only(kind):
    with pytest.raises(CutError, match=r"a random number is read by .* in the model .* set layerdrop to 0"):
        pipeline_stage(kind(), "Ett|ttL", 0, names=NAMES)(ids=IDS)
    assert prove_cut(kind().eval(), "Ett|ttL", {"ids": IDS}, names=NAMES).holds


# -- families -----------------------------------------------------------------------------------------------------


def ctrl():
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "dff": 32, "vocab_size": WORDS, "n_positions": 64}
    return transformers.CTRLLMHeadModel(transformers.CTRLConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0))


def switch():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    experts = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "dropout_rate": 0.0}
    config = transformers.SwitchTransformersConfig(
        **sizes, **experts, vocab_size=WORDS, pad_token_id=0, decoder_start_token_id=0
    )
    config._experts_implementation = "eager"
    return transformers.SwitchTransformersForConditionalGeneration(config)


@pytest.mark.few(1)
@pytest.mark.parametrize(("make", "layout"), [(ctrl, "Ett|ttL"), (switch, "Eee|ttL"), (switch, "Eee,t|tL")])
def test_an_embedding_scaled_in_place_and_an_encoder_that_returns_more_than_a_tuple(make, layout):
    def made():
        torch.manual_seed(0)
        return make().double()

    assert check_stages(made, layout, {"input_ids": IDS, "labels": IDS}).holds


def aimv2():
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16}
    config = transformers.Aimv2VisionConfig(**sizes, hidden_size=16, patch_size=4, use_head=False)
    torch.manual_seed(0)
    return transformers.Aimv2VisionModel(config).double()


def test_rounding_in_float32_that_depends_on_strides_is_no_difference():
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = check_stages(aimv2, "Ett|ttL", {"pixel_values": images})
    assert found.holds
    assert 1e-8 < found.strides < 1e-5
    assert "equal (limit 1e-08), where hidden states are contiguous; other strides change the model by" in str(found)


# -- names --------------------------------------------------------------------------------------------------------

SMALL = {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


def family(name, **options):
    """A tiny model of transformers without values."""
    kind = getattr(transformers, name)
    with torch.device("meta"):
        return kind(kind.config_class(**SMALL, **options))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("RobertaForMaskedLM", "roberta.encoder.layer"),
        ("ElectraForMaskedLM", "electra.encoder.layer"),
        ("BioGptForCausalLM", "biogpt.layers"),
        ("Dinov2Model", "encoder.layer"),
        ("HubertForCTC", "hubert.encoder.layers"),
        ("WavLMForCTC", "wavlm.encoder.layers"),
        ("UniSpeechForCTC", "unispeech.encoder.layers"),
    ],
)
def test_the_only_list_that_may_be_one_of_layers_is_taken_and_one_line_says_so(name, layers):
    model = family(name)
    with pytest.warns(UserWarning, match=f"the layers of {name} are {layers}, 4 .*: no other list could be") as told:
        assert find_names(model) == Names(layers)
    assert len(told) == 1
    assert "\n" not in str(told[0].message)


def test_of_two_lists_the_one_with_as_many_modules_as_the_layout_has_layers_is_taken():
    class Two(Model):
        def __init__(self):
            super().__init__()
            self.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

        def forward(self, ids):
            return self.head(self.body(self.before(self.embed(ids)), ids))

    with pytest.raises(CutError, match=r"its lists of modules are: blocks \(4\), before \(2\); give names"):
        find_names(Two())
    with pytest.raises(CutError, match="its lists of modules are"):
        pipeline_stage(Two(), "Ettt|tttL", 0)
    with pytest.warns(UserWarning, match="the layers of Two are blocks, 4 Block"):
        assert prove_cut(Two(), "Ett|ttL", {"ids": IDS}, names=None).layout == "'Ett|ttL'"


def test_a_layer_that_a_list_has_twice_is_named():
    model = Model()
    model.blocks[2] = model.blocks[0]
    with pytest.raises(CutError, match=r"blocks\.2 is the same module as blocks\.0, and a layer is on one stage"):
        pipeline_stage(model, "Ett|ttL", 0, names=NAMES)


# -- adapters of PEFT ---------------------------------------------------------------------------------------------

TARGETS = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS = {
    "LoRA": ("LoraConfig", {"r": 2, **TARGETS}, ""),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True, **TARGETS}, ""),
    "VeRA": ("VeraConfig", {"r": 4, **TARGETS}, ""),
    "OFT": ("OFTConfig", {"oft_block_size": 4, **TARGETS}, ""),
    "LN tuning": ("LNTuningConfig", {}, ""),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}, ""),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 16}, ""),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}, ""),
    "AdaLoRA": ("AdaLoraConfig", {"total_step": 10, **TARGETS}, r"stage 1 computes permute\(.*lora_A.default"),
}


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # of PEFT's own call
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.filterwarnings("ignore:Unsupported layer type .*LlamaRMSNorm:UserWarning")
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_llama_with_an_adapter_of_peft_is_cut_without_names(kind):
    peft = pytest.importorskip("peft")
    config, options, text = ADAPTERS[kind]

    def make():
        torch.manual_seed(0)
        whole = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, vocab_size=WORDS))
        return peft.get_peft_model(whole, getattr(peft, config)(task_type="CAUSAL_LM", **options)).double()

    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS}
    if not text:
        assert check_stages(make, "Ett|ttL", batch).holds
        return
    with pytest.raises(CutError, match=text):
        check_stages(make, "Ett|ttL", batch)
