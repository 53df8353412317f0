"""Every check of the project, one session each. `nox` alone runs `tests`, the day's; `nox -l` lists them.

Environments are made once and reused: a session installs again only when a metadata file, the constraints
or its own list of requirements changed. What several environments need is made once for all: what is large, each in a
folder of its own, and the packages themselves as wheels that refer to their sources.
"""

from __future__ import annotations

import argparse
import datetime as dt
import difflib
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

# Hundreds of ranks and scripts import the packages from their sources: each would compile them anew, for 0.2 to 0.5 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What a change must pass, and what a release, a merge and each night must pass as well: pages, equipment of tests, dry
# runs, products of axes; with them every property again, on more examples.
DAY = "not nightly and not thorough"
THOROUGH = "(thorough or hypothesis) and not nightly"
DAY_CPU_SECONDS = 1000
"""Of `tests`, environments made, on a machine of 2026. Another machine may need three times as many."""

ROOT = Path(__file__).parent
PACKAGES = ROOT / "packages"
CONSTRAINTS = ROOT / "constraints.txt"


def _metadata(name: str) -> dict[str, Any]:
    return tomllib.loads((PACKAGES / name / "pyproject.toml").read_text())


def _siblings(requirements: list[str]) -> tuple[str, ...]:
    """The packages of this repository among ``requirements``."""
    found = (re.match(r"pipegrid-(\w+)", requirement) for requirement in requirements)
    return tuple(match[1] for match in found if match)


# A new package needs no line here: its sessions follow from its metadata. What it does not declare, its session lacks.
ALL = tuple(path.parent.name for path in sorted(PACKAGES.glob("*/pyproject.toml")))
DECLARED = {name: _siblings(_metadata(name)["project"]["dependencies"]) for name in ALL}


def _with_needs(*names: str) -> tuple[str, ...]:
    """``names`` and the packages that they declare, those that these declare, and so on."""
    found = dict.fromkeys(names)
    for name in names:
        found |= dict.fromkeys(_with_needs(*DECLARED[name]))
    return tuple(sorted(found))


# What is installed without torch: neither they nor what they need declare it.
_DECLARES_TORCH = {
    name for name in ALL if any(re.match(r"torch\b", need) for need in _metadata(name)["project"]["dependencies"])
}
WITHOUT_TORCH = tuple(name for name in ALL if not _DECLARES_TORCH.intersection(_with_needs(name)))


# What a package's tests need, from its dependency group `test`.
TEST_NEEDS: dict[str, list[str]] = {name: _metadata(name)["dependency-groups"]["test"] for name in ALL}
# What the tests of several packages need together.
EVERY_TEST = ("pytest", "hypothesis", "rich", "matplotlib", "scikit-learn", "transformers", "safetensors", "peft")
# What ranks are forked with where the tests have imported it, so that each need not import it by itself.
_SLOW_TO_IMPORT = (
    "anyio.pytest_plugin",
    "cattrs",
    "hypothesis.strategies",
    "numpy",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "pipegrid.bridges.multimodule",
    "pipegrid.schedules.megatron",
    "pipegrid.checkpoint",
    "pipegrid.training.pipeline",
)
PRELOAD = f"ranks_preload={' '.join(_SLOW_TO_IMPORT)}"
# What runs the notebook of the documentation.
NOTEBOOK = ("nbclient", "ipykernel")
# Not --no-compile: each process would compile torch anew where it may not write it down.
PIP = ("--quiet", "--constraint")
# What takes pip several seconds to install: once, for all environments that need it.
LARGE = ("torch", "transformers", "scikit-learn", "matplotlib")
# What builds the documentation.
META: dict[str, Any] = tomllib.loads((ROOT / "meta" / "pyproject.toml").read_text())["project"]
SITE = tuple(META["optional-dependencies"]["docs"])


def _digest(*parts: object) -> str:
    """Of files by their content, of other values by their text."""
    key = hashlib.sha256()
    for part in parts:
        key.update(part.read_bytes() if isinstance(part, Path) else repr(part).encode())
    return key.hexdigest()[:16]


