"""The directory of a run's checkpoints: written aside, switched by one rename, the last few kept. No torch.

``save-0007-step-00000100`` is the seventh save of the directory, of step 100. The newest is the one saved last, also
after a run went back to an earlier step. Until it is whole, a checkpoint is ``.saving-...``; before its files are
removed, ``.removing-...``. So a folder without a dot is whole, whenever a process ended.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from attrs import frozen

from pipegrid.stages.errors import CorruptCheckpointError

MANIFEST = "manifest.json"
_SAVED = re.compile(r"save-(\d+)-step-(\d+)")
_ASIDE = (".saving-", ".removing-")


@frozen
class Saved:
    """A whole checkpoint: the number of the save in its directory, the step, the folder."""

    number: int
    step: int
    path: Path


def named_in(directory: Path) -> list[Saved]:
    """The checkpoints of a directory by their names, the newest first; none where it does not exist."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _SAVED.fullmatch(path.name)
        if match is not None:
            found.append(Saved(int(match[1]), int(match[2]), path))
    return sorted(found, key=lambda saved: saved.number, reverse=True)


def saved_in(directory: Path) -> list[Saved]:
    """The checkpoints of a directory that have a manifest, the newest first."""
    return [saved for saved in named_in(directory) if (saved.path / MANIFEST).is_file()]


def opened(path: Path) -> BinaryIO:
    """A file of a checkpoint, to be read; OSError where there is none.

    Raises CorruptCheckpointError where it is no regular file, or a link out of its folder.
    """
    real = Path(os.path.realpath(path, strict=True))  # a loop of links is an OSError; of `resolve`, a RuntimeError
    if real.parent != Path(os.path.realpath(path.parent)):
        raise CorruptCheckpointError(f"{path.name} is a link out of the checkpoint's folder, to {real}")
    if not stat.S_ISREG(real.stat().st_mode):
        raise CorruptCheckpointError(f"{path.name} is no regular file")
    return real.open("rb")


def clean(directory: Path) -> None:
    """Remove what saves that did not end left behind."""
    for path in directory.iterdir():
        if path.name.startswith(_ASIDE):
            _remove(path)


def begin(directory: Path, step: int) -> Path:
    """A new folder aside for the files of a checkpoint."""
    path = directory / f".saving-{step}-{secrets.token_hex(4)}"
    path.mkdir()
    return path


def publish(aside: Path, step: int) -> Path:
    """Switch a whole checkpoint from aside into its place."""
    sync(aside)
    directory = aside.parent
    number = 1 + max((saved.number for saved in named_in(directory)), default=0)
    path = directory / f"save-{number:04}-step-{step:08}"
    aside.rename(path)
    sync(directory)
    return path


def prune(directory: Path, keep: int) -> None:
    """Remove all checkpoints but the last ``keep``."""
    for saved in saved_in(directory)[keep:]:
        aside = directory / f".removing-{saved.path.name}"
        try:
            saved.path.rename(aside)
        except FileNotFoundError:  # a process whose lock was taken over has done it meanwhile
            continue
        _remove(aside)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def write(path: Path, text: str) -> None:
    """Write a text file and force it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Force the entries of a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
