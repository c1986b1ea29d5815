"""The load-balance report: how a plan loads each rank, as numbers, sentences and tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from html import escape
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from dmuon.report import render
from dmuon.report.render import count_text
from dmuon.scheduler.certificate import Certificate, certify
from dmuon.scheduler.json_files import write_text
from dmuon.scheduler.plan import Batch, OwnershipPlan
from dmuon.scheduler.specs import ShapeKey
from dmuon.types import Algorithm, grouped

FOLD_ABOVE, SHOWN = 16, 5  # tables of more ranks show only so many busiest and idlest
_MOST_SHAPES, _MOST_NAMES = 16, 100  # rows of tables
_OF_GROUP = ("group", "algorithm", "lr", "weight_decay")
_WORDS = {"milp": "MILP", "time_limit": "stopped by the time limit"}


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One rank's number of matrices, predicted ms per step, and bytes of optimizer state."""

    rank: int
    matrices: int
    ms: float
    state_bytes: int


@dataclass(frozen=True, slots=True)
class ShapeUse:
    """All matrices of one shape: (size, number) of their batches, largest first, and their cost.

    ``single_ms`` is the price of one matrix alone, None if the plan has no prices; ``origins`` are
    the origins of the prices of these batches."""

    rows: int
    cols: int
    dtype: str
    count: int
    batches: tuple[tuple[int, int], ...]
    each_ms: float
    total_ms: float
    single_ms: float | None
    origins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The busiest rank, and its costliest batch of ``rows x cols`` matrices. ``movable``: some
    matrix of this rank could have another owner."""

    rank: int
    ms: float
    rows: int
    cols: int
    matrices: tuple[str, ...]
    batch_ms: float
    movable: bool


@dataclass(frozen=True, slots=True)
class MeasuredBalance:
    """Measured and predicted milliseconds per step, compared by rank.

    ``loads_ms`` are the measured times, ``ratios`` theirs to the predicted ones, and ``ratio`` that
    of all ranks together; None without a prediction.

    ``straggles_ms`` is how much longer the busiest rank takes than the mean of ranks that execute
    the same batches; no new plan can remove that difference."""

    loads_ms: tuple[float, ...]
    ratios: tuple[float | None, ...]
    ratio: float | None
    makespan_ms: float
    imbalance: float
    busiest: int
    straggles_ms: float


@dataclass(frozen=True)
class LoadBalanceReport:
    """The balance of a plan: `str()` for a terminal, `to_html` for a browser, `to_dict` as data.
    ``measured_ms`` are the ranks' milliseconds of momentum and Newton-Schulz per step, None before
    any training step. Empty if unknown: the ``model``'s name, the ``source`` of its sizes, bytes of
    the fullest rank by purpose (``memory``), the optimizer's param ``groups`` (number, algorithm,
    learning rate, weight decay)."""

    plan: OwnershipPlan
    measured_ms: tuple[float, ...] | None = None
    model: str = ""
    source: str = ""
    memory: tuple[tuple[str, int], ...] = ()
    groups: tuple[tuple[int, str, float, float], ...] = ()

    @cached_property
    def ranks(self) -> tuple[RankLoad, ...]:
        """Every rank in order."""
        counts = Counter(r for b in self.plan.batches for r in b.ranks for _ in b.matrices)
        loads = zip(self.plan.loads_ms, self.plan.state_bytes, strict=True)
        return tuple(RankLoad(r, counts[r], ms, state) for r, (ms, state) in enumerate(loads))

    @property
    def makespan_ms(self) -> float:
        """The predicted milliseconds of the busiest owner."""
        return self.plan.makespan_ms

    @property
    def lower_bound_ms(self) -> float:
        """No assignment has a smaller makespan than this under the same costs."""
        return self.plan.lower_bound_ms

    @property
    def mean_ms(self) -> float:
        """The predicted milliseconds, averaged over ranks."""
        return sum(self.plan.loads_ms) / len(self.plan.loads_ms)

    @property
    def gap(self) -> float:
        """Makespan / bound - 1."""
        return _excess(self.makespan_ms, self.lower_bound_ms)

    @property
    def imbalance(self) -> float:
        """Makespan / mean - 1."""
        return _excess(self.makespan_ms, self.mean_ms)

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that own no matrix."""
        return tuple(r.rank for r in self.ranks if not r.matrices)

    @cached_property
    def shapes(self) -> tuple[ShapeUse, ...]:
        """Every shape with its batches, the costliest first."""
        by_key = grouped((_key_of(self.plan, batch), batch) for batch in self.plan.batches)
        prices = {row.key: row for row in self.plan.prices}
        found = []
        for key, batches in by_key.items():
            sizes, price = Counter(len(b.matrices) for b in batches), prices.get(key)
            by_size = tuple(sorted(sizes.items(), reverse=True))
            count = sum(size * n for size, n in by_size)
            total = sum(b.ms * len(b.ranks) for b in batches)
            origins = {o for size in sizes if price for o in price.origin[size - 1 : size]}
            single, origin = price.ms[0] if price else None, tuple(sorted(origins))
            found.append(ShapeUse(*key, count, by_size, total / count, total, single, origin))
        return tuple(sorted(found, key=lambda s: (-s.total_ms, s.rows, s.cols, s.dtype)))

    @cached_property
    def bottleneck(self) -> Bottleneck | None:
        """The rank and batch that limit the plan; None if it has no matrices."""
        plan = self.plan
        if not plan.batches:
            return None
        working = {rank for b in plan.batches for rank in b.ranks}
        rank = max(working, key=lambda r: (plan.loads_ms[r], -r))
        batches = [b for b in plan.batches if rank in b.ranks]
        batch = max(batches, key=lambda b: b.ms)
        rows, cols, _ = _key_of(plan, batch)
        return Bottleneck(
            rank=rank,
            ms=plan.loads_ms[rank],
            rows=rows,
            cols=cols,
            matrices=tuple(plan.specs.matrices[i].name for i in batch.matrices),
            batch_ms=batch.ms,
            movable=not all(plan.limits.is_forced(i) for b in batches for i in b.matrices),
        )

    @property
    def certificate(self) -> Certificate:
        """The verdict of an independent check of the plan and of its lower bound."""
        return _certified(self.plan)

    @cached_property
    def measured(self) -> MeasuredBalance | None:
        """The comparison of measured and predicted times; None before any training step."""
        return None if self.measured_ms is None else _compare(self.plan, self.measured_ms)

    def _tables(self) -> list[render.Table]:
        balance = [_rank_table, _shape_table] if self.plan.topology.world > 1 else []
        return [*(table(self) for table in balance), _parameter_table(self.plan)]

    def _title(self) -> str:
        """Describe the model, the mesh that it is planned for, and the plan."""
        plan, topology = self.plan, self.plan.topology
        everything = plan.specs.parameters + plan.specs.frozen
        mesh, axes = " x ".join(map(str, topology.shape)), f" ({', '.join(topology.axes)})"
        axes = "" if axes == " (axis0)" else axes  # a made-up name
        dtypes = ", ".join(sorted({p.dtype for p in everything}))
        matrices = count_text(len(plan.specs.matrices), "matrix", "matrices")
        numel = render.quantity(sum(p.numel for p in everything))
        ranks, nodes = count_text(topology.world, "rank"), count_text(topology.nodes, "node")
        lines = [
            f"{self.model or 'model'}: {numel} parameters ({dtypes}), {matrices}",
            f"mesh {mesh}{axes}: {ranks} on {nodes} of {_device(plan)}, layout {plan.layout.value}",
            f"costs {plan.cost_source}, plan {plan.fingerprint()}",
        ]
        return "\n".join(lines + [f"shapes: {self.source}"] * bool(self.source))

    def __rich__(self) -> RenderableType:
        return render.render(self._title(), _facts(self), self._tables())

    def __str__(self) -> str:
        return render.printed(self)

    def __repr__(self) -> str:
        ranks = count_text(len(self.ranks), "rank")
        return f"<LoadBalanceReport: {ranks}, makespan {self.makespan_ms:.3f} ms>"

    def _repr_html_(self) -> str:
        """Return the page of `to_html`, for notebooks."""
        return f'<iframe srcdoc="{escape(_page(self))}" width="100%" height="640"></iframe>'

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page with pictures, whole or not at all; FileNotFoundError if
        the directory does not exist."""
        write_text(path, _page(self))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, fit for JSON, with the keys of the benchmarks."""
        plan, state, cap = self.plan, self.plan.state_bytes, self.plan.limits.memory_bytes
        search = asdict(plan.search)
        alternatives = dict(search.pop("alternatives"))
        of_report = ("makespan_ms", "lower_bound_ms", "gap", "imbalance")
        memory = {"min": min(state), "mean": sum(state) / len(state), "max": max(state)}
        kernels, topology = _kernel_uses(plan), plan.topology
        return {
            "model": self.model,
            "source": self.source,
            "mesh": dict(zip(topology.axes, topology.shape)),
            "nodes": topology.nodes,
            "device": _device(plan),
            "groups": [dict(zip(_OF_GROUP, group)) for group in self.groups],
            "layout": plan.layout.value,
            "owners": plan.topology.world,
            "solver": plan.solver,
            "status": plan.status,
            **search,
            "costs": plan.cost_source,
            "fingerprint": plan.fingerprint(),
            **{name: getattr(self, name) for name in of_report},
            "certificate": asdict(self.certificate) | {"verdict": str(self.certificate)},
            "alternatives_ms": alternatives,
            "kernels": [dict(zip(("kernel", "batches", "matrices"), use)) for use in kernels],
            "idle": list(self.idle),
            "step": plan.step
            and asdict(plan.step) | {"bucket_bytes": plan.bucket_bytes, "rings": plan.rings},
            "memory": memory | {"cap": cap, "fullest_rank": dict(self.memory)},
            "bottleneck": self.bottleneck and asdict(self.bottleneck),
            "shapes": [asdict(shape) for shape in self.shapes],
            "measured": self.measured and asdict(self.measured),
            "ranks": [asdict(rank) for rank in self.ranks],
            "parameters": [
                asdict(p) | {"algorithm": p.algorithm.value, "numel": p.numel}
                for p in plan.specs.parameters + plan.specs.frozen
            ],
        }

    def ms_text(self, ms: float) -> str:
        """Format milliseconds with the decimals that the largest time of the report needs."""
        return render.ms_text(ms, max([self.makespan_ms, *(self.measured_ms or ())]))


