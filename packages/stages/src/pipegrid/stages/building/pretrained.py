"""Weights that ``from_pretrained`` loads while a function makes a model: of the files, own tensors alone are read.

transformers opens files with `safetensors.safe_open`, by a name in its module, takes slices of all tensors, and reads
each when its parameter is made. Here that name is replaced while the function runs, and `runs` says what a slice
gives: a tensor on the meta device in the first run; in the second the values, or memory that all tensors of other
stages share.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from typing import Any, Self

from torch import Tensor, nn

from pipegrid.stages.errors import CutError, few
from pipegrid.stages.safetensors_files import Stored, stored_in
from pipegrid.stages.transformers_compat import require_names

_MODULE, _OPEN = "transformers.modeling_utils", "safe_open"
_IN_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"  # transformers then reads tensors in the thread that makes the model


def loads() -> bool:
    """Whether transformers is imported."""
    return "transformers" in sys.modules


@contextmanager
def files_read_by(source: Callable[[Stored], Tensor], hidden: Collection[Stored] = ()) -> Iterator[None]:
    """Give what transformers reads from files by ``source``; tensors in ``hidden`` are not in their files."""
    if loads():
        importlib.import_module(_MODULE)  # itself imported on use
    module = sys.modules.get(_MODULE)
    original: Any = getattr(module, _OPEN, None)
    before = os.environ.get(_IN_THREADS)

    def opened(path: str | os.PathLike[str], *options: Any, **named: Any) -> _File:
        stored = stored_in(path)
        left_out = {name for name, one in stored.items() if one in hidden}
        return _File(original(path, *options, **named), stored, source, left_out)

    os.environ[_IN_THREADS] = "1"
    try:
        if original is not None:
            setattr(module, _OPEN, opened)
        yield
    finally:
        if original is not None:
            setattr(module, _OPEN, original)
        if before is None:
            del os.environ[_IN_THREADS]
        else:
            os.environ[_IN_THREADS] = before


class _File:
    """A file opened by `safetensors.safe_open`, whose tensors ``source`` gives."""

    def __init__(
        self, file: Any, stored: Mapping[str, Stored], source: Callable[[Stored], Tensor], hidden: set[str]
    ) -> None:
        self._file, self._stored, self._source, self._hidden = file, stored, source, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.__exit__(*raised)

    def keys(self) -> list[str]:
        return [name for name in self._file.keys() if name not in self._hidden]  # noqa: SIM118 -- no mapping

    def get_slice(self, name: str) -> Any:
        found = self._file.get_slice(name)
        stored = self._stored.get(name)
        return found if stored is None else _TensorSlice(found, partial(self._source, stored))

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.get_slice(name)[...]
        return tensor


class _TensorSlice:
    """The result of `get_slice`: shape and dtype of a tensor, and its values where they are asked for."""

    def __init__(self, found: Any, values: Callable[[], Tensor]) -> None:
        self._found, self._values = found, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self._values() if index is Ellipsis else self._values()[index]


def stored_twice(model: nn.Module, origin: Callable[[nn.Parameter], Collection[Stored]]) -> set[Stored]:
    """The tensors in files that a model has tied to others with the same values in the files.

    transformers ties them when it has compared values, which it does not have on the meta device. ``origin`` gives what
    of files a parameter is made of. Raises CutError where the config ties two parameters whose values in the files
    differ; or this transformers has other names than those by which its files and ties are found.
    """
    found = set()
    library = sys.modules.get(_MODULE)
    for module in model.modules():
        if library is not None and isinstance(module, library.PreTrainedModel):
            require_names(library, _OPEN)
            require_names(module, "all_tied_weights_keys")
        pairs = getattr(module, "all_tied_weights_keys", None) or {}
        parameters = dict(module.named_parameters(remove_duplicate=False)) if pairs else {}
        for target, source in pairs.items():
            one, two = parameters.get(target), parameters.get(source)
            if one is None or two is None or one is two:
                continue
            first, second = origin(one), origin(two)
            if not (len(first) == len(second) == 1):
                continue
            (copy,), (kept,) = first, second
            if not copy.equals(kept):
                raise CutError(
                    f"the config of {type(module).__name__} ties {target} to {source}, and the files have both, with "
                    f"different values ({copy.path.name}, {kept.path.name}); pass tie_word_embeddings=False to "
                    "from_pretrained"
                )
            found.add(copy)
    return found


def misfits(error: BaseException) -> str:
    """The parameters that ``from_pretrained`` has refused, with both shapes; its own error does not name them."""
    for frame, _ in walk_tb(error.__traceback__):
        found = getattr(frame.f_locals.get("loading_info"), "mismatched_keys", None)
        if found:
            listed = [
                f"{name} is {list(there)} in the files and {list(here)} in the model"
                for name, there, here in sorted(found)
            ]
            return "; ".join(few(listed))
    return ""
