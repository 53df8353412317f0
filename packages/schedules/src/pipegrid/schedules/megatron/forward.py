"""One forward of one stage, its autocast context and its loss, under Megatron's names."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from pipegrid.core.errors import StepArgumentError
from pipegrid.gradients.all_reduce import all_reduce
from pipegrid.monitor.collectives import Waiting
from pipegrid.schedules.errors import StageOutputError
from pipegrid.schedules.megatron.config import option, unwrapped_attribute
from pipegrid.schedules.runtime import describe, flatten


@frozen(eq=False)
class WithLoss:
    """An output with a loss of the stage's own, such as an encoder's contrastive loss or a balance of experts.

    The output of ``forward_step_func`` on a stage before the last. The step functions differentiate the loss together
    with the received gradients, divided by the number of microbatches and scaled to a mean over the replicas of its
    own module, independent of the replicas of the module with the main loss.

    Attributes:
        output: as without a loss.
        loss: one element, a mean over this replica's share of the microbatch (with context parallelism this rank's
            share of that mean). In a call for several microbatches (`Routes.every`) a mean over theirs, which counts as
            many times.
    """

    output: Any
    loss: torch.Tensor


def set_current_microbatch(model: torch.nn.Module, microbatch_id: int) -> None:
    """Set ``current_microbatch`` of every module of ``model`` with that attribute."""
    for module in modules_with(model.modules(), "current_microbatch")["current_microbatch"]:
        module.current_microbatch = microbatch_id  # type: ignore[assignment]


def modules_with(modules: Iterable[torch.nn.Module], *names: str) -> Mapping[str, Sequence[torch.nn.Module]]:
    """By attribute in ``names`` those of ``modules`` that have it."""
    found: Mapping[str, list[torch.nn.Module]] = defaultdict(list)
    for module in modules:
        own, kind = vars(module), type(module)
        for name in names:
            if name in own or hasattr(kind, name):  # looked up so, a module without it costs no error of `__getattr__`
                found[name].append(module)
    return found


def forward_step(
    forward_step_func: Callable[..., tuple[Any, Callable[[Any], Any]]],
    data_iterator: Any,
    model: torch.nn.Module,
    num_microbatches: int,
    input_tensor: Any,
    forward_data_store: list[Any],
    config: Any,
    cp_group_size: int,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: bool | None = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
    *,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Any, torch.Tensor]:
    """Run ``forward_step_func`` on one microbatch; on the last stage, its loss function too.

    ``input_tensor`` (a tensor, a list of tensors, or a dict by module) is the argument of the model's
    ``set_input_tensor``. A first stage ignores it and reads ``data_iterator``.

    Returns:
        The output of the stage (on the last stage the scaled loss; a list where ``input_tensor`` was a list) and the
        number of tokens in its loss (0 elsewhere).

    Raises:
        StepArgumentError: ``forward_step_func`` did not return ``(output, loss_func)``.
        StageOutputError: the loss function's result has none of the documented forms.
    """
    if is_first_microbatch:
        start = unwrapped_attribute(model, "set_is_first_microbatch")
        if start is not None:
            start()
    if current_microbatch is not None:
        set_current_microbatch(model, current_microbatch)
    as_list = isinstance(input_tensor, list)
    extra = () if checkpoint_activations_microbatch is None else (checkpoint_activations_microbatch,)
    output, loss_func = run_model(
        forward_step_func,
        data_iterator,
        model,
        input_tensor,
        extra,
        unwrapped_attribute(model, "set_input_tensor"),
        autocast_of(config, model),
        is_last_stage,
    )
    output, num_tokens = forward_step_calc_loss(
        model,
        output,
        loss_func,
        config,
        vp_stage,
        collect_non_loss_data,
        num_microbatches,
        forward_data_store,
        cp_group_size,
        is_last_stage,
        cp_group=cp_group,
    )
    if as_list and not isinstance(output, list):
        output = [output]
    return output, num_tokens


def run_model(
    forward_step_func: Callable[..., tuple[Any, Callable[[Any], Any]]],
    data_iterator: Any,
    model: torch.nn.Module,
    input_tensor: Any,
    extra: tuple[Any, ...],
    set_input_tensor: Callable[[Any], None] | None,
    context: Callable[[], contextlib.AbstractContextManager[Any]] | None,
    is_last_stage: bool,
) -> tuple[Any, Any]:
    """The output and the loss function of one microbatch; ``extra``: further arguments of ``forward_step_func``."""
    if set_input_tensor is not None:
        set_input_tensor(input_tensor if isinstance(input_tensor, (list, dict)) else [input_tensor])
    elif input_tensor is not None and any(tensor is not None for tensor in flatten(input_tensor)):
        raise StepArgumentError(f"{type(model).__name__} has no set_input_tensor(input_tensor) for its activation")
    if context is None:
        result = forward_step_func(data_iterator, model, *extra)
    else:
        with context():
            result = forward_step_func(data_iterator, model, *extra)
    pair = isinstance(result, (tuple, list)) and len(result) == 2  # a tensor with a first axis of 2 unpacks as well
    if not pair or not (callable(result[1]) or result[1] is None):
        found = f"({describe(result[0])}, {describe(result[1])})" if pair else describe(result)
        raise StepArgumentError(
            f"forward_step_func returned {found}; it returns (output, loss_func), and the last stage calls "
            "loss_func(output)"
        )
    output, loss_func = result
    if is_last_stage and isinstance(output, WithLoss):
        raise StageOutputError("a last stage returned WithLoss; its loss_func(output) returns the sum of all losses")
    return output, loss_func


def forward_step_calc_loss(
    model: torch.nn.Module,
    output_tensor: Any,
    loss_func: Callable[..., Any] | None,
    config: Any,
    vp_stage: int | None,
    collect_non_loss_data: bool,
    num_microbatches: int,
    forward_data_store: list[Any],
    cp_group_size: int | None = None,
    is_last_stage: bool | None = None,
    *,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Any, torch.Tensor]:
    """The loss of one microbatch, scaled so that the sum over microbatches is the step's loss.

    ``loss_func(output_tensor)`` returns one of

    - ``(loss, info)``: the loss is divided by the number of microbatches and multiplied by the cp size (each
      cp rank returns its share of the mean, and the gradient reduction averages over cp as over dp);
    - ``(loss, num_tokens, info)``: divided by ``max(num_tokens, 1)`` and the number of microbatches, unless
      ``config.calculate_per_token_loss``: then it is a pure sum, finished by ``finalize_model_grads_func``.
      ``num_tokens`` may be the sum of tokens' weights, which need not be whole. Under context parallelism each rank
      counts its own tokens, and the count of a sequence is the sum over ``cp_group``;
    - any object, with ``collect_non_loss_data``.

    Without a loss function, None, ``output_tensor`` itself is the result and, for a backward, the loss.

    The user's loss tensor is not modified. ``info`` (or the object) is appended to ``forward_data_store``.

    Returns:
        ``(output, num_tokens)``: the scaled loss on the last stage, ``output_tensor`` elsewhere.

    Raises:
        StepArgumentError: ``is_last_stage`` is None.
        StageOutputError: the loss function's result has none of the documented forms.
    """
    del model
    if is_last_stage is None:
        raise StepArgumentError("is_last_stage is None; pass is_last_stage=True on the stage with the loss")
    if not is_last_stage:
        return output_tensor, torch.zeros((), dtype=torch.int64)
    if loss_func is None or collect_non_loss_data:
        found = output_tensor if loss_func is None else loss_func(output_tensor, non_loss_data=True)
        forward_data_store.append(found)
        return output_tensor, torch.zeros((), dtype=torch.int64)
    loss, num_tokens, info = scaled_loss(
        loss_func(output_tensor),
        config,
        num_microbatches,
        cp_group=cp_group,
        cp_size=cp_group_size or 1,
        where="" if vp_stage is None else f" on chunk {vp_stage}",
        per_token=bool(option(config, "calculate_per_token_loss")),
    )
    forward_data_store.append(info)
    return loss, torch.zeros((), dtype=torch.int64) if num_tokens is None else num_tokens


def scaled_loss(
    result: Any,
    config: Any,
    num_microbatches: float,
    *,
    cp_group: dist.ProcessGroup | None,
    cp_size: int | None = None,
    where: str = "",
    per_token: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """`forward_step_calc_loss` of what the loss function returned: the scaled loss, the tokens if counted, the info.

    ``cp_size``: default that of ``cp_group``; ``where``: for errors.
    """
    if not isinstance(result, tuple) or len(result) not in ((3,) if per_token else (2, 3)):
        raise StageOutputError(
            f"the loss function returned {describe(result)}; expected (loss, num_tokens, info), or without "
            "calculate_per_token_loss (loss, info), or any object with collect_non_loss_data=True"
        )
    loss = result[0]
    if isinstance(loss, (int, float)) and not torch.is_grad_enabled():  # an evaluation differentiates nothing
        loss = torch.tensor(float(loss))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise StageOutputError(f"the loss{where} is {describe(loss)}; a loss is a tensor with one element")
    if len(result) == 3:
        num_tokens = result[1]
        if not isinstance(num_tokens, torch.Tensor) or num_tokens.dtype != torch.float64 or num_tokens.dim():
            num_tokens = _tokens(num_tokens)
        if not per_token:
            # Weights are counted in float64, which must not widen the loss.
            loss = (loss / _tokens_per_rank(num_tokens, loss, config, cp_group) / num_microbatches).to(loss.dtype)
        return loss, num_tokens.detach(), result[2]
    if cp_size is None:
        cp_size = 1 if cp_group is None else cp_group.size()
    return loss * (cp_size / num_microbatches), None, result[1]


def _tokens_per_rank(
    num_tokens: torch.Tensor, loss: torch.Tensor, config: Any, cp_group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The tokens of the sequence, the sum over its cp ranks, per cp rank.

    The gradient reduction averages over cp as over dp, so a rank's sum over its own tokens is divided by the mean
    count: after the average, by the sum. A count of the whole sequence on every rank is its own mean.
    """
    total = num_tokens.detach().to(loss.device, copy=True)
    if cp_group is None or cp_group.size() == 1:
        return torch.clamp(total, min=1)
    all_reduce(total, cp_group)(Waiting(option(config, "deadline"), option(config, "monitor")))
    return torch.clamp(total, min=1) / cp_group.size()


