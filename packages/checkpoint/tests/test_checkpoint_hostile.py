"""Checkpoints that a stranger has written: a typed error or the data, never code, a file outside, endless memory.

The checksums of these are right: whoever writes a file can compute them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pipegrid.checkpoint import Checkpoints, TrainingState, export_safetensors, load_safetensors
from pipegrid.checkpoint.__main__ import main
from pipegrid.stages.errors import CheckpointError, CorruptCheckpointError

KEY = "model/head/weight"


def made(value=1.0):
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
            parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.step()
    state = TrainingState(
        stages={"head": {0: module}}, optimizers=[optimizer], data={"sample": (3, 1), "w": torch.ones(2)}, plan="a plan"
    )
    return state, module


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    np.random.default_rng()  # so that its state is stored as well
    directory = tmp_path_factory.mktemp("run")
    with contextlib.closing(Checkpoints(directory)) as checkpoints:
        checkpoints.save(made()[0], step=1)
    return directory


@pytest.fixture
def saved(tmp_path, once):
    """The folder of a checkpoint."""
    shutil.copytree(once, tmp_path / "run")
    return tmp_path / "run" / "save-0001-step-00000001"


def short(value):
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def sealed(folder, content):
    """Write a manifest with its checksum."""
    text = {"checksum": zlib.crc32(short(content).encode()), "content": content}
    (folder / "manifest.json").write_text(short(text))


def content_of(folder):
    return json.loads((folder / "manifest.json").read_text())["content"]


def put(content, path, value):
    """Set what is at ``path``."""
    *way, last = path
    for key in way:
        content = content[key]
    content[last] = value


def require_corrupt(folder, match=None):
    """Every reader raises its own error."""
    state, module = made(5.0)
    before = module.weight.clone()
    with (
        contextlib.closing(Checkpoints(folder.parent)) as checkpoints,
        pytest.raises(CorruptCheckpointError, match=match),
    ):
        checkpoints.load(state, step=1)
    assert torch.equal(module.weight, before)
    try:
        code = main(["verify", str(folder)])
    except SystemExit as error:
        code = error.code
    assert code in {1, 2}


CHUNK = ("tensors", KEY, "chunks", 0)
EDITS = [
    *[
        ((*CHUNK, "file"), name)
        for name in ("../../x", "/etc/passwd", "a/b", "..", ".", "", "a\0", "a\x1b[2J", 5, None)
    ],
    (("files", "../../../etc/passwd"), {"length": 1, "crc32": 0}),
    (("files", "/etc/passwd"), {"length": 1, "crc32": 0}),
    *[((*CHUNK, "start"), number) for number in (-1, 2**63, 10**40, 1.0, "3", True, None, float("nan"), float("inf"))],
    *[((*CHUNK, "length"), number) for number in (-1, 2**63 - 1, 10**300, 0, float("-inf"))],
    *[((*CHUNK, "crc32"), number) for number in (2**32, -1, "0")],
    *[((*CHUNK, "shape"), shape) for shape in ([2], [2, 2], [2, 3, 1], [10**12, 10**12], [-2, -3], [2.0, 3.0], "23")],
    *[((*CHUNK, "offset"), offset) for offset in ([1, 0], [0], [2**62, 0])],
    *[(("tensors", KEY, "shape"), shape) for shape in ([10**12], [4, 3], [2**62, 2**62], [], [0, 3, 2**62], [1] * 70)],
    *[(("tensors", KEY, "dtype"), name) for name in ("load", "float31", "__class__", "Tensor", "", 3, None)],
    (("tensors", KEY, "chunks"), []),
    (("tensors", KEY), {}),
    (("tensors", KEY), []),
    *[(("tensors", key), {"dtype": "bool", "shape": [], "chunks": []}) for key in ("model", "evil/x", "optimizer/a/b")],
    *[(("values", key), 1) for key in ("", "model/\ud800", "random/0")],
    *[
        (("data",), data)
        for data in (
            {"$tensor": ["load", [1], ""]},
            {"$tensor": ["float32", [2**60], "AAAA"]},
            {"$tensor": ["float32", "x", ""]},
            {"$tensor": 3},
            {"$dict": [[{"$dict": []}, 1]]},
            {"$dict": 1},
            {"$tuple": 5},
            {"$bytes": 5},
            {"$bytes": "a"},
        )
    ],
    *[(("step",), step) for step in (-1, 10**30, "1", 1.0, None, float("nan"))],
    (("groups",), 3),
    (("groups", 0, "parameters"), [["head"]]),
    (("groups", 0, "optimizer"), -1),
    (("groups", 0, "options"), []),
    (("ranks",), 5),
    (("grids",), [1]),
    (("tensors",), []),
    (("files",), None),
    (("seed",), "x"),
]


@pytest.mark.parametrize(("path", "value"), EDITS, ids=str)
def test_a_manifest_that_is_not_sound_is_corrupt(saved, path, value):
    content = content_of(saved)
    put(content, path, value)
    sealed(saved, content)
    require_corrupt(saved)
    with pytest.raises(CheckpointError):
        export_safetensors(saved, saved.parent / "x.safetensors")
    assert not (saved.parent / "x.safetensors").exists()


def test_chunks_that_cover_a_tensor_twice_or_share_bytes_are_corrupt(saved):
    content = content_of(saved)
    chunk = content["tensors"][KEY]["chunks"][0]
    content["tensors"][KEY]["chunks"] = [chunk, dict(chunk)]
    sealed(saved, content)
    require_corrupt(saved, match=r"do not cover the shape \[2, 3\] once")
    # A tensor of any size out of the same few bytes, again and again.
    content["tensors"][KEY] = {
        "dtype": "float32",
        "shape": [2000, 3],
        "chunks": [{**chunk, "offset": [at, 0], "shape": [1, 3]} for at in range(2000)],
    }
    sealed(saved, content)
    require_corrupt(saved, match="two chunks share the bytes")


TEXTS = [
    b"",
    b"null",
    b"5",
    b"[]",
    b"{}",
    b"\xff\xfe{}",
    b'{"checksum": 0, "content": ' + b"[" * 10**6,
    b'{"checksum": 0, "content": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    b'{"checksum": 0, "content": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    b'{"checksum": ' + b"9" * 10**5 + b', "content": {}}',
    b'{"checksum": NaN, "content": {}}',
    b'{"checksum": 2745614147, "content": {}, "content": {}}',
    b'{"checksum": 1, "content"',
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:40]))
def test_a_manifest_that_is_no_manifest_is_corrupt(saved, text):
    (saved / "manifest.json").write_bytes(text)
    require_corrupt(saved)


def test_data_that_nests_deeply_is_corrupt_and_not_a_recursion(saved):
    content = content_of(saved)
    content["data"] = 0
    deep = '{"$tuple":[' * 400 + "0" + "]}" * 400
    text = short(content).replace('"data":0', f'"data":{deep}')
    (saved / "manifest.json").write_text(f'{{"checksum":{zlib.crc32(text.encode())},"content":{text}}}')
    state, _ = made()
    with contextlib.suppress(CorruptCheckpointError), contextlib.closing(Checkpoints(saved.parent)) as checkpoints:
        checkpoints.load(state, step=1)


def test_links_and_things_that_are_no_files_are_corrupt(saved, tmp_path):
    outside = tmp_path / "outside"
    for path in sorted(saved.iterdir()):
        kept = path.read_bytes()
        outside.write_bytes(kept)
        kinds = (
            path.symlink_to,
            lambda _, path=path: path.symlink_to(path.name),  # a loop
            lambda _, path=path: os.mkfifo(path),
            lambda _, path=path: path.mkdir(),
        )
        for make in kinds:
            path.unlink()
            make(outside)
            require_corrupt(saved)
            path.rmdir() if path.is_dir() else path.unlink()
            path.write_bytes(kept)
    state, _ = made()
    with contextlib.closing(Checkpoints(saved.parent)) as checkpoints:
        assert checkpoints.load(state, step=1).step == 1


class Evil:
    """Writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def evil_pickles(mark):
    yield pickle.dumps(Evil(mark))
    yield pickle.dumps(Evil(mark), protocol=0)
    yield pickle.dumps({"a": [Evil(mark)]})


