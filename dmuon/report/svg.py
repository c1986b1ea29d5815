"""What the pictures of the report are made of: SVG text, no library, no script.

Lengths are in the units of a view box that is `WIDTH` wide. Colours of text and lines are CSS
variables of the page, so that the pictures follow its light or dark theme; colours that carry a
value are fixed and readable on both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

__all__ = [
    "CATEGORIES",
    "FIXED",
    "OTHER",
    "WIDTH",
    "axis_ticks",
    "ink_on",
    "legend_ramp",
    "line",
    "number",
    "picture",
    "ramp",
    "rect",
    "text",
]

WIDTH = 1000.0

# Distinct also for colour-blind eyes (after Okabe and Ito), on white and on dark grey.
CATEGORIES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6bb1")
OTHER = "#a3a9b1"
FIXED = "#6b727c"

# Nine samples of the viridis colour map: lightness grows evenly along it.
_RAMP = (
    (68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140),
    (40, 174, 128), (94, 201, 98), (173, 220, 48), (253, 231, 37),
)  # fmt: skip


def ramp(share: float) -> str:
    """A colour of the perceptual ramp, dark at 0 and bright at 1.

    >>> ramp(0.0), ramp(1.0)
    ('#440154', '#fde725')
    """
    place = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(place), len(_RAMP) - 2)
    mixed = (a + (b - a) * (place - low) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True))
    return "#" + "".join(f"{round(c):02x}" for c in mixed)


def ink_on(colour: str) -> str:
    """The class of text that reads well on ``colour``: black or white."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"


def axis_ticks(top: float, about: int = 5) -> list[float]:
    """Round numbers from 0 up to ``top``.

    >>> axis_ticks(2.6)
    [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    """
    if top <= 0:
        return [0.0]
    raw = top / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= 0.75 * raw)
    return [round(i * step, 12) for i in range(int(top / step * (1 + 1e-9)) + 1)]


def number(value: float) -> str:
    """A coordinate with at most two decimals: the file is mostly made of these.

    >>> number(3.0), number(2.345)
    ('3', '2.35')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def rect(x: float, y: float, w: float, h: float, fill: str, title: str = "") -> str:
    """A filled rectangle, with a tooltip if there is a title."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}"'
    shape = f'<rect {place} fill="{fill}"'
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def text(x: float, y: float, words: str, css: str = "", anchor: str = "start") -> str:
    """A line of text; ``css`` is a class of the page's style."""
    style = f' class="{css}"' if css else ""
    place = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"'
    return f"<text {place}{style}>{escape(words)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """A straight line with the stroke of a class of the page's style."""
    return f'<path d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}" class="{css}"/>'


def picture(height: float, label: str, parts: Iterable[str], width: float = WIDTH) -> str:
    """The whole picture; ``label`` is what a screen reader says."""
    box = f'viewBox="0 0 {number(width)} {number(height)}"'
    named = f'role="img" aria-label="{escape(label)}"'
    return f"<svg {box} {named}>{''.join(parts)}</svg>"


def legend_ramp(low: str, high: str) -> str:
    """The ramp from left to right, its ends labelled."""
    steps = 48
    parts = [text(0, 14, low, "dim")]
    start, width = 14.0 + 7.0 * len(low), 320.0
    for i in range(steps):
        x = start + i * width / steps
        parts.append(rect(x, 3, width / steps + 0.5, 14, ramp(i / (steps - 1))))
    parts.append(text(start + width + 10, 14, high, "dim"))
    return picture(22, f"colours from {low} to {high}", parts)
