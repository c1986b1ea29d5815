"""The sections of the page that are pictures: load per rank, slot maps, contention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dmuon.report.balance import Balance, ShapeUse, launch_owners
from dmuon.report.bottleneck import key_of
from dmuon.report.charts import Bar, Block, Mark, grouped_bars, stacked_bars, step_chart
from dmuon.report.markup import figure_html, legend_html, section_html
from dmuon.report.slots import READABLE, Cell, Grid, slot_map
from dmuon.report.svg import CATEGORIES, FIXED, OTHER, WIDTH, legend_ramp, ramp
from dmuon.report.words import ms_text, top_ms
from dmuon.scheduler.costs import ShapeKey
from dmuon.scheduler.placement import layer_of, row_major

__all__ = ["contention_section", "layer_map_section", "load_map_section", "loads_section"]

MOST_BARS = 64  # ranks drawn as a bar each
MOST_STRIPES = 6000  # rectangles of the layer map
NO_LAYER = "var(--line)"
MOST_IN_FLIGHT = 512  # slots on which matrices in flight are drawn


def loads_section(balance: Balance) -> str:
    top = top_ms(balance)
    bound, mean = balance.lower_bound_ms, balance.mean_ms
    marks = [
        Mark(bound, f"lower bound {ms_text(bound, top)} ms", "bound"),
        Mark(mean, f"mean of the ranks {ms_text(mean, top)} ms", "mean"),
    ]
    label = "predicted milliseconds of each rank"
    if len(balance.ranks) <= MOST_BARS:
        figure = _bars(balance, marks, label)
    else:
        figure = _curve(balance, marks, label)
    return section_html("Load per rank", figure)


def _curve(balance: Balance, marks: Sequence[Mark], label: str) -> str:
    """Sorted, for in rank order thousands of ranks are a smear; the map shows the places."""
    by_load = sorted(balance.ranks, key=lambda r: (-r.ms, r.rank))
    measured = balance.measured
    line = [] if measured is None else [measured.loads_ms[r.rank] for r in by_load]
    loads = [r.ms for r in by_load]
    axis = "ranks, the busiest first"
    picture = step_chart(loads, marks, unit="ms a step", axis=axis, label=label, line=line)
    also = "; the line is what was measured" if line else ""
    return figure_html(picture, f"Predicted milliseconds a step of each rank{also}.")


def _colour_of(shapes: Sequence[ShapeUse]) -> dict[ShapeKey, str]:
    """A colour for each shape; the cheapest ones share the last."""
    colours = [*CATEGORIES, *[OTHER] * len(shapes)]
    return {(s.rows, s.cols, s.dtype): c for s, c in zip(shapes, colours, strict=False)}


def _bars(balance: Balance, marks: Sequence[Mark], label: str) -> str:
    colours = _colour_of(balance.shapes)
    blocks = _blocks(balance, colours)
    bars = [_bar(balance, load.rank, tuple(blocks[load.rank])) for load in balance.ranks]
    picture = stacked_bars(bars, marks, unit="ms a step", axis="rank", label=label)
    names = [(f"{rows} x {cols} {dtype}", c) for (rows, cols, dtype), c in colours.items()]
    entries = names[: len(CATEGORIES)]
    if len(names) > len(entries):
        entries.append((f"{len(names) - len(entries)} more shapes", OTHER))
    if any(balance.plan.limits.fixed_ms):
        entries.append(("fixed load", FIXED))
    caption = "Predicted milliseconds a step of each rank, a block for each batch."
    if balance.measured is not None:
        caption += " Diamonds are what was measured."
    return figure_html(picture, caption, legend_html(entries))


def _blocks(balance: Balance, colours: dict[ShapeKey, str]) -> dict[int, list[Block]]:
    """What each rank's bar is made of, from the bottom up: fixed load, then the costly shapes."""
    plan, top = balance.plan, top_ms(balance)
    blocks: dict[int, list[Block]] = defaultdict(list)
    for rank, fixed in enumerate(plan.limits.fixed_ms):
        if fixed:
            title = f"rank {rank}: fixed load, {ms_text(fixed, top)} ms"
            blocks[rank].append((fixed, FIXED, title))
    order = {key: i for i, key in enumerate(colours)}
    for batch in sorted(plan.batches, key=lambda b: order[key_of(plan, b)]):
        rows, cols, dtype = key = key_of(plan, batch)
        title = (
            f"rank {batch.owner}: {len(batch.matrices)} x [{rows} x {cols} {dtype}], "
            f"{ms_text(batch.ms, top)} ms"
        )
        blocks[batch.owner].append((batch.ms, colours[key], title))
    return blocks


def _bar(balance: Balance, rank: int, parts: tuple[Block, ...]) -> Bar:
    if balance.measured is None:
        return Bar(str(rank), parts)
    ms = balance.measured.loads_ms[rank]
    return Bar(str(rank), parts, ms, f"rank {rank}: measured {ms:.3f} ms")


# ---- slot maps ---------------------------------------------------------------------------


