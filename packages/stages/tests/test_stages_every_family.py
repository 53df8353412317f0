"""Every text model of the installed transformers, made small: where its cut is proved, the stages compute the same."""

from __future__ import annotations

import copy
import inspect
import signal
import warnings
from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

from pipegrid.stages import check_stages, prove_cut
from pipegrid.stages.errors import CutError
from stages_kit.models import LENGTH, WORDS, small_text

LAYOUTS = ("Et|tt|tL", "E|tttt|L")
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
_SMALLER = _EXPERTS | {
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 5,
}
"""Of options that a config has: what makes its model small. Other sizes of it are those of `small_text`."""
_MOST = 4_000_000  # parameters
_SECONDS = 60


@contextmanager
def at_most(seconds):
    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def small_config(kind, *, causal):
    fields = set(inspect.signature(kind.__init__).parameters)
    fields |= {name for each in kind.__mro__ for name in getattr(each, "__annotations__", {})}
    options = _SMALLER | {"is_decoder": causal}
    config = kind(**small_text() | {name: value for name, value in options.items() if name in fields})
    for name, value in list(vars(config).items()):
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def batch():
    ids = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def made(name):
    """A function that makes the small model, and the widest dtype in which it trains; None where none does."""
    try:
        with at_most(_SECONDS):
            kind = getattr(transformers, name)
            config = small_config(kind.config_class, causal=not name.endswith("MaskedLM"))
            for dtype in (torch.float64, torch.float32):  # grouped products of experts have the second alone
                model = kind(copy.deepcopy(config))
                if sum(one.numel() for one in model.parameters()) > _MOST:
                    return None
                try:
                    model.to(dtype)(**batch()).loss.backward()
                except (RuntimeError, TypeError):
                    continue
                return lambda: kind(copy.deepcopy(config)), dtype
    except Exception:  # noqa: BLE001 -- errors of the config's checks, or of the model in one process: of any class
        return None
    return None


def judged(name):
    """What becomes of a model: in words, with the first line of what is wrong."""
    found = made(name)
    if found is None:
        return "fails alone"
    make, dtype = found
    words = []
    for layout in LAYOUTS:
        try:
            proved = prove_cut(make, layout, batch()).holds
        except CutError:  # its layers are not found
            proved = False
        if proved:
            try:
                check_stages(make, layout, batch(), dtype=dtype)
            except CutError as error:
                return f"WRONG in {layout}: {str(error).splitlines()[0][:200]}"
        words.append("right" if proved else "not proved")
    return " and ".join(dict.fromkeys(words))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mapping", "least"), [("CAUSAL_LM", 100), ("MASKED_LM", 15)])
def test_a_cut_that_is_proved_is_right_in_every_family(mapping, least):
    names = dict.fromkeys(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values())
    found = {}
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = judged(name)
        print(f"{name:45} {found[name]}", flush=True)  # noqa: T201 -- the night's log has the table
    assert not {name: word for name, word in found.items() if "WRONG" in word}
    assert sum("right" in word for word in found.values()) >= least
