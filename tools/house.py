"""Figures of the code base: lines, files, needs of packages, import circles, errors, public names, calls of a step.

    python tools/house.py [--no-run]

A report, not a gate: the import contracts (`lint-imports`) are the gate. All but the last figures are read from the
sources; two ranks measure those, in an environment with the packages. ``--no-run`` leaves them out.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = tuple(sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))

# ---- Static figures: read from the source text.


def sources() -> dict[str, Path]:
    """Every module of the packages, by dotted name."""
    found = {}
    for package in PACKAGES:
        root = ROOT / "packages" / package / "src"
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def _imports(name: str, path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Modules that a module imports: when it is executed, in a call, or for the type checker alone."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (below & modules.keys()) or {node.module}
    return {one for one in found if one in modules and one != name}


def circles(modules: Mapping[str, Path]) -> list[list[str]]:
    """Circles of imports between files and folders side by side: each is cut at one arrow before the next is found."""
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        for one in _imports(name, path, modules):
            mine, other = name.split("."), one.split(".")
            depth = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(mine, other, strict=False)))
            if depth < min(len(mine), len(other)):  # else one is the folder of the other
                graph.setdefault(".".join(mine[: depth + 1]), set()).add(".".join(other[: depth + 1]))
    found = []
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle = list(error.args[1])
            found.append(circle)
            graph[circle[1]].discard(circle[0])
        else:
            return found


def _only_raises(body: list[ast.stmt]) -> bool:
    return (
        bool(body) and isinstance(body[-1], ast.Raise) and all(isinstance(one, (ast.Raise, ast.Assign)) for one in body)
    )


def _is_validator(function: ast.AST) -> bool:
    """A function that raises or returns nothing: it makes no value and changes no state."""
    if not isinstance(function, ast.FunctionDef) or function.name.startswith("__"):
        return False
    inner = list(ast.walk(function))
    if not any(isinstance(one, ast.Raise) for one in inner):
        return False
    gives = (isinstance(one, ast.Return) and one.value is not None for one in inner)
    yields = (isinstance(one, (ast.Yield, ast.YieldFrom)) for one in inner)
    stores = (isinstance(one, (ast.Attribute, ast.Subscript)) and isinstance(one.ctx, ast.Store) for one in inner)
    return not any((*gives, *yields, *stores))


def _validating(tree: ast.Module) -> set[int]:
    """Lines whose one purpose is to raise: `if ...: raise`, validators, calls of `check_*` and `require_*`."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        whole = isinstance(node, ast.If) and _only_raises(node.body) and not node.orelse
        whole |= isinstance(node, ast.Raise) or _is_validator(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            whole |= name.lstrip("_").startswith(("check", "require"))
        if whole and isinstance(node, ast.stmt):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _code_lines(tree: ast.Module) -> set[int]:
    """Lines that hold code: statements without docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            end = node.end_lineno if not hasattr(node, "body") else node.lineno
            lines |= set(range(node.lineno, (end or node.lineno) + 1))
    return lines


def _public(tree: ast.Module) -> int:
    """The number of names in a package's ``__all__``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return 0


def twice_named(modules: Mapping[str, Path]) -> list[str]:
    """Names of more than one class: a reader who knows the one takes the other for it."""
    trees = [ast.parse(path.read_text()) for path in modules.values()]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in names.items() if count > 1)