def _shared(session: nox.Session, constraints: Path, *requirements: str) -> Path:
    """A folder with ``requirements`` and what they declare, for every environment that may import them."""
    digest = _digest(constraints, requirements, sys.version)
    folder = Path(session.virtualenv.location).parent / "shared" / f"{requirements[0]}-{digest}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        target = (*PIP, str(constraints), "--target", str(part))
        session.run("python", "-m", "pip", "install", *target, *requirements, silent=True)
        part.rename(folder)
    return folder


def _editable(session: nox.Session, name: str) -> Path:
    """The wheel of a package that refers to its sources, built once for each state of its metadata."""
    digest = _digest(PACKAGES / name / "pyproject.toml")
    folder = Path(session.virtualenv.location).parent / "shared" / f"{name}-{digest}"
    if not list(folder.glob("*.whl")):
        builder = _shared(session, CONSTRAINTS, "hatchling", "editables")
        with session.chdir(PACKAGES / name):
            build = ("python", "-m", "hatchling", "build", "-t", "wheel:editable", "-d", str(folder))
            session.run(*build, env={"PYTHONPATH": str(builder)}, silent=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(
    session: nox.Session, packages: tuple[str, ...], *requirements: str, constraints: Path = CONSTRAINTS
) -> None:
    """Install ``packages`` (editable) and ``requirements`` under the constraints, unless nothing changed."""
    metadata = [PACKAGES / name / "pyproject.toml" for name in packages]
    key = _digest(constraints, *metadata, requirements, sys.version)
    stamp = Path(session.virtualenv.location) / "installed.sha256"
    if stamp.exists():
        if stamp.read_text() == key:
            return
        session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *(f"pipegrid-{name}" for name in ALL))
    wheels = [_editable(session, name) for name in packages]
    (site,) = Path(session.virtualenv.location).glob("[Ll]ib/**/site-packages")
    needed = {*requirements, *(need for name in packages for need in _metadata(name)["project"]["dependencies"])}
    large = [name for name in LARGE if any(re.match(rf"{name}\b", need) for need in needed)]
    (site / "large.pth").write_text("".join(f"{_shared(session, constraints, name)}\n" for name in large))
    session.install(*PIP, str(constraints), *map(str, wheels), *requirements)
    stamp.write_text(key)


def _pytest(session: nox.Session, *arguments: str) -> None:
    """The day's tests, or those that an ``-m`` among the session's own arguments chooses; prints their CPU seconds."""
    none_of_them = [5] if THOROUGH in session.posargs else []
    before = os.times()
    session.run("pytest", "-m", DAY, *arguments, *session.posargs, success_codes=[0, *none_of_them])
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    print(f"{session.name}: {seconds:.0f} CPU seconds of tests", flush=True)


def _declare_session(name: str) -> None:
    def session(session: nox.Session) -> None:
        needs = TEST_NEEDS[name]
        install(session, _with_needs(name, *_siblings(needs)), *(need for need in needs if not _siblings([need])))
        preload = ("-o", PRELOAD) if "pipegrid-testing" in needs else ()
        _pytest(session, *preload, str(PACKAGES / name / "tests"))

    session.__doc__ = f"The tests of pipegrid-{name}, with that package and its declared dependencies only."
    session.__name__ = f"test_{name}"
    nox.session(name=f"test-{name}")(session)


