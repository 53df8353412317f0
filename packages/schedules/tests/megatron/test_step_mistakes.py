"""The mistakes of a first hour with step functions: each is one typed error that names the value and the rule."""

import contextlib
import enum
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipegrid.schedules import (
    DataEndedError,
    GradientError,
    PipelineConfig,
    PipelineError,
    PlanError,
    StageOutputError,
    StepArgumentError,
    backward_step,
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    forward_backward_with_schedule,
    forward_step_calc_loss,
    get_forward_backward_func,
)
from pipegrid.topology import MultiModuleProcessGroupCollection, ProcessGroupCollection
from pipegrid.transport import P2PUsageError

from ..kit.models import call
from ..kit.of_job import OfJob


class Model(nn.Linear):
    config = PipelineConfig(pipeline_dtype=torch.float32)

    def __init__(self, config=None):
        super().__init__(2, 2)
        if config is not None:
            self.config = config


def batches(count=2):
    return iter([torch.ones(1, 2)] * count)


def good(iterator, model):
    return model(next(iterator)), lambda output: (output.sum(), {})


def step(forward=good, *, function=forward_backward_no_pipelining, **options):
    given = {"forward_step_func": forward, "data_iterator": batches(), "model": Model(), "count": 2}
    return call(function, **given | options)


def pipelined(**options):
    return step(function=forward_backward_pipelining_without_interleaving, **options)


def interleaved(**options):
    given = {
        "model": [Model(), Model()],
        "data_iterator": [batches(), batches()],
        "p2p_communicator": OfJob(total_stages=2, current_stage=0),
    }
    return step(function=forward_backward_pipelining_with_interleaving, **given | options)


def losing(loss):
    """A step with that loss function."""
    return step(lambda iterator, model: (model(next(iterator)), loss))


BEFORE = {
    "no function": (
        lambda: step(5),
        r"forward_step_func is 5, .* as f\(data_iterator, model\): 5 is not a",
    ),
    "a function of one argument": (
        lambda: step(lambda model: None),
        r"forward_step_func is .*as f\(data_iterator, model\): too many positional",
    ),
    "a function of three": (
        lambda: step(lambda iterator, model, args: None),
        r"forward_step_func is .*as f\(data_iterator, model\): missing a required argument: 'args'",
    ),
    "a pipeline without its function": (
        lambda: step(p2p_communicator=OfJob(total_stages=2, current_stage=0)),
        "p2p_communicator has 2 stages; pp_size=2 gives the function for them",
    ),
    "no microbatches": (lambda: step(num_microbatches=0), "num_microbatches is 0; it must be an integer of at least 1"),
    "microbatches by /": (lambda: step(num_microbatches=8 / 4), "num_microbatches is 2.0; it must be an integer"),
    "a model without config": (
        lambda: step(model=nn.Linear(2, 2)),
        "`config` of model Linear is None; it must be",
    ),
    "a dict for a config": (
        lambda: step(model=Model({"deadline": 5})),
        r"the `config` of model Model is {'deadline': 5} \(dict\); .* as attributes, such as PipelineConfig",
    ),
    "two models": (lambda: step(model=[Model(), Model()]), "model is a list of 2: without interleaving a rank has one"),
    "batches for an iterator": (
        lambda: step(data_iterator=[1, 2]),
        "data_iterator is a list of 2: without interleaving",
    ),
    "no communicator": (
        pipelined,
        "p2p_communicator is None; it must be a Communicator .* pass P2PCommunicator",
    ),
    "a name for a communicator": (
        lambda: pipelined(p2p_communicator="nccl"),
        "p2p_communicator is 'nccl'; it must be a Communicator whose job has stages",
    ),
    "one model interleaved": (
        lambda: interleaved(model=Model()),
        "model is Model.*; interleaving takes a list of at least",
    ),
    "one iterator interleaved": (
        lambda: interleaved(data_iterator=batches()),
        "runs 2 stages of module 'model', and data_iterator is list_iterator; give a list",
    ),
    "microbatches that do not fit": (
        lambda: interleaved(num_microbatches=3),
        "3 microbatches in groups of 2 over 2 ranks: the interleaved step needs",
    ),
    "evaluation results of training": (
        lambda: step(collect_non_loss_data=True),
        "collect_non_loss_data has no loss to differentiate; set forward_only=True",
    ),
    "no size": (get_forward_backward_func, "the pipeline size is unknown: there is no global parallel state"),
    "a size of 0": (lambda: get_forward_backward_func(pp_size=0), "pp_size is 0; it must be an integer of at least 1"),
}


