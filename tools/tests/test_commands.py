"""The command `pipegrid` has in its table what the packages' metadata declares, and each command runs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pipegrid.core.__main__ import COMMANDS, GROUP

ROOT = Path(__file__).parents[2]
POINTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"].get("entry-points", {}).get(GROUP, {})
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}


def test_the_table_is_that_of_the_metadata():
    declared = {name: package for package, points in POINTS.items() for name in points}
    assert declared == {name: command.package for name, command in COMMANDS.items()}


def test_core_has_the_console_script():
    core = tomllib.loads((ROOT / "packages/core/pyproject.toml").read_text())["project"]
    assert core["scripts"] == {"pipegrid": "pipegrid.core.__main__:main"}


@pytest.fixture(scope="module")
def pipegrid(tmp_path_factory):
    """Runs `pipegrid` with the entry points of the metadata beside the sources, whatever was installed when."""
    folder = tmp_path_factory.mktemp("installed")
    for package, points in POINTS.items():
        if points:
            dist = folder / f"pipegrid_{package}-0.1.0.dist-info"
            dist.mkdir()
            (dist / "METADATA").write_text(f"Metadata-Version: 2.1\nName: pipegrid-{package}\nVersion: 0.1.0\n")
            lines = "".join(f"{name} = {value}\n" for name, value in points.items())
            (dist / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")

    def run(*arguments):
        path = [str(folder), *sys.path]
        code = f"import sys; sys.path[:] = {path}; from pipegrid.core.__main__ import main; sys.exit(main())"
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example(pipegrid, name):
    done = pipegrid(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"example: pipegrid {name} {COMMANDS[name].example}\n")
    assert "usage: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("show", "zero_bubble_v", "--pp", "2", "--microbatches", "4"), "bubble"),
        (("compare", "--pp", "2", "--microbatches", "4"), "zero_bubble_v"),
        (("layout", "Ett|ttL", "--pp", "2"), "tt"),
        (("topology", "describe", "--world", "4", "a:tp=2,dp=2"), "tp"),
        (("planner", "layers", "--help"), "kinds of layers that take no time"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_command_runs(pipegrid, arguments, text):
    done = pipegrid(*arguments)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout


def test_help_lists_all(pipegrid):
    done = pipegrid("--help")
    assert all(f"\n{name} " in done.stdout for name in COMMANDS)
    assert "not installed" not in done.stdout
