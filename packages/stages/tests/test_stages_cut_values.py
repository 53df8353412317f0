"""Initial values of a cut model, where parameters are sources of others: those of one process, and little memory."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipegrid.stages import Names, pipeline_stage, torch_compat
from pipegrid.stages.errors import CutError
from stages_kit.models import LowRank, llama

WIDTH = 32


class Model(nn.Module):
    """Eight layers, each a copy of one that is not part of the model."""

    def __init__(self, layers=8):
        super().__init__()
        template = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.blocks = nn.TransformerEncoder(template, layers, enable_nested_tensor=False).layers
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def upcycled():
    model = llama()()
    model.model.layers[3].load_state_dict(model.model.layers[0].state_dict())
    return model


def resized():
    model = llama()()
    model.resize_token_embeddings(60, mean_resizing=False)
    return model


def with_noise():
    model = llama()()
    layers = model.model.layers
    with torch.no_grad():
        for layer in layers[1:]:
            weight = layers[0].mlp.up_proj.weight
            layer.mlp.up_proj.weight.copy_(weight * 0.5 + torch.randn(weight.shape) * 0.1)
    return model


def drawn_by_python():
    model = llama()()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(random.random())
    return model


def one_original_twice():
    model = Model()
    weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))
    model.blocks[1].linear2.weight = weight
    model.blocks[6].linear2.weight = weight
    return model


class Inside(nn.Module):
    """A model inside of another, which calls its forward, as PEFT's ``LoraModel`` does."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model.forward(*args, **kwargs)


class Adapted(nn.Module):
    """As PEFT's ``PeftModelForCausalLM``: its model is ``base_model.model``."""

    def __init__(self, model):
        super().__init__()
        self.base_model = Inside(model)

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None, task_ids=None, **kwargs):
        del task_ids
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        return self.base_model(**inputs, labels=labels, **kwargs)


def adapted():
    model = llama()().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.mlp.up_proj = LowRank(layer.mlp.up_proj)
    return Adapted(model)


def checkpointed():
    model = llama()()
    model.activation_checkpointing_enable()
    return model


def compiled():
    model = llama()()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(layer, backend="eager")
    return model


FACTORIES = {
    "copies": Model,
    "upcycled": upcycled,
    "resized": resized,
    "with noise": with_noise,
    "bfloat16": lambda: llama()().to(torch.bfloat16),
    "float16": lambda: llama()().half(),
    "moved": lambda: llama()().to("cpu"),
    "float64, of bfloat16": lambda: llama()().bfloat16().double(),
    "adapted": adapted,
    "adapted, bfloat16": lambda: adapted().to(torch.bfloat16),
    "checkpointed": checkpointed,
    "compiled": compiled,
    "copied": lambda: copy.deepcopy(llama(tie_word_embeddings=True)()),
    "python": drawn_by_python,
    "one original twice": one_original_twice,
}


def seeded(function):
    torch.manual_seed(3)
    random.seed(3)
    return function()


@pytest.mark.parametrize("name", FACTORIES)
def test_initial_values_are_those_of_one_process(name):
    make = FACTORIES[name]
    names = Names("blocks") if name in ("copies", "one original twice") else None
    whole = seeded(make)
    values = dict(whole.named_parameters(remove_duplicate=False))
    layout = "Ettt|tttttL" if names else "Et|tttL"
    found = [seeded(lambda n=n: pipeline_stage(make, layout, n, names=names)) for n in (0, 1)]
    for stage in found:
        for key, value in stage.named_parameters(remove_duplicate=False):
            assert value.dtype == values[key].dtype
            assert value.requires_grad == values[key].requires_grad
            assert torch.equal(value, values[key]), key
    ties = pipeline_stage(whole, layout, 0, names=names).ties
    assert all(stage.ties == ties for stage in found)


