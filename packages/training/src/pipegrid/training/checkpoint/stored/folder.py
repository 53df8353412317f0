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
from pathlib import Path

from attrs import frozen

MANIFEST = "manifest.json"
_SAVED = re.compile(r"save-(\d+)-step-(\d+)")
_ASIDE = (".saving-", ".removing-")


@frozen
class Saved:
    """A whole checkpoint: the number of the save in its directory, the step, the folder."""

    number: int
    step: int
    path: Path


def saved_in(directory: Path) -> list[Saved]:
    """The checkpoints of a directory, the newest first; none where it does not exist."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _SAVED.fullmatch(path.name)
        if match is not None and (path / MANIFEST).is_file():
            found.append(Saved(int(match[1]), int(match[2]), path))
    return sorted(found, key=lambda saved: saved.number, reverse=True)


def clean(directory: Path) -> bool:
    """Make the directory, and remove what saves that did not end left behind; whether it can be written to."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.name.startswith(_ASIDE):
            shutil.rmtree(path)
    return os.access(directory, os.W_OK)


def begin(directory: Path, step: int) -> Path:
    """A new folder aside for the files of a checkpoint."""
    path = directory / f".saving-{step}-{secrets.token_hex(4)}"
    path.mkdir()
    return path


def publish(aside: Path, step: int) -> Path:
    """Switch a whole checkpoint from aside into its place."""
    sync(aside)
    directory = aside.parent
    matches = (_SAVED.fullmatch(other.name) for other in directory.iterdir())
    number = max((int(match[1]) for match in matches if match is not None), default=0) + 1
    path = directory / f"save-{number:04}-step-{step:08}"
    aside.rename(path)
    sync(directory)
    return path


def prune(directory: Path, keep: int) -> None:
    """Remove all checkpoints but the last ``keep``."""
    for saved in saved_in(directory)[keep:]:
        aside = directory / f".removing-{saved.path.name}"
        saved.path.rename(aside)
        shutil.rmtree(aside)


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