def _device(plan: OwnershipPlan) -> str:
    """Return the device that the prices name, or else the mesh's type of device."""
    kind, _, name = plan.cost_source.partition(",")[0].partition(":")
    return name if kind == "analytic" and name else plan.topology.device_type


def _excess(most: float, mean: float) -> float:
    return most / mean - 1 if mean else 0.0


# A check may take as long as planning, and reports are often repeated.
_certified = lru_cache(maxsize=8)(certify)


def _key_of(plan: OwnershipPlan, batch: Batch) -> ShapeKey:
    return plan.specs.matrices[batch.matrices[0]].key


def _kernel_uses(plan: OwnershipPlan) -> list[tuple[str, int, int]]:
    """Return (kernel, batches, matrices), most batches first; "" is the fixed rule."""
    sizes = grouped((batch.kernel, len(batch.matrices)) for batch in plan.batches)
    uses = [(kernel, len(found), sum(found)) for kernel, found in sizes.items()]
    return sorted(uses, key=lambda use: (-use[1], use[0]))


def _compare(plan: OwnershipPlan, measured_ms: tuple[float, ...]) -> MeasuredBalance:
    """Compare the measured milliseconds of each rank with the plan's."""
    world = plan.topology.world
    runs: list[Counter[tuple[ShapeKey, int, str]]] = [Counter() for _ in range(world)]
    for batch in plan.batches:
        what = _key_of(plan, batch), len(batch.matrices), f"{batch.kernel} {len(batch.ranks)}"
        for rank in batch.ranks:
            runs[rank][what] += 1
    makespan, predicted = max(measured_ms), plan.loads_ms
    busiest = measured_ms.index(makespan)
    alike = [ms for run, ms in zip(runs, measured_ms, strict=True) if run == runs[busiest]]
    return MeasuredBalance(
        loads_ms=measured_ms,
        ratios=tuple(m / p if p else None for m, p in zip(measured_ms, predicted, strict=True)),
        ratio=sum(measured_ms) / sum(predicted) if any(predicted) else None,
        makespan_ms=makespan,
        imbalance=_excess(makespan, sum(measured_ms) / world),
        busiest=busiest,
        straggles_ms=makespan - sum(alike) / len(alike),
    )


