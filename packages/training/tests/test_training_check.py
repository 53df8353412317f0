"""check_stages and what runs it: equal for stages that are the model, else the values, their stages and errors."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from pipegrid.schedules import PipelineConfig, StepArgumentError, get_forward_backward_func
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
from pipegrid.training import CutError, check_stages, pipeline_stage
from pipegrid.training.__main__ import main
from pipegrid.transport import P2PCommunicator
from stages_kit import looped_models as looped
from stages_kit.models import batch_of, llama

PLAIN = (("none", "tanh"),) * looped.LAYERS
LAYOUT = "Ettt|ttL"


def check(make, layout=LAYOUT, **options):
    return check_stages(make, layout, looped.batch(), names=looped.NAMES, **options)


class Reading(looped.Looped):
    """The host reads a value of the hidden states: on stage 1 it is that of a stand-in, and nothing is NaN."""

    def forward(self, ids, mask):
        hidden = self.embed(ids)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)[0]
            if number == 0:
                factor = 2 if bool((hidden > 10).any()) or bool(hidden.isnan().any()) else 1
        return (self.head(hidden) * factor).square().mean()


def reading():
    return Reading(PLAIN, "none").double()


# -- what it says ----------------------------------------------------------------------------------------------


def test_stages_that_are_the_model_are_equal_and_the_report_says_what_was_compared():
    torch.manual_seed(3)
    found = check_stages(llama(tie_word_embeddings=True), "Et|tt|tL", batch_of("llama"), dtype=torch.float64)
    assert found.holds
    assert len(found.gradients) == 38
    assert found.loss == found.loss_of_stages
    tied = next(one for one in found.gradients if one.name == "gradient of model.embed_tokens.weight")
    assert tied.stages == (0, 2)
    lines = str(found).splitlines()
    assert lines[:2] == ["'Et|tt|tL': proved", "  stage 1, after model.layers.0: float64 (3, 7, 16), 2.62 KiB"]
    assert lines[4].startswith("stage 0: 10 gradients, the largest error ")
    assert lines[-1] == "equal (limit 1e-08)"


def by_name(named):
    """Options as recipes choose them: no decay of embeddings."""
    return torch.optim.AdamW([{"params": [one], "weight_decay": 0.5 * ("embed" not in name)} for name, one in named])


def by_depth(named):
    """A place among the parameters of a stage is another one than among all."""
    return torch.optim.SGD([{"params": [one], "lr": 0.1 * 0.9**number} for number, (_, one) in enumerate(named)])


class OfAll(torch.optim.SGD):
    """Divides all gradients by the norm of all."""

    def __init__(self, named):
        super().__init__([one for _, one in named], lr=0.1)

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e-3)
        super().step(closure)


def test_an_update_is_compared_by_the_names_of_one_process():
    torch.manual_seed(3)
    options = {"layout": "Et|tt|tL", "batch": batch_of("llama"), "dtype": torch.float64}
    found = check_stages(llama(tie_word_embeddings=True), optimizer=by_name, **options)
    assert len(found.updates) == 39, "both copies of the tied weight"
    assert str(found).splitlines()[-2] == "39 parameters after an update, the largest error 0"
    for kind in (by_depth, OfAll):
        with pytest.raises(CutError, match=r"gradients, buffers and updates.*\n  update of model\.\S+ on stage \d"):
            check_stages(llama(tie_word_embeddings=True), optimizer=kind, **options)


def test_what_a_proof_cannot_decide_is_decided_by_numbers():
    with pytest.raises(CutError, match="do not compute what the model computes") as error:
        check(reading)
    lines = str(error.value).splitlines()
    assert len(lines) <= 10
    for line in lines[1:-1]:
        assert re.fullmatch(r"  gradient of [a-z0-9.]+ on stage [01]: error 3 of the norm [0-9.e-]+", line)
    assert lines[-1] == "  and 9 more"


def test_a_cut_that_is_not_proved_is_the_error_of_its_proof():
    with pytest.raises(CutError, match=r"made by cos in blocks\.1 \(looped_models"):
        check(looped.Tapped)


def test_statistics_that_a_stage_makes_of_stand_ins_are_named():
    class Normed(looped.Looped):
        def __init__(self):
            super().__init__(PLAIN, "none")
            self.norm = nn.BatchNorm1d(looped.WIDTH, affine=False)

        def forward(self, ids, mask):
            hidden = self.embed(ids)
            for block in self.blocks:
                hidden = self.norm(block(hidden)[0].transpose(1, 2)).transpose(1, 2)
            return self.head(hidden).square().mean()

    with pytest.raises(CutError, match=r"buffer norm\.running_mean on stage 1: error nan"):
        check(lambda: Normed().double())


def test_random_numbers_are_the_same_in_both():
    """In the embedding, in layers, between them and at the end."""

    class Dropping(looped.Looped):
        def __init__(self):
            super().__init__(PLAIN, "none")
            self.drop = nn.Dropout(0.4)

        def forward(self, ids, mask):
            hidden = self.drop(self.embed(ids))
            for block in self.blocks:
                hidden = self.drop(block(self.drop(hidden))[0])
            return self.head(self.drop(hidden)).square().mean()

    state = torch.get_rng_state()
    assert check(lambda: Dropping().double(), "Et|tt|ttL").holds
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_is_copied_and_stays_as_it_is():
    whole = looped.made(PLAIN, "none")
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    assert check(whole).holds
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    assert all(parameter.grad is None for parameter in whole.parameters())


def test_a_function_that_makes_other_values_each_time_is_named():
    def make():
        torch.seed()
        return looped.Looped(PLAIN, "none").double()

    with pytest.raises(CutError, match=r"embed\.weight on stage 0 has other initial values than in the whole model"):
        check(make)


def test_without_a_loss_all_that_the_model_returns_is_compared():
    class Scored(looped.Looped):
        def forward(self, ids, mask):
            hidden = self.embed(ids)
            for block in self.blocks:
                hidden = block(hidden)[0]
            return {"scores": self.head(hidden), "half": self.scale(hidden) * (2 if hidden.isnan().any() else 1)}

    found = check(lambda: Scored(PLAIN, "none").double())
    assert {one.name for one in found.gradients if one.norm > 0} >= {
        "gradient of head.weight",
        "gradient of scale.bias",
    }
    other = check(lambda: Scored(PLAIN, "none").double(), loss=lambda output: output["scores"].square().sum())
    assert next(one for one in other.gradients if one.name == "gradient of scale.bias").norm == 0


@pytest.mark.thorough
def test_the_page_about_cuts_prints_what_it_says(capsys):
    page = (Path(__file__).parents[3] / "docs" / "concepts" / "cuts.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|text)\n(.*?)```", page, re.DOTALL)
    names = {}
    for (_, code), (_, text) in zip(blocks[::2], blocks[1::2], strict=True):
        exec(code, names)
        loss = re.compile(r"[0-9]+\.[0-9]{4,}")  # of random values, which may be others in another torch
        assert loss.sub("x", capsys.readouterr().out) == loss.sub("x", text)


# -- carry, and a proof at construction ---------------------------------------------------------------------------


class Masked(looped.Looped):
    """Its layers read a mask that later stages have no data for."""

    def forward(self, ids=None, mask=None):
        hidden = self.embed(ids if ids is not None else torch.zeros(mask.shape, dtype=torch.long))
        for block in self.blocks:
            hidden = block(hidden * mask.unsqueeze(-1))[0]
        return self.head(hidden).square().mean()


def masked():
    return Masked(PLAIN, "none").double()


def test_carried_arguments_reach_later_stages_without_data():
    assert check(masked, "Et|tt|ttL", carry="mask").holds


def test_a_carried_name_that_the_first_stage_is_not_called_with_is_an_error():
    first, _ = pipeline_stage(masked(), LAYOUT, [0, 1], names=looped.NAMES, carry=["mask"])
    with pytest.raises(CutError, match="carry has 'mask', and stage 0 is called with ids; call it with mask=..."):
        first(ids=looped.batch()["ids"])
    assert torch.equal(first(**looped.batch())[1], looped.batch()["mask"])


def test_a_batch_proves_the_cut_before_parameters_have_values():
    made = []

    def make():
        made.append(looped.Tapped())
        return made[-1]

    with pytest.raises(CutError, match=r"made by cos in blocks\.1"):
        pipeline_stage(make, LAYOUT, 0, names=looped.NAMES, batch=looped.batch())
    assert [all(one.is_meta for one in model.parameters()) for model in made] == [True]
    with pytest.raises(CutError, match=r"made by cos in blocks\.1"):
        pipeline_stage(looped.Tapped(), LAYOUT, 0, names=looped.NAMES, batch=looped.batch())
    stage = pipeline_stage(masked, LAYOUT, 0, names=looped.NAMES, batch=looped.batch())
    stage.proofs._outline = None  # of a call that is proved, no further trace
    stage(**looped.batch())


# -- in the first step --------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_the_first_step_compares_the_stages_and_is_a_step(ranks):
    """Gradients are those of a step without it; generators too: the stage has dropout."""
    batches = [batch_of("llama", seed=seed) for seed in range(2)]
    grid = HyperCommGrid([1, 2], ["dp", "pp"])
    grid.create_pgs(["dp", "pp"])
    groups, grads = ProcessGroupCollection.from_grid(grid), []
    for checked in (True, False):
        torch.manual_seed(5)
        stage = pipeline_stage(llama(attention_dropout=0.3), "Ett|ttL", dist.get_rank()).double()
        stage.config = PipelineConfig(variable_seq_lengths=True, deadline=60.0, check=checked)
        pipe = P2PCommunicator(groups.pp, stage.config)
        step = get_forward_backward_func(schedule="1f1b")
        step(
            forward_step_func=lambda data, stage: (stage(**next(data)), lambda out: (out.loss, None)),
            data_iterator=iter(batches),
            model=stage,
            num_microbatches=2,
            p2p_communicator=pipe,
            pg_collection=groups,
        )
        pipe.close()
        grads.append([parameter.grad for parameter in stage.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_the_first_forward_of_stage_0_finds_a_difference():
    stage = pipeline_stage(reading, LAYOUT, 0, names=looped.NAMES, config=PipelineConfig(check=True))
    with warnings.catch_warnings(), pytest.raises(CutError, match="do not compute what the model computes"):
        warnings.simplefilter("error")
        stage(**looped.batch())


def test_a_cut_that_is_not_proved_is_compared_unless_that_is_left_out():
    said = (
        r"is not proved: .*Stage 0 compares .* of the whole model \(499 parameters; without being asked at most 100,0"
    )
    stage = pipeline_stage(reading, LAYOUT, 0, names=looped.NAMES, config=PipelineConfig())
    with pytest.warns(UserWarning, match=said), pytest.raises(CutError, match="do not compute what the model computes"):
        stage(**looped.batch())
    for left_out in (
        pipeline_stage(reading, LAYOUT, 0, names=looped.NAMES, config=PipelineConfig(check=False)),
        pipeline_stage(reading(), LAYOUT, 0, names=looped.NAMES, config=PipelineConfig()),
    ):
        with pytest.warns(
            UserWarning, match=r"is not proved: .*check_stages, or PipelineConfig\(check=True\), compares"
        ):
            left_out(**looped.batch())


class Kept(looped.Looped):
    """The first layer's result decides, on the host, what the last one does."""

    kept: ClassVar = {}

    def forward(self, ids, mask):
        hidden = self.embed(ids)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)[0]
            if number == 0:
                self.kept["norm"] = hidden.detach().abs().mean().item()
        return (self.head(hidden) * self.kept["norm"]).square().mean()


