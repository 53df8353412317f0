"""Writes a checkpoint into a folder aside, which is renamed once all ranks have written and the disk has all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import cattrs
from attrs import evolve

from pipegrid.checkpoint.job import CheckpointRanks
from pipegrid.checkpoint.state import optimizers
from pipegrid.checkpoint.state.snapshot import Snapshot
from pipegrid.checkpoint.stored import dcp, folder, manifest
from pipegrid.checkpoint.stored.manifest import FileEntry, Manifest, TensorEntry
from pipegrid.stages.errors import CheckpointError
from pipegrid.stages.generators import as_tensors

PLAN = "plan.txt"
_SEEN_WITHIN = 10.0  # seconds until a new folder of a shared file system is seen by every rank


class Saver:
    """Writes checkpoints of a job into a directory."""

    def __init__(
        self, job: CheckpointRanks, directory: Path, *, keep: int, replicas: Literal["equal", "first"]
    ) -> None:
        self._job, self._directory, self._keep, self._replicas = job, directory, keep, replicas
        self._agreed: list[int] = []

    def require_shared(self, what: str) -> None:
        """Raise on every rank unless each sees a folder that the first one makes; ``what`` begins the text."""
        with ExitStack() as undo:
            self._begin(0, undo, what)

    def write(self, snapshot: Snapshot | Exception) -> None:
        """Write a checkpoint of the ``snapshot`` of each rank, or why it has none; all ranks together.

        Raises CheckpointError where it is not saved: on every rank, with the same text.
        """
        told = self._job.together("the checkpoint is not saved", lambda: _step_and_form(snapshot))
        assert isinstance(snapshot, Snapshot)
        step = snapshot.manifest.step
        what = f"step {told[0][0]} is not saved"
        self._agree(snapshot, what, [form for _, form in told])
        snapshot.wait()
        if self._replicas == "equal":
            self._job.require_equal(
                what,
                snapshot.checksums(),
                "; a shard of a tensor must be a DTensor, and replicas='first' stores one of unequal copies",
            )
        with ExitStack() as undo:
            path = self._begin(step, undo, what)
            self._write_files(path, snapshot, what)
            self._job.first(what, lambda: folder.publish(path, step).name)
            undo.pop_all()
        remain = f"step {step} is saved, but older ones remain"
        self._job.first(remain, lambda: folder.prune(self._directory, self._keep))

    def _agree(self, snapshot: Snapshot, what: str, forms: list[int]) -> None:
        """Compare what must be equal, before the first byte: steps and data; the rest where a rank's form is new."""
        own = snapshot.manifest
        position = {} if own.data is None else {"the data position": own.data}
        self._job.require_equal(what, {"the step": own.step} | position)
        if forms == self._agreed:
            return
        settings = {"the plan": snapshot.plan, "the grids": own.grids, "the layout": own.layout}
        self._job.require_equal(what, settings)
        self._job.tables(what, snapshot.held)
        self._agreed = forms

    def _begin(self, step: int, undo: ExitStack, what: str) -> Path:
        """A folder aside, which every rank sees; ``undo`` removes it."""

        def begin() -> str:
            made = folder.begin(self._directory, step)
            undo.callback(shutil.rmtree, made, ignore_errors=True)
            return made.name

        path = self._directory / str(self._job.first(what, begin))
        self._job.each(what, lambda: _require_seen(path))
        return path

    def _write_files(self, path: Path, snapshot: Snapshot, what: str) -> None:
        prefix = f"random/{self._job.rank}"
        randoms = {f"{prefix}/{kind}": state for kind, state in as_tensors(snapshot.random).items()}
        boxes = [*snapshot.boxes, *((item, randoms[item.index.fqn]) for item in dcp.items_of(randoms))]
        with self._job.reaching(f"{what}: "):
            tensors, here = dcp.save(path, boxes, self._job.group, lowest=self._replicas == "first")
        own = snapshot.manifest
        of_ranks = self._job.together(what, lambda: evolve(own, tensors=dcp.written(path, tensors, here)))
        self._job.first(what, lambda: _describe(path, snapshot.plan, cattrs.structure(of_ranks, list[Manifest])))


def _step_and_form(snapshot: Snapshot | Exception) -> tuple[int, int]:
    """The step, and a number that changes with the names, the shapes or the settings; raises the error of a rank."""
    if isinstance(snapshot, Exception):
        raise snapshot
    own = snapshot.manifest
    return own.step, hash((snapshot.held, repr((snapshot.plan, own.grids, own.layout))))


def _require_seen(path: Path) -> None:
    until = time.monotonic() + _SEEN_WITHIN
    while not path.is_dir():
        if time.monotonic() > until:
            raise CheckpointError(f"{path} of the first rank does not exist here; all ranks share one directory")
        time.sleep(0.05)


def _describe(path: Path, plan: str | None, of_ranks: Sequence[Manifest]) -> None:
    if plan is not None:
        folder.write(path / PLAN, plan)
    tensors: dict[str, TensorEntry] = {}
    for key, entry in (item for own in of_ranks for item in own.tensors.items()):
        chunks = tensors[key].chunks if key in tensors else ()
        tensors[key] = evolve(entry, chunks=(*chunks, *entry.chunks))
    files: dict[str, FileEntry] = {}
    for name in (dcp.METADATA, *([] if plan is None else [PLAN])):
        length = (path / name).stat().st_size
        files[name] = FileEntry(length, manifest.checksum_of(path / name, 0, length))
    found = evolve(
        of_ranks[0],
        tensors=tensors,
        files=files,
        groups=optimizers.merged([own.groups for own in of_ranks]),
        values={key: value for own in of_ranks for key, value in own.values.items()},
        scaler=next((own.scaler for own in of_ranks if own.scaler is not None), None),
        data=next((own.data for own in of_ranks if own.data is not None), None),
        ranks=tuple(own.ranks[0] for own in of_ranks),
    )
    manifest.write(path, found)
