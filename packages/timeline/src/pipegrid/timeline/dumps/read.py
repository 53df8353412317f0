"""Flight-recorder dumps of torch's process groups, a file for each rank: pickles and JSON of format 2.x.

torch writes them where a collective times out (``TORCH_NCCL_DUMP_ON_TIMEOUT``), and on demand. A pickle is read by an
unpickler without any global, so a file cannot run code.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from attrs import field, frozen

from pipegrid.core.strict_json import read_json
from pipegrid.plans.errors import PlanError

LARGEST = 512 * 2**20
"""Bytes of a file; torch's dumps of 20,000 entries have about 10 MB."""
_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|pt))?$")
_RECORD = re.compile(r"rank(\d+)(?:-\d+)?\.json")
_P2P = re.compile(r"(?:\w+:)?(send|recv) (\d+)(->|<-)(\d+)")


class DumpError(PlanError):
    """A file that is no dump: ``file``, and ``offset`` of the byte where it ends or goes wrong, where known."""

    def __init__(self, file: Path, message: str, offset: int | None = None) -> None:
        self.file, self.offset = file, offset
        super().__init__(f"{file}{'' if offset is None else f', byte {offset}'}: {message}")


@frozen
class Entry:
    """An operation that a rank launched.

    Attributes:
        number: of the launch on its rank.
        group: the name of the process group, by which all of its ranks know it.
        members: its ranks; empty where the dump does not have them.
        kind: ``send``, ``recv``, ``all_reduce``, ...
        sequence: of a collective, its number in the group; of a message, of its call on the rank: messages of a batch
            have one.
        peer: the rank at the other end of a message; None of a collective.
        state: ``scheduled``, ``started`` or ``completed``.
        sizes: of inputs and outputs, and their types: what ranks must agree about, as text.
        created: nanoseconds since the epoch.
        retired: the watchdog has seen its end.
    """

    number: int
    group: str
    members: tuple[int, ...]
    kind: str
    sequence: int
    peer: int | None
    state: str
    sizes: str
    created: int
    retired: bool = False

    @property
    def ended(self) -> bool:
        """Whether the operation has ended."""
        return self.retired or self.state == "completed"

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.kind} {self.sequence} of group {self.group}"
        return f"{self.kind} {'to' if self.kind == 'send' else 'from'} rank {self.peer} (group {self.group})"


@frozen
class Dump:
    """The dump of a rank.

    Attributes:
        rank: by the name of its file.
        file: of the dump.
        entries: in the order of their launches.
        groups: the ranks of each process group of this rank, by its name.
    """

    rank: int
    file: Path
    entries: tuple[Entry, ...] = field(converter=tuple[Entry, ...])
    groups: Mapping[str, tuple[int, ...]]