def _named(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))


def _facts(report: LoadBalanceReport) -> list[render.Fact]:
    """Return facts about the plan, the most important first, without empty ones."""
    plan, idle, text, percent = report.plan, report.idle, report.ms_text, render.percent
    measured = report.measured
    of_model = {"memory": _memory_text(report), "parameters": _parameters_text(report)}
    if plan.topology.world == 1:  # nothing to balance, and nothing to prove
        found = f", measured {text(measured.makespan_ms)} ms" if measured else ""
        work = f"{text(report.makespan_ms)} ms a step, all on this process{found}"
        return [("work", work), *of_model.items()]
    certificate = report.certificate
    verdict = "valid"
    if not (certificate.ok and certificate.proven):
        what = "plan valid, bound not proven" if certificate.ok else "INVALID"
        verdict = f"{what}: {'; '.join(certificate.findings)}"
    proven = "" if certificate.proven else " (not proven)"
    engine = f" ({plan.search.engine})" if plan.search.engine else ""
    clock = ", depends on the clock" if plan.search.hit_time_limit else ""
    solver, status = _named(plan.solver), _named(plan.status)
    named = f": {', '.join(map(str, idle))}" if len(idle) <= 8 else ""
    once = ", for each matrix once" if _has_copies(plan) else ""
    gap = f", gap {percent(report.gap)}"
    facts = {
        "makespan": f"{text(report.makespan_ms)} ms; mean of the ranks {text(report.mean_ms)} ms, "
        f"imbalance {percent(report.imbalance)}",
        "lower bound": f"{text(report.lower_bound_ms)} ms{proven}{once or gap}",
        "solver": f"{solver}{engine}: {status}{clock}, {plan.search.seconds:.2f} s",
        "certificate": verdict,
        "compared": ", ".join(
            f"{_named(name)} {text(ms)} ms ({percent(_excess(ms, report.makespan_ms), '+.1%')})"
            for name, ms in ([] if once else plan.search.alternatives)
        ),
        "kernels": _kernels_text(plan),
        "network": _network_text(report),
        "note": plan.search.note,
        "bottleneck": _bottleneck_text(report),
        "idle": f"{len(idle)} of {len(report.ranks)} ranks own no matrix{named}" if idle else "",
        **of_model,
    }
    if measured:
        ratio = "" if measured.ratio is None else f", {measured.ratio:.2f} x predicted"
        makespan = f"makespan {text(measured.makespan_ms)} ms on rank {measured.busiest}"
        late = f", {text(measured.straggles_ms)} ms above ranks that do the same"
        late *= measured.straggles_ms > 1e-3 * measured.makespan_ms
        facts["measured"] = f"{makespan}{late}, imbalance {percent(measured.imbalance)}{ratio}"
    return [(label, sentence) for label, sentence in facts.items() if sentence]


