"""One colour per kind of action, the same in every picture."""

from __future__ import annotations

# Okabe and Ito's palette, which colour-blind people can tell apart (its green darkened for white text).
COLOURS = {
    "F": "#0072b2",
    "B": "#d55e00",
    "I": "#e69f00",
    "W": "#00805d",
    "REDUCE": "#7b4fa3",
    "COLLECTIVE": "#cc79a7",
    "SEND_F": "#5b8fb0",
    "RECV_F": "#5b8fb0",
    "SEND_B": "#c58a63",
    "RECV_B": "#c58a63",
}
OTHER = "#767676"


def tint(colour: str, share: float) -> str:
    """``colour`` with ``share`` of white in it: later stages of a row are lighter."""
    parts = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on ``colour`` (relative luminance, as WCAG defines it)."""
    channels = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#111111"