def load_map_section(balance: Balance) -> str:
    slots, top = balance.plan.topology.slots(), balance.makespan_ms or 1.0
    cells = [
        Cell(
            (ramp(r.ms / top),),
            f"rank {r.rank}: {ms_text(r.ms, top)} ms, {r.matrices} matrices",
            str(r.rank),
        )
        for r in balance.ranks
    ]
    picture = slot_map(slots, cells, label="load of each slot of the mesh")
    grid = Grid(len(slots), max(map(len, slots)))
    legend = legend_ramp("0 ms", f"{ms_text(top, top)} ms")
    numbers = " Numbers are ranks." if grid.pitch(WIDTH) >= READABLE else ""
    caption = f"Predicted load by place. {grid.caption()}{numbers}"
    return section_html("Slot map: load", figure_html(picture, caption, legend))


def layer_map_section(balance: Balance) -> str:
    plan = balance.plan
    names = [layer_of(m.name) for m in plan.specs.matrices]
    layers = list(dict.fromkeys(name for name in names if name))
    if len(layers) < 2:
        return ""
    colours = {name: ramp(i / (len(layers) - 1)) for i, name in enumerate(layers)}
    owned: dict[int, list[str]] = defaultdict(list)
    for name, owner in zip(names, plan.owners, strict=True):
        owned[owner].append(name)
    stripes = {rank: list(dict.fromkeys(owned[rank])) for rank in range(plan.topology.world)}
    fine = sum(map(len, stripes.values())) <= MOST_STRIPES
    cells = [_layer_cell(rank, stripes[rank], colours, fine) for rank in stripes]
    slots = plan.topology.slots()
    picture = slot_map(slots, cells, label="layers owned by each slot of the mesh")
    what = "One stripe for each layer that a rank owns a matrix of"
    if not fine:
        what = "The middle one of the layers that a rank owns a matrix of"
    grid = Grid(len(slots), max(map(len, slots)))
    caption = f"{what}; grey: none, or matrices outside of layers. {grid.caption()}"
    return section_html(
        "Slot map: layers", figure_html(picture, caption, legend_ramp(layers[0], layers[-1]))
    )


def _layer_cell(rank: int, layers: Sequence[str], colours: dict[str, str], fine: bool) -> Cell:
    shown = list(layers) if fine or not layers else [layers[len(layers) // 2]]
    listed = ", ".join(name or "no layer" for name in layers[:12]) or "no matrix"
    more = f", {len(layers) - 12} more" if len(layers) > 12 else ""
    stripes = tuple(colours.get(name, NO_LAYER) for name in shown) or (NO_LAYER,)
    return Cell(stripes, f"rank {rank}: {listed}{more}")


# ---- contention --------------------------------------------------------------------------


def contention_section(balance: Balance) -> str:
    found = balance.contention
    if found is None:
        return ""
    before, after = CATEGORIES[1], CATEGORIES[0]
    rows, plan = found.row_major, found.plan
    groups = [
        (f"{what} ({kind})", [(float(a), before), (float(b), after)])
        for what, kind, a, b in (
            ("on one node", "worst", rows.node_max, plan.node_max),
            ("on one node", "mean", rows.node_mean, plan.node_mean),
            ("in one column", "worst", rows.column_max, plan.column_max),
            ("in one column", "mean", rows.column_mean, plan.column_mean),
        )
    ]
    legend = legend_html([("before: rank after rank", before), ("after: this plan", after)])
    bars = grouped_bars(groups, label="matrices in flight that share a node or a column")
    caption = (
        f"Of {plan.window} consecutive matrices, how many have owners on the most crowded node or "
        "in the most crowded column. Fewer means less contention for links."
    )
    return section_html("Contention", figure_html(bars, caption, legend), _flights(balance))


def _flights(balance: Balance) -> str:
    """The first matrices in flight on the mesh, before and after."""
    found = balance.contention
    if found is None or balance.plan.topology.world > MOST_IN_FLIGHT:
        return ""
    window = found.plan.window
    pictures = [
        _flight(balance, owners[:window], heading)
        for owners, heading in (
            (row_major(window, balance.plan.topology.world), "Before: rank after rank"),
            (launch_owners(balance.plan), "After: this plan"),
        )
    ]
    caption = f"<p class='dim'>The owners of the first {window} matrices, from dark to bright.</p>"
    return f'{caption}<div class="pair">{"".join(pictures)}</div>'


def _flight(balance: Balance, owners: Sequence[int], heading: str) -> str:
    numbers: dict[int, list[int]] = defaultdict(list)
    for i, owner in enumerate(owners):
        numbers[owner].append(i)
    last = max(len(owners) - 1, 1)
    cells = [
        Cell(
            tuple(ramp(i / last) for i in numbers[rank]) or ("var(--panel)",),
            f"rank {rank}",
            ",".join(str(i + 1) for i in numbers[rank]),
        )
        for rank in range(balance.plan.topology.world)
    ]
    picture = slot_map(balance.plan.topology.slots(), cells, label=heading, width=480.0)
    return figure_html(picture, heading)
