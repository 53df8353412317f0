"""Kinds of spans: work, transfers and waits, each with its meaning and colour."""

from __future__ import annotations

COMPUTE_KINDS = ("F", "B", "I", "W")
"""Kinds that count as work; everything else on a row counts as bubble."""

TRANSFER_KINDS = (
    *("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"),
    *("OFFLOAD", "RELEASE", "RELOAD"),
)
"""Kinds that travel beside the work of a row, and are drawn beside it."""

STUCK, BEHIND = "STUCK", "BEHIND"
"""Kinds of spans in a deadlock: those that never end, and those behind them that never start."""

HATCHED = ("REDUCE", "COLLECTIVE")
"""Kinds in which a whole group takes part: hatched, so that no shade of a compute is taken for them."""

# Kind, meaning, colour; the colours are Okabe and Ito's palette, distinct for colour-blind readers (its green darkened
# for white text).
_TABLE = (
    ("F", "F forward", "#0072b2"),
    ("B", "B backward", "#d55e00"),
    ("I", "I input gradient", "#e69f00"),
    ("W", "W weight gradient", "#00805d"),
    ("REDUCE", "REDUCE gradients", "#7b4fa3"),
    ("COLLECTIVE", "COLLECTIVE", "#cc79a7"),
    ("SEND_F", "activation on its way", "#5b8fb0"),
    ("RECV_F", "activation on its way", "#5b8fb0"),
    ("SEND_B", "gradient on its way", "#c58a63"),
    ("RECV_B", "gradient on its way", "#c58a63"),
    ("UNSHARD", "UNSHARD parameters", "#b09a00"),
    ("RESHARD", "RESHARD parameters", "#b09a00"),
    ("REDUCE_GRAD", "REDUCE_GRAD over replicas", "#7b4fa3"),
    ("OFFLOAD", "OFFLOAD activations", "#3c8d80"),
    ("RELEASE", "RELEASE", "#3c8d80"),
    ("RELOAD", "RELOAD activations", "#2c6b94"),
    (STUCK, "never ends", "#b3122a"),
    (BEHIND, "never starts, behind that", "#d9a3ab"),
)
MEANING = {kind: meaning for kind, meaning, _ in _TABLE}
COLOURS = {kind: colour for kind, _, colour in _TABLE}
OTHER = "#767676"


def tint(colour: str, share: float) -> str:
    """``colour`` with ``share`` of white in it."""
    parts = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on ``colour`` (relative luminance, as WCAG defines it)."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#111111"
