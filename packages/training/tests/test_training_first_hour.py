"""The mistakes of a user's first hour with cut models: each is one typed error that names the value and the rule."""

from functools import partial

import pytest
import torch

from pipegrid.gradients import required_ties
from pipegrid.layout import LayoutError
from pipegrid.schedules import GradientError, PipelineConfig
from pipegrid.topology import HyperCommGrid
from pipegrid.training import (
    CheckpointError,
    Checkpoints,
    CutError,
    Names,
    TrainingState,
    compile_layers,
    load_safetensors,
    pipeline_stage,
    tie_stage_parameters,
    ties_of,
)

from .kit.layered import Layered


def stage_of(number=1, **options):
    return pipeline_stage(Layered, "Et|tttL", number, names=Names("layers"), **options)


def run(received, **options):
    stage = stage_of(**options)
    stage.set_input_tensor(received)
    return stage(torch.zeros(1, dtype=torch.long))


MISTAKES = {
    "a model's name": (
        CutError,
        lambda: pipeline_stage("llama", "Et|tL", 0),
        "model is 'llama'; give a torch.nn.Module, or a fun",
    ),
    "no model": (CutError, lambda: pipeline_stage(None, "Et|tL", 0), "model is None; give a torch.nn.Module"),
    "a function without return": (
        CutError,
        lambda: pipeline_stage(lambda: None, "Et|tL", 0),
        "makes the model returned None",
    ),
    "a pair from the function": (
        CutError,
        lambda: ties_of(lambda: (Layered(), 1), "Et|tL"),
        r"makes the model returned \(Layered.* must return a torch.nn.Module",
    ),
    "a number for a layout": (
        LayoutError,
        lambda: pipeline_stage(Layered, 4, 0),
        "layout must be a string or .*, got 4",
    ),
    "counts for a layout": (
        LayoutError,
        lambda: pipeline_stage(Layered, [2, 2], 0),
        r"layout must be a string or .*, got \[2, 2\]",
    ),
    "a letter that is none": (
        LayoutError,
        lambda: pipeline_stage(Layered, "Ex|tL", 0),
        "column 1 .* found 'x', expected a layer",
    ),
    "a stage as text": (CutError, lambda: stage_of("0"), "stage is '0'; it must be an integer of at least 0"),
    "a stage as float": (CutError, lambda: stage_of(1.0), "stage is 1.0; it must be an integer of at least 0"),
    "no stage": (CutError, lambda: stage_of(None), "stage is None; it must be an integer of at least 0"),
    "the last stage by -1": (CutError, lambda: stage_of(-1), "stage is -1; it must be an integer of at least 0"),
    "a stage too far": (CutError, lambda: stage_of(2), r"stage is 2; layout 'Et\|t\*3,L' has the stages 0..1"),
    "a stage twice": (CutError, lambda: stage_of([0, 0]), r"stage is \[0, 0\]; a rank has each of its stages once"),
    "names as text": (
        CutError,
        lambda: pipeline_stage(Layered, "Et|tttL", 0, names="layers"),
        r"names is 'layers'; give Names\(layers=...\)",
    ),
    "a list of lists": (CutError, lambda: Names(["a", "b"]), "Names.layers is .* must be the dotted name of a list"),
    "one part as text": (
        CutError,
        lambda: Names("layers", embedding="word"),
        "Names.embedding is 'word'; it must be a list or tuple",
    ),
    "a part that is none": (
        CutError,
        lambda: pipeline_stage(Layered, "Et|tttL", 0, names=Names("layers", head=("norm",))),
        "Names.head has 'norm', which Layered has not",
    ),
    "a list that is none": (
        CutError,
        lambda: pipeline_stage(Layered, "Et|tttL", 0, names=Names("blocks")),
        "Layered has no list of modules 'blocks'; its lists are layers",
    ),
    "too many layers": (CutError, lambda: pipeline_stage(Layered, "Et*5|tL", 0), "has 6 decoder layers, the model 4"),
    "a key for an output": (CutError, lambda: stage_of(output="logits"), "output is 'logits'; give a function from"),
    "a way to compile that is none": (
        CutError,
        lambda: compile_layers(stage_of(), compile="halves"),
        "compile is 'halves'; it must be 'whole' or 'split'",
    ),
    "no input": (CutError, lambda: run([None]), "stage 1 has received nothing; call set_input_tensor"),
    "modules without a name": (
        CutError,
        lambda: run({"images": torch.ones(1, 4)}),
        r"has received from 'images', and its own module is None; give pipeline_stage\(..., module=...\)",
    ),
    "another module's name": (
        CutError,
        lambda: run([{"images": torch.ones(1, 4)}], module="language"),
        "has received from 'images', and its own module is 'language'",
    ),
    "a stage for its ties": (
        CutError,
        lambda: tie_stage_parameters(stage_of(), stage_of(), HyperCommGrid([1, 1], ["dp", "pp"], world_size=1)),
        "ties is a Stage; give stage.ties",
    ),
}