def test_code_in_pickles_of_a_checkpoint_never_runs(saved, tmp_path):
    """In torch's metadata, and around each tensor."""
    mark = tmp_path / "code-ran"
    content = content_of(saved)
    for data in evil_pickles(mark):
        (saved / ".metadata").write_bytes(data)
        content["files"][".metadata"] = {"length": len(data), "crc32": zlib.crc32(data)}
        for entry in content["tensors"].values():
            (chunk,) = entry["chunks"]
            repack(saved, chunk, lambda members, data=data: members | {"archive/data.pkl": data})
        sealed(saved, content)
        state, module = made(5.0)
        with contextlib.closing(Checkpoints(saved.parent)) as checkpoints:
            assert checkpoints.load(state).step == 1
        assert module.weight.unique().numel() == 1
        assert module.weight[0, 0] < 1.0
        export_safetensors(saved, tmp_path / "x.safetensors")
        assert main(["verify", str(saved)]) == 0
        assert main(["show", str(saved)]) == 0
        assert not mark.exists()


def repack(folder, chunk, change, *, compression=zipfile.ZIP_STORED):
    """Write the archive of a chunk again, in a file of its own, with other members."""
    with (folder / chunk["file"]).open("rb") as file:
        file.seek(chunk["start"])
        archive = zipfile.ZipFile(io.BytesIO(file.read(chunk["length"])))
    members = change({name: archive.read(name) for name in archive.namelist()})
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as target:
        for name, data in members.items():
            target.writestr(name, data)
    store(folder, chunk, written.getvalue())