@pytest.mark.parametrize("what", BEFORE)
def test_a_mistake_in_the_arguments_is_an_error_before_the_step(what):
    call, text = BEFORE[what]
    with pytest.raises(StepArgumentError, match=text):
        call()


def test_a_schedule_that_is_none_is_an_error_with_the_names_of_all():
    with pytest.raises(PlanError, match="there is no schedule '1f2b' .did you mean '1f1b'.*; the schedules are"):
        get_forward_backward_func(schedule="1f2b")


INSIDE = {
    "the output alone": (
        StepArgumentError,
        lambda: step(lambda iterator, model: model(next(iterator))),
        r"forward_step_func returned a tensor of shape \(1, 2\); it returns \(output, loss_func\)",
    ),
    "no return": (
        StepArgumentError,
        lambda: step(lambda iterator, model: None),
        r"forward_step_func returned None; it returns \(output, loss_func\)",
    ),
    "no loss function": (
        StepArgumentError,
        lambda: losing(None),
        r"returned no loss_func on stage 0, the last one, for microbatch 0: there is no loss to differentiate",
    ),
    "the loss itself": (
        StepArgumentError,
        lambda: losing(torch.ones(())),
        r"returned \(a tensor of shape \(1, 2\), a tensor of shape \(\)\); it returns \(output, loss_func\)",
    ),
    "a loss alone": (
        StageOutputError,
        lambda: losing(lambda output: output.sum()),
        r"the loss function returned a tensor of shape \(\); expected \(loss, num_tokens, info\)",
    ),
    "a loss that is no scalar": (
        StageOutputError,
        lambda: losing(lambda output: (output, {})),
        r"the loss is a tensor of shape \(1, 2\); a loss is a tensor with one element",
    ),
    "a loss as a number": (
        StageOutputError,
        lambda: losing(lambda output: (output.sum().item(), {})),
        r"the loss is .*; a loss is a tensor with one element",
    ),
    "a loss without gradient": (
        StageOutputError,
        lambda: losing(lambda output: (output.sum().detach(), {})),
        "the loss of stage 0 for microbatch 0 is .*requires_grad=False; .*forward_only=True",
    ),
    "a frozen model": (
        StageOutputError,
        lambda: step(model=Model().requires_grad_(False)),
        "is .*requires_grad=False; a loss is a tensor",
    ),
    "too few batches": (
        DataEndedError,
        lambda: step(data_iterator=batches(1)),
        "the iterator of stage 0 ended at microbatch 1 of 2",
    ),
}


@pytest.mark.parametrize("what", INSIDE)
def test_a_mistake_inside_a_step_is_an_error_with_the_place_in_the_plan(what):
    error, call, text = INSIDE[what]
    with pytest.raises(PipelineError, match=text) as caught:
        call()
    assert isinstance(caught.value.__cause__, error)
    assert "at position 0, step" in str(caught.value)


@pytest.mark.parametrize("name", ["grad_scale_func", "finalize_model_grads_func", "no_sync_func", "grad_sync_func"])
def test_a_value_for_a_function_is_an_error_of_the_config(name):
    with pytest.raises(P2PUsageError, match=rf"PipelineConfig.{name} is 2.0; it must be a function"):
        PipelineConfig(**{name: 2.0})


def test_functions_for_all_chunks_or_for_each_are_settings():
    functions = [print, None]
    config = PipelineConfig(grad_sync_func=functions, param_sync_func=print, no_sync_func=None)
    assert (config.grad_sync_func, config.param_sync_func, config.no_sync_func) == (functions, print, None)


def without_loss(iterator, model):
    return model(next(iterator)), None


