"""One self-contained page of plain values: no script, no font, no network, two pictures.

Pictures are inline SVG in which horizontal places are percentages and everything else is pixels, so
that text has one size on a phone and on a wide screen. Nothing here knows of plans; `data` says
what there is to show.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from dmuon.report.text import Fact, Table
from dmuon.types import printable

MOST_SHOWN = 64  # ranks that are drawn one by one; of more, several together
_LINE = 16  # slots side by side
_ROW = 18  # pixels from bar to bar
_SQUARE = 30  # pixels from slot to slot, downwards
_LEFT, _RIGHT = 20.0, 82.0  # percent of the width: bars lie between, names and numbers beside
_NODE = 19.0  # percent of the width that the names of nodes take

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2128; --dim: #59636e; --line: #d5dae0;
  --panel: #f2f5f8; --good: #1a7f37; --warn: #9a6700; --less: #6ea8d8; --more: #d9722e; }
@media (prefers-color-scheme: dark) { :root { --bg: #14181d; --fg: #e4e8ed; --dim: #9aa5b1;
  --line: #363d46; --panel: #1d232a; --good: #56d364; --warn: #e3b341; } }
body { background: var(--bg); color: var(--fg); max-width: 1060px; margin: 1.2rem auto;
  padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 1.8rem 0 .5rem; }
p { margin: .3rem 0; } p.dim, figcaption { color: var(--dim); font-size: .9rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: .6rem;
  margin: 1rem 0; }
.tile { background: var(--panel); border-radius: 8px; padding: .5rem .8rem; }
.tile b { display: block; font-size: 1.25rem; } .tile span { color: var(--dim); font-size: .85rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin: 0; }
dt { color: var(--dim); } dd { margin: 0; }
@media (max-width: 600px) { dl { display: block; } dd { margin-bottom: .5rem; } }
.verdict { border-left: 4px solid var(--good); background: var(--panel); padding: .5rem .8rem; }
.verdict.warn { border-color: var(--warn); }
figure { margin: 0; } svg { display: block; width: 100%; }
svg text { fill: var(--fg); font: 12px system-ui, sans-serif; } svg .dim { fill: var(--dim); }
svg .black { fill: #000; } svg .white { fill: #fff; } svg .line { stroke: var(--dim); }
svg .less { fill: var(--less); } svg .more { fill: var(--more); } svg .measured { fill: var(--fg); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; }
th { text-align: left; color: var(--dim); font-weight: 500; vertical-align: bottom; }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); }
td { vertical-align: top; } th.n, td.n { text-align: right; white-space: nowrap; }
td.name { min-width: 9rem; overflow-wrap: normal; }
"""


def _escape(text: str) -> str:
    return html.escape(printable(text))


# The name and title of a rank; how far its load lies from the bound, as a fraction, None if it is
# idle; and the same of what was measured, drawn as a short stroke.
Bar = tuple[str, str, float | None, float | None]


def loads_picture(bars: Sequence[Bar]) -> str:
    """The bars below each other; the bound is a vertical line.

    The scale is that of the deviations, so that small ones can be seen."""
    known = [value for bar in bars for value in bar[2:] if value is not None]
    low, high = min([0.0, *known]), max([0.0, *known])
    per_unit = (_RIGHT - _LEFT) / ((high - low) or 1.0)
    zero, height = _LEFT - low * per_unit, len(bars) * _ROW
    parts = []
    for i, (name, title, deviation, measured) in enumerate(bars):
        y = i * _ROW
        parts.append(f"<g><title>{_escape(title)}</title>" + _text(0, y + 13, name, "dim"))
        if deviation is not None:
            left, css = zero + min(deviation, 0.0) * per_unit, "more" if deviation > 0 else "less"
            parts.append(_rect(left, y + 3, abs(deviation) * per_unit, _ROW - 6, f'class="{css}"'))
        if measured is not None:
            at = zero + measured * per_unit
            parts.append(_rect(at - 0.25, y + 1, 0.5, _ROW - 2, 'class="measured"'))
        number = "idle" if deviation is None else f"{deviation:+.2%}"
        parts.append(_text(100, y + 13, number, "", "end") + "</g>")
    line = f'<line class="line" x1="{zero:.2f}%" x2="{zero:.2f}%" y1="0" y2="{height}"/>'
    return _picture(height, "load of each rank as deviation from the bound", [*parts, line])


