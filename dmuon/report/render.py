"""Plain values as text: numbers and folded names, facts and tables in a terminal or on a page.

A page uses no script, font or network. In its pictures, inline SVG, horizontal positions are
percentages and all other sizes pixels, so that text has one size on a phone and on a wide screen.
"""

from __future__ import annotations

import html
import math
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from dmuon.types import grouped, printable

WIDTH = 100  # columns
_MOST_RUNS = 8  # runs of numbers inside one pair of braces

Fact = tuple[str, str]  # a label and a sentence


@dataclass(frozen=True, slots=True)
class Table:
    """A heading and rows of text; ``left`` are the headings of columns without numbers.

    ``reasons`` is the number of last cells that many rows share. In a terminal, rows are listed
    below these cells, and a row's first cell, a name, comes last, so that it stays in one piece."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: tuple[str, ...] = ()
    reasons: int = 0


def ms_text(ms: float, top: float) -> str:
    """Format milliseconds with as many decimals as a table whose largest entry is ``top`` needs.

    >>> ms_text(12.3456, 20.0), ms_text(0.0012345, 0.02)
    ('12.346', '0.00123')
    """
    decimals = 3 if top >= 0.1 or top <= 0 else min(6, 2 - math.floor(math.log10(top)) + 1)
    return f"{ms:.{decimals}f}"


def percent(part: float, form: str = ".2%") -> str:
    """
    >>> percent(-1e-9), percent(0.25, "+.0%"), percent(-1e-9, "+.1%")
    ('0.00%', '+25%', '0.0%')
    """
    text = format(part, form)
    return text.lstrip("+-") if not float(text[:-1]) else text


def quantity(number: float) -> str:
    """
    >>> quantity(7_615_616_512), quantity(12)
    ('7.62 B', '12')
    """
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def bytes_text(count: float) -> str:
    """
    >>> bytes_text(5), bytes_text(3 << 20)
    ('5 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def count_text(number: int, noun: str, plural: str = "") -> str:
    """
    >>> count_text(1, "rank"), count_text(24534, "matrix", "matrices")
    ('1 rank', '24,534 matrices')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def fold_names(names: Iterable[str]) -> list[tuple[str, int]]:
    """Fold names that differ only in their numbers into patterns, each with its number of names.

    >>> fold_names(["a.0.w", "a.1.w", "a.3.w", "b.w"])
    [('a.{0,1,3}.w', 3), ('b.w', 1)]
    >>> fold_names(f"h.{i}.e.{j}" for i in range(4) for j in range(8))
    [('h.{0..3}.e.{0..7}', 32)]
    """
    alike: defaultdict[tuple[str, ...], dict[tuple[str, ...], int]] = defaultdict(dict)
    for name in names:
        parts = tuple(name.split("."))
        alike[tuple("#" if part.isdecimal() else part for part in parts)][parts] = 1
    folded = []
    for shape, count in alike.items():
        # From the innermost number outwards: join names that differ in this number only.
        for at in reversed([i for i, part in enumerate(shape) if part == "#"]):
            equal: defaultdict[tuple[tuple[str, ...], int], list[int]] = defaultdict(list)
            for parts, each in count.items():
                equal[(*parts[:at], "", *parts[at + 1 :]), each].append(int(parts[at]))
            count = {
                (*parts[:at], _braces(numbers), *parts[at + 1 :]): each * len(numbers)
                for (parts, each), numbers in equal.items()
            }
        folded += [(".".join(parts), number) for parts, number in count.items()]
    return folded


def _braces(numbers: Sequence[int]) -> str:
    """Write a single number as it is, several as {0..2,7}."""
    if len(numbers) == 1:
        return str(numbers[0])
    by_run = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in by_run]
    shown = [f"{r[0]}..{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs[:_MOST_RUNS]]
    return "{" + ",".join(shown + ["..."] * (len(runs) > _MOST_RUNS)) + "}"


def render(title: str, facts: Iterable[Fact], tables: Iterable[Table]) -> RenderableType:
    """Return the report for a `rich.console.Console`, which may add colour."""
    listed = RichTable.grid(padding=(0, 2))
    listed.add_column(style="bold", no_wrap=True)
    listed.add_column()
    for label, sentence in facts:
        listed.add_row(label, Text(printable(sentence)))  # brackets in names are no markup
    parts: list[RenderableType] = [title, "", listed]
    for table in tables:
        table = replace(table, rows=[[*map(printable, row)] for row in table.rows])
        parts += ["", (_rich_list if table.reasons else _rich_table)(table)]
    return Group(*parts)


def _rich_list(table: Table) -> Text:
    """List rows by their last cells."""
    end = -table.reasons
    below = grouped((": ".join(filter(None, row[end:])), row[:end]) for row in table.rows)
    columns = list(zip(*(row[1:] for rows in below.values() for row in rows), strict=True))
    widths = [max(map(len, column)) for column in columns]
    found = Text(no_wrap=True, overflow="ignore").append(table.title, "bold")
    for reason, rows in below.items():
        found.append(f"\n{reason}", "dim")
        for name, *cells in rows:
            first, *others = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            found.append("  ".join(["\n ", first.strip().rjust(widths[0]), *others, name]))
    return found


def _rich_table(table: Table) -> RichTable:
    made = grid(table.headings, table.left, overflow="fold")
    made.columns[0].no_wrap = True
    made.show_edge, made.collapse_padding, made.header_style = False, True, ""
    made.title, made.title_justify, made.title_style = table.title, "left", "bold"
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made


def printed(*shown: RenderableType, width: int = WIDTH, plain: bool = True) -> str:
    """Return text of so many columns; unless ``plain``, in a terminal's width and colours."""
    here = None if not plain and sys.stdout.isatty() else width
    how: dict[str, Any] = {"color_system": None if plain else "auto"}
    out = Console(width=here, highlight=False, markup=False, emoji=False, **how)
    with out.capture() as capture:
        out.print(*shown, sep="\n", crop=False)
    return "\n".join(map(str.rstrip, capture.get().rstrip().splitlines()))


def grid(headings: Iterable[str], left: Collection[str], **columns: Any) -> RichTable:
    """Return a table without rows; ``left`` are the headings of columns without numbers."""
    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right", **columns)
    return made


# ---- a page for a browser ---------------------------------------------------------------------

MOST_SHOWN = 64  # ranks, or rows of matrices, that are drawn one by one
MOST_BESIDE = 16  # matrices that share a cell
COLOURS = 8  # classes c0, c1, ... of the style sheet; "rest" is grey
_ROW = 18  # pixels from bar to bar
_LEFT, _RIGHT = 24.0, 84.0  # percent of the width: bars lie between, names and numbers beside

_DOT = re.compile(r"\.(?![^{]*\})")  # outside of braces
_STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def _escape(text: str) -> str:
    return html.escape(printable(text))


# A name, a title, its parts (CSS class, size, words), a stroke's place if any, and a remark.
Bar = tuple[str, str, Sequence[tuple[str, float, str]], float | None, str]


def picture(
    colours: Iterable[Fact], bars: Sequence[Bar], unit: str, bound: float | None = None
) -> str:
    """Draw bars from 0 on, over an axis in this ``unit``; the bound is a vertical line. ``colours``
    are CSS classes and what they mean."""
    ends = [sum(size for _, size, _ in bar[2]) for bar in bars]
    top = max([bound or 0.0, *ends, *(bar[3] for bar in bars if bar[3] is not None)]) or 1.0
    height, per_unit = len(bars) * _ROW, (_RIGHT - _LEFT) / top
    # A scale from 0 on, with a few round numbers.
    step = 10.0 ** math.floor(math.log10(top))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if top / s < 6)
    drawn = []
    for i in range(int(top / step * (1 + 1e-9)) + 1):
        x = _LEFT + i * step * per_unit
        grid = f'class="grid" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{height}"'
        drawn += [f"<line {grid}/>", _text(x, height + 14, f"{i * step:g}", "dim", "middle")]
    drawn.append(_text(100, height + 14, unit, "dim", "end"))
    for i, (name, title, parts, stroke, remark) in enumerate(bars):
        y, at = i * _ROW, _LEFT
        drawn.append(f"<g><title>{_escape(title)}</title>" + _text(0, y + 13, name, "dim"))
        for css, size, words in parts:
            width = size * per_unit
            drawn.append(_rect(at, y + 3, width, _ROW - 6, f'class="{css}"'))
            if words and width > 1.5:
                number = "number" if width > 5 else "number dense"
                drawn.append(_text(at + width / 2, y + 13, words, number, "middle"))
            at += width
        if stroke is not None:
            x = _LEFT + stroke * per_unit
            drawn.append(_rect(x - 0.25, y + 1, 0.5, _ROW - 2, 'class="measured"'))
        drawn.append(_text(100, y + 13, remark, "", "end") + "</g>")
    if bound is not None:
        x = _LEFT + bound * per_unit
        drawn.append(f'<line class="line" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{height}"/>')
    named = (f'<span><i class="{css}"></i>{_escape(words)}</span>' for css, words in colours)
    picture = f'<svg role="img" height="{height + 20}">{"".join(drawn)}</svg>'
    return f"<p class='legend dim'>{''.join(named)}</p>{picture}"


