"""What a forward reads of other stages beside the hidden states: right, or a CutError."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from pipegrid.stages import Names, check_stages, pipeline_stage
from pipegrid.stages.errors import CutError
from pipegrid.stages.skeleton import PartPlaceholder, StageRun
from stages_kit.models import WORDS, batch_of, llama, text_model

from .test_stages_cut import require_equal

SMALL = {"vocab_size": WORDS, "num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 16}
TEXT = SMALL | {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}


def classified(batch):
    ids = batch["input_ids"] * batch["attention_mask"]
    return {"input_ids": ids, "attention_mask": batch["attention_mask"], "labels": torch.tensor([0, 1, 1])}


def narrow_opt(**options):
    config = transformers.OPTConfig(
        **SMALL, ffn_dim=32, word_embed_proj_dim=8, max_position_embeddings=64, dropout=0, **options
    )
    return lambda: transformers.OPTForCausalLM(config)


def test_ids_are_there_for_what_the_models_own_code_reads_in_them():
    """A classifier pools at the last token that is no padding; OPT-350m projects a narrow embedding."""

    def classifier():
        return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**TEXT, num_labels=2))

    for make, batch in ((classifier, classified(batch_of("llama"))), (narrow_opt(), batch_of("llama"))):
        torch.manual_seed(1)
        require_equal(make().double(), make, "Et|t|ttL", batch, ranks=2)


def deepstack(layers):
    """Qwen3-VL, whose first three layers take visual features in the loop of the model."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = TEXT | {"num_hidden_layers": layers, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    vision = {"depth": 3, "num_heads": 4, "patch_size": 4, "hidden_size": 32, "intermediate_size": 32}
    config = transformers.Qwen3VLConfig(
        text_config=text | {"num_key_value_heads": 2, "rope_parameters": rope},
        vision_config=vision
        | {"out_hidden_size": 32, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]},
        image_token_id=9,
        video_token_id=10,
        vision_start_token_id=8,
        vision_end_token_id=7,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def seen():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(12, WORDS, (2, 10), generator=generator)
    ids[:, 1:5] = 9
    return {
        "input_ids": ids,
        "labels": ids,
        "pixel_values": torch.randn(32, 96, generator=generator, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == 9).int(),
    }


@pytest.mark.parametrize("layout", ["Etttt|tL", "Ett|tttL", "Et|t|t|ttL", "E|ttttt|L"])
def test_layers_that_take_visual_features_have_them_on_every_stage(layout):
    """Qwen3-VL: the layers' stages are called with pixels, which they do not compute with, and get the features."""
    torch.manual_seed(1)
    found = check_stages(lambda: deepstack(5), layout, seen(), dtype=torch.float64)
    assert max(one.error for one in found.gradients) < 1e-12
    read = [int(one.value[-2]) for one in found.proof.skips]
    assert read == ([] if layout == "Etttt|tL" else [1, 2] if layout == "Ett|tttL" else [0, 1, 2])


def test_a_stage_that_takes_visual_features_is_called_with_pixels_or_an_error():
    first, last = pipeline_stage(lambda: deepstack(5).double(), "Ett|tttL", [0, 1])
    first.look(lambda: first(**seen()))
    assert first.skips == ()  # to the next stage they go beside the hidden states
    first.set_skips({})
    last.set_input_tensor([first(**seen())])
    last.set_skips(first.take_skips())
    last(**{name: value for name, value in seen().items() if name != "pixel_values"})
    with pytest.raises(CutError, match=r"came to stage 1 along edges 0>1, .* give every stage the same batch"):
        last.take_skips()


class Dims(nn.Module):
    """The numbers that it is given decide the shape of what it returns."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, sizes):
        number = sizes.prod(-1).sum().item()
        rows = torch.zeros(number, 4, device=self.table.weight.device)
        rows[sizes.new_ones(number, dtype=torch.bool)] = self.table(torch.arange(number, device=sizes.device) % 8)
        return rows


def test_a_part_of_another_stage_has_its_shape_by_numbers_of_the_batch():
    run = StageRun(received=torch.zeros(2, 4), device=torch.device("cpu"))
    part = PartPlaceholder("part", Dims(), run, earlier=True)
    made = part(torch.tensor([[1, 2], [2, 2]]))
    assert made.shape == (6, 4)
    assert made.isnan().all()


def test_without_ids_a_stand_in_has_the_width_of_the_embedding():
    torch.manual_seed(1)
    whole = narrow_opt()().double()
    batch = batch_of("llama")
    expected = whole(**batch).loss
    first, last = pipeline_stage(whole, "Ett|ttL", [0, 1])
    last.set_input_tensor([first(**batch)])
    del batch["input_ids"]
    assert last(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-12)


class Loop(nn.Module):
    """A model whose loop is one of several."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.words = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(weight_norm(nn.Linear(8, 8)) for _ in range(4))
        self.out = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))
        if way == "hidden tie":
            self.kept = [self.words.weight]
        elif way == "one memory":
            self.blocks[0].parametrizations.weight.original1.data = self.blocks[
                3
            ].parametrizations.weight.original1.data

    def forward(self, ids):
        first = hidden = self.words(ids)
        outputs = []
        for block in reversed(self.blocks) if self.way == "reversed" else self.blocks:
            result = torch.tanh(block(hidden))
            if self.way == "residual":
                result = result + hidden
            elif self.way == "scaled" and block is not self.blocks[-1]:
                result = result * self.scale
            hidden = result
            outputs.append(hidden)
        if self.way == "skip":
            hidden = hidden + first
        elif self.way == "all":
            hidden = torch.stack(outputs).sum(0)
        return self.out(hidden * self.scale)


