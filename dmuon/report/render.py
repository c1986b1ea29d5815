"""Plain values as text: numbers and folded names, facts and tables in a terminal or on a page."""

from __future__ import annotations

import io
import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from dmuon.types import grouped, printable

WIDTH = 100  # columns
_MOST_RUNS = 8  # of numbers inside one pair of braces

Fact = tuple[str, str]  # a label and a sentence


@dataclass(frozen=True, slots=True)
class Table:
    """A heading and rows of text; ``left`` are the headings of columns that are no numbers.

    ``reasons``: so many of the last cells are alike in many rows. In a terminal rows are listed
    below them, each with its first cell, a name, last, so that it stays in one piece."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: tuple[str, ...] = ()
    reasons: int = 0


def ms_text(ms: float, top: float) -> str:
    """Milliseconds with as many decimals as a table whose largest entry is ``top`` needs.

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
    """Names that differ in their numbers alone as one pattern, with how many it stands for.

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
        # From the innermost number outwards: what is equal so far may differ in this number.
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
    """A number alone as it is, several as {0..2,7}."""
    if len(numbers) == 1:
        return str(numbers[0])
    by_run = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in by_run]
    shown = [f"{r[0]}..{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs[:_MOST_RUNS]]
    return "{" + ",".join(shown + ["..."] * (len(runs) > _MOST_RUNS)) + "}"


def render(title: str, facts: Iterable[Fact], tables: Iterable[Table]) -> RenderableType:
    """The report for a `rich.console.Console`, which may add colour."""
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
    """Rows by their last cells."""
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
    """Text of so many columns; unless ``plain``, as many as a terminal has, and in its colours."""
    here = None if not plain and sys.stdout.isatty() else width
    out = Console(width=here, highlight=False, markup=False, color_system=None if plain else "auto")
    with out.capture() as capture:
        out.print(*shown, sep="\n", crop=False)
    return "\n".join(map(str.rstrip, capture.get().rstrip().splitlines()))


def page(shown: RenderableType) -> str:
    """The same as a web page without scripts, fonts or network."""
    out = Console(width=WIDTH, record=True, file=io.StringIO(), highlight=False, markup=False)
    out.print(shown, crop=False)
    return out.export_html(inline_styles=True)


def grid(headings: Iterable[str], left: Collection[str], **columns: Any) -> RichTable:
    """A table without rows; ``left`` are the headings of columns that are no numbers."""
    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        made.add_column(heading, justify="left" if heading in left else "right", **columns)
    return made
