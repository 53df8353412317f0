"""Every check of the project, one session each. `nox` alone runs `tests`; `nox -l` lists them.

Environments are made once and reused: a session installs again only when a metadata file, the constraints
or its own list of requirements changed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

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
DEPENDENCIES = {name: _siblings(_metadata(name)["project"]["dependencies"]) for name in ALL}
# What a package's tests need, from its dependency group `test`.
TEST_NEEDS: dict[str, list[str]] = {name: _metadata(name)["dependency-groups"]["test"] for name in ALL}
# What the tests of several packages need together.
EVERY_TEST = ("pytest", "hypothesis", "rich", "matplotlib", "scikit-learn", "transformers", "safetensors")


def install(
    session: nox.Session, packages: tuple[str, ...], *requirements: str, constraints: Path = CONSTRAINTS
) -> None:
    """Install ``packages`` (editable) and ``requirements`` under the constraints, unless nothing changed."""
    key = hashlib.sha256()
    for path in (constraints, *(PACKAGES / name / "pyproject.toml" for name in packages)):
        key.update(path.read_bytes())
    key.update(repr((packages, requirements, session.python)).encode())
    stamp = Path(session.virtualenv.location) / "installed.sha256"
    if stamp.exists() and stamp.read_text() == key.hexdigest():
        return
    editable = [part for name in packages for part in ("--editable", str(PACKAGES / name))]
    session.install("--quiet", "--constraint", str(constraints), *editable, *requirements)
    stamp.write_text(key.hexdigest())


def _test_package(session: nox.Session, name: str) -> None:
    needs = TEST_NEEDS[name]
    others = [need for need in needs if not _siblings([need])]
    install(session, (*DEPENDENCIES[name], *_siblings(needs), name), *others)
    session.run("pytest", "-m", "not nightly", str(PACKAGES / name / "tests"), *session.posargs)


def _declare_package_sessions() -> None:
    for name in ALL:

        def session(session: nox.Session, name: str = name) -> None:
            _test_package(session, name)

        session.__doc__ = f"The tests of pipegrid-{name}, with that package and its declared dependencies only."
        session.__name__ = f"test_{name}"
        nox.session(name=f"test-{name}")(session)


_declare_package_sessions()


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    install(session, (), "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over every package, the tools, the examples and this file."""
    install(session, ALL, "mypy", *EVERY_TEST, "nox")
    session.run("mypy", *(str(PACKAGES / name / "src") for name in ALL))
    session.run("mypy", "noxfile.py", "tools", "docs/examples")


@nox.session
def contract(session: nox.Session) -> None:
    """Import-linter: who may import whom; the proof that the contract bites; the tools, run small."""
    # numpy is for a peer that a benchmark compares with: torch's own pipelining sends objects, which needs it.
    install(session, ALL, "import-linter", "pytest", "numpy", "hypothesis")
    session.run("lint-imports")
    session.run("pytest", "tools/tests")


@nox.session
def integration(session: nox.Session) -> None:
    """The packages composed on ranks. Takes `--backend gloo|nccl|fake_nccl|staged` and pytest's own options."""
    install(session, ALL, *EVERY_TEST)
    session.run("pytest", "-m", "not nightly", "integration_tests", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """The full matrices and fuzzing that are too long for every run."""
    install(session, ALL, *EVERY_TEST)
    session.run("pytest", "-m", "nightly", "packages", "integration_tests", *session.posargs)


@nox.session(name="tests-torch")
def tests_torch(session: nox.Session) -> None:
    """The tests of all packages with another torch: `nox -s tests-torch -- 2.15.0`. pytest's options go after it."""
    version, *options = session.posargs or [""]
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        session.error(f"give a version of torch after --, such as 2.15.0; got {version!r}")
    constraints = Path(session.virtualenv.location) / "constraints.txt"
    others = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("torch==")]
    constraints.write_text("\n".join([*others, f"torch=={version}"]) + "\n")
    install(session, ALL, *EVERY_TEST, constraints=constraints)
    session.run("pytest", "-m", "not nightly", "packages", "integration_tests", *options)


# An indented line of a README that begins so is what its readers type.
_INSTALL_LINE = re.compile(r"^ +pip install ((?:\./packages/\S+ ?)+)", re.MULTILINE)


@nox.session(name="install", reuse_venv=False)
def install_as_written(session: nox.Session) -> None:
    """The `pip install` lines of the READMEs, in an empty environment: each resolves; the one for everything works."""
    readmes = [PACKAGES / name / "README.md" for name in ALL]
    for readme in (ROOT / "README.md", *readmes):
        lines = _INSTALL_LINE.findall(readme.read_text())
        if len(lines) != 1:
            session.error(f"{readme.relative_to(ROOT)} has {len(lines)} lines of `pip install ./packages/...`, not one")
        own = [readme.parent.name] if readme in readmes else list(ALL)
        given = [Path(path.partition("[")[0]).name for path in lines[0].split()]
        if not set(own) <= set(given):
            session.error(f"{readme.relative_to(ROOT)} installs {given}, without {own}")
        session.run("pip", "install", "--quiet", "--dry-run", "--constraint", str(CONSTRAINTS), *lines[0].split())
    (everything,) = _INSTALL_LINE.findall((ROOT / "README.md").read_text())
    session.install("--quiet", "--constraint", str(CONSTRAINTS), *everything.split())
    session.run("pip", "check")
    for name in ALL:
        session.run("python", "-c", f"from pipegrid.{name} import *", silent=True)


@nox.session
def train(session: nox.Session) -> None:
    """The main job: train the digit reader on 4 processes. Options go after `--`."""
    install(session, ALL, "rich", "matplotlib", "scikit-learn")
    session.run("python", "docs/examples/digit_reader/train.py", *session.posargs)


@nox.session
def example(session: nox.Session) -> None:
    """Run an example by its folder's name: `nox -s example -- edge_cloud`. Its own options go after the name."""
    install(session, ALL, "scikit-learn")
    name, *options = session.posargs or [""]
    script = ROOT / "docs" / "examples" / name / "run.py"
    if not script.is_file():
        known = sorted(path.parent.name for path in ROOT.glob("docs/examples/*/run.py"))
        session.error(f"there is no example {name!r}; give one of {known} after --")
    session.run("python", str(script), *options)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link or reference is an error."""
    install(session, ALL, "mkdocs", "mkdocs-material", "mkdocstrings[python]")
    session.run("mkdocs", "build", "--strict")


@nox.session
def tests(session: nox.Session) -> None:
    """Lint, types, contract, installing as written, every package alone, integration on gloo."""
    for name in ("lint", "types", "contract", "install", *(f"test-{name}" for name in ALL), "integration"):
        session.notify(name)


@nox.session(default=False)
def clean(session: nox.Session) -> None:
    """Remove build outputs and caches, environments excepted."""
    del session
    for pattern in (
        "**/__pycache__",
        "**/*.egg-info",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".hypothesis",
        "site",
    ):
        for path in ROOT.glob(pattern):
            if ".nox" not in path.parts:
                shutil.rmtree(path, ignore_errors=True)
