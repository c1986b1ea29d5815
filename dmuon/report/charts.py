"""Charts of the report with an axis, as SVG text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dmuon.report import svg as draw

__all__ = ["Bar", "Block", "Mark", "grouped_bars", "stacked_bars", "step_chart"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 62.0, 16.0, 26.0, 40.0
_PLOT_HEIGHT = 230.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A horizontal line across a chart, such as the lower bound. ``css`` gives its stroke."""

    value: float
    label: str
    css: str


Block = tuple[float, str, str]  # height, colour, tooltip


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of blocks, from the bottom up; ``dot`` marks another value on it."""

    label: str
    parts: tuple[Block, ...]
    dot: float | None = None
    dot_title: str = ""


class _Frame:
    """Axis, grid and scale of a chart of values from 0 to ``top``."""

    def __init__(self, top: float, unit: str) -> None:
        self.top = top * 1.04 or 1.0
        self.unit = unit
        self.left, self.right = _LEFT, draw.WIDTH - _RIGHT
        self.upper, self.lower = _TOP, _TOP + _PLOT_HEIGHT
        self.height = self.lower + _BOTTOM

    def y(self, value: float) -> float:
        return self.lower - _PLOT_HEIGHT * value / self.top

    def axis(self) -> list[str]:
        parts = [draw.text(4, 14, self.unit, "dim")]
        for tick in draw.axis_ticks(self.top):
            y = self.y(tick)
            parts.append(draw.line(self.left, y, self.right, y, "grid"))
            parts.append(draw.text(self.left - 8, y + 4, f"{tick:g}", "dim", "end"))
        return parts

    def marks(self, marks: Sequence[Mark]) -> list[str]:
        """Lines with their labels above the plot, so that they never cover each other."""
        parts = []
        for i, mark in enumerate(marks):
            y, x = self.y(mark.value), self.left + 90 + 250 * i
            parts.append(draw.line(self.left, y, self.right, y, mark.css))
            parts.append(draw.line(x, 10, x + 26, 10, mark.css))
            parts.append(draw.text(x + 32, 14, mark.label, "dim"))
        return parts


def stacked_bars(
    bars: Sequence[Bar], marks: Sequence[Mark], *, unit: str, axis: str, label: str
) -> str:
    """A vertical bar for each entry, its parts stacked."""
    heights = [sum(part[0] for part in bar.parts) for bar in bars]
    dots = [bar.dot for bar in bars if bar.dot is not None]
    frame = _Frame(max([*heights, *dots, *(m.value for m in marks)], default=0.0), unit)
    pitch = (frame.right - frame.left) / max(len(bars), 1)
    width = min(0.72 * pitch, 70.0)
    every = max(1, math.ceil(24 / pitch))
    parts = frame.axis()
    for i, bar in enumerate(bars):
        middle = frame.left + (i + 0.5) * pitch
        base = 0.0
        for value, colour, title in bar.parts:
            y, x = frame.y(base + value), middle - width / 2
            # A hair apart, so that two batches of one shape are seen as two.
            tall = max(frame.y(base) - y - (0.8 if base else 0.0), 0.2)
            parts.append(draw.rect(x, y, width, tall, colour, title))
            base += value
        if bar.dot is not None:
            parts.append(_diamond(middle, frame.y(bar.dot), bar.dot_title))
        if i % every == 0:
            parts.append(draw.text(middle, frame.lower + 16, bar.label, "dim", "middle"))
    parts += frame.marks(marks)
    parts.append(draw.text(draw.WIDTH / 2, frame.height - 4, axis, "dim", "middle"))
    return draw.picture(frame.height, label, parts)


def _diamond(x: float, y: float, title: str) -> str:
    shape = f"M{draw.number(x - 6)} {draw.number(y)}l6 -6l6 6l-6 6z"
    return f'<path d="{shape}" class="dot"><title>{escape(title)}</title></path>'


def step_chart(
    values: Sequence[float],
    marks: Sequence[Mark],
    *,
    unit: str,
    axis: str,
    label: str,
    line: Sequence[float] = (),
) -> str:
    """A step area over many entries, with an optional second curve as a line."""
    frame = _Frame(max([*values, *line, *(m.value for m in marks)], default=0.0), unit)
    pitch = (frame.right - frame.left) / max(len(values), 1)
    parts = frame.axis()
    area = _steps(values, frame, pitch)
    left, floor = draw.number(frame.left), draw.number(frame.lower)
    parts.append(f'<path d="M{left} {floor}{area}V{floor}z" fill="{draw.CATEGORIES[0]}"/>')
    if line:
        curve = _steps(line, frame, pitch)
        start = f"M{left} {draw.number(frame.y(line[0]))}"
        parts.append(f'<path d="{start}{curve}" class="measured"/>')
    for tick in draw.axis_ticks(float(len(values)), 8):
        x = frame.left + tick * pitch
        parts.append(draw.text(x, frame.lower + 16, f"{tick:g}", "dim", "middle"))
    parts += frame.marks(marks)
    parts.append(draw.text(draw.WIDTH / 2, frame.height - 4, axis, "dim", "middle"))
    return draw.picture(frame.height, label, parts)


def _steps(values: Sequence[float], frame: _Frame, pitch: float) -> str:
    """Path commands along the tops, one step for each run of equal values."""
    commands = []
    last = None
    for i, value in enumerate(values):
        y = draw.number(frame.y(value))
        if y != last:
            commands.append(f"V{y}")
            last = y
        if i + 1 == len(values) or draw.number(frame.y(values[i + 1])) != y:
            commands.append(f"H{draw.number(frame.left + (i + 1) * pitch)}")
    return "".join(commands)


def grouped_bars(groups: Sequence[tuple[str, Sequence[tuple[float, str]]]], *, label: str) -> str:
    """Horizontal bars in groups, each with its number at the end: (title, [(value, colour)])."""
    top = max((value for _, bars in groups for value, _ in bars), default=0.0) or 1.0
    left, thick, gap = 250.0, 16.0, 14.0
    scale = (draw.WIDTH - left - 70) / top
    parts, y = [], 4.0
    for title, bars in groups:
        parts.append(draw.text(left - 12, y + len(bars) * thick / 2 + 4, title, "", "end"))
        for value, colour in bars:
            parts.append(draw.rect(left, y, max(value * scale, 1.0), thick - 3, colour))
            parts.append(draw.text(left + value * scale + 8, y + thick - 6, f"{value:.3g}", "dim"))
            y += thick
        y += gap
    return draw.picture(y, label, parts)