def _tokens(counted: Any) -> torch.Tensor:
    """A number of tokens in a dtype of exact sums: int64 for integers, float64 for weighted counts."""
    if not isinstance(counted, (int, float, torch.Tensor)) or torch.as_tensor(counted).numel() != 1:
        raise StageOutputError(f"the loss function counted {describe(counted)} as num_tokens; it must be one number")
    whole = isinstance(counted, int) if not isinstance(counted, torch.Tensor) else not counted.is_floating_point()
    return torch.as_tensor(counted, dtype=torch.int64 if whole else torch.float64).reshape(())


def autocast_of(config: Any, model: torch.nn.Module) -> Callable[[], contextlib.AbstractContextManager[Any]] | None:
    """What makes the autocast context of each forward; StepArgumentError for a dtype that torch would ignore."""
    if not option(config, "enable_autocast"):
        return None
    dtype = option(config, "autocast_dtype") or option(config, "pipeline_dtype")  # None: the device's default
    if dtype not in (None, torch.float16, torch.bfloat16):
        name = "autocast_dtype" if option(config, "autocast_dtype") else "pipeline_dtype"
        raise StepArgumentError(
            f"enable_autocast is set and {name} is {dtype}; autocast computes in torch.float16 or torch.bfloat16"
        )
    parameter = next(model.parameters(), None)
    return partial(torch.autocast, "cpu" if parameter is None else parameter.device.type, dtype=dtype)