def _long(tree: ast.Module, file: str) -> Iterator[tuple[str, str, int]]:
    """Classes above 300 lines and functions above 70: the kind, the name and the lines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            kind, most = ("class", 300) if isinstance(node, ast.ClassDef) else ("function", 70)
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > most:
                yield kind, f"{file}: {node.name}", length


def static_figures() -> Iterator[tuple[str, str, str]]:
    """Name, figure and goal."""
    from draw_packages import all_needs, metadata, needs

    direct = needs()
    torch = {name for name, declared in metadata().items() if any(one.startswith("torch") for one in declared)}
    modules = sources()
    lines = dict.fromkeys(PACKAGES, 0)
    public = dict.fromkeys(PACKAGES, 0)
    folders: dict[Path, int] = {}
    long: list[tuple[str, str, int]] = []
    errors: set[str] = set()
    code = validation = raises = 0
    for name, path in modules.items():
        text, package = path.read_text(), name.split(".")[1]
        tree = ast.parse(text)
        lines[package] += text.count("\n")
        if path.name != "__init__.py":
            folders[path.parent] = folders.get(path.parent, 0) + 1
        elif name.count(".") == 1:
            public[package] = _public(tree)
        long += _long(tree, path.name)
        nodes = list(ast.walk(tree))
        classes = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        errors |= {one for one in classes if one.endswith("Error") and not one.startswith("_")}
        code += len(_code_lines(tree))
        validation += len(_validating(tree) & _code_lines(tree))
        raises += sum(isinstance(node, ast.Raise) for node in nodes)
    yield "lines of source", f"{sum(lines.values()):,}", "64,000"
    yield (
        "  of a package: median, most",
        f"{statistics.median(lines.values()):,}, {max(lines.values()):,}",
        "3,000, 10,000",
    )
    for package, count in lines.items():
        inside = [(folder, files) for folder, files in folders.items() if f"packages/{package}/" in str(folder)]
        largest, files = max(inside, key=lambda pair: pair[1], default=(Path(package), 0))  # of one file: no folder
        line = "torch" if torch & {package, *all_needs(package, direct)} else "no torch"
        cell = f"{count:,} in {sum(n for _, n in inside)} files, most in {largest.name}: {files}; {line}; needs "
        yield f"  {package}", cell + (", ".join(sorted(direct[package])) or "nothing of pipegrid"), ""
    found = circles(modules)
    yield "import circles inside packages", str(len(found)), "0"
    for circle in found:
        yield "", " > ".join(one.removeprefix("pipegrid.") for one in circle), ""
    for kind, most in (("class", 300), ("function", 70)):
        own = [(name, length) for one, name, length in long if one == kind]
        yield f"longer than {most} lines: {kind}", str(len(own)), "0"
        yield from (("", f"{name} {length}", "") for name, length in own)
    yield "class names that mean two things", ", ".join(twice_named(modules)) or "none", "none"
    yield "error classes, without aliases", str(len(errors)), ""
    yield "lines that only validate", f"{validation / code:.0%} of code ({raises} raise)", "under 10%"
    each = ", ".join(f"{name} {count}" for name, count in public.items())
    yield "public names", f"{sum(public.values())} ({each})", "about 110"


def _helpers(path: Path) -> int:
    """Lines of the functions and classes of a file of tests that are no tests."""
    found = 0
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith(("test_", "Test")):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found += (node.end_lineno or first) - first + 1
    return found


def test_figures() -> Iterator[tuple[str, str, str]]:
    """Name, figure and goal, of the tests."""
    folders = [*(ROOT / "packages" / package / "tests" for package in PACKAGES), ROOT / "integration_tests"]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    helpers = {path: _helpers(path) for path in paths}
    lines = sum(path.read_text().count("\n") for path in paths)
    shared = sum(count for path, count in helpers.items() if not path.name.startswith("test_"))
    yield "lines of tests", f"{lines:,} in {len(paths)} files", ""
    cell = f"{sum(helpers.values()):,}, of which {shared:,} serve several files"
    yield "  functions and classes that are no test", cell, ""


# ---- Figures of a run: two ranks on gloo.


def _depth_of_send(step: Any) -> int | None:
    """Python frames from ``step`` to the first call of a process group's ``send``, both ends counted once."""
    depths: list[int] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") == "send":
            depth = 0
            while frame is not None and frame.f_code is not start:
                depth, frame = depth + 1, frame.f_back
            depths.append(depth + 1)

    start = getattr(step, "__func__", step).__code__
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return min(depths) if depths else None


def _counted(call: Any) -> dict[str, int]:
    """How many plans are constructed and how many are verified while ``call`` runs."""
    from pipegrid.schedules import Plan, verify

    counts = {"plans": 0, "proofs": 0}
    codes = {Plan.__init__.__code__: "plans", verify.__code__: "proofs"}

    def profile(frame: Any, event: str, argument: Any) -> None:
        del argument
        if event == "call" and frame.f_code in codes:
            counts[codes[frame.f_code]] += 1

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts


