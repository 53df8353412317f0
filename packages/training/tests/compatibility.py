"""The compatibility table: every family of models, run in every way, is right or an error by name.

    python -m packages.training.tests.compatibility                               # the whole table, printed
    python -m packages.training.tests.compatibility --page docs/compatibility.md  # and written into the page
    python -m packages.training.tests.compatibility --families "Llama, tied" BERT --columns ZB-V generate
    python -m packages.training.tests.compatibility --record run.jsonl                # goes on after what is in there

A cell is *right* where loss, every gradient or every token is that of one process; *unsupported* where a typed error of
pipegrid ends it and no loss or token is returned; it *fails alone* where the model does so in one process without
pipegrid.
Anything else, wrong numbers, another error, no end within ``--deadline``, fails the run. Ranks are forked once and run
one cell after another; after a cell that is not right they are replaced.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from attrs import asdict, define, evolve, frozen

from pipegrid.schedules import JobFailedError, PipelineError
from pipegrid.transport import P2PLaneDeadError, P2PPeerError

sys.path.insert(0, str(Path(__file__).parents[2] / "stages" / "tests"))  # its kit, where pytest has not set the paths

from .compatibility_cells import COLUMNS, FailsAloneError, World, WrongNumbersError
from .compatibility_families import FAMILIES

BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
NOTED = ("fails alone", "unsupported")
_GRACE = 30.0  # seconds for the other ranks, once one has ended with an error
Cell = tuple[str, str]


@frozen
class Outcome:
    """How a cell ended, on one rank or on all.

    Attributes:
        word: right, unsupported, fails alone, stopped (by another rank's failure), crash or WRONG.
        text: of the error; of a right cell, why its cut is not proved, if it is not.
        seconds: that it took.
    """

    word: str
    text: str = ""
    seconds: float = 0.0


# -- On a rank.


def outcome_of(cell: Cell, world: World) -> Outcome:
    """Run a cell on this rank."""
    family, column = cell
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            COLUMNS[column][1](FAMILIES[family], world)
    except WrongNumbersError as error:
        return Outcome("WRONG", str(error))
    except FailsAloneError as error:
        return Outcome("fails alone", str(error))
    except Exception as error:  # noqa: BLE001 -- every kind is an outcome
        return outcome_of_error(error)
    unproved = [str(each.message) for each in caught if "is not proved" in str(each.message)]
    return Outcome("right", unproved[0] if unproved else "")


def outcome_of_error(error: BaseException) -> Outcome:
    """Unsupported, stopped or crashed: by the error's type, or by that of the error that a step wraps."""
    while isinstance(error, PipelineError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, (PipelineError, JobFailedError, P2PLaneDeadError, P2PPeerError)):
        return Outcome("stopped", str(error))
    if isinstance(error, ValueError) and type(error).__module__.startswith("pipegrid."):
        return Outcome("unsupported", f"`{type(error).__name__}`: {first_sentence(str(error))}")
    return Outcome("crash", "".join(traceback.format_exception(error))[-3000:])


def first_sentence(text: str) -> str:
    """Of an error, with the first of the values that it lists."""
    lines = text.splitlines() or [""]
    if lines[0].endswith(":") and len(lines) > 1:
        return f"{lines[0]} {lines[1].strip()}"
    return re.split(r"(?<=\w)[.;] ", lines[0])[0]


def _rank_main(rank: int, size: int, store: str, channel: socket.socket) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    world = World(rank, size)
    with channel.makefile("rw") as lines:
        for line in lines:
            outcome = outcome_of(tuple(json.loads(line)), world)
            lines.write(json.dumps(asdict(outcome)) + "\n")
            lines.flush()


# -- Beside the ranks.


@define
class Ranks:
    """Forked processes, one per rank, and the sockets that bring them cells."""

    processes: list[int]
    channels: list[socket.socket]

    @classmethod
    def forked(cls, size: int, folder: str) -> Ranks:
        """Fork ``size`` ranks from this process, which has imported what they need."""
        store = tempfile.mktemp(dir=folder)
        made = cls([], [])
        for rank in range(size):
            ours, theirs = socket.socketpair()
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    for channel in (ours, *made.channels):  # the ends of the other ranks: they see this process end
                        channel.close()
                    _rank_main(rank, size, store, theirs)
                    code = 0
                finally:
                    os._exit(code)
            theirs.close()
            made.processes.append(child)
            made.channels.append(ours)
        return made

    def run(self, cell: Cell, deadline: float) -> Outcome:
        """Run a cell on all ranks."""
        began = time.monotonic()
        for channel in self.channels:
            channel.sendall(f"{json.dumps(cell)}\n".encode())
        found: dict[int, Outcome] = {}
        parts = dict.fromkeys(range(len(self.channels)), b"")
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self.channels):
                selector.register(channel, selectors.EVENT_READ, rank)
            limit = began + deadline
            while len(found) < len(self.channels) and time.monotonic() < limit:
                for key, _ in selector.select(timeout=max(0.0, limit - time.monotonic())):
                    data = self.channels[key.data].recv(1 << 16)
                    parts[key.data] += data
                    if data and not parts[key.data].endswith(b"\n"):
                        continue
                    ended = parts[key.data] or b'{"word": "crash", "text": "the process ended"}'
                    found[key.data] = Outcome(**json.loads(ended))
                    selector.unregister(self.channels[key.data])
                    if found[key.data].word != "right":
                        limit = min(limit, time.monotonic() + _GRACE)
        return evolve(together(found, len(self.channels), deadline), seconds=time.monotonic() - began)

    def end(self) -> None:
        """End all processes."""
        for channel in self.channels:
            channel.close()
        for child in self.processes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def together(found: Mapping[int, Outcome], size: int, deadline: float) -> Outcome:
    """The worst of the outcomes of all ranks, with the text of the first rank that has it."""
    for word in ("WRONG", "crash", *NOTED):
        for rank, outcome in sorted(found.items()):
            if outcome.word == word:
                return outcome if word in NOTED else evolve(outcome, text=f"rank {rank}: {outcome.text}")
    for rank in range(size):
        if rank not in found:
            return Outcome("crash", f"rank {rank} did not end within {deadline:g} s")
        if found[rank].word == "stopped":
            return Outcome("crash", f"rank {rank}: {found[rank].text}")
    return found[0]