def _network_text(report: LoadBalanceReport) -> str:
    """Describe how the step is cut for its links, and how long it would take otherwise."""
    plan, text = report.plan, report.ms_text
    if (step := plan.step) is None:
        return ""
    by = Counter[int]()
    for batch in plan.batches:
        by[max(1, len(batch.copies))] += len(batch.matrices)
    told = "each matrix computed once"
    if by[1] < by.total():
        parts = (f"{count} by {n}" for n, count in sorted(by.items()) if count)
        told = f"matrices computed once or by several parts of the mesh: {', '.join(parts)}"
    size = render.bytes_text(plan.bucket_bytes or 0)
    told += f", buckets of {size}" * (plan.bucket_bytes is not None)
    told += ", in rings between nodes" * plan.rings
    binds = "the links bind" if step.link_ms > step.work_ms else "computing binds"
    work = f"{text(step.work_ms)} ms of work, {text(step.link_ms)} ms on links: {binds}"
    others = ("each matrix once", step.once_ms), ("all in each part of the mesh", step.copied_ms)
    ends = ", ".join(f"{how} {text(ms)} ms" for how, ms in others if ms is not None)
    return f"a step of {text(step.ms)} ms, simulated ({ends}); {told}. {work}"


def _kernels_text(plan: OwnershipPlan) -> str:
    uses = _kernel_uses(plan)
    if [kernel for kernel, _, _ in uses] == [""]:
        return 'chosen by the fixed rule at run time: Muon.stats()["kernels"] names them'
    counts = [(kernel or "by the fixed rule", n) for kernel, n, _ in uses]
    return ", ".join(f"{kernel} {count_text(n, 'batch', 'batches')}" for kernel, n in counts)


