"""The load-balance report for a terminal."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from dmuon.report.balance import Balance, RankLoad
from dmuon.report.words import (
    batches_text,
    bound_text,
    bytes_text,
    facts,
    measured_text,
    ms_text,
    replan_text,
    routed,
    title_text,
    top_ms,
)

__all__ = ["renderable", "text"]

WIDTH = 100  # columns
FOLD_ABOVE = 16  # ranks
SHOWN = 5  # busiest and idlest ranks, when folded
_BAR = 24
_BINS = 8
_MOST_SHAPES = 16


def text(balance: Balance) -> str:
    """Plain text, `WIDTH` columns, no colour codes."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, highlight=False, markup=False)
    console.print(renderable(balance))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


def renderable(balance: Balance) -> RenderableType:
    """The same for a `rich.console.Console`, which may add colour."""
    tables = [_histogram(balance)] if len(balance.ranks) > FOLD_ABOVE else []
    tables += [_ranks(balance), _shapes(balance), _parameters(balance)]
    return Group(_summary(balance), *(part for table in tables for part in ("", table)))


def _table(*headings: str, left: tuple[str, ...] = (), title: str | None = None) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


# ---- summary -----------------------------------------------------------------------------


def _summary(balance: Balance) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, value in _facts(balance):
        table.add_row(label, value)
    whole = Table.grid()
    whole.add_row(title_text(balance))
    whole.add_row("")
    whole.add_row(table)
    return whole


def _facts(balance: Balance) -> list[tuple[str, str]]:
    top = top_ms(balance)
    head = [
        (
            "makespan",
            f"{ms_text(balance.makespan_ms, top)} ms; mean of the ranks "
            f"{ms_text(balance.mean_ms, top)} ms, imbalance {balance.imbalance:.2%}",
        ),
        ("lower bound", bound_text(balance, top)),
    ]
    if balance.measured is None:
        return head + facts(balance)
    tail = [
        ("measured", measured_text(balance.measured, top)),
        ("verdict", replan_text(balance.measured, top)),
    ]
    return head + facts(balance) + tail


# ---- ranks -------------------------------------------------------------------------------


def _histogram(balance: Balance) -> Table:
    loads = [r.ms for r in balance.ranks]
    low, high, top = min(loads), max(loads), top_ms(balance)
    width = (high - low) / _BINS
    counts = [0] * (_BINS if width else 1)
    for ms in loads:
        counts[min(int((ms - low) / width), _BINS - 1) if width else 0] += 1
    table = _table("predicted ms", "ranks", "", left=("",), title="Load of the ranks")
    for i, count in enumerate(counts):
        bounds = (low + i * width, low + (i + 1) * width)
        bar = "█" * max(round(_BAR * count / max(counts)), min(count, 1))
        label = " - ".join(ms_text(b, top) for b in bounds) if width else ms_text(low, top)
        table.add_row(label, str(count), bar)
    return table


def _ranks(balance: Balance) -> Table:
    fold = len(balance.ranks) > FOLD_ABOVE
    measured = balance.measured
    headings = ["rank", "matrices", "predicted ms", "state", "load"]
    if measured is not None:
        headings[3:3] = ["measured ms", "ratio"]
    table = _table(*headings, left=("load",), title="Busiest and idlest ranks" if fold else "Ranks")
    by_load = sorted(balance.ranks, key=lambda r: (-r.ms, r.rank))
    shown = by_load[:SHOWN] + by_load[-SHOWN:] if fold else balance.ranks
    for i, load in enumerate(shown):
        if fold and i == SHOWN:
            more = f"{len(balance.ranks) - 2 * SHOWN} more ranks"
            table.add_row("...", *[""] * (len(headings) - 2), more)
        table.add_row(*_rank_row(balance, load))
    if fold:
        table.add_section()
        table.add_row(*_mean_row(balance))
    return table


def _rank_row(balance: Balance, load: RankLoad) -> list[str]:
    top = top_ms(balance)
    filled = round(_BAR * load.ms / (balance.makespan_ms or 1.0))
    bar = "█" * max(filled, 1 if load.ms else 0)
    row = [
        str(load.rank),
        str(load.matrices),
        ms_text(load.ms, top),
        bytes_text(load.state_bytes),
        bar,
    ]
    if balance.measured is not None:
        ratio = balance.measured.ratios[load.rank]
        row[3:3] = [
            ms_text(balance.measured.loads_ms[load.rank], top),
            "" if ratio is None else f"{ratio:.2f}",
        ]
    return row


def _mean_row(balance: Balance) -> list[str]:
    count, top = len(balance.ranks), top_ms(balance)
    row = [
        "mean",
        f"{sum(r.matrices for r in balance.ranks) / count:.1f}",
        ms_text(balance.mean_ms, top),
        bytes_text(balance.memory.mean),
        "",
    ]
    measured = balance.measured
    if measured is not None:
        ratio = "" if measured.ratio is None else f"{measured.ratio:.2f}"
        row[3:3] = [ms_text(sum(measured.loads_ms) / count, top), ratio]
    return row


# ---- shapes and parameters ---------------------------------------------------------------


def _shapes(balance: Balance) -> Table:
    priced = any(shape.single_ms is not None for shape in balance.shapes)
    headings = ["shape", "dtype", "matrices", "batch sizes", "ms each", "ms in all"]
    if priced:
        headings += ["ms alone", "prices"]
    table = _table(*headings, left=("shape", "dtype", "batch sizes", "prices"), title="Shapes")
    top = top_ms(balance)
    for shape in balance.shapes[:_MOST_SHAPES]:
        row = [
            f"{shape.rows} x {shape.cols}",
            shape.dtype,
            str(shape.count),
            batches_text(shape),
            ms_text(shape.each_ms, top),
            ms_text(shape.total_ms, top),
        ]
        if priced:
            alone = "" if shape.single_ms is None else ms_text(shape.single_ms, top)
            row += [alone, ", ".join(shape.origins)]
        table.add_row(*row)
    rest = balance.shapes[_MOST_SHAPES:]
    if rest:
        count = sum(shape.count for shape in rest)
        total = ms_text(sum(shape.total_ms for shape in rest), top)
        filler = [""] * (len(headings) - 6)
        table.add_row(f"{len(rest)} more shapes", "", str(count), "", "", total, *filler)
    return table


def _parameters(balance: Balance) -> Table:
    headings = ("updated by", "parameters", "elements", "why")
    table = _table(*headings, left=("updated by", "why"), title="Parameters")
    for row in routed(balance):
        table.add_row(row.algorithm, str(row.parameters), f"{row.elements:,}", row.why)
    return table
