"""The command `pipegrid`: what is installed and what is not, and which arguments a command gets."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from pipegrid.core.__main__ import COMMANDS, overview
from pipegrid.core.parser import Parser

MAIN = "import sys\n\n\ndef main(arguments):\n    print(*arguments)\n    return len(arguments)\n"


@pytest.fixture
def command(tmp_path):
    """Runs `pipegrid` beside another project, which has the commands `greetings` and `hello`."""
    (tmp_path / "greetings").mkdir()
    (tmp_path / "greetings" / "__main__.py").write_text(MAIN)
    dist = tmp_path / "greetings-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n")
    points = "".join(f"{name} = greetings.__main__:main\n" for name in ("greetings", "hello"))
    (dist / "entry_points.txt").write_text(f"[pipegrid.commands]\n{points}")

    def run(*arguments):
        path = [str(tmp_path), *sys.path]
        code = f"import sys; sys.path[:] = {path}; from pipegrid.core.__main__ import main; sys.exit(main())"
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)

    return run


def test_a_command_with_its_packages_name_gets_its_arguments_another_one_its_name_before(command):
    for given, printed in [
        (("greetings", "a", "--help"), "a --help\n"),
        (("hello", "a"), "hello a\n"),
        (("hello",), "hello\n"),
    ]:
        done = command(*given)
        assert (done.stdout, done.returncode, done.stderr) == (printed, len(printed.split()), "")


def test_help_lists_what_is_installed(command):
    done = command("--help")
    assert done.returncode == 0, done.stderr
    for name in ("greetings", "hello"):  # the width of a column depends on what is installed
        assert re.search(rf"^{name} +of another project +pipegrid {name} --help$", done.stdout, re.MULTILINE)
    assert command().returncode == 2


def test_what_is_not_installed_has_its_install_line():
    text = overview([name for name in COMMANDS if name not in ("plan", "planner", "goodput")])
    here, _, missing = text.partition("not installed")
    assert "pipegrid show zero_bubble_v --pp 4" in here
    assert "pip install" not in here
    assert "plan, planner" in missing
    assert "pip install pipegrid-planner\n" in missing
    assert "pip install pipegrid-goodput\n" in missing


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("helo", "no command 'helo' (did you mean 'hello'?); pipegrid --help lists them"),
        ("compre", "no command 'compre' (did you mean 'compare'?)"),
        ("xyzzy", "no command 'xyzzy'; pipegrid --help lists them"),
    ],
)
def test_a_wrong_name_is_an_error_with_the_nearest(command, name, text):
    done = command(name)
    assert done.returncode == 2
    assert text in done.stderr


def test_a_command_that_is_not_installed_is_an_error_with_its_install_line(monkeypatch, capsys):
    from pipegrid.core import __main__ as module

    monkeypatch.setattr(module, "installed", dict)
    assert module.main(["plan", "job.toml"]) == 2
    assert "pip install pipegrid-planner" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["shwo"], "(did you mean 'show'?)"),
        (["show", "--to", "tortch"], "(did you mean 'torch'?)"),
        (["xyzzy"], "invalid choice: 'xyzzy'"),
    ],
)
def test_a_parser_names_the_command_or_choice_that_was_meant(capsys, given, text):
    parser = Parser(prog="made")
    commands = parser.add_subparsers()
    commands.add_parser("show").add_argument("--to", choices=["torch", "megatron"])
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(given)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert text in printed
    assert ("did you mean" in printed) == ("did you mean" in text)