def _bottleneck_text(report: LoadBalanceReport) -> str:
    found, text = report.bottleneck, report.ms_text
    if found is None:
        return "no matrix to orthogonalize"
    others, what, more, end = len(found.matrices) - 1, "matrix", "", ""
    if others:
        what, more = f"batch, {others + 1} matrices", f" and {others} more"
    if not found.movable:
        end = ". All of its matrices are whole on that rank alone, so no plan can move them"
    return (
        f"rank {found.rank}, {text(found.ms)} ms; its costliest {what} of {found.rows} x "
        f"{found.cols}: {found.matrices[0]}{more}, {text(found.batch_ms)} ms{end}"
    )


def _memory_text(report: LoadBalanceReport) -> str:
    plan, text = report.plan, render.bytes_text
    state, cap = plan.state_bytes, plan.limits.memory_bytes
    least, most = min(state), max(state)
    told = f"min {text(least)}, mean {text(sum(state) / len(state))}, max {text(most)}"
    if text(least) == text(most):
        told = text(most) + f" (all within {text(most - least)})" * (least < most)
    told += "" if cap is None else f", cap {text(cap)}"
    held = not plan.layout.keeps_state_at_owners and len(state) > 1
    told = f"state per rank: {told}" + ", with the parameters" * held
    if report.memory:
        parts = ", ".join(f"{what} {text(n)}" for what, n in report.memory if n)
        total = text(sum(n for _, n in report.memory))
        told += f". The fullest rank, activations aside: {total} ({parts})"
    return told


def _parameters_text(report: LoadBalanceReport) -> str:
    everything = report.plan.specs.parameters + report.plan.specs.frozen
    sizes = {a: [p.numel for p in everything if p.algorithm is a] for a in Algorithm}
    told = [
        f"{algorithm.value} {count_text(len(found), 'parameter')} of {sum(found):,} elements"
        for algorithm, found in sizes.items()
        if found
    ]
    told += (
        f"group {number} by {algorithm}: lr {lr:g}, weight decay {decay:g}"
        for number, algorithm, lr, decay in report.groups
    )
    return "; ".join(told)


def _rank_table(report: LoadBalanceReport) -> render.Table:
    """List all ranks, equal ones in one row; or the busiest and the idlest, with the mean."""
    bound, measured, count = report.lower_bound_ms, report.measured, len(report.ranks)
    headings = ["rank", "matrices", "predicted ms", "to the bound", "state"]
    headings += ["measured ms", "ratio"] if measured else []

    def row(matrices: str, ranks: Sequence[RankLoad]) -> tuple[str, ...]:
        ms = sum(r.ms for r in ranks) / len(ranks)
        state = render.bytes_text(sum(r.state_bytes for r in ranks) / len(ranks))
        deviation = render.percent(ms / bound - 1, "+.2%") if bound and ms else ""
        cells = [matrices, report.ms_text(ms), deviation, state]
        if measured:
            found = sum(measured.loads_ms[r.rank] for r in ranks) / len(ranks)
            ratio = measured.ratios[ranks[0].rank] if len(ranks) == 1 else measured.ratio
            cells += [report.ms_text(found), "" if ratio is None else f"{ratio:.2f}"]
        return tuple(cells)

    alike = grouped((row(str(r.matrices), [r]), r.rank) for r in _by_load(report))
    if len(alike) <= FOLD_ABOVE < count or len(alike) == 1:
        rows = [[_numbers(ranks), *cells] for cells, ranks in alike.items()]
        return render.Table("Ranks that are alike", headings, rows)
    rows = [[str(r.rank), *row(str(r.matrices), [r])] for r in report.ranks]
    if count <= FOLD_ABOVE:
        return render.Table("Ranks", headings, rows)
    by_load = [rows[r.rank] for r in _by_load(report)]
    more = [f"{count - 2 * SHOWN:,} more ranks"] + [""] * (len(headings) - 1)
    mean = ["mean", *row(f"{len(report.plan.owners) / count:.1f}", report.ranks)]
    shown = [*by_load[:SHOWN], more, *by_load[-SHOWN:], mean]
    return render.Table("Busiest and idlest ranks", headings, shown)