class _Plain(pickle.Unpickler):
    """An unpickler of numbers, texts, lists, tuples and dicts: a dump needs nothing else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}; a dump has plain data, and this could run code")

    def persistent_load(self, _pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it names an object outside of the file; a dump has plain data")


def read_dumps(paths: Iterable[Path]) -> tuple[list[Dump], list[DumpError]]:
    """The dumps in files and folders, by rank, and the errors of the files that are none.

    In a folder, files whose names end with the number of a rank are dumps: ``nccl_trace_rank_3``, ``dump_3.json``; but
    ``rank3.json`` is a record of pipegrid (see `read_records`).

    Raises:
        DumpError: two files of one rank, a file without a rank in its name, or no files.
    """
    found: dict[int, Path] = {}
    for path in paths:
        inside = [path]
        if path.is_dir():
            files = sorted(one for one in path.iterdir() if one.is_file())
            inside = [one for one in files if _RANK.search(one.name) and not _RECORD.fullmatch(one.name)]
        for file in inside:
            if (match := _RANK.search(file.name)) is None:
                raise DumpError(file, "the name of a dump ends with its rank, as in nccl_trace_rank_3")
            rank = int(match[1])
            if found.setdefault(rank, file) != file:
                raise DumpError(file, f"{found[rank]} is a dump of rank {rank} as well; give the dumps of one job")
        if not inside:
            raise DumpError(path, "no file in it has a name that ends with a rank, as in nccl_trace_rank_3")
    dumps, errors = [], []
    for rank, file in sorted(found.items()):
        try:
            dumps.append(read_dump(file, rank))
        except DumpError as error:
            errors.append(error)
    return dumps, errors


def read_records(paths: Iterable[Path]) -> dict[int, str]:
    """The failures that pipegrid recorded in these folders (``failure_dir``), as text by rank.

    Raises:
        DumpError: a file of that name which is no such record.
    """
    found = {}
    for folder in (path for path in paths if path.is_dir()):
        for file in sorted(folder.iterdir()):  # a later attempt of the job has a later name
            if (match := _RECORD.fullmatch(file.name)) is not None:
                record = _json(file, file.read_bytes())
                if not isinstance(record, dict) or not isinstance(record.get("first_failure"), str):
                    raise DumpError(file, "it is no record of a failed step: those have first_failure")
                place = f", at {record['place']}" if record.get("place") else ""
                found[int(match[1])] = f"{record['first_failure']}{place}"
    return found


def read_dump(file: Path, rank: int) -> Dump:
    """The dump in a file.

    Raises:
        DumpError: the file is cut, too large, no dump, or of another format.
    """
    if (size := file.stat().st_size) > LARGEST:
        raise DumpError(file, f"it has {size} bytes; a dump has at most {LARGEST}")
    data = file.read_bytes()
    if not data:
        raise DumpError(file, "it is empty", 0)
    document = _json(file, data) if data.lstrip()[:1] == b"{" else _pickled(file, data)
    version = document.get("version") if isinstance(document, dict) else None
    if (
        not isinstance(document, dict)
        or not isinstance(document.get("entries", []), list)
        or not isinstance(version, str)
    ):
        raise DumpError(file, "it is no dump of a flight recorder: those have entries and a version")
    if version.split(".")[0] != "2":
        raise DumpError(file, f"its version is {version!r:.40}; versions 2.x are read")
    path = "pg_config"
    try:
        config = document.get(path) or {}
        groups = {str(name): _members(group["ranks"]) for name, group in config.items()}
        entries = []
        for number, one in enumerate(document.get("entries", [])):
            path = f"entries[{number}]"
            entries.append(_entry(one, groups))
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ) as error:
        raise DumpError(file, f"{path} is not as torch writes it ({type(error).__name__}: {error!s:.80})") from None
    return Dump(rank, file, sorted(entries, key=lambda entry: entry.number), groups)


def _json(file: Path, data: bytes) -> Any:
    try:
        return read_json(data.decode(), finite=False)
    except UnicodeDecodeError as error:
        raise DumpError(file, f"it is not UTF-8 text: {error.reason}", error.start) from None
    except json.JSONDecodeError as error:
        raise DumpError(file, error.msg, len(error.doc[: error.pos].encode())) from None
    except ValueError as error:
        raise DumpError(file, str(error)) from None


def _pickled(file: Path, data: bytes) -> Any:
    stream = io.BytesIO(data)
    try:
        return _Plain(stream).load()
    except Exception as error:  # noqa: BLE001 -- an unpickler of other bytes raises nearly anything
        cut = "it is cut: " if stream.tell() >= len(data) else ""
        raise DumpError(file, f"{cut}{error!s:.200}", stream.tell()) from None


def _members(ranks: Any) -> tuple[int, ...]:
    if isinstance(ranks, str):
        ranks = ast.literal_eval(ranks)
    members = tuple(int(rank) for rank in ranks)
    if min(members, default=0) < 0:
        raise ValueError(f"a group has rank {min(members)}")
    return members


def _entry(one: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> Entry:
    group, kind = str(one["process_group"][0]), str(one["profiling_name"])
    message = _P2P.fullmatch(kind)
    members, peer = groups.get(group, ()), None
    if message is not None:  # its ranks are those of the group
        peer = members[int(message[4])] if members else int(message[4])
    shapes = ", ".join(f"{one.get(f'{side}_sizes')} {one.get(f'{side}_dtypes')}" for side in ("input", "output"))
    return Entry(
        number=int(one["record_id"]),
        group=group,
        members=members,
        kind=message[1] if message else kind.rpartition(":")[2],
        sequence=int(one["p2p_seq_id" if one.get("is_p2p") else "collective_seq_id"]),
        peer=peer,
        state=str(one["state"]),
        sizes=shapes,
        created=int(one.get("time_created_ns") or 0),
        retired=bool(one.get("retired")),
    )
