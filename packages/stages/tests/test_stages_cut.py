"""A model cut into stages is the model: weights from the start, loss, gradients and names, for every family and cut."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from pipegrid.stages import Names, pipeline_stage
from pipegrid.stages.errors import CutError
from stages_kit.chain import gradients, stages_of, step
from stages_kit.models import MAKERS, TWO_LISTS, batch_of, llama, loss_of

CUTS = ("Et|tt|tL", "Et||ttt|L", "E|tttt|L", "EttttL", "Etttt|L")
CUTS_OF_TWO = ("Eee|eet|tttL", "Eeee|e|tt||t|tL", "Eeeee|tttt|L", "E|eeeettttL")
OFTEN = ("Et||ttt|L", "Eeee|e|tt||t|tL")  # the others run at night
ALONE = ("llama tied", "t5")  # in every run also with each stage cut by itself
CASES = [
    pytest.param(name, layout, ranks, marks=[] if layout in OFTEN and (ranks or name in ALONE) else pytest.mark.nightly)
    for name in MAKERS
    for layout in (CUTS_OF_TWO if name in TWO_LISTS else CUTS)
    for ranks in ((None, 2) if layout in OFTEN else (None,))
]


def require_equal(whole, make, layout, batch, **options):
    loss = loss_of(whole(**batch))
    loss.backward()
    stages = stages_of(make, layout, **options)
    names = dict(whole.named_parameters(remove_duplicate=False))
    held = [name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)]
    assert sorted(held) == sorted(names)
    state = whole.state_dict()
    for stage in stages:
        for name, value in stage.state_dict().items():
            assert torch.equal(value, state[name]), name
    assert step(stages, batch, loss_of).item() == pytest.approx(loss.item(), rel=1e-12)
    for name, right, found in gradients(whole, stages):
        assert (right is None) == (found is None), name
        if right is not None:
            torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize(("name", "layout", "ranks"), CASES)
def test_a_family_in_stages_is_the_model(name, layout, ranks):
    """On two ranks, which have every other stage; or on one for each stage."""
    torch.manual_seed(1)
    require_equal(MAKERS[name]().double(), MAKERS[name], layout, batch_of(name), ranks=ranks)


class Plain(nn.Module):
    """A model of no library, with a bare parameter beside its layers."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(5, 6))
        self.word = nn.Embedding(9, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.scale = nn.Parameter(torch.randn(6))
        self.out = nn.Linear(6, 9)

    def forward(self, ids, *, logits=True):
        hidden = self.blocks(self.word(ids) + self.position)
        return {"logits": self.out(hidden * self.scale)} if logits else hidden


PARTS = Names("blocks", embedding=("position",), head=("scale",))


@pytest.mark.parametrize("layout", ["Et|t|tL", "E|ttt|L"])
def test_any_module_is_cut_by_the_name_of_its_layers(layout):
    torch.manual_seed(1)
    whole = Plain().double()
    ids = torch.randint(0, 9, (2, 5))
    whole(ids)["logits"].square().mean().backward()
    stages = stages_of(Plain, layout, names=PARTS)
    hidden = None
    for stage in stages:
        stage.set_input_tensor([hidden])
        hidden = stage(ids)  # linked, so one backward passes all stages
    hidden["logits"].square().mean().backward()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name


def test_stages_of_a_model_with_values_share_its_parameters_and_leave_it_whole():
    model = MAKERS["llama tied"]()
    names = [name for name, _ in model.named_parameters()]
    first, last = pipeline_stage(model, "Et|tt|tL", [0, 2])
    assert first.get_parameter("model.embed_tokens.weight") is last.get_parameter("lm_head.weight")
    assert first.get_parameter("model.layers.0.mlp.up_proj.weight") is model.model.layers[0].mlp.up_proj.weight
    batch = batch_of("llama")
    assert torch.isfinite(model(**batch).loss)
    assert [name for name, _ in model.named_parameters()] == names
    assert [(tie.name, tie.stages) for tie in first.ties] == [("model.embed_tokens.weight", (0, 2))]
    assert last.ties == first.ties


def test_a_stage_has_the_modes_and_dtypes_of_its_parts():
    stage = pipeline_stage(MAKERS["whisper encoder"], "Et|tttL", 1).to(torch.bfloat16)
    assert {parameter.dtype for parameter in stage.parameters()} == {torch.bfloat16}
    stage.eval()
    assert not stage.whole.training
    assert not any(module.training for module in stage.whole.modules())
    assert stage.layers == ("layers.1", "layers.2", "layers.3")


def test_a_function_makes_the_parameters_of_its_stage_only():
    made = []

    class Watched(nn.Linear):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self.weight.untyped_storage().data_ptr())

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Watched(8, 8) for _ in range(6))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    stage = pipeline_stage(Model, "tt|tttt", 0, names=Names("blocks"))
    assert len(made) == 12  # a run on the meta device, and one that keeps the stage's
    assert len(set(made[6:])) == 3  # two own weights, and one buffer for all others
    assert sum(parameter.numel() for parameter in stage.parameters()) == 2 * 72


