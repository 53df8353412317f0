"""Flight-recorder dumps of torch's process groups, a file for each rank: pickles and JSON of format 2.x.

torch writes them where a collective times out (``TORCH_NCCL_DUMP_ON_TIMEOUT``), and on demand. A pickle is read by an
unpickler that has the opcodes of plain data and no other, so a file cannot run code, nor take memory beyond its size.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from attrs import field, frozen

from pipegrid.core.strict_json import read_json
from pipegrid.plans.errors import PlanError

LARGEST = 512 * 2**20
"""Bytes of a file; torch's dumps of 20,000 entries have about 10 MB."""
_LONGEST = 1000  # characters of a name
_MOST_TENSORS, _MOST_DIMS = 10_000, 64  # of an operation, of a tensor
_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|pt))?$")
_RECORD = re.compile(r"rank(\d+)(?:-\d+)?\.json")
_ATTEMPT = re.compile(r"((?:nccl_trace_rank_|rank)\d+)-(\d+)(?=(?:\.json)?$)")  # pipegrid's names of later attempts
_P2P = re.compile(r"(?:\w+:)?(send|recv) (\d+)(->|<-)(\d+)", re.ASCII)


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
        way = "" if self.peer is None else f" {'to' if self.kind == 'send' else 'from'} rank {self.peer}"
        return f"{self.kind} {self.sequence}{way} of group {self.group}"


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


class _RefusedError(Exception):
    """An opcode that plain data does not need."""


def _refuse(_reader: Any) -> NoReturn:
    raise _RefusedError("it is no pickle of plain data; any other could run code")


_PLAIN = (
    pickle.PROTO, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.INT, pickle.LONG, pickle.FLOAT,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.UNICODE, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8,
    pickle.EMPTY_LIST, pickle.LIST, pickle.APPEND, pickle.APPENDS,
    pickle.EMPTY_DICT, pickle.DICT, pickle.SETITEM, pickle.SETITEMS,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE, pickle.GET, pickle.BINGET, pickle.LONG_BINGET,
)  # fmt: skip
"""Numbers, texts, lists, tuples and dicts. Not DUP: torch does not write it."""