def test_each_stage_has_its_own_copy_of_what_a_class_holds():
    with pytest.raises(CutError, match="do not compute what the model computes"):
        check(lambda: Kept(PLAIN, "none").double())
    assert Kept.kept == {}


def test_a_difference_is_found_again_after_a_failed_step():
    stage = pipeline_stage(reading, LAYOUT, 0, names=looped.NAMES, config=PipelineConfig(check=True))
    for _ in range(2):
        with pytest.raises(CutError, match="do not compute what the model computes"):
            stage(**looped.batch())


def test_a_stage_of_a_model_keeps_no_whole_one_to_compare_with():
    stage = pipeline_stage(masked(), LAYOUT, 0, names=looped.NAMES, config=PipelineConfig(check=True))
    with pytest.raises(CutError, match=r"give pipeline_stage a function .* or call check_stages\(model,"):
        stage(**looped.batch())


def test_what_arrives_from_other_modules_gets_no_gradient_from_the_comparison():
    class Seeing(looped.Looped):
        def forward(self, ids, mask, seen):
            hidden = self.embed(ids) + seen.image
            for block in self.blocks:
                hidden = block(hidden)[0]
            return self.head(hidden).square().mean()

    class Seen:
        image = torch.ones(looped.WIDTH, dtype=torch.float64, requires_grad=True)

    make = lambda: Seeing(PLAIN, "none").double()
    stage = pipeline_stage(make, LAYOUT, 0, names=looped.NAMES, config=PipelineConfig(check=True))
    stage(**looped.batch(), seen=Seen())
    assert Seen.image.grad is None