def test_a_tie_that_a_script_forgets_is_an_error_before_the_first_step():
    first, last = pipeline_stage(partial(Layered, tied=True), "Et|tttL", [0, 1], names=Names("layers"))
    for stages in ([first], [last]):
        with pytest.raises(
            GradientError, match=r"'word.weight' is one .* stages \[0, 1\].* tie_stage_parameters\(stage.ties,"
        ):
            required_ties(models=stages, config=PipelineConfig(), stages=[0])
    assert required_ties(models=[first, last], config=PipelineConfig(), stages=[0, 1]) == ()  # one parameter
    by_hand = PipelineConfig(finalize_model_grads_func=lambda models, tokens, pg_collection: None)
    assert required_ties(models=[first], config=by_hand, stages=[0]) == ()
    first.requires_grad_(False)
    assert required_ties(models=[first], config=PipelineConfig(), stages=[0]) == ()


CHECKPOINT_MISTAKES = {
    "a model to save": (
        lambda saved: saved.save(Layered(), step=1),
        r"state is Layered.*\(Layered\); it must be a TrainingState",
    ),
    "a model to load into": (
        lambda saved: saved.load(Layered()),
        r"state is Layered.*\(Layered\); it must be a TrainingState",
    ),
    "the file before the state": (
        lambda _: load_safetensors("model.safetensors", TrainingState(stages={})),
        "state is 'model.safetensors'; it must be a TrainingState",
    ),
    "a list of stages": (
        lambda _: TrainingState(stages=[Layered()]),
        r"stages is \[Layered.* it must be a dict by module",
    ),
    "a stage alone": (lambda _: TrainingState(stages=Layered()), "stages is Layered.* it must be a dict by module"),
    "a module without stages": (
        lambda _: TrainingState(stages={"m": None}),
        "stages is {'m': None}.* a dict by module",
    ),
    "an optimizer alone": (
        lambda _: TrainingState(stages={}, optimizers=torch.optim.AdamW(Layered().parameters())),
        "optimizers is AdamW.* it must be a list of optimizers",
    ),
    "another module's name": (
        lambda saved: (
            saved.save(TrainingState(stages={"language": {0: Layered()}}), step=1),
            saved.load(TrainingState(stages={"vision": {0: Layered()}})),
        ),
        "of module 'vision' has .* and the checkpoint has the modules language",
    ),
}


@pytest.mark.parametrize("what", CHECKPOINT_MISTAKES)
def test_a_first_mistake_with_checkpoints_is_a_typed_error(tmp_path, what):
    call, text = CHECKPOINT_MISTAKES[what]
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        call(Checkpoints(tmp_path))


@pytest.mark.parametrize("what", MISTAKES)
def test_a_first_mistake_is_a_typed_error_that_names_value_and_rule(what):
    error, call, text = MISTAKES[what]
    with pytest.raises(error, match=text):
        call()