class _Plain(pickle._Unpickler):  # noqa: SLF001 -- the one in C allocates what a memo's number in the file says
    """An unpickler of numbers, texts, lists, tuples and dicts: a dump needs nothing else."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **dict.fromkeys(range(256), _refuse),
        **{code[0]: pickle._Unpickler.dispatch[code[0]] for code in _PLAIN},  # noqa: SLF001
        pickle.FRAME[0]: lambda reader: reader.read(8),  # frames are for speed; without them the offset is exact
    }


def read_dumps(paths: Iterable[Path]) -> tuple[list[Dump], list[DumpError]]:
    """The dumps in files and folders, by rank, and the errors of the files that are none.

    In a folder, files whose names end with the number of a rank are dumps: ``nccl_trace_rank_3``, ``dump_3.json``; but
    ``rank3.json`` is a record of pipegrid (see `read_records`). Of the attempts of a job in one folder
    (``nccl_trace_rank_3-1``) the last is taken.

    Raises:
        DumpError: two files of one rank, a file without a rank in its name, or no files.
    """
    found: dict[int, Path] = {}
    for path in paths:
        inside = [path]
        if path.is_dir():
            files = [one for one in _last_attempts(path) if one.is_file()]
            inside = [one for one in files if _RANK.search(one.name) and not _RECORD.fullmatch(one.name)]
        for file in inside:
            if (match := _RANK.search(_ATTEMPT.sub(r"\1", file.name))) is None:
                raise DumpError(file, "the name of a dump ends with its rank, as in nccl_trace_rank_3")
            rank = int(match[1])
            if found.setdefault(rank, file) != file:
                raise DumpError(file, f"{found[rank]} is a dump of rank {rank} as well; give the dumps of one job")
        if not inside and not any(_RECORD.fullmatch(file.name) for file in files):
            raise DumpError(path, "no file in it has a name that ends with a rank, as in nccl_trace_rank_3")
    dumps, errors = [], []
    for rank, file in sorted(found.items()):
        try:
            dumps.append(read_dump(file, rank))
        except DumpError as error:
            errors.append(error)
    return dumps, errors


def _last_attempts(folder: Path) -> list[Path]:
    """The files of a folder, by name, without those that a later attempt of the job has as well."""

    def attempt(file: Path) -> int:
        found = _ATTEMPT.search(file.name)
        return int(found[2]) if found else 0

    last = {_ATTEMPT.sub(r"\1", file.name): file for file in sorted(folder.iterdir(), key=attempt)}
    return sorted(last.values())


def read_records(paths: Iterable[Path]) -> dict[int, str]:
    """The failures that pipegrid recorded in these folders (``failure_dir``), as text by rank.

    Raises:
        DumpError: a file of that name which is no such record.
    """
    found = {}
    for folder in (path for path in paths if path.is_dir()):
        for file in _last_attempts(folder):
            if (match := _RECORD.fullmatch(file.name)) is not None:
                record = _json(file, file.read_bytes())
                if not isinstance(record, dict) or not isinstance(record.get("first_failure"), str):
                    raise DumpError(file, "it is no record of a failed step: those have first_failure")
                place = f", at {record['place']}" if record.get("place") else ""
                found[int(match[1])] = f"{record['first_failure']}{place}".encode(errors="backslashreplace").decode()
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
    known = isinstance(document, dict) and isinstance(document.get("entries", []), list)
    if not known or not isinstance(version := document.get("version"), str):
        raise DumpError(file, "it is no dump of a flight recorder: those have entries and a version")
    if version.split(".")[0] != "2":
        raise DumpError(file, f"its version is {version!r:.40}; versions 2.x are read")
    path, groups, entries = "pg_config", {}, []
    members = texts = 0
    try:
        for name, group in (document.get(path) or {}).items():
            groups[_name(name)] = _members(group["ranks"])
            members = _bounded(members + len(groups[name]))
        for number, one in enumerate(document.get("entries", [])):
            path = f"entries[{number}]"
            entries.append(_entry(one, groups, rank))
            texts = _bounded(texts + len(entries[-1].sizes))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
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
        cut = "it is cut, or no pickle: " if stream.tell() >= len(data) else ""
        what = str(error) if isinstance(error, _RefusedError) else f"{type(error).__name__} {error!s:.200}".strip()
        raise DumpError(file, cut + what, stream.tell()) from None


def _bounded(size: int) -> int:
    """Parts of a pickle may be shared, so that what is made of them would be larger than any memory."""
    if size > LARGEST:
        raise ValueError(f"with it the dump has more than {LARGEST} ranks of groups, or characters of sizes")
    return size


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise ValueError(f"a name is a string of at most {_LONGEST} printable characters, not {value!r:.40}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"a number is an integer from 0, not {value!r:.40}")
    return value


def _members(ranks: Any) -> tuple[int, ...]:
    found = read_json(ranks) if isinstance(ranks, str) else ranks  # torch writes "[0, 1]"
    if not isinstance(found, (list, tuple)):
        raise TypeError(f"the ranks of a group are a list, not {found!r:.40}")
    members = tuple(map(_number, found))
    if len(set(members)) < len(members):
        raise ValueError("a group has a rank twice")
    return members


def _tensors(sizes: Any, dtypes: Any) -> str:
    """Sizes and types of the tensors of an operation, as text."""
    sizes, dtypes = sizes or [], dtypes or []
    if not all(isinstance(one, list) and len(one) <= _MOST_TENSORS for one in (sizes, dtypes)):
        raise ValueError(f"sizes and types are lists of at most {_MOST_TENSORS} tensors")
    if not all(isinstance(one, list) and len(one) <= _MOST_DIMS for one in sizes):
        raise ValueError(f"the size of a tensor is a list of at most {_MOST_DIMS} numbers")
    return f"{[list(map(_number, size)) for size in sizes]} {list(map(_name, dtypes))}"


def _entry(one: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]], rank: int) -> Entry:
    group, kind = _name(one["process_group"][0]), _name(one["profiling_name"])
    message = _P2P.fullmatch(kind)
    members, peer = groups.get(group, ()), None
    if members and rank not in members:
        raise ValueError(f"rank {rank}, by the name of the file, is not in group {group}")
    if message is not None:  # its ranks are those of the group
        own, peer = (members[int(message[at])] if members else int(message[at]) for at in (2, 4))
        if own != rank:
            raise ValueError(f"a message of rank {own}; the file is that of rank {rank} by its name")
    sides = (_tensors(one.get(f"{side}_sizes"), one.get(f"{side}_dtypes")) for side in ("input", "output"))
    return Entry(
        number=_number(one["record_id"]),
        group=group,
        members=members,
        kind=message[1] if message else kind.rpartition(":")[2],
        sequence=_number(one["p2p_seq_id" if one.get("is_p2p") else "collective_seq_id"]),
        peer=peer,
        state=_name(one["state"]),
        sizes=", ".join(sides),
        created=_number(one.get("time_created_ns") or 0),
        retired=bool(one.get("retired")),
    )