def run_cells(cells: Sequence[Cell], deadline: float) -> Iterator[tuple[Cell, Outcome]]:
    """Run cells, those of equal numbers of ranks after each other."""
    for family in dict.fromkeys(family for family, _ in cells):
        FAMILIES[family].make()  # imports it, for all ranks
    with tempfile.TemporaryDirectory(prefix="pipegrid-compatibility-") as folder:
        for size in sorted({COLUMNS[column][0] for _, column in cells}):
            ranks: Ranks | None = None
            try:
                for cell in cells:
                    if COLUMNS[cell[1]][0] != size:
                        continue
                    ranks = ranks or Ranks.forked(size, folder)
                    outcome = ranks.run(cell, deadline)
                    yield cell, outcome
                    if outcome.word != "right":
                        ranks.end()
                        ranks = None
            finally:
                if ranks is not None:
                    ranks.end()


# -- The page.


def table(outcomes: Mapping[Cell, Outcome]) -> str:
    """The table as Markdown, with the texts of refusals below it."""
    columns = [column for column in COLUMNS if any(column == at for _, at in outcomes)]
    texts: dict[str, int] = {}
    rows: list[str] = []
    for family in dict.fromkeys(family for family, _ in outcomes):
        cells: list[str] = []
        for column in columns:
            outcome = outcomes.get((family, column), Outcome(""))
            note = f" ({texts.setdefault(outcome.text, len(texts) + 1)})" if outcome.word in NOTED else ""
            unproved = ", not proved" if outcome.word == "right" and outcome.text else ""
            cells.append(f"{outcome.word}{note}{unproved}")
        rows.append(f"| {family} | {' | '.join(cells)} |")
    counts = Counter(outcome.word for outcome in outcomes.values())
    said = ", ".join(f"{number} {word}" for word, number in counts.most_common())
    day = dt.datetime.now(tz=dt.UTC).date()
    head = (
        f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}, {day}: "
        f"{len(rows)} families, {len(outcomes)} cells, {said}."
    )
    return "\n".join(
        [
            head,
            "",
            f"| family | {' | '.join(columns)} |",
            f"| --- |{' --- |' * len(columns)}",
            *rows,
            "",
            *(f"{number}. {text}" for text, number in texts.items()),
            "",
        ]
    )


def write_page(page: Path, text: str) -> None:
    """Replace the table between the marks of a page."""
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def main() -> None:
    """Run cells, print each as it ends, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES], metavar="NAME", help="rows")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=[*COLUMNS], metavar="NAME", help="columns")
    parser.add_argument("--page", type=Path, help="a page to write the table into")
    parser.add_argument("--record", type=Path, help="outcomes, a line each; cells that are in it are not run again")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for a cell")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    cells = [(family, column) for family in given.families for column in given.columns]
    recorded = given.record.read_text().splitlines() if given.record and given.record.exists() else []
    outcomes = {tuple(each.pop("cell")): Outcome(**each) for each in map(json.loads, recorded)}
    for cell, outcome in run_cells([cell for cell in cells if cell not in outcomes], given.deadline):
        outcomes[cell] = outcome
        print(f"{cell[0]:22} {cell[1]:22} {outcome.word:8} {outcome.seconds:5.1f} s  {outcome.text}", flush=True)
        if given.record:
            with given.record.open("a") as file:
                print(json.dumps({"cell": cell, **asdict(outcome)}), file=file)
    found = {cell: outcomes[cell] for cell in cells}
    text = table(found)
    print(f"\n{text}")
    if given.page:
        write_page(given.page, text)
    sys.exit(any(outcome.word not in ("right", *NOTED) for outcome in found.values()))


if __name__ == "__main__":
    main()