def store(folder, chunk, data):
    name = f"own-{len(list(folder.iterdir()))}.distcp"
    (folder / name).write_bytes(data)
    chunk |= {"file": name, "start": 0, "length": len(data), "crc32": zlib.crc32(data)}


BOMB = b"\0" * 2**20
ARCHIVES = [
    (lambda members: members | {"archive/data/0": BOMB}, zipfile.ZIP_STORED),
    (lambda members: members | {"archive/data/0": BOMB}, zipfile.ZIP_DEFLATED),
    (lambda members: members, zipfile.ZIP_DEFLATED),
    (lambda members: {name: data for name, data in members.items() if name != "archive/data/0"}, zipfile.ZIP_STORED),
    (lambda members: {name: data for name, data in members.items() if name != "archive/byteorder"}, zipfile.ZIP_STORED),
    (lambda members: members | {"archive/byteorder": b"big"}, zipfile.ZIP_STORED),
    (lambda members: members | {"archive/byteorder": BOMB}, zipfile.ZIP_STORED),
    (lambda members: {}, zipfile.ZIP_STORED),
]


@pytest.mark.parametrize(("change", "compression"), ARCHIVES)
def test_an_archive_that_is_not_of_the_tensor_is_an_error(saved, change, compression):
    content = content_of(saved)
    (chunk,) = content["tensors"][KEY]["chunks"]
    repack(saved, chunk, change, compression=compression)
    chunk["length"] = max(chunk["length"], 24)
    sealed(saved, content)
    state, _ = made()
    with contextlib.closing(Checkpoints(saved.parent)) as checkpoints, pytest.raises(CorruptCheckpointError):
        checkpoints.load(state, step=1)
    with pytest.raises(CorruptCheckpointError):
        export_safetensors(saved, saved.parent / "x.safetensors")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("../../x"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


@QUICK
@pytest.mark.filterwarnings("ignore:.* in the script and .* in the checkpoint:UserWarning")
@given(choice=st.randoms(use_true_random=False), value=JSON)
def test_any_value_anywhere_in_a_manifest_is_read_or_a_typed_error(saved, choice, value):
    kept = (saved / "manifest.json").read_bytes()
    content = content_of(saved)
    put(content, choice.choice([path for path in places(content) if path]), value)
    sealed(saved, content)
    state, _ = made()
    try:
        with contextlib.closing(Checkpoints(saved.parent)) as checkpoints, contextlib.suppress(CheckpointError):
            checkpoints.load(state, step=1)
        with contextlib.suppress(CheckpointError):
            export_safetensors(saved, saved.parent / "x.safetensors")
        try:
            main(["show", str(saved)])
        except SystemExit as ended:  # of another format: the command has printed the error
            assert (ended.code, content["format"] == 1) == (2, False)
    finally:
        (saved / "manifest.json").write_bytes(kept)


def mutated(data, choice):
    """Some bytes flipped, removed, doubled, or cut off."""
    made = bytearray(data)
    for _ in range(choice.randint(1, 4)):
        at = choice.randrange(len(made) + 1)
        end = min(len(made), at + choice.randint(1, 9))
        kind = choice.randrange(4)
        made[at:end] = (
            bytes(byte ^ 1 << choice.randrange(8) for byte in made[at:end]),
            b"",
            bytes(made[at:end]) * 2,
            choice.randbytes(choice.randrange(12)),
        )[kind]
    return bytes(made[: choice.randrange(len(made) + 1)] if choice.random() < 0.1 else made)


@QUICK
@given(choice=st.randoms(use_true_random=False))
def test_mutated_bytes_of_any_file_are_a_typed_error_or_change_nothing(saved, choice):
    path = choice.choice(sorted(saved.iterdir()))
    kept = path.read_bytes()
    path.write_bytes(mutated(kept, choice))
    state, module = made(5.0)
    try:
        with contextlib.closing(Checkpoints(saved.parent)) as checkpoints:
            checkpoints.load(state, step=1)
    except CorruptCheckpointError:
        pass
    else:
        assert torch.equal(module.weight, made(1.0)[1].weight)
    finally:
        path.write_bytes(kept)


def header(text, tail=b""):
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(data)) + data + tail