@pytest.mark.parametrize("layout", ["Et|ttt|L", "E|ttttL", "Ett|ttL"])
@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("residual", "right"),
        ("skip", "right"),
        ("all", "right"),
        ("reversed", r"layers run in the order blocks\.3, blocks\.2, blocks\.1, blocks\.0"),
        ("scaled", "scale is on stage ., and stage . uses it by mul in the model|right"),
        ("hidden tie", "kept is a plain attribute that holds words.weight, a parameter of another stage|right"),
        ("one memory", "two parameters with one memory|right"),
        ("plain", "right"),
    ],
)
def test_a_loop_that_needs_more_than_the_hidden_state_is_right_or_a_cut_error(way, text, layout):
    torch.manual_seed(0)
    model = Loop(way).double()
    ids = torch.randint(0, WORDS, (2, 3))
    expected = model(ids)
    names = Names("blocks", head=("scale",))

    def run():
        hidden, values = None, {}
        for stage in pipeline_stage(model, layout, list(range(layout.count("|") + 1)), names=names):
            stage.set_input_tensor([hidden])
            stage.set_skips({edge: came for edge, came in values.items() if edge.destination == stage.number})
            hidden = stage(ids)
            values |= stage.take_skips()
        torch.testing.assert_close(hidden, expected)
        raise CutError("right")

    with pytest.raises(CutError, match=text):
        run()


def test_hidden_states_of_other_stages_are_an_error_where_the_loss_uses_them():
    model = llama()()
    first, last = pipeline_stage(model, "Et|tttL", [0, 1])
    batch = batch_of("llama") | {"output_hidden_states": True}
    last.set_input_tensor([first(**batch)])
    found, whole = last(**batch).hidden_states, model(**batch).hidden_states
    assert len(found) == len(whole)
    with pytest.raises(CutError, match=r"output.*hidden_states.*\[0\] of the model is made on an earlier stage"):
        found[0].mean()
    assert torch.equal(found[1], whole[1])
    assert torch.equal(found[-1], whole[-1])


def test_nan_of_the_layers_themselves_is_no_error_of_the_cut():
    model = llama()()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0] = torch.nan
    first, last = pipeline_stage(model, "Et|tttL", [0, 1])
    last.set_input_tensor([first(**batch_of("llama"))])
    assert last(**batch_of("llama")).loss.isnan()


def test_layerdrop_is_named():
    stage = pipeline_stage(narrow_opt(layerdrop=0.5)(), "Et|tttL", 0)
    with pytest.raises(CutError, match="layerdrop of OPTConfig is above 0"):
        stage(**batch_of("llama"))
    stage.eval()(**batch_of("llama"))


def test_a_loss_over_the_routers_of_all_layers_is_that_of_one_process():
    make = text_model("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, output_router_logits=True)
    found = check_stages(make, "Et|tttL", batch_of("llama"))
    assert max(one.error for one in found.gradients) < 1e-4  # its products of experts have no float64
    assert [one.value for one in found.proof.skips] == ["model.layers.0.mlp.gate[0]"]
    first, behind = pipeline_stage(make, "Et|tttL", [0, 1])
    first.set_skips({})
    behind.set_input_tensor([first(**batch_of("llama"))])
    behind.set_skips(first.take_skips())
    logits = behind(**batch_of("llama")).router_logits
    assert len(logits) == 4
    assert logits[0].shape == logits[1].shape  # also that of the first stage
    first.set_skips({})
    first(**batch_of("llama"), output_router_logits=False)
    assert first.take_skips() == {}
    last = pipeline_stage(make, "E|ttttL", 1)  # every router is on the last stage
    last.set_input_tensor([torch.randn(*batch_of("llama")["input_ids"].shape, 16)])
    last(**batch_of("llama"))


def test_parametrized_layers_are_cut_from_a_model_and_from_a_function():
    torch.manual_seed(1)
    whole = Loop("plain").double()
    ids = {"ids": torch.randint(0, WORDS, (2, 3))}
    expected = whole(**ids).square().mean()

    def make():
        torch.manual_seed(1)
        return Loop("plain")

    names = Names("blocks", head=("scale",))
    stages = [pipeline_stage(make, "Ett|ttL", number, names=names).double() for number in (0, 1)]
    stages[1].set_input_tensor([stages[0](**ids)])
    assert torch.equal(stages[1](**ids).square().mean(), expected)