def test_without_a_loss_function_outputs_are_the_result_of_an_evaluation_and_no_training():
    model = Model()
    expected = model(torch.ones(1, 2))
    for output in step(without_loss, model=model, forward_only=True):
        assert torch.equal(output, expected)
    for output in step(without_loss, model=model, forward_only=True, collect_non_loss_data=True):
        assert torch.equal(output, expected)
    with pytest.raises(
        PipelineError, match="forward_step_func returned no loss_func on stage 0, the last one, for micro"
    ):
        step(without_loss, model=model)
    store = []
    loss = model(torch.ones(1, 2)).sum()
    arguments = (model, loss, None, model.config, None, False, 4, store)
    assert forward_step_calc_loss(*arguments, is_last_stage=True) == (loss, 0)
    assert store == [loss]


def test_a_backward_takes_the_config_as_fourth_or_fifth_argument():
    config = PipelineConfig(grad_scale_func=lambda loss: 8 * loss)
    for arguments, keywords in (((config,), {}), (("type", config), {}), ((), {"config": config})):
        x = torch.ones(2, requires_grad=True)
        assert backward_step(x, (3 * x).sum(), None, *arguments, **keywords).tolist() == [24.0, 24.0]
    for arguments in ((), (None,), (ModelType.encoder,)):
        with pytest.raises(
            StepArgumentError, match=r"config is .*; call backward_step\(input_tensor, output_tensor, outpu"
        ):
            backward_step(x, x.sum(), None, *arguments)


class ModelType(enum.Enum):
    encoder = 1


def test_collections_of_several_modules_give_the_step_function_of_a_graph():
    groups = MultiModuleProcessGroupCollection(module_pgs={"vision": ProcessGroupCollection()})
    foreign = SimpleNamespace(module_pgs={"vision": SimpleNamespace()})
    for collection in (groups, foreign, {"vision": ProcessGroupCollection()}):
        for arguments, keywords in (
            ((), {"schedule_pg_collection": collection}),
            ((1, None, collection), {}),
            ((1,), {"pg_collection": collection}),
        ):
            found = get_forward_backward_func(*arguments, **keywords)
            assert found is forward_backward_pipelining_without_interleaving
    assert get_forward_backward_func(2, schedule_pg_collection=None) is forward_backward_pipelining_without_interleaving
    one = SimpleNamespace(pp=SimpleNamespace(size=lambda: 1))
    assert get_forward_backward_func(schedule_pg_collection=one) is forward_backward_no_pipelining
    with pytest.raises(StepArgumentError, match="names of one argument"):
        get_forward_backward_func(1, pg_collection=groups, schedule_pg_collection=groups)
    with pytest.raises(StepArgumentError, match="vp_size=2 with process groups of several modules; schedule='interl"):
        get_forward_backward_func(2, 2, schedule_pg_collection=groups)


class Sharding(nn.Linear):
    """A wrapper that reduces by itself, and may keep a shard."""

    config = PipelineConfig(pipeline_dtype=torch.float32)

    def no_sync(self):
        return contextlib.nullcontext()


def test_force_all_reduce_reaches_the_finalizer_or_is_true_already():
    seen = []
    model = Model()
    step(model=model, force_all_reduce=True)
    whole = model.weight.grad.clone()

    def finalize(models, tokens, *, pg_collection, force_all_reduce=False):
        seen.append(force_all_reduce)

    for function in (forward_backward_no_pipelining, partial(forward_backward_with_schedule, schedule="1f1b")):
        model = Model(PipelineConfig(pipeline_dtype=torch.float32, finalize_model_grads_func=finalize))
        alone = {} if function is forward_backward_no_pipelining else {"p2p_communicator": ALONE}
        for forced in (True, False, None):
            step(function=function, model=model, force_all_reduce=forced, **alone)
        step(function=function, model=model, force_all_reduce=True, forward_only=True, **alone)
    assert seen == [True, False, False] * 2
    assert whole.abs().sum() > 0

    def old(models, tokens, *, pg_collection):
        raise AssertionError

    model = Model(PipelineConfig(pipeline_dtype=torch.float32, finalize_model_grads_func=old))
    with pytest.raises(GradientError, match="force_all_reduce=True, and finalize_model_grads_func: got an unexpected"):
        step(model=model, force_all_reduce=True)
    with pytest.raises(
        GradientError, match="force_all_reduce=True, and module 'model' is in a Sharding, of which each"
    ):
        step(model=Sharding(2, 2), force_all_reduce=True)


ALONE = OfJob(total_stages=1, current_stage=0)