def _rect(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:.2f}%" y="{y}" width="{width:.2f}%" height="{height}" {look}/>'


def _text(x: float, y: float, words: str, css: str, anchor: str = "start") -> str:
    look = f'class="{css}" text-anchor="{anchor}"'
    return f'<text x="{x:.2f}%" y="{y}" {look}>{_escape(words)}</text>'


def page(
    title: str,
    tiles: Iterable[Fact],
    facts: Iterable[Fact],
    pictures: Iterable[tuple[str, str, str]],
    tables: Iterable[Table],
) -> str:
    """Make the page; ``pictures`` are (heading, SVG, caption). All but the SVG is escaped here."""
    head = "".join(f"<p class='dim'>{_escape(line)}</p>" for line in title.splitlines())
    parts = [f"<h1>Load balance</h1>{head}<div class='tiles'>"]
    for label, value in tiles:
        cell = f"<b>{_escape(value)}</b><span>{_escape(label)}</span>"
        parts.append(f'<div class="tile">{cell}</div>')
    parts.append("</div>")
    for heading, picture, caption in pictures:
        figure = f"<figure>{picture}<figcaption>{_escape(caption)}</figcaption></figure>"
        parts.append(f"<section><h2>{_escape(heading)}</h2>{figure}</section>")
    listed = "".join(f"<dt>{_escape(k)}</dt><dd>{_escape(v)}</dd>" for k, v in facts)
    parts.append(f"<section><h2>Plan</h2><dl>{listed}</dl></section>")
    body = "\n".join([*parts, *map(_table, tables)])
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escape(title.splitlines()[0])}</title><style>\n{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _table(table: Table) -> str:
    """Make a table. A narrow screen shows rows of tables with words as lists: heading, value."""
    css = ["name" if h in table.left else "n" for h in table.headings]

    def line(cells: Sequence[str]) -> str:
        if not any(cells[1:]):
            return f'<tr><td colspan="{len(cells)}">{_escape(cells[0])}</td></tr>'
        made = ""
        for c, heading, cell in zip(css, table.headings, map(_escape, cells), strict=True):
            # A long name may be broken after a dot.
            shown = _DOT.sub(".<wbr/>", cell) if c == "name" else cell
            made += f'<td class="{c}" data-of="{heading}">{shown}</td>'
        return f"<tr>{made}</tr>"

    head = "".join(f'<th class="{c}">{_escape(h)}</th>' for c, h in zip(css, table.headings))
    body = "".join(map(line, table.rows))
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    css_of = "scroll lists" if table.left else "scroll"
    return f'<section><h2>{_escape(table.title)}</h2><div class="{css_of}">{whole}</div></section>'
