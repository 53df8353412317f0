"""The code on the pages about schedules runs as it is written, and prints what the pages say."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipegrid.schedules import ActionKind, PlanError, from_text, gpipe, lower, to_csv, verify
from pipegrid.topology import HyperCommGrid, ProcessGroupCollection

from .kit.programs import blocks, torchrun

ROOT = Path(__file__).parents[1]
CONCEPTS = ROOT / "docs" / "concepts"
SCHEDULES, RUNNING, GRADIENTS = (CONCEPTS / f"{name}.md" for name in ("schedules", "running", "gradients"))


def python(page):
    """The blocks of code of a page, each with the text block that follows it at once, if one does."""
    return re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", page.read_text(encoding="utf-8"), re.DOTALL)


def texts(page):
    return blocks(page.read_text(encoding="utf-8"), "text")


def needs_ranks(code):
    return "init_process_group" in code or "get_rank" in code


# The tutorial's first block runs in test_readme.
PAGES = [
    SCHEDULES,
    CONCEPTS / "search.md",
    CONCEPTS / "encoders.md",
    CONCEPTS / "routes.md",
    CONCEPTS / "offload.md",
    CONCEPTS / "survive.md",
    CONCEPTS / "timelines.md",
    ROOT / "docs" / "tutorial.md",
]
ALONE = [
    (page, number)
    for page in PAGES
    for number, (code, _) in enumerate(python(page))
    if not needs_ranks(code) and "runtime.register(" not in code and not code.startswith("--8<--")
]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(("page", "number"), ALONE, ids=lambda value: getattr(value, "stem", str(value)))
def test_code_on_one_process_prints_what_the_page_says(page, number):
    code, said = python(page)[number]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page.name, "exec"), {})
    assert printed.getvalue() == said or not said


def test_every_block_is_run_somewhere_here():
    """The training loop that survives deaths runs in test_survive."""
    assert [len(python(page)) for page in PAGES] == [10, 1, 1, 1, 1, 3, 1, 2]
    assert len(ALONE) == 15
    assert (len(python(RUNNING)), len(python(GRADIENTS))) == (1, 2)


def run_on_ranks(number, code):
    Path("page.py").write_text(code, encoding="utf-8")
    done = torchrun(number, "page.py")
    assert done.returncode == 0, done.stdout + done.stderr


END = "\ndist.barrier()\ndist.destroy_process_group()\n"


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_ranks")
def test_the_runtime_and_its_monitor_run_on_ranks():
    (run,) = (code for code, _ in python(SCHEDULES) if needs_ranks(code))
    timed, _ = registering()
    ((monitored, _),) = python(RUNNING)
    sends = "sum(action.kind.is_send for action in plan.actions(runtime.position))"
    run += f"{timed}\nruntime.step()\nassert len(seconds) == {sends}\n"
    learnt = "\nassert all(stage.model.weight.grad.abs().sum() > 0 for stage in stages.values())\n"
    run_on_ranks(2, run + learnt + monitored + "\nmonitor.close()\ncommunicator.close()\n" + END)


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_ranks")
def test_a_reduce_of_ones_own_sums_tied_gradients():
    _, code = registering()
    weight = torch.full((3,), 1 + 2**-12).requires_grad_()
    weight.grad = weight.detach().clone()
    registered = {}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        names = {"torch": torch, "weight": weight, "tied_group": dist.group.WORLD}
        exec(
            compile(code, "schedules.md", "exec"), names | {"runtime": SimpleNamespace(register=registered.__setitem__)}
        )
        registered[ActionKind.REDUCE](None, None)
    finally:
        dist.destroy_process_group()
    assert weight.grad.eq(1).all(), "rounded to bfloat16"


def registering():
    """The blocks of code that register an effect, without their imports."""
    return [code for code, _ in python(SCHEDULES) if "runtime.register(" in code]


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_ranks")
def test_a_parameter_is_tied_on_ranks():
    tied = python(GRADIENTS)[0][0]
    summed = "\nweight.grad = torch.ones_like(weight)\nword.reduce()\nassert not copies or weight.grad.eq(2).all()\n"
    run_on_ranks(4, tied + summed + END)


def test_a_scaled_step_runs():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        modules = nn.Linear(2, 2)
        names = {
            "modules": modules,
            "collections": ProcessGroupCollection.from_grid(HyperCommGrid([1], ["pp"])),
            "optimizer": torch.optim.SGD(modules.parameters(), lr=1.0),
        }
        (modules(torch.ones(1, 2)).sum() * 2.0**16).backward()
        before = modules.weight.detach().clone()
        exec(compile(python(GRADIENTS)[1][0], "gradients.md", "exec"), names)
        assert torch.linalg.vector_norm(before - modules.weight) <= 1.0
        assert not torch.equal(before, modules.weight)
    finally:
        dist.destroy_process_group()


def test_the_circle_is_the_one_on_the_page():
    plan, fault = (
        text for text in texts(SCHEDULES) if "0RECV_B1<1 0B1" in text or ("[cycle]" in text and "1 fault" in text)
    )
    with pytest.raises(PlanError) as refused:
        verify(from_text(plan))
    assert str(refused.value) == fault.rstrip("\n")


def test_a_mistake_is_pointed_at_as_on_the_page():
    (said,) = (text for text in texts(SCHEDULES) if text.startswith("line 4"))
    with pytest.raises(PlanError) as refused:
        from_text(python(SCHEDULES)[0][1].split("\n\n")[0].replace("0SEND_F0>1", "0SEND_F0>2"))
    assert str(refused.value) == said.rstrip("\n")


def test_the_header_on_the_page_is_one():
    (header,) = (text for text in texts(SCHEDULES) if "group bridge" in text)
    with pytest.raises(PlanError, match="found the end; expected an action of a position"):
        from_text(header)


COMMANDS = [
    line.strip().removeprefix("python -m pipegrid.schedules ").split()
    for page in PAGES
    for line in re.findall(r"^    python -m pipegrid\.schedules .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_command_lines_run(arguments, monkeypatch, capsys):
    Path("costs.json").write_text(json.dumps({"F": 1.0, "latency": 0.1}), encoding="utf-8")
    Path("plan.csv").write_text(to_csv(lower(gpipe(2, 2))), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["pipegrid.schedules", *arguments])
    monkeypatch.delitem(sys.modules, "pipegrid.schedules.__main__", raising=False)  # another test may have imported it
    with contextlib.suppress(SystemExit):
        runpy.run_module("pipegrid.schedules", run_name="__main__")
    assert "makespan" in (said := capsys.readouterr()).out or "each once and in time" in said.out, said.err