def mesh_picture(slots: Sequence[Sequence[int]], loads_ms: Sequence[float]) -> tuple[str, str]:
    """The mesh as a grid of slots, coloured from the least load to the largest, and its caption.

    ``slots`` holds the ranks of each node. A mesh of more than `MOST_SHOWN` slots is folded: a
    square is the busiest of several ranks."""
    columns, is_folded = max(map(len, slots)), len(loads_ms) > MOST_SHOWN
    wide = max(1, -(-columns // 8)) if is_folded else 1  # columns in a square
    squares_in_row = -(-columns // wide)
    # Nodes in a square.
    tall = -(-len(slots) // max(1, MOST_SHOWN // squares_in_row)) if is_folded else 1
    low, high = min(loads_ms), max(loads_ms)
    row_height = -(-squares_in_row // _LINE) * _SQUARE
    pitch = (100 - _NODE) / min(squares_in_row, _LINE)
    parts, top = [], 0
    for first in range(0, len(slots), tall):
        nodes = slots[first : first + tall]
        last = first + len(nodes) - 1
        parts.append(_text(0, top + 19, f"node {first}" + f"-{last}" * (last > first), "dim"))
        for square in range(squares_in_row):
            ranks = [r for node in nodes for r in node[square * wide : (square + 1) * wide]]
            if not ranks:
                continue
            load = max(loads_ms[r] for r in ranks)
            share = (load - low) / (high - low) if high > low else 0.0
            x, y = _NODE + square % _LINE * pitch, top + square // _LINE * _SQUARE
            name = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks from {ranks[0]}"
            parts.append(f"<g><title>{name}: {load:.6g} ms</title>")
            parts.append(_rect(x, y, pitch * 0.94, _SQUARE - 2, f'fill="{_colour(share)}"'))
            if len(ranks) == 1:
                ink = "white" if share > 0.5 else "black"
                parts.append(_text(x + pitch * 0.47, y + 19, str(ranks[0]), ink, "middle"))
            parts.append("</g>")
        top += row_height
    y = top + 6
    for step in range(11):  # the legend
        at = _NODE + step * (100 - _NODE) / 11
        parts.append(_rect(at, y, (100 - _NODE) / 11 + 0.2, 8, f'fill="{_colour(step / 10)}"'))
    parts.append(_text(_NODE, y + 22, f"least {low:.4g} ms", "dim"))
    parts.append(_text(100, y + 22, f"largest {high:.4g} ms", "dim", "end"))
    folded = f" A square is the busiest of up to {tall * wide} ranks." if tall * wide > 1 else ""
    caption = f"Predicted load by place; a row is {'some nodes' if tall > 1 else 'a node'}.{folded}"
    return _picture(y + 28, "load of each slot of the mesh", parts), caption


def _colour(share: float) -> str:
    """From pale to dark blue."""
    pale, dark = (222, 235, 247), (8, 48, 107)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(pale, dark))


def _rect(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:.2f}%" y="{y}" width="{width:.2f}%" height="{height}" {look}/>'


def _text(x: float, y: float, words: str, css: str, anchor: str = "start") -> str:
    look = f'class="{css}" text-anchor="{anchor}"'
    return f'<text x="{x:.2f}%" y="{y}" {look}>{_escape(words)}</text>'


def _picture(height: float, label: str, parts: Iterable[str]) -> str:
    return f'<svg role="img" aria-label="{label}" height="{height}">{"".join(parts)}</svg>'


def page(
    title: str,
    tiles: Iterable[Fact],
    facts: Iterable[Fact],
    verdict: tuple[str, bool] | None,
    pictures: Iterable[tuple[str, str, str]],
    tables: Iterable[Table],
) -> str:
    """The whole page. ``verdict`` is a sentence and whether it is a warning; ``pictures`` are
    (heading, SVG, caption). All but the SVG is escaped here."""
    parts = [f"<h1>Load balance</h1><p class='dim'>{_escape(title)}</p><div class='tiles'>"]
    for label, value in tiles:
        cell = f"<b>{_escape(value)}</b><span>{_escape(label)}</span>"
        parts.append(f'<div class="tile">{cell}</div>')
    parts.append("</div>")
    if verdict is not None:
        parts.append(f'<p class="verdict{" warn" * verdict[1]}">{_escape(verdict[0])}</p>')
    for heading, picture, caption in pictures:
        figure = f"<figure>{picture}<figcaption>{_escape(caption)}</figcaption></figure>"
        parts.append(f"<section><h2>{_escape(heading)}</h2>{figure}</section>")
    listed = "".join(f"<dt>{_escape(k)}</dt><dd>{_escape(v)}</dd>" for k, v in facts)
    parts.append(f"<section><h2>Plan</h2><dl>{listed}</dl></section>")
    parts += map(_table, tables)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _table(table: Table) -> str:
    css = [' class="name"' if h in table.left else ' class="n"' for h in table.headings]

    def line(tag: str, cells: Sequence[str]) -> str:
        made = ""
        for c, cell in zip(css, map(_escape, cells), strict=True):
            # A long name is broken behind a dot.
            made += f"<{tag}{c}>{cell.replace('.', '.<wbr/>') if 'name' in c else cell}</{tag}>"
        return f"<tr>{made}</tr>"

    head, body = line("th", table.headings), "".join(line("td", row) for row in table.rows)
    whole = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
    title = f"<h2>{_escape(table.title)}</h2>"
    return f'<section>{title}<div class="scroll">{whole}</div></section>'