for each in ALL:
    _declare_session(each)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    install(session, (), "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over every package, the tools, the examples and this file."""
    install(session, ALL, "mypy", *EVERY_TEST, "nox", "import-linter", *SITE)
    session.run("mypy", *(str(PACKAGES / name / "src") for name in ALL))
    session.run("mypy", "noxfile.py", "tools", "docs/examples")


@nox.session
def contract(session: nox.Session) -> None:
    """Import-linter: who may import whom; the proof that the contract bites; the tools, run small."""
    # numpy is for a peer that a benchmark compares with: torch's own pipelining sends objects, which needs it.
    install(session, ALL, "import-linter", "pytest", "numpy", "hypothesis", "hatchling", "griffelib", *NOTEBOOK)
    session.run("lint-imports")
    _pytest(session, "tools/tests")


@nox.session
def integration(session: nox.Session) -> None:
    """The packages composed on ranks. Takes `--backend gloo|nccl|fake_nccl|staged` and pytest's own options."""
    install(session, ALL, *EVERY_TEST)
    _pytest(session, "-o", PRELOAD, "integration_tests")


@nox.session
def nightly(session: nox.Session) -> None:
    """The full matrices and fuzzing that are too long for every run."""
    install(session, ALL, *EVERY_TEST, "torchao")
    for kind in ("newest", "oldest"):
        session.notify(kind, posargs=[])
    tests = ("packages", "integration_tests", "tools/tests", "--hypothesis-profile", "night", *session.posargs)
    for chosen in ("nightly", "hypothesis and not nightly"):  # properties with more examples, drawn anew
        session.run("pytest", "-m", chosen, *tests)
    _over_fake_nccl(session)


@nox.session(name="fake-nccl")
def fake_nccl(session: nox.Session) -> None:
    """Transport and bridges by NCCL's rules on a CPU: a stream per group, or per rank; nccl-legacy, nccl-lazy."""
    install(session, ALL, *EVERY_TEST)
    _over_fake_nccl(session)


def _over_fake_nccl(session: nox.Session) -> None:
    both = ("transport", "bridges")
    for mode, names in (("streams", both), ("serial", both), ("legacy", both[:1]), ("lazy", both[:1])):
        tests = [str(PACKAGES / name / "tests") for name in names]
        options = ("--backend", "fake_nccl", "--fake-nccl", mode)
        session.run("pytest", "-m", "not nightly", *tests, *options, *session.posargs)


@nox.session(name="tests-torch")
def tests_torch(session: nox.Session) -> None:
    """The day's tests with another torch: `nox -s tests-torch -- 2.15.0`. pytest's options go after it."""
    version, *options = session.posargs or [""]
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        session.error(f"give a version of torch after --, such as 2.15.0; got {version!r}")
    constraints = Path(session.virtualenv.location) / "constraints.txt"
    pins = re.sub(r"^setuptools==.*\n", "", CONSTRAINTS.read_text(), flags=re.MULTILINE)  # torch 2.11: below 82
    constraints.write_text(re.sub(r"^torch==.*$", f"torch=={version}", pins, flags=re.MULTILINE))
    install(session, ALL, *EVERY_TEST, "import-linter", "hatchling", "griffelib", *NOTEBOOK, constraints=constraints)
    session.run("pytest", "-m", DAY, "packages", "integration_tests", "tools/tests", *options)


def _constraints() -> Any:
    """The module tools/constraints.py."""
    sys.path.insert(0, str(ROOT / "tools"))
    return importlib.import_module("constraints")


def _with_other_releases(session: nox.Session, kind: str, pinned: dict[str, str], *wanted: str) -> None:
    """Install under ``pinned`` alone, run what touches each release that is not constraints.txt's, print the table."""
    tool = _constraints()
    parser = argparse.ArgumentParser(prog=f"nox -s {kind} --")
    parser.add_argument("--hold", nargs="+", default=[], metavar="NAME", help="keep these as tested")
    given, options = parser.parse_known_args(session.posargs)
    held = {tool.name_of(name) for name in given.hold}
    kept = {name: version for name, version in tool.pins(CONSTRAINTS.read_text()).items() if name in held}
    folder = Path(session.virtualenv.location)
    constraints, junit = folder / "constraints.txt", folder / "cases.xml"
    # The day is part of what is shared by its content: releases of another day are installed anew.
    lines = [f"# {dt.datetime.now(tz=dt.UTC):%F}", *(f"{name}=={at}" for name, at in {**pinned, **kept}.items())]
    constraints.write_text("".join(f"{line}\n" for line in lines))
    asked = [one for one in wanted if tool.name_of(one) not in held]
    for one in list(asked):
        look = ("pip", "install", "--quiet", "--dry-run", "--no-deps", one)
        if subprocess.run([str(Path(session.bin) / "python"), "-m", *look], check=False).returncode:
            print(f"{one} is not on the indexes of this machine; the newest that is there is installed")
            asked.remove(one)
    install(session, ALL, *EVERY_TEST, *asked, constraints=constraints)
    found = json.loads(str(session.run("python", "-m", "pip", "list", "--format", "json", silent=True)))
    installed = {tool.name_of(one["name"]): one["version"].partition("+")[0] for one in found}
    tests = sorted({str(path) for paths in tool.to_test(installed, held).values() for path in paths})
    if tests:
        junit.unlink(missing_ok=True)
        # As a module: before pytest 8.4, conftests of several packages are found from the root in sys.path alone.
        run = ("python", "-m", "pytest", "-m", "not nightly", "-o", PRELOAD, "--junit-xml", str(junit), *tests)
        session.run(*run, *options, success_codes=[0, 1])  # failures are counted in the table
    print(tool.table(kind, installed, held, junit if tests else None), flush=True)
    if tests and tool.failures(junit):
        session.error(f"{tool.failures(junit)} cases fail with the {kind} releases")


@nox.session(reuse_venv=False)
def newest(session: nox.Session) -> None:
    """What the newest releases of all dependencies change: `nox -s newest -- --hold torch`; pytest's options follow."""
    _with_other_releases(session, "newest", {}, "torch>=2.15")


@nox.session(reuse_venv=False)
def oldest(session: nox.Session) -> None:
    """The same with the lowest versions that the packages' metadata allows; others are the newest."""
    _with_other_releases(session, "oldest", _constraints().lowest())


@nox.session(name="install", reuse_venv=False)
def install_as_written(session: nox.Session) -> None:
    """What the READMEs' `pip install` of everything installs, where nothing is.

    Before that what installs without torch, and its commands; fake_nccl and testing, alone, in a project of others.
    Then all packages with the extras that docs/install.md names.
    """
    quick = ("--no-compile", *PIP, str(CONSTRAINTS))  # each is imported once
    # pip builds each in an environment of its own, which is under the second name; before pip 25.3 under the first.
    builds = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), str(CONSTRAINTS))
    session.install(*quick, *[str(PACKAGES / name) for name in WITHOUT_TORCH], env=builds)
    session.run("python", "tools/alone.py")
    session.run("pip", "uninstall", "--quiet", "--yes", *(f"pipegrid-{name}" for name in WITHOUT_TORCH))
    session.install(*quick, str(PACKAGES / "testing"), str(PACKAGES / "fake_nccl"), env=builds)
    project = Path(session.create_tmp())
    page = (ROOT / "docs" / "how_to" / "test_on_ranks.md").read_text()
    (project / "pytest.ini").write_text("[pytest]\n")
    (project / "test_of_others.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    with session.chdir(project):
        for options in ((), ("--backend", "fake_nccl", "-k", "agree")):
            session.run("pytest", "-q", "-p", "no:cacheprovider", *options, "test_of_others.py")
    session.install(*quick, *[str(PACKAGES / name) for name in ALL], env=builds)
    session.run("pip", "check")
    session.run("python", "-c", "\n".join(f"from pipegrid.{name} import *" for name in ALL), silent=True)
    extras = "./meta[hf,cli]"
    if f'`pip install ./packages/* "{extras}"`' not in (ROOT / "docs" / "install.md").read_text():
        session.error(f"docs/install.md has no line that installs ./packages/* and {extras}")
    session.install(*quick, extras, env=builds)
    session.run("python", "-c", "import transformers, rich, pipegrid.training", silent=True)


@nox.session
def release(session: nox.Session) -> None:
    """A release without publishing: wheels and sdists in `dist/`, what is in them, and each installed from there."""
    install(session, (), "hatchling")
    release = ("python", "tools/release.py")
    session.run(*release, "build", *session.posargs)
    session.run(*release, "check", *session.posargs)
    # What they declare besides each other is made once for all; the tool adds it to each environment.
    shared = _shared(session, CONSTRAINTS, "torch", "attrs", "cattrs", "numpy", "safetensors", "pytest")
    session.run(*release, "install", "--shared", str(shared))


@nox.session
def train(session: nox.Session) -> None:
    """The main job: train the digit reader on 4 processes. Options go after `--`."""
    install(session, ALL, "rich", "matplotlib", "scikit-learn")
    # After Ctrl-C the ranks finish their step and save.
    session.run("python", "docs/examples/digit_reader/train.py", *session.posargs, interrupt_timeout=60.0)


@nox.session
def example(session: nox.Session) -> None:
    """Run an example by its folder's name: `nox -s example -- edge_cloud`. Its own options go after the name."""
    install(session, ALL, "rich", "scikit-learn", "transformers", "safetensors")
    name, *options = session.posargs or [""]
    script = ROOT / "docs" / "examples" / name / "run.py"
    if not script.is_file():
        known = sorted(path.parent.name for path in ROOT.glob("docs/examples/*/run.py"))
        near = "".join(f" (did you mean {one!r}?)" for one in difflib.get_close_matches(name, known, n=1))
        session.error(f"there is no example {name!r}{near}; give one of {known} after --")
    session.run("python", str(script), *options)


@nox.session
def browser(session: nox.Session) -> None:
    """The pages of timelines in Chromium, which a wheel of pip has; prints how long a frame takes at each zoom."""
    install(session, ALL, "pytest", "hypothesis", "pyside6-webengine")
    session.run("pytest", "-s", "tools/tests/test_browser.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation in `site/`; a broken link, anchor or reference is an error."""
    install(session, ALL, *SITE)
    session.run("python", "tools/documentation.py")


def _run_beside(name: str, options: list[str], env: dict[str, str]) -> tuple[str, int, str, float]:
    """A session in a process of its own: its name, its exit status, all that it wrote, and its CPU seconds."""
    command = [sys.executable, "-m", "nox", "--session", name, "--", *options]
    merged = {**os.environ, **env}
    run = subprocess.Popen(command, cwd=ROOT, env=merged, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert run.stdout is not None
    output = run.stdout.read()
    _, status, usage = os.wait4(run.pid, 0)  # with all that it has waited for
    run.returncode = os.waitstatus_to_exitcode(status)
    return name, run.returncode, output, usage.ru_utime + usage.ru_stime


def _run_all_beside(session: nox.Session, names: tuple[str, ...], options: list[str], env: dict[str, str]) -> float:
    """Sessions side by side; each is printed whole when it ends. Their CPU seconds.

    One more than there are cores, since many a test waits (at most 4).
    """
    # What the environments share is made before any wants it, what is large two at a time.
    for name in ALL:
        _editable(session, name)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: _shared(session, CONSTRAINTS, name), LARGE))
    failed, spent = [], dict.fromkeys(names, 0.0)
    with ThreadPoolExecutor(min(4, 1 + (os.cpu_count() or 1))) as pool:
        for done in as_completed([pool.submit(_run_beside, name, options, env) for name in names]):
            name, status, output, spent[name] = done.result()
            print(output, f"{name}: {spent[name]:.0f} CPU seconds", sep="", flush=True)
            failed += [name] if status else []
    total = sum(spent.values())
    print(f"{total:.0f} CPU seconds: {', '.join(f'{name} {each:.0f}' for name, each in spent.items())}", flush=True)
    if failed:
        session.error(f"failed: {', '.join(failed)}")
    return total


def _with_tests() -> tuple[str, ...]:
    """The sessions of pytest, the longest first: what is left for the end is short."""
    sizes = {name: sum(path.stat().st_size for path in (PACKAGES / name).glob("tests/**/*.py")) for name in ALL}
    first, second, *others = (f"test-{name}" for name in sorted(ALL, key=lambda name: -sizes[name]))
    return "integration", first, second, "contract", *others


@nox.session
def tests(session: nox.Session) -> None:
    """Lint, types, contract, documentation, every package alone, integration on gloo: what a change must pass."""
    spent = _run_all_beside(session, (*_with_tests(), "types", "docs", "lint"), session.posargs, {})
    if spent > 3 * DAY_CPU_SECONDS:
        session.error(f"{spent:.0f} CPU seconds are three times those of a day; mark what is not the core as thorough")


@nox.session
def thorough(session: nox.Session) -> None:
    """What is not by day: tests marked so, properties on more examples, installing as the READMEs say."""
    options = ["-m", THOROUGH, *session.posargs]
    _run_all_beside(session, (*_with_tests(), "install"), options, {"HYPOTHESIS_PROFILE": "thorough"})


@nox.session(default=False)
def clean(session: nox.Session) -> None:
    """Remove build outputs and caches, environments excepted."""
    del session
    caches = (".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "site")
    for path in (path for pattern in ("**/__pycache__", "**/*.egg-info", *caches) for path in ROOT.glob(pattern)):
        if ".nox" not in path.parts:
            shutil.rmtree(path, ignore_errors=True)
