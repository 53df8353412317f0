"""Write a checkpoint: aside, forced to the disk, and switched into its place once all ranks have written."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import cattrs
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pipegrid.training.checkpoint import agreement
from pipegrid.training.checkpoint.agreement import Held
from pipegrid.training.checkpoint.job import Job, reached
from pipegrid.training.checkpoint.state import groups as parameter_groups
from pipegrid.training.checkpoint.state import random_state
from pipegrid.training.checkpoint.state.shot import Shot, stages_of
from pipegrid.training.checkpoint.state.snapshot import SnapshotPlanner
from pipegrid.training.checkpoint.stored import dcp, folder, manifest
from pipegrid.training.checkpoint.stored.manifest import Chunk, GroupEntry, Manifest, TensorEntry
from pipegrid.training.checkpoint.stored.plain import dtype_name
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

    def write(self, shot: Shot | Exception) -> None:
        """Write a checkpoint; all ranks together.

        Raises:
            CheckpointError: it is not saved; on every rank, with the same text.
        """
        step = self._job.together("the checkpoint is not saved", lambda: _step(shot))[0]
        assert isinstance(shot, Shot)
        what = f"step {step} is not saved"
        self._agree(shot, what)
        shot.snapshot.wait()
        if self._replicas == "equal":
            agreement.require_equal(
                what,
                self._job.gather(shot.checksums()),
                "; a shard of a tensor must be a DTensor, and replicas='first' stores one of unequal copies",
            )
        with ExitStack() as undo:
            path = self._begin(step, undo, what)
            self._write_files(path, shot, what)
            self._job.first(what, lambda: folder.publish(path, step).name)
            undo.pop_all()
        remain = f"step {step} is saved, but older ones remain"
        self._job.first(remain, lambda: folder.prune(self._directory, self._keep))

    def _agree(self, shot: Shot, what: str) -> None:
        """Compare what must be equal, before the first byte."""
        position = {} if shot.data is None else {"the data position": shot.data}
        told = self._job.gather(({"the step": shot.step} | position, hash((shot.held, repr(shot.settings)))))
        agreement.require_equal(what, [values for values, _ in told])
        hashes = [digest for _, digest in told]
        if hashes == self._agreed:
            return
        tables = self._job.gather((shot.held, shot.settings))
        settings = ("the plan", "the grids", "the layout")
        agreement.require_equal(what, [dict(zip(settings, values, strict=True)) for _, values in tables])
        agreement.require_whole_names(what, [cattrs.structure(held, tuple[Held, ...]) for held, _ in tables])
        self._agreed = hashes

    def _begin(self, step: int, undo: ExitStack, what: str) -> Path:
        """A folder aside, which every rank sees; ``undo`` removes it."""

        def begin() -> str:
            made = folder.begin(self._directory, step)
            undo.callback(shutil.rmtree, made, ignore_errors=True)
            return made.name

        path = self._directory / str(self._job.first(what, begin))
        self._job.together(what, lambda: _require_seen(path))
        return path

    def _write_files(self, path: Path, shot: Shot, what: str) -> None:
        own = f"random/{self._job.rank}"
        randoms = {f"{own}/{kind}": state for kind, state in random_state.as_tensors(shot.random).items()}
        planner = SnapshotPlanner(shot.snapshot, randoms, lowest=self._replicas == "first")
        with reached(f"{what}: "):
            metadata, places = dcp.save(path, planner, self._job.group)
        written = self._job.together(
            what,
            lambda: (
                dcp.chunks(path, places, planner.plan.items),
                shot.groups,
                shot.values,
                stages_of(shot.held),
                shot.scaler,
                shot.data,
            ),
        )
        self._job.first(what, lambda: _describe(path, shot, metadata, written))


def _step(shot: Shot | Exception) -> int:
    if isinstance(shot, Exception):
        raise shot
    return shot.step


def _require_seen(path: Path) -> None:
    until = time.monotonic() + _SEEN_WITHIN
    while not path.is_dir():
        if time.monotonic() > until:
            raise CheckpointError(f"{path} of the first rank does not exist here; all ranks share one directory")
        time.sleep(0.05)


def _describe(path: Path, shot: Shot, metadata: Metadata, written: Sequence[Sequence[Any]]) -> None:
    """Write the texts and the manifest."""
    chunks: dict[str, list[Chunk]] = {}
    for key, chunk in (entry for own, *_ in written for entry in own):
        chunks.setdefault(key, []).append(cattrs.structure(chunk, Chunk))
    tensors = {
        key: TensorEntry(dtype_name(stored.properties.dtype), tuple(stored.size), tuple(chunks[key]))
        for key, stored in sorted(metadata.state_dict_metadata.items())
        if isinstance(stored, TensorStorageMetadata)
    }
    plan, grids, layout = shot.settings
    names = [dcp.METADATA]
    if plan is not None:
        folder.write(path / PLAN, plan)
        names.append(PLAN)
    found = Manifest(
        step=shot.step,
        tensors=tensors,
        files={name: manifest.file_entry(path / name) for name in names},
        groups=parameter_groups.merged([cattrs.structure(groups, list[GroupEntry]) for _, groups, *_ in written]),
        values={key: value for _, _, values, *_ in written for key, value in values.items()},
        scaler=next((scaler for *_, scaler, _ in written if scaler is not None), None),
        data=next((data for *_, data in written if data is not None), None),
        seed=shot.seed,
        ranks=tuple(tuple((module, stage) for module, stage in stages) for _, _, _, stages, *_ in written),
        grids=grids,
        layout=layout,
    )
    manifest.write(path, found)
