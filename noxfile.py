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

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
PACKAGES = ROOT / "packages"
CONSTRAINTS = ROOT / "constraints.txt"


def _declared(name: str) -> tuple[str, ...]:
    """The sibling packages that the metadata of ``name`` asks for."""
    project = tomllib.loads((PACKAGES / name / "pyproject.toml").read_text())["project"]
    found = (re.match(r"pipegrid-(\w+)", requirement) for requirement in project["dependencies"])
    return tuple(match[1] for match in found if match)


# Read from the packages' own metadata, so that a dependency missing there is missing in the package's session, too.
DEPENDENCIES = {path.parent.name: _declared(path.parent.name) for path in sorted(PACKAGES.glob("*/pyproject.toml"))}
# Packages whose tests run on real ranks need the plugin; it brings no other pipegrid package with it.
RANKED_TESTS = ("topology", "transport", "bridges", "schedules", "testing")
# Optional extras that a package's own tests cover.
TESTED_EXTRAS = {"topology": "[describe]"}
ALL = tuple(DEPENDENCIES)


def install(session: nox.Session, packages: tuple[str, ...], *requirements: str, extras: str = "") -> None:
    """Install ``packages`` (editable) and ``requirements`` under the constraints, unless nothing changed."""
    key = hashlib.sha256()
    for path in (CONSTRAINTS, *(PACKAGES / name / "pyproject.toml" for name in packages)):
        key.update(path.read_bytes())
    key.update(repr((packages, requirements, extras, session.python)).encode())
    stamp = Path(session.virtualenv.location) / "installed.sha256"
    if stamp.exists() and stamp.read_text() == key.hexdigest():
        return
    editable = [
        part
        for name in packages
        for part in ("--editable", f"{PACKAGES / name}{extras if name == packages[-1] else ''}")
    ]
    session.install("--quiet", "--constraint", str(CONSTRAINTS), *editable, *requirements)
    stamp.write_text(key.hexdigest())


def _test_package(session: nox.Session, name: str) -> None:
    plugin = ("testing",) if name in RANKED_TESTS and name != "testing" else ()
    extras = TESTED_EXTRAS.get(name, "")
    install(session, (*DEPENDENCIES[name], *plugin, name), "pytest", "hypothesis", extras=extras)
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
    install(session, ALL, "mypy", "pytest", "hypothesis", "rich", "matplotlib", "scikit-learn", "nox")
    session.run("mypy", *(str(PACKAGES / name / "src") for name in ALL))
    session.run("mypy", "noxfile.py", "tools", "docs/examples")


@nox.session
def contract(session: nox.Session) -> None:
    """Import-linter: who may import whom; the proof that the contract bites; the tools, run small."""
    # numpy is for a peer that a benchmark compares with: torch's own pipelining sends objects, which needs it.
    install(session, ALL, "import-linter", "pytest", "numpy")
    session.run("lint-imports")
    session.run("pytest", "tools/tests")


@nox.session
def integration(session: nox.Session) -> None:
    """The packages composed on several ranks. Takes `--backend gloo|nccl` and pytest's own options."""
    install(session, ALL, "pytest", "hypothesis", "rich", "matplotlib", "scikit-learn")
    session.run("pytest", "-m", "not nightly", "integration_tests", *session.posargs)


@nox.session
def nightly(session: nox.Session) -> None:
    """The full matrices and fuzzing that are too long for every run."""
    install(session, ALL, "pytest", "hypothesis", "rich", "matplotlib", "scikit-learn")
    session.run("pytest", "-m", "nightly", "packages", "integration_tests", *session.posargs)


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
    """Lint, types, contract, every package alone, integration on gloo."""
    for name in ("lint", "types", "contract", *(f"test-{name}" for name in ALL), "integration"):
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