def _depths(rank: int) -> dict[str, int | None]:
    """Python frames from `PipelineRuntime.step` to the send, of a chain of two stages and over a bridge."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from pipegrid.bridges import MultiModulePipelineCommunicator
    from pipegrid.schedules import Forwarded, PipelineConfig, PipelineRuntime, lower, multi_module_1f1b, one_f_one_b
    from pipegrid.topology import HyperCommGrid
    from pipegrid.transport import Edge, P2PCommunicator, P2PConfig

    weight, edge = nn.Parameter(torch.ones(1, 1, 4)), Edge(0, 1)

    class Stage:
        def forward(self, microbatch: int, inputs: Mapping[Edge, Any]) -> Forwarded:
            del microbatch
            y = (inputs[edge] if rank else torch.ones(1, 1, 4)) * weight
            return Forwarded({}, y.sum()) if rank else Forwarded({edge: y})

    def depth(plan: Any, communicator: Any) -> int | None:
        runtime = PipelineRuntime(plan, {rank: Stage()}, communicator)
        for _ in range(2):  # shapes are agreed in the first step
            runtime.step()
        return _depth_of_send(runtime.step)

    options: dict[str, Any] = {"pipeline_dtype": torch.float32, "deadline": 60.0}
    chain = P2PCommunicator(dist.group.WORLD, P2PConfig(**options), placement=(0, 1), tensor_shape=(1, 1, 4))
    of_chain = depth(lower(one_f_one_b(2, 4)), chain)
    chain.close()
    grids = {
        "images": HyperCommGrid([1, 1], ["dp", "pp"]),
        "language": HyperCommGrid([1, 1], ["dp", "pp"], rank_offset=1),
    }
    bridge = MultiModulePipelineCommunicator(grids, {"images": ["language"]}, PipelineConfig(**options))
    of_bridge = depth(lower(multi_module_1f1b(bridge.graph, 4)), bridge)
    bridge.destroy()
    return {"chain": of_chain, "bridge": of_bridge}


def _plans() -> dict[str, dict[str, int]]:
    """Plans and proofs of the first and of the second call of a step function."""
    import torch
    from torch import nn

    from pipegrid.schedules import PipelineConfig, forward_backward_pipelining_without_interleaving
    from pipegrid.topology import HyperCommGrid, ProcessGroupCollection
    from pipegrid.transport import P2PCommunicator, P2PConfig

    class Model(nn.Linear):
        def set_input_tensor(self, received: Any) -> None:
            (self.received,) = received  # None on the first stage

    def forward_step(batches: Any, stage: Any) -> Any:
        y = stage(stage.received if stage.received is not None else next(batches))
        return y, lambda y: (y.sum(), None)

    options: dict[str, Any] = {"pipeline_dtype": torch.float32, "deadline": 60.0}
    grid = HyperCommGrid([2], ["pp"])
    grid.create_pg("pp")
    model = Model(4, 4)
    model.config = PipelineConfig(**options)  # type: ignore[assignment]  # the attribute that the step functions read
    pipe = P2PCommunicator(grid.get_pg("pp"), P2PConfig(**options))

    def call() -> None:
        forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=iter([torch.ones(1, 1, 4)] * 4),
            model=model,
            num_microbatches=4,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=pipe,
            pg_collection=ProcessGroupCollection(pp=grid.get_pg("pp")),
        )

    counts = {"first": _counted(call), "second": _counted(call)}
    pipe.close()
    return counts


def _rank(rank: int, store: str) -> dict[str, Any]:
    """The figures of one of the two ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    figures = {**_depths(rank), **_plans()}
    dist.destroy_process_group()
    return figures


def run_figures() -> Iterator[tuple[str, str, str]]:
    """Name, figure and goal, measured by rank 0 of two."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--store", f"{folder}/store", "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env={**os.environ})
            for rank in (0, 1)
        ]
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed; its error is printed above")
    figures = json.loads(outputs[0].splitlines()[-1])
    yield "frames from step() to the backend's send, chain", str(figures["chain"]), "5"
    yield "frames from step() to the backend's send, bridge", str(figures["bridge"]), "7"
    for name in ("first", "second"):
        counts, goal = figures[name], "2 plans, 1 proof" if name == "first" else "none"
        yield f"{name} call of a step function", f"{counts['plans']} plans, {counts['proofs']} proofs", goal


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-run", action="store_true", help="only what is read from the source")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(_rank(options.rank, options.store)))
        return
    rows = [("", "now", "goal"), *static_figures(), *test_figures()]
    if options.no_run or importlib.util.find_spec("pipegrid") is None or importlib.util.find_spec("torch") is None:
        rows.append(("frames, plans and proofs of a step", "not measured: needs the packages and torch", ""))
    else:
        rows += run_figures()
    width = max(len(name) for name, _, _ in rows)
    for name, figure, goal in rows:
        print(f"{name:<{width}}  {figure}" + (f"   [{goal}]" if goal else ""))


if __name__ == "__main__":
    main()