def _numbers(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks, or how many they are if that text is too long.

    >>> _numbers((4, 5, 6, 7)), _numbers((0, 2)), _numbers((3,))
    ('4-7', '0, 2', '3')
    """
    first, last = min(ranks), max(ranks)
    text = ", ".join(map(str, sorted(ranks)))
    if last - first == len(ranks) - 1 > 0:  # no gap
        text = f"{first}-{last}"
    return text if len(text) <= 16 else f"{len(ranks)} ranks"


def _by_load(report: LoadBalanceReport) -> list[RankLoad]:
    return sorted(report.ranks, key=lambda r: (-r.ms, r.rank))


def _shape_table(report: LoadBalanceReport) -> render.Table:
    text = report.ms_text
    rows = []
    for s in report.shapes[:_MOST_SHAPES]:
        sizes = ", ".join(f"{size}" if n == 1 else f"{size} x{n}" for size, n in s.batches)
        alone = "" if s.single_ms is None else text(s.single_ms)
        cells = [f"{s.rows} x {s.cols}", s.dtype, str(s.count), sizes]
        rows.append([*cells, text(s.each_ms), text(s.total_ms), alone, ", ".join(s.origins)])
    headings = ["shape", "dtype", "matrices", "batch sizes"]
    headings += ["ms each", "ms in all", "ms alone", "prices"]
    kinds = {(s.dtype, s.origins) for s in report.shapes}
    same = [i for i, of in zip((1, 7), zip(*kinds)) if len({*of}) == 1]  # stated in the title
    told = ", ".join(f"{headings[i]} {rows[0][i]}" for i in same if rows[0][i])
    if more := report.shapes[_MOST_SHAPES:]:
        count, total = sum(s.count for s in more), text(sum(s.total_ms for s in more))
        rows.append([f"{len(more)} more shapes", "", str(count), "", "", total, "", ""])
    headings, *rows = [[c for i, c in enumerate(r) if i not in same] for r in (headings, *rows)]
    left = ("shape", "dtype", "batch sizes", "prices")
    return render.Table("Shapes" + f": {told}" * bool(told), headings, rows, left)


def _parameter_table(plan: OwnershipPlan) -> render.Table:
    """List each parameter's algorithm and the reason; fold names that differ only in numbers."""
    everything = plan.specs.parameters + plan.specs.frozen
    alike = grouped(((p.algorithm, p.shape, p.reason), p.name) for p in everything)
    rows = [
        [pattern, str(count), " x ".join(map(str, shape)), algorithm.value, reason]
        for algorithm, shape, reason in sorted(alike, key=lambda key: list(Algorithm).index(key[0]))
        for pattern, count in render.fold_names(alike[algorithm, shape, reason])
    ]
    if len(rows) > _MOST_NAMES:
        more = f"{len(rows) - _MOST_NAMES} more patterns: see to_dict()"
        rows = [*rows[:_MOST_NAMES], [more, "", "", "", ""]]
    left = ("parameter", "shape", "by", "why")
    return render.Table("Parameters", ("parameter", "number", *left[1:]), rows, left, reasons=2)


def _has_copies(plan: OwnershipPlan) -> bool:
    return any(batch.copies for batch in plan.batches)


def _page(report: LoadBalanceReport) -> str:
    text, proven = report.ms_text, "" if report.certificate.proven else ", not proven"
    tiles = [
        ("makespan", f"{text(report.makespan_ms)} ms"),
        (f"lower bound{proven}", f"{text(report.lower_bound_ms)} ms"),
        ("gap to the bound", render.percent(report.gap)),
        ("imbalance over the mean", render.percent(report.imbalance)),
        ("matrices on ranks", f"{len(report.plan.specs.matrices):,} on {len(report.ranks):,}"),
    ]
    if _has_copies(report.plan):  # the bound counts each matrix once
        del tiles[2]
    pictures = [("Newton-Schulz in a step, by rank", *_loads_picture(report))]
    if report.plan.specs.matrices:
        pictures.append(("Owners, by place in the model", *_owners_picture(report.plan)))
    if len(report.ranks) == 1:
        tiles, pictures = tiles[:1], []
    facts, tables = _facts(report), report._tables()
    return render.page(report._title(), tiles, facts, pictures, tables)


def _owners_picture(plan: OwnershipPlan) -> tuple[str, str]:
    """Draw the owners by name and layer, the first number of a name; a caption."""
    rows: dict[str, dict[int, list[int]]] = {}
    for matrix, owner in zip(plan.specs.matrices, plan.owners, strict=True):
        path = matrix.name.partition("[")[0].split(".")
        layer = next((int(part) for part in path if part.isdecimal() and len(part) < 4), 0)
        row = ".".join("*" if part.isdecimal() else part for part in path)
        rows.setdefault(row, {}).setdefault(layer, []).append(owner)
    what, places = "rank", [*range(plan.topology.world)]
    if len(places) > render.COLOURS:
        what, places = "node", [*map(plan.topology.node, places)]
    css = [f"c{place % render.COLOURS}" for place in places]
    layers, bars = range(1 + max(layer for cells in rows.values() for layer in cells)), []
    for row, cells in [*rows.items()][: render.MOST_SHOWN]:
        parts = []
        for layer in layers:
            looks = [(css[owner], str(owner)) for owner in cells.get(layer, [])] or [("gap", "")]
            looks = looks if len(looks) <= render.MOST_BESIDE else [("rest", "...")]
            parts += [(look, 1 / len(looks), words) for look, words in looks]
        ranks = count_text(len({owner for owners in cells.values() for owner in owners}), "rank")
        name = ".".join(row.removesuffix(".weight").split(".")[-2:])
        bars.append((name, f"{row}: {ranks}", parts, None, ranks))
    caption = "The ranks that own each weight, from layer to layer."
    if len(bars) < len(rows):
        caption += f" The first {len(bars)} of {len(rows):,} names."
    names = [(f"c{i}", f"{what} {i}") for i in sorted({*places})[: render.COLOURS]]
    return render.picture(names, bars, "layer"), caption


def _loads_picture(report: LoadBalanceReport) -> tuple[str, str]:
    """Draw a bar per rank, of many ranks some at even steps from busiest to idlest; a caption."""
    plan, text, measured = report.plan, report.ms_text, report.measured
    zero = report.lower_bound_ms or report.mean_ms
    ranks = report.ranks
    if many := len(ranks) > render.MOST_SHOWN:
        by_load = [r for r in _by_load(report) if r.ms or r.matrices] or [*ranks]
        last, steps = len(by_load) - 1, min(render.MOST_SHOWN // 2, len(by_load)) - 1
        ranks = tuple(by_load[i * last // max(steps, 1)] for i in range(steps + 1))
    css = {(s.rows, s.cols, s.dtype): f"c{i}" for i, s in enumerate(report.shapes)}
    css |= dict.fromkeys([*css][render.COLOURS :], "rest")
    works = {r.rank: defaultdict[str, float](float) for r in ranks}
    for batch in plan.batches:
        for rank in works.keys() & {*batch.ranks}:
            works[rank][css[_key_of(plan, batch)]] += batch.ms
    # Ranks may all be slower than predicted; the strokes show how they differ among themselves.
    speed = (measured.ratio if measured else None) or 1.0
    bars = []
    for r in ranks:
        told, stroke = f"rank {r.rank}: {text(r.ms)} ms", None
        if measured:
            found = measured.loads_ms[r.rank]
            stroke = found / speed
            told += f", measured {text(found)} ms"
        is_busy = bool(r.ms or r.matrices)
        beside = render.percent(r.ms / (zero or 1.0) - 1, "+.2%") if is_busy else "idle"
        parts = [(look, ms, "") for look, ms in sorted(works[r.rank].items())]
        bars.append((f"rank {r.rank}", told, parts, stroke, beside))
    if plan.step:
        link = plan.step.link_ms
        bars.append(("links", "traffic", [("link", link, "")], None, f"{text(link)} ms"))
    what = f"{'lower bound' if report.lower_bound_ms else 'mean'} of {text(zero)} ms"
    caption = f"Predicted time, and by how much it differs from the {what}, the vertical line."
    caption += " Links: the least that the traffic takes, beside it." * bool(plan.step)
    if many:
        caption += f" {len(bars)} of {len(report.ranks):,} ranks, from the busiest to the idlest."
        caption += " Idle ones are left out." if report.idle else ""
    if measured:
        caption += f" Strokes: measured, divided by {speed:.2f}, the ratio of all ranks together."
    names = [(css[key], "{} x {}".format(*key)) for key in [*css][: render.COLOURS]]
    return render.picture(names, bars, "ms", zero), caption