def two_lists():
    """Neither has as many modules as the layout has layers."""
    model = nn.Module()
    for name in ("blocks", "more"):
        model.add_module(name, nn.ModuleList(nn.Linear(2, 2) for _ in range(2)))
    return model


@pytest.mark.parametrize(
    ("make", "layout", "stage", "options", "text"),
    [
        (llama(), "Et|tL", 0, {}, "LlamaForCausalLM and its layout do not fit: .* has 2 decoder layers, the model 4"),
        (llama(), "Et|tttL", 2, {}, r"stage is 2; layout 'Et\|t\*3,L' has the stages 0..1"),
        (llama(), "Et||tttL", 1, {}, "stage 1 of layout .* has no parameters; move a layer to it"),
        (llama(), "Ete|teL", 0, {}, "layers of the kinds decoder, encoder, and the model has one list of layers"),
        (two_lists, "Et|ttL", 0, {}, r"its layers under no name of Hugging Face's; .*: blocks \(2\), more \(2\)"),
        (Plain, "Et|ttL", 0, {"names": Names("layer")}, "Plain has no list of modules 'layer'; its lists are blocks"),
        (Plain, "Et|ttL", 0, {"names": Names("blocks")}, "position is beside the layers; name it in"),
        (MAKERS["t5"], "Ett|tteeeeL", 0, {}, "layers run in the order encoder, decoder"),
    ],
)
def test_a_cut_that_does_not_fit_is_a_clear_error(make, layout, stage, options, text):
    with pytest.raises(CutError, match=text):
        pipeline_stage(make, layout, stage, **options)


def test_a_model_on_the_meta_device_has_no_values_to_cut():
    with torch.device("meta"):
        model = llama()()
    with pytest.raises(CutError, match="is on the meta device; pass a function that makes the model"):
        pipeline_stage(model, "Et|tttL", 0)


def test_a_stage_without_its_input_is_a_clear_error():
    stage = pipeline_stage(llama(), "Et|tttL", 1)
    with pytest.raises(CutError, match="stage 1 has received nothing; call set_input_tensor"):
        stage(**batch_of("llama"))


class NormFirst(Plain):
    """Registers the part that runs last before its layers."""

    def __init__(self):
        super().__init__()
        self.blocks = self._modules.pop("blocks")  # now behind `out`


def test_a_part_registered_before_the_layers_and_run_after_them_is_named_in_the_error():
    stage = pipeline_stage(NormFirst, "Et|ttL", 1, names=PARTS)
    stage.set_input_tensor([torch.randn(2, 5, 6)])
    with pytest.raises(CutError, match="stages hand on out.bias, out.weight past others, .*head="):
        stage(torch.zeros(2, 5, dtype=torch.long))
    stage = pipeline_stage(
        NormFirst, "Et|ttL", 1, names=Names("blocks", embedding=("position",), head=("scale", "out"))
    )
    stage.set_input_tensor([torch.randn(2, 5, 6)])
    assert stage(torch.zeros(2, 5, dtype=torch.long))["logits"].isfinite().all()


def test_what_a_stage_sends_is_what_its_last_layer_returned_after_all_its_hooks():
    """Such as those of parallelize_module, which gathers a sequence there; they are registered after the cut."""
    torch.manual_seed(0)
    plain, hooked = (pipeline_stage(llama()(), "Ett|ttL", 0) for _ in range(2))
    hooked.load_state_dict(plain.state_dict())
    hooked.get_submodule(hooked.layers[-1]).register_forward_hook(lambda layer, args, result: result * 2)
    batch = batch_of("llama")
    assert torch.equal(hooked(**batch), plain(**batch) * 2)
    assert torch.equal(hooked(**batch), plain(**batch) * 2)


def test_parts_that_another_module_runs_are_on_no_stage():
    """The text model of a composite one: its stages have nothing of the vision tower, and the names of the whole."""
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4
        ),
        text_config=transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
        ),
        image_token_index=3,
    )

    def make():
        torch.manual_seed(1)
        return transformers.LlavaForConditionalGeneration(config)

    whole = make()
    tower = ("model.vision_tower", "model.multi_modal_projector")
    stages = pipeline_stage(make, "Et|tL", [0, 1], names=Names("model.language_model.layers", elsewhere=tower))
    held = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(held) == sorted(name for name, _ in whole.named_parameters() if not name.startswith(tower))
    ids = torch.randint(4, 50, (2, 5))
    stages[0](ids)
    stages[1].set_input_tensor([stages[0](ids)])
    assert torch.equal(stages[1](ids).logits, whole(input_ids=ids).logits)
    with pytest.raises(
        CutError, match=r"Names\.elsewhere has 'model.tower', which LlavaForConditionalGeneration has not"
    ):
        pipeline_stage(make, "Et|tL", 0, names=Names("model.language_model.layers", elsewhere=("model.tower",)))
