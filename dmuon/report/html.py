"""The load-balance report as one self-contained page: no script, no font, no network."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from dmuon.report.balance import Balance
from dmuon.report.markup import section_html, table_html
from dmuon.report.pictures import (
    contention_section,
    layer_map_section,
    load_map_section,
    loads_section,
)
from dmuon.report.words import (
    batches_text,
    bytes_text,
    facts,
    measured_text,
    ms_text,
    replan_text,
    routed,
    title_text,
    top_ms,
)

__all__ = ["page", "write_whole"]

MOST_LISTED = 64  # ranks that are listed each
LISTED = 10  # busiest and idlest ranks, when not all are

_STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2128; --dim: #59636e; --line: #d5dae0;
  --panel: #f5f7f9; --good: #1a7f37; --warn: #9a6700; --bound: #c2185b; }
@media (prefers-color-scheme: dark) { :root { --bg: #14181d; --fg: #e4e8ed; --dim: #9aa5b1;
  --line: #363d46; --panel: #1d232a; --good: #56d364; --warn: #e3b341; --bound: #ff7eb6; } }
body { background: var(--bg); color: var(--fg); max-width: 1060px; margin: 2rem auto;
  padding: 0 1.2rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .3rem 0; } .dim, figcaption { color: var(--dim); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .7rem;
  margin: 1.2rem 0; }
.tile { background: var(--panel); border-radius: 8px; padding: .6rem .9rem; }
.tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tile span { color: var(--dim); font-size: .85rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 0; }
dt { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
.verdict { border-left: 4px solid var(--good); background: var(--panel); padding: .5rem .9rem;
  margin: .8rem 0; } .verdict.warn { border-color: var(--warn); }
figure { margin: .4rem 0 1rem; } svg { display: block; width: 100%; height: auto; }
figcaption { font-size: .88rem; margin-top: .3rem; }
svg text { fill: var(--fg); font: 12px system-ui, sans-serif; } svg text.dim { fill: var(--dim); }
svg text.black { fill: #000; } svg text.white { fill: #fff; }
svg text.outlined { fill: #fff; stroke: #000; stroke-width: 2.5; paint-order: stroke; }
.grid, .bound, .mean, .measured { fill: none; }
.grid { stroke: var(--line); stroke-width: 1; }
.bound { stroke: var(--bound); stroke-width: 2; stroke-dasharray: 7 4; }
.mean { stroke: var(--dim); stroke-width: 1.5; stroke-dasharray: 2 4; }
.measured { stroke: #e69f00; stroke-width: 1; }
svg path.dot { fill: var(--fg); stroke: var(--bg); stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; font-size: .88rem; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
  margin-right: .4em; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(380px, 1fr)); gap: 1.4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--dim); font-weight: 500; }
th, td { padding: .22rem .9rem .22rem 0; border-bottom: 1px solid var(--line); }
th.n, td.n { text-align: right; } td { overflow-wrap: anywhere; }
"""


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees a part of it.

    Raises:
        FileNotFoundError: its directory does not exist.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write {path}: the directory {path.parent} does not exist; create it first"
        )
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def page(balance: Balance) -> str:
    """The whole page."""
    title = escape(title_text(balance))
    sections = [
        _header(balance),
        _measured(balance),
        loads_section(balance),
        load_map_section(balance),
        layer_map_section(balance),
        contention_section(balance),
        _shapes(balance),
        _ranks(balance),
        _parameters(balance),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body></html>\n"
    )


# ---- numbers -----------------------------------------------------------------------------


def _header(balance: Balance) -> str:
    plan, top = balance.plan, top_ms(balance)
    bound = "lower bound" + ("" if balance.certificate.proven else ", not proven")
    tiles = [
        ("makespan", f"{ms_text(balance.makespan_ms, top)} ms"),
        (bound, f"{ms_text(balance.lower_bound_ms, top)} ms"),
        ("gap to the bound", f"{balance.gap:.2%}"),
        ("imbalance over the mean", f"{balance.imbalance:.2%}"),
        ("matrices on ranks", f"{len(plan.specs.matrices)} on {plan.topology.world}"),
    ]
    made = "".join(
        f'<div class="tile"><b>{escape(v)}</b><span>{escape(k)}</span></div>' for k, v in tiles
    )
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts(balance))
    return (
        f"<header><h1>Load balance</h1><p class='dim'>{escape(title_text(balance))}</p></header>"
        f'<div class="tiles">{made}</div><dl>{listed}</dl>'
    )


def _measured(balance: Balance) -> str:
    measured = balance.measured
    if measured is None:
        return ""
    top = top_ms(balance)
    css = "verdict warn" if measured.replan else "verdict"
    return section_html(
        "Measured and predicted",
        f"<p>{escape(measured_text(measured, top))}</p>",
        f'<p class="{css}">{escape(replan_text(measured, top))}</p>',
    )


# ---- tables ------------------------------------------------------------------------------


def _shapes(balance: Balance) -> str:
    top = top_ms(balance)
    rows = [
        (
            f"{s.rows} x {s.cols}",
            s.dtype,
            str(s.count),
            batches_text(s),
            ms_text(s.each_ms, top),
            "" if s.single_ms is None else ms_text(s.single_ms, top),
            ms_text(s.total_ms, top),
            ", ".join(s.origins),
        )
        for s in balance.shapes
    ]
    headings = (
        "shape", "dtype", "matrices", "batch sizes", "ms each", "ms alone", "ms in all", "prices",
    )  # fmt: skip
    return section_html("Shapes", table_html(headings, rows, (2, 4, 5, 6)))


def _ranks(balance: Balance) -> str:
    top, measured = top_ms(balance), balance.measured
    by_load = sorted(balance.ranks, key=lambda r: (-r.ms, r.rank))
    few = len(by_load) <= MOST_LISTED
    shown = balance.ranks if few else by_load[:LISTED] + by_load[-LISTED:]
    rows = []
    for r in shown:
        row = [str(r.rank), str(r.matrices), ms_text(r.ms, top), bytes_text(r.state_bytes)]
        if measured is not None:
            ratio = measured.ratios[r.rank]
            row += [
                ms_text(measured.loads_ms[r.rank], top),
                "" if ratio is None else f"{ratio:.2f}",
            ]
        rows.append(row)
    headings = ["rank", "matrices", "predicted ms", "state"]
    if measured is not None:
        headings += ["measured ms", "measured / predicted"]
    heading = "Ranks" if few else f"Ranks: the {LISTED} busiest and the {LISTED} idlest"
    return section_html(heading, table_html(headings, rows, range(len(headings))))


def _parameters(balance: Balance) -> str:
    rows = [(r.algorithm, str(r.parameters), f"{r.elements:,}", r.why) for r in routed(balance)]
    headings = ("updated by", "parameters", "elements", "why")
    return section_html("Parameters", table_html(headings, rows, (1, 2)))
