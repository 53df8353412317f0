"""JSON whose objects have each key once. Two writers who differ must not be read as one of them."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str) -> Any:
    """The document in ``text``.

    Raises:
        ValueError: it is not JSON, or an object has a key twice.
        RecursionError: it nests too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"an object has the key {key!r:.80} twice")
        found[key] = value
    return found