def entry(**changed):
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changed


WEIGHTS = [
    b"",
    b"\xff" * 8,
    struct.pack("<Q", 2**62) + b"{}",
    header(b"{"),
    header(b"\xff\xfe{}"),
    header(b"[" * 10**6),
    header({"weight": entry(shape=[2**40, 2**40])}, b"\0" * 24),
    header({"weight": entry(data_offsets=[0, 2**60])}, b"\0" * 24),
    header({"weight": entry(data_offsets=[-1, 24])}, b"\0" * 24),
    header({"weight": entry(dtype="evil")}, b"\0" * 24),
    header({"weight": entry(), "bias": entry()}, b"\0" * 24),
    header({"weight": entry()}, b"\0" * 23),
    header({"weight": 5}),
    header(b'{"weight":{"dtype":"F32","shape":[NaN,3],"data_offsets":[0,24]}}', b"\0" * 24),
    header({}),
    header({"weight": entry()}, b"\0" * 24),
]


@pytest.mark.parametrize("data", WEIGHTS, ids=lambda data: repr(data[:60]))
def test_a_safetensors_file_that_is_none_or_lacks_names_is_an_error(tmp_path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        load_safetensors(made()[0], path)


@QUICK
@given(choice=st.randoms(use_true_random=False))
def test_a_mutated_safetensors_file_is_read_or_a_typed_error(saved, choice):
    path = saved.parent / "x.safetensors"
    export_safetensors(saved, path)
    path.write_bytes(mutated(path.read_bytes(), choice))
    with contextlib.suppress(CheckpointError):
        load_safetensors(made()[0], path)


def tiles(shape, rng):
    """A tensor cut at random into boxes, again and again."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(rng.randrange(6) if shape else 0):
        at = rng.randrange(len(boxes))
        offset, size = boxes.pop(at)
        axis = rng.randrange(len(shape))
        cut = rng.randint(0, size[axis])
        for start, extent in ((0, cut), (cut, size[axis] - cut)):
            boxes.append(
                (
                    (*offset[:axis], offset[axis] + start, *offset[axis + 1 :]),
                    (*size[:axis], extent, *size[axis + 1 :]),
                )
            )
    return boxes


@pytest.mark.parametrize("seed", range(200))
def test_boxes_cover_a_tensor_once_exactly_where_counting_says_so(seed):
    """Against a count of every element."""
    from pipegrid.checkpoint.stored.manifest import Chunk, TensorEntry
    from pipegrid.checkpoint.stored.reading import _require_tiles

    rng = random.Random(seed)
    shape = [rng.randint(1, 4) for _ in range(rng.randrange(4))]
    boxes = tiles(shape, rng)
    if seed % 2 and boxes:
        at = rng.randrange(len(boxes))
        offset, size = boxes[at]
        change = rng.randrange(3)
        boxes[at : at + 1] = [
            [],
            [boxes[at], boxes[at]],
            [(tuple(max(0, one + rng.randint(-1, 1)) for one in offset), size)],
        ][change]
    count = torch.zeros(shape, dtype=torch.int64)
    inside = True
    for offset, size in boxes:
        inside &= all(a + n <= m for a, n, m in zip(offset, size, shape, strict=True)) or 0 in size
        count[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))] += 1
    chunks = tuple(Chunk(offset, size, "a", 0, 10**6, 0) for offset, size in boxes)
    right = inside and bool((count == 1).all())
    with contextlib.nullcontext() if right else pytest.raises(CorruptCheckpointError, match="once"):
        _require_tiles("model/a/b", TensorEntry("float32", tuple(shape), chunks))
