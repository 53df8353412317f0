"""Write a checkpoint: aside, forced to the disk, and switched into its place once all ranks have written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import cattrs
from attrs import evolve

from pipegrid.training.checkpoint.job import Job, reached
from pipegrid.training.checkpoint.state import groups as parameter_groups
from pipegrid.training.checkpoint.state import random_state
from pipegrid.training.checkpoint.state.names import stages_of
from pipegrid.training.checkpoint.state.snapshot import Snapshot
from pipegrid.training.checkpoint.stored import dcp, folder, manifest
from pipegrid.training.checkpoint.stored.manifest import Chunk, GroupEntry, Manifest, TensorEntry
from pipegrid.training.errors import CheckpointError

PLAN = "plan.txt"
_SEEN_WITHIN = 10.0  # seconds until a new folder of a shared file system is seen by every rank


class Saver:
    """Writes checkpoints of a job into a directory."""

    def __init__(self, job: Job, directory: Path, *, keep: int, replicas: Literal["equal", "first"]) -> None:
        self._job, self._directory, self._keep, self._replicas = job, directory, keep, replicas
        self._agreed: list[int] = []

    def require_shared(self, what: str) -> None:
        """Raise on every rank unless each sees a folder that the first one makes; ``what`` begins the text."""
        with ExitStack() as undo:
            self._begin(0, undo, what)

    def write(self, snapshot: Snapshot | Exception) -> None:
        """Write a checkpoint; all ranks together.

        Args:
            snapshot: of this rank, or why it has none.

        Raises:
            CheckpointError: it is not saved; on every rank, with the same text.
        """
        told = self._job.together("the checkpoint is not saved", lambda: _step_and_form(snapshot))
        assert isinstance(snapshot, Snapshot)
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
            path = self._begin(snapshot.step, undo, what)
            self._write_files(path, snapshot, what)
            self._job.first(what, lambda: folder.publish(path, snapshot.step).name)
            undo.pop_all()
        remain = f"step {snapshot.step} is saved, but older ones remain"
        self._job.first(remain, lambda: folder.prune(self._directory, self._keep))

    def _agree(self, snapshot: Snapshot, what: str, forms: list[int]) -> None:
        """Compare what must be equal, before the first byte: steps and data; the rest where a rank's form is new."""
        position = {} if snapshot.data is None else {"the data position": snapshot.data}
        self._job.require_equal(what, {"the step": snapshot.step} | position)
        if forms == self._agreed:
            return
        settings = {"the plan": snapshot.plan, "the grids": snapshot.grids, "the layout": snapshot.layout}
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
        own = f"random/{self._job.rank}"
        randoms = {f"{own}/{kind}": state for kind, state in random_state.as_tensors(snapshot.random).items()}
        boxes = [*snapshot.boxes, *((item, randoms[item.index.fqn]) for item in dcp.items_of(randoms))]
        with reached(f"{what}: "):
            tensors, boxes_here = dcp.save(path, boxes, self._job.group, lowest=self._replicas == "first")
        written = self._job.together(
            what,
            lambda: (
                dcp.chunks(path, boxes_here),
                snapshot.groups,
                snapshot.values,
                stages_of(snapshot.held),
                snapshot.scaler,
                snapshot.data,
            ),
        )
        self._job.first(what, lambda: _describe(path, snapshot, tensors, written))


def _step_and_form(snapshot: Snapshot | Exception) -> tuple[int, int]:
    """The step, and a number that changes with the names, the shapes or the settings; raises the error of a rank."""
    if isinstance(snapshot, Exception):
        raise snapshot
    return snapshot.step, hash((snapshot.held, repr((snapshot.plan, snapshot.grids, snapshot.layout))))


def _require_seen(path: Path) -> None:
    until = time.monotonic() + _SEEN_WITHIN
    while not path.is_dir():
        if time.monotonic() > until:
            raise CheckpointError(f"{path} of the first rank does not exist here; all ranks share one directory")
        time.sleep(0.05)


def _describe(
    path: Path, snapshot: Snapshot, tensors: dict[str, TensorEntry], written: Sequence[Sequence[Any]]
) -> None:
    """Write the texts and the manifest."""
    chunks: dict[str, list[Chunk]] = {}
    for key, chunk in (entry for own, *_ in written for entry in own):
        chunks.setdefault(key, []).append(cattrs.structure(chunk, Chunk))
    names = [dcp.METADATA]
    if snapshot.plan is not None:
        folder.write(path / PLAN, snapshot.plan)
        names.append(PLAN)
    found = Manifest(
        step=snapshot.step,
        tensors={key: evolve(entry, chunks=tuple(chunks[key])) for key, entry in tensors.items()},
        files={name: manifest.file_entry(path / name) for name in names},
        groups=parameter_groups.merged([cattrs.structure(groups, list[GroupEntry]) for _, groups, *_ in written]),
        values={key: value for _, _, values, *_ in written for key, value in values.items()},
        scaler=next((scaler for *_, scaler, _ in written if scaler is not None), None),
        data=next((data for *_, data in written if data is not None), None),
        seed=snapshot.seed,
        ranks=tuple(tuple((module, stage) for module, stage in stages) for _, _, _, stages, *_ in written),
        grids=snapshot.grids,
        layout=snapshot.layout,
    )
    manifest.write(path, found)