class Peak(TorchDispatchMode):
    """The most bytes of tensors that are alive together."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch_compat.tensors_in(result):
            if not tensor.is_meta:
                self.alive[torch_compat.memory_of(tensor)] = tensor.untyped_storage().nbytes()
        self.alive = {key: size for key, size in self.alive.items() if not key.expired()}
        self.most = max(self.most, sum(self.alive.values()))
        return result


@pytest.mark.parametrize(("make", "layers"), [(Model, 8), (lambda: Model().to(torch.bfloat16), 8)])
def test_copied_and_cast_layers_of_other_stages_take_no_memory(make, layers):
    with Peak() as whole:
        make()
    with Peak() as part:
        stage = pipeline_stage(make, "t|" + "t" * (layers - 1), 0, names=Names("blocks"))
    layer = 4 * sum(parameter.numel() for parameter in stage.blocks[0].parameters())
    assert whole.most > layers * layer
    assert part.most < 4 * layer  # its own, what it is copied from, the scratch buffer, a result


def by_values():
    model = llama()()
    if model.lm_head.weight.sum().item() > 0:
        nn.init.zeros_(model.lm_head.weight)
    return model


def by_data():
    model = llama()()
    model.lm_head.weight.data = torch.zeros_like(model.lm_head.weight, device="cpu")
    return model


def with_a_mean():
    model = llama()()
    model.resize_token_embeddings(60)
    return model


def compiled_in_place():
    model = llama()()
    model.model.layers[1].compile(backend="eager")
    return model


def lazy():
    model = Model(1)
    model.blocks = nn.ModuleList(nn.LazyLinear(WIDTH) for _ in range(2))
    return model


def through_numpy():
    model = llama()()
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.from_numpy(model.model.embed_tokens.weight.detach().numpy()))
    return model


@pytest.mark.parametrize(
    ("make", "names", "text"),
    [
        (by_values, None, r"make the model in full and cut that, pipeline_stage\(make\(\), \.\.\.\)"),
        (by_data, None, r"make the model in full and cut that, pipeline_stage\(make\(\), \.\.\.\)"),
        (through_numpy, None, r"make the model in full and cut that, pipeline_stage\(make\(\), \.\.\.\)"),
        (with_a_mean, None, r"make the model in full and cut that, pipeline_stage\(make\(\), \.\.\.\)"),
        (compiled_in_place, None, r"model.layers.1 is compiled, .* compile_layers\(stage\)"),
        (lambda: torch.compile(llama()(), backend="eager"), None, r"the model is compiled, .* compile_layers\(stage\)"),
        (lazy, Names("blocks"), "LazyLinear.weight is a lazy parameter, .* give its layer its sizes"),
    ],
)
def test_values_that_a_part_of_the_model_does_not_give_are_a_cut_error(make, names, text):
    with pytest.raises(CutError, match=text):
        pipeline_stage(make, "Et|tttL" if names is None else "t|tL", 1, names=names)


def test_a_lazy_layer_in_a_made_model_is_a_cut_error():
    with pytest.raises(CutError, match=r"blocks\.0\.weight is a lazy parameter"):
        pipeline_stage(lazy(), "t|tL", 0, names=Names("blocks"))


def test_a_function_that_makes_another_model_each_time_is_a_cut_error():
    sizes = iter((2, 3))
    with pytest.raises(CutError, match="makes another model at its second call"):
        pipeline_stage(lambda: Model(next(sizes)), "t|tL", 0, names=Names("blocks"))


def test_the_schemas_of_operations_tell_memory_and_writes():
    aten, one = torch.ops.aten, torch.ones(2)
    assert torch_compat.makes_memory(aten.clone.default)
    assert torch_compat.makes_memory(aten.split_with_sizes_copy.default)
    for operation in (aten.view.default, aten.add_.Tensor, aten._unsafe_view.default, aten._local_scalar_dense.default):
        assert not torch_compat.makes_memory(operation)
    assert torch_compat.written_by(aten.add_.Tensor, (one, one), {}) == [one]
    assert torch_compat.written_by(aten._foreach_copy_.default, ([one], [one]), {})[0] is one
    assert torch_compat.written_by(aten.add.Tensor, (one, one), {}) == []
    assert torch_compat.memory_of(one) == torch_compat.memory_of(one.view(1, 2))
    assert torch_compat.extent_of(torch.ones(3, 4).t()[1:]) == 4 * (12 - 1)


class OlderOutput(OrderedDict):
    """An output as transformers 5.0 registers them: torch knows its entries, and not their names."""


_pytree.register_pytree_node(
    OlderOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: OlderOutput(zip(names, values, strict=True)),
)


@pytest.mark.parametrize("kind", [dict, OlderOutput])
def test_leaves_of_outputs_have_places(kind):
    inner = kind(loss=None, hidden=(2, [3]))
    output = {"first": 1, "output": kind(logits=4, inner=inner)}
    places = torch_compat.named_leaves(output)
    assert places == [
        ("['first']", 1),
        ("['output']['logits']", 4),
        ("['output']['inner']['loss']", None),
        ("['output']['inner']['hidden'][0]", 2),
        ("['output']['inner']['hidden'][1][0]", 3),
    ]
    mapped = torch_compat.mapped_by_place(lambda place, leaf: (place, leaf), output)
    assert mapped["output"]["inner"]["hidden"] == (places[3], [places[4]])
    assert type(mapped["output"]) is kind


def test_an_adapted_model_in_stages_computes_what_it_computes_whole():
    batch = {"input_ids": torch.arange(12).reshape(2, 6), "labels": torch.arange(12).reshape(2, 6)}
    whole = seeded(adapted).double()
    first, last = (seeded(lambda n=n: pipeline_stage(adapted, "Et|tttL", n)).double() for n in (0, 1))
    hidden = first(**batch)
    received = hidden.detach().requires_grad_()
    last.set_input_tensor([received])
    loss = last(**batch).loss
    loss.backward()
    hidden.backward(received.grad)
    expected = whole(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for stage in (first, last):
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-14, msg=name)