def test_a_model_that_is_no_stage_has_nothing_to_compare_with():
    model = nn.Linear(2, 2)
    model.config = PipelineConfig(check=True)
    with pytest.raises(
        StepArgumentError, match="the Linear of stage 0 is not made by `pipeline_stage` of pipegrid.training"
    ):
        get_forward_backward_func(1)(
            forward_step_func=lambda data, model: None,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=1,
            micro_batch_size=1,
        )


# -- the command --------------------------------------------------------------------------------------------------


def saved(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return str(tmp_path)


def tiny(**options):
    return transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=40, **options
    )


@pytest.mark.thorough
def test_the_command_compares_the_model_of_a_config(tmp_path, capsys):
    folder = saved(tmp_path, tiny(architectures=["LlamaForSequenceClassification"], pad_token_id=0))
    assert main(["check", folder, "Et|t|tL", "--dtype", "float64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": proved")
    assert lines[-1] == "equal (limit 1e-08)"
    assert main(["check", f"{folder}/config.json", "Et|ttL", "--proof-only"]) == 0
    assert "loss" not in capsys.readouterr().out


def broken():
    return Reading(PLAIN, "none")


@pytest.mark.thorough
def test_the_command_ends_with_1_where_stages_differ_and_2_where_nothing_is_compared(tmp_path, capsys):
    here = __name__
    arguments = [f"{here}:broken", LAYOUT, "--layers", "blocks", "--batch", f"{looped.__name__}:batch"]
    assert main(["check", *arguments]) == 1
    assert "nothing" not in capsys.readouterr().out
    for wrong, text in (("nowhere", "is no file and no folder"), (f"{here}:nothing", "is no function")):
        with pytest.raises(SystemExit) as ended:
            main(["check", wrong, LAYOUT])
        assert ended.value.code == 2
        assert text in capsys.readouterr().err
    sizes = {"vocab_size": 40, "hidden_size": 16, "dim_head": 4, "dim_ff": 32, "num_hidden_layers": 4}
    late = transformers.CpmAntConfig(**sizes, num_attention_heads=4, output_hidden_states=True)  # its embedding is last
    where = ["--class", "CpmAntForCausalLM", "--layers", "cpmant.encoder.layers"]
    assert main(["check", saved(tmp_path, late), "Et|tt|tL", *where]) == 1
    out = capsys.readouterr().out
    assert ": not proved" in out
    assert "without output_hidden_states=True there may be less to send" in out
