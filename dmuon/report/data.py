"""The load-balance report: what a plan does to each rank, as numbers, sentences and tables.

::

    OwnershipPlan, measured ms -> LoadBalanceReport -> facts, tables -> text.render, html.page
                                                    -> to_dict
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmuon.report import html
from dmuon.report.text import (
    Fact,
    Table,
    bytes_text,
    count_text,
    fold_names,
    ms_text,
    plain,
    render,
)
from dmuon.scheduler.certificate import Certificate, certify
from dmuon.scheduler.costs import ShapeKey, newton_schulz_flops
from dmuon.scheduler.placement import Contention, contention, natural_key
from dmuon.scheduler.plan import Batch, OwnershipPlan
from dmuon.types import Algorithm, Layout

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["LoadBalanceReport", "RankLoad", "build_report", "launch_owners"]

# Below these a new plan is not worth a restart: measured times vary by as much.
REPLAN_FRACTION = 0.05
REPLAN_MS = 0.05
_REPLAN_HOW = (
    'own.close(), then dmuon.dedicate_params(model, costs="measured") with an empty '
    "PlannerOptions.cache_dir, and dmuon.Muon again; its momentum starts anew"
)
FOLD_ABOVE, SHOWN = 16, 5  # of more ranks than this, so many busiest and idlest are listed
_MOST_SHAPES, _MOST_NAMES = 16, 100  # rows of tables
_WORDS = {"milp": "MILP", "round_robin": "round robin", "time_limit": "stopped by the time limit"}
# How implementations name a weight that holds several projections.
_FUSED = re.compile(r"qkv|c_attn|query_key_value|gate_?up|up_?gate|(^|[._])(in_proj|kv_proj|w13)")


# ---- what a report holds -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank has: matrices, predicted ms a step, bytes of optimizer state."""

    rank: int
    matrices: int
    ms: float
    state_bytes: int


@dataclass(frozen=True, slots=True)
class ShapeUse:
    """All matrices of one shape: how they are batched, and what that costs.

    ``batches`` holds (size, how many of them), largest first. ``single_ms`` is the price of one
    matrix alone, None where the plan has no prices; ``origins`` say where the prices come from.
    """

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
class Split:
    """An estimate of cutting matrices in two by rows, as `heads` or `splits` would.

    It is about ``count`` matrices that cost the same, ``ms`` alone on an owner; ``name`` and
    ``rows x cols`` are those of the first. ``makespan_ms`` is what would limit any plan afterwards.
    """

    name: str
    rows: int
    cols: int
    count: int
    ms: float
    makespan_ms: float
    saves_ms: float


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The busiest rank, and its costliest batch of ``rows x cols`` matrices.

    ``split`` is the split that saves most. ``floor``: no plan is faster than the owner of one
    matrix, and ``split`` is of that matrix and those as costly. ``movable``: some matrix of this
    rank could have another owner.
    """

    rank: int
    ms: float
    rows: int
    cols: int
    matrices: tuple[str, ...]
    batch_ms: float
    floor: bool
    split: Split
    movable: bool


@dataclass(frozen=True, slots=True)
class MeasuredBalance:
    """Measured milliseconds a step against predicted ones, by rank.

    ``ms`` and ``predicted_ms`` are of momentum and Newton-Schulz; ``loads_ms`` add the fixed load
    of the plan, and ``makespan_ms`` and ``imbalance`` are theirs. ``ratios`` are measured over
    predicted, ``ratio`` that of all ranks together; None where nothing was predicted.

    Costs do not tell ranks apart that execute the same batches, so no plan from costs mends a
    difference between them: ``plannable_ms`` is the makespan if they all took their mean, and
    ``straggles_ms`` what the busiest takes more. ``best_ms`` is what no new plan gets below: the
    even share of the measured work, or the costliest matrix or the plan's lower bound at the
    measured speed. ``replan``: a new plan could save enough (``saving_ms``) to be worth it.
    """

    ms: tuple[float, ...]
    predicted_ms: tuple[float, ...]
    makespan_ms: float
    imbalance: float
    ratio: float | None
    plannable_ms: float
    best_ms: float
    saving_ms: float
    replan: bool
    loads_ms: tuple[float, ...]
    ratios: tuple[float | None, ...]
    busiest: int
    straggles_ms: float


@dataclass(frozen=True)
class LoadBalanceReport:
    """The balance of a plan: `str()` for a terminal, `to_html` for a browser, `to_dict` as data.

    ``measured_ms`` are the ranks' milliseconds of momentum and Newton-Schulz a step, None before
    training steps. State is what `OwnershipPlan.state_bytes` says.
    """

    plan: OwnershipPlan
    measured_ms: tuple[float, ...] | None = None

    @cached_property
    def ranks(self) -> tuple[RankLoad, ...]:
        """Every rank in order."""
        counts, plan = Counter(self.plan.owners), self.plan
        loads = zip(plan.loads_ms, plan.state_bytes, strict=True)
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
        """The predicted milliseconds of the mean of the ranks."""
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
        return _shapes(self.plan)

    @cached_property
    def bottleneck(self) -> Bottleneck | None:
        """What limits the plan; None when it has no matrices."""
        return _bottleneck(self.plan)

    @property
    def certificate(self) -> Certificate:
        """The verdict of an independent check of the plan and of its lower bound."""
        return _certified(self.plan)

    @cached_property
    def contention(self) -> dict[str, Contention] | None:
        """How the owners of consecutive matrices share nodes and columns: "plan", and "row_major"
        as if the ranks took turns in order; None on a single node.
        """
        topology, owners = self.plan.topology, launch_owners(self.plan)
        if topology.nodes < 2 or not owners:
            return None
        in_turn = [i % topology.world for i in range(len(owners))]
        return {"row_major": contention(in_turn, topology), "plan": contention(owners, topology)}

    @cached_property
    def measured(self) -> MeasuredBalance | None:
        """Measured against predicted; None before any training step."""
        return None if self.measured_ms is None else _compare(self.plan, self.measured_ms)

    def __rich__(self) -> RenderableType:
        return render(_title(self), _facts(self), _tables(self))

    def __str__(self) -> str:
        return plain(self.__rich__())

    def to_html(self, path: str | Path) -> None:
        """Write one self-contained page with pictures; it appears whole or not at all.

        Raises:
            FileNotFoundError: the directory does not exist.
        """
        html.write_whole(Path(path), _page(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON; keys as in the benchmarks."""
        plan, contended, measured = self.plan, self.contention or {}, self.measured
        state = [r.state_bytes for r in self.ranks]
        memory = {"min": min(state), "mean": sum(state) / len(state), "max": max(state)}
        uses = _kernel_uses(plan)
        return {
            "layout": plan.layout.value,
            "owners": plan.topology.world,
            "solver": plan.solver,
            "engine": plan.engine,
            "status": plan.status,
            "hit_time_limit": plan.hit_time_limit,
            "note": plan.note,
            "seconds": plan.seconds,
            "costs": plan.cost_source,
            "fingerprint": plan.fingerprint(),
            "makespan_ms": self.makespan_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "gap": self.gap,
            "imbalance": self.imbalance,
            "certificate": asdict(self.certificate) | {"verdict": str(self.certificate)},
            "alternatives_ms": dict(plan.alternatives),
            "kernels": [{"kernel": k, "batches": b, "matrices": m} for k, b, m in uses],
            "idle": list(self.idle),
            "memory": memory | {"cap": plan.limits.memory_bytes},
            "bottleneck": self.bottleneck and asdict(self.bottleneck),
            "contention": {k: asdict(found) for k, found in contended.items()} or None,
            "shapes": [asdict(shape) for shape in self.shapes],
            "measured": measured and asdict(measured),
            "ranks": [asdict(rank) for rank in self.ranks],
            "parameters": [
                asdict(p) | {"numel": p.numel} for p in plan.specs.parameters + plan.specs.frozen
            ],
        }


def build_report(plan: OwnershipPlan, measured: Sequence[float] | None = None) -> LoadBalanceReport:
    """The report of a plan.

    ``measured`` are the milliseconds of momentum and Newton-Schulz that each rank needs a step.

    Raises:
        ValueError: ``measured`` has not one time for each rank.
    """
    world = plan.topology.world
    if measured is not None and len(measured) != world:
        raise ValueError(f"measured holds {len(measured)} times for {world} ranks")
    return LoadBalanceReport(plan, None if measured is None else tuple(measured))


def _excess(most: float, mean: float) -> float:
    return most / mean - 1 if mean else 0.0


# ---- numbers out of a plan ---------------------------------------------------------------


@lru_cache(maxsize=8)
def _certified(plan: OwnershipPlan) -> Certificate:
    # Kept, because it may take as long as planning, and reports are made again and again.
    return certify(plan)


def launch_owners(plan: OwnershipPlan) -> list[int]:
    """The owner of each matrix, in about the order in which the matrices travel.

    Without those that a single rank may own: they do not travel.
    """
    named = [
        (natural_key(matrix.name), owner)
        for i, (matrix, owner) in enumerate(zip(plan.specs.matrices, plan.owners, strict=True))
        if not plan.limits.is_forced(i)
    ]
    return [owner for _, owner in sorted(named)]


def _key_of(plan: OwnershipPlan, batch: Batch) -> ShapeKey:
    return plan.specs.matrices[batch.matrices[0]].key


def _kernel_uses(plan: OwnershipPlan) -> list[tuple[str, int, int]]:
    """(kernel, batches, matrices), that with most batches first; "" is the fixed rule."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for batch in plan.batches:
        sizes[batch.kernel].append(len(batch.matrices))
    uses = [(kernel, len(found), sum(found)) for kernel, found in sizes.items()]
    return sorted(uses, key=lambda use: (-use[1], use[0]))


def _shapes(plan: OwnershipPlan) -> tuple[ShapeUse, ...]:
    by_key: dict[ShapeKey, list[Batch]] = defaultdict(list)
    for batch in plan.batches:
        by_key[_key_of(plan, batch)].append(batch)
    prices = {row.key: row for row in plan.prices}
    found = []
    for key, batches in by_key.items():
        sizes = Counter(len(b.matrices) for b in batches)
        price, total = prices.get(key), sum(b.ms for b in batches)
        count = sum(len(b.matrices) for b in batches)
        origins = {o for size in sizes if price for o in price.origin[size - 1 : size]}
        found.append(
            ShapeUse(
                *key,
                count=count,
                batches=tuple(sorted(sizes.items(), reverse=True)),
                each_ms=total / count,
                total_ms=total,
                single_ms=price.ms[0] if price else None,
                origins=tuple(sorted(origins)),
            )
        )
    return tuple(sorted(found, key=lambda s: (-s.total_ms, s.rows, s.cols, s.dtype)))


def _least_ms(plan: OwnershipPlan) -> dict[ShapeKey, float]:
    """What an owner needs at least to have a matrix of each shape, the costliest first."""
    least: dict[ShapeKey, float] = {}
    for batch in plan.batches:
        # Without prices: a batch is rarely cheaper alone than its share in a larger one.
        key, share = _key_of(plan, batch), batch.ms / len(batch.matrices)
        least[key] = min(share, least.get(key, share))
    least.update((row.key, min(row.ms)) for row in plan.prices if row.key in least)
    return dict(sorted(least.items(), key=lambda item: -item[1]))


def _bottleneck(plan: OwnershipPlan) -> Bottleneck | None:
    if not plan.batches:
        return None
    # A rank with fixed load alone has nothing that a plan could move.
    rank = max({b.owner for b in plan.batches}, key=lambda r: (plan.loads_ms[r], -r))
    batches = [b for b in plan.batches if b.owner == rank]
    batch = max(batches, key=lambda b: b.ms)
    rows, cols, _ = _key_of(plan, batch)
    least = _least_ms(plan)
    # One matrix is the floor if its owner has no other, or if ranks are idle. With pools, ranks
    # may be idle while those of one pool have much to do.
    alone = max(least.values()) + min(plan.limits.fixed_ms, default=0.0)
    scarce = plan.topology.world > len(plan.specs.matrices) and not plan.limits.pool_of
    floor = scarce or plan.makespan_ms <= alone * (1 + 1e-9)
    # A shape costs what its transpose costs, so several shapes may have one price.
    by_price: dict[float, set[ShapeKey]] = defaultdict(set)
    for key, ms in least.items():
        by_price[next((p for p in by_price if p * (1 - 1e-9) <= ms), ms)].add(key)
    splits = [_split(plan, least, keys, floor) for keys in by_price.values()]
    return Bottleneck(
        rank=rank,
        ms=plan.loads_ms[rank],
        rows=rows,
        cols=cols,
        matrices=tuple(plan.specs.matrices[i].name for i in batch.matrices),
        batch_ms=batch.ms,
        floor=floor,
        split=splits[0] if floor else max(splits, key=lambda s: s.saves_ms),
        movable=not all(plan.limits.is_forced(i) for b in batches for i in b.matrices),
    )


def _split(
    plan: OwnershipPlan, least: dict[ShapeKey, float], keys: set[ShapeKey], floor: bool
) -> Split:
    """What limits any plan once all matrices of these shapes are cut in two by rows, about.

    There is no price for a half, so it is its whole's price, scaled by the operations; a single
    row is not cut.
    """
    members = [m for m in plan.specs.matrices if m.key in keys]
    first, world, mean = members[0], plan.topology.world, sum(plan.loads_ms) / plan.topology.world
    # Where no single matrix limits the plan, bounds are compared: the rest of the makespan is the
    # solver's, and needs no split.
    then = now = plan.makespan_ms if floor else max(mean, plan.lower_bound_ms)
    if all(m.rows > 1 for m in members):
        one_of = {m.shape: m for m in members}
        half = {
            (r, c): newton_schulz_flops(r - r // 2, c, 1) / newton_schulz_flops(r, c, 1)
            for r, c in one_of
        }
        changed = sum(
            batch.ms / len(batch.matrices) * (2 * half[plan.specs.matrices[i].shape] - 1)
            for batch in plan.batches
            if _key_of(plan, batch) in keys
            for i in batch.matrices
        )
        halves = [least[m.key] * half[m.shape] for m in one_of.values()]
        together = -(-2 * len(members) // world)  # by pigeonhole some owner takes so many of them
        limits = [mean + changed / world, together * min(halves), *halves, *plan.limits.fixed_ms]
        then = max([*limits, *(ms for key, ms in least.items() if key not in keys)])
    saves, ms = max(0.0, now - then), least[first.key]
    return Split(first.name, first.rows, first.cols, len(members), ms, then, saves)


def _compare(plan: OwnershipPlan, measured_ms: tuple[float, ...]) -> MeasuredBalance:
    """The measured milliseconds of each rank against the plan's."""
    world = plan.topology.world
    fixed = plan.limits.fixed_ms or (0.0,) * world
    predicted = [0.0] * world
    runs: list[list[tuple[ShapeKey, int, str]]] = [[] for _ in range(world)]
    for batch in plan.batches:
        predicted[batch.owner] += batch.ms
        runs[batch.owner].append((_key_of(plan, batch), len(batch.matrices), batch.kernel))
    same: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for run, ms in zip(runs, measured_ms, strict=True):
        same[tuple(sorted(run))].append(ms)
    means = {run: sum(times) / len(times) for run, times in same.items()}
    alike = [means[tuple(sorted(run))] for run in runs]
    loads = tuple(m + f for m, f in zip(measured_ms, fixed, strict=True))
    makespan = max(loads)
    busiest = loads.index(makespan)
    plannable = max(m + f for m, f in zip(alike, fixed, strict=True))
    best = max(sum(loads) / world, _measured_floor(plan, predicted, alike))
    saving = max(0.0, plannable - best)
    pairs = zip(measured_ms, predicted, strict=True)
    return MeasuredBalance(
        ms=measured_ms,
        predicted_ms=tuple(predicted),
        makespan_ms=makespan,
        imbalance=_excess(makespan, sum(loads) / world),
        ratio=sum(measured_ms) / sum(predicted) if any(predicted) else None,
        plannable_ms=plannable,
        best_ms=best,
        saving_ms=saving,
        replan=_matters(saving, makespan),
        loads_ms=loads,
        ratios=tuple(m / p if p else None for m, p in pairs),
        busiest=busiest,
        straggles_ms=measured_ms[busiest] - alike[busiest],
    )


def _matters(ms: float, makespan_ms: float) -> bool:
    return ms > max(REPLAN_MS, REPLAN_FRACTION * makespan_ms)


def _measured_floor(
    plan: OwnershipPlan, predicted: Sequence[float], measured: Sequence[float]
) -> float:
    """What no plan gets below at the measured speed, however evenly it shares the work out.

    The costliest matrix; and the plan's own lower bound, because if every batch takes at least
    ``slowest`` times its prediction, then so does every plan.
    """
    speed: dict[ShapeKey, float] = {}
    for batch in plan.batches:
        key, p, m = _key_of(plan, batch), predicted[batch.owner], measured[batch.owner]
        if p and m:  # no time where no gradient came: that says nothing of the speed
            speed[key] = min(m / p, speed.get(key, math.inf))
    if not speed:
        return 0.0
    least, fixed = _least_ms(plan), plan.limits.fixed_ms
    costliest = max(ratio * least[key] for key, ratio in speed.items())
    # Fixed loads were not measured: they count once, as they are.
    slowest = min([*speed.values(), 1.0] if any(fixed) else speed.values())
    return max(costliest + min(fixed, default=0.0), slowest * plan.lower_bound_ms)


# ---- sentences ---------------------------------------------------------------------------


def _top_ms(report: LoadBalanceReport) -> float:
    """The largest time in the report, which decides how many decimals all of them have."""
    return max([report.makespan_ms, *(report.measured_ms or ())])


def _title(report: LoadBalanceReport) -> str:
    plan = report.plan
    return (
        f"dmuon load balance: {count_text(len(plan.specs.matrices), 'matrix', 'matrices')} on "
        f"{count_text(plan.topology.world, 'rank')}, layout {plan.layout.value}, "
        f"plan {plan.fingerprint()}"
    )


def _facts(report: LoadBalanceReport) -> list[Fact]:
    """(label, sentence) about the plan, most important first; empty ones are left out."""
    plan, top, certificate, idle = report.plan, _top_ms(report), report.certificate, report.idle
    verdict = "valid: makespan and lower bound computed anew from the stored prices and duals"
    if not (certificate.ok and certificate.proven):
        what = "plan valid, bound not proven" if certificate.ok else "INVALID"
        verdict = f"{what}: {'; '.join(certificate.findings)}"
    named = f": {', '.join(map(str, idle))}" if len(idle) <= 8 else ""
    by_algorithm: dict[Algorithm, list[int]] = {algorithm: [] for algorithm in Algorithm}
    for p in plan.specs.parameters + plan.specs.frozen:
        by_algorithm[p.algorithm].append(p.numel)
    elements = [
        f"{algorithm.value} {count_text(len(sizes), 'parameter')} of {sum(sizes):,} elements"
        for algorithm, sizes in by_algorithm.items()
        if sizes
    ]
    engine = f" ({plan.engine})" if plan.engine else ""
    clock = ", depends on the clock" if plan.hit_time_limit else ""
    found = [
        (
            "makespan",
            f"{ms_text(report.makespan_ms, top)} ms; mean of the ranks "
            f"{ms_text(report.mean_ms, top)} ms, imbalance {report.imbalance:.2%}",
        ),
        (
            "lower bound",
            f"{ms_text(report.lower_bound_ms, top)} ms"
            f"{'' if certificate.proven else ' (not proven)'}, gap {report.gap:.2%}",
        ),
        (
            "solver",
            f"{_WORDS.get(plan.solver, plan.solver)}{engine}: "
            f"{_WORDS.get(plan.status, plan.status)}{clock}, {plan.seconds:.2f} s; "
            f"costs {plan.cost_source}",
        ),
        ("certificate", verdict),
        ("compared", ", ".join(_compared(report))),
        ("kernels", _kernels_text(plan)),
        ("note", plan.note),
        ("bottleneck", _bottleneck_text(report.bottleneck, top)),
        ("split", _split_text(report)),
        ("fused", "; ".join(_fused(plan))),
        ("owners", "; ".join(_pools(plan))),
        ("idle", f"{len(idle)} of {len(report.ranks)} ranks own no matrix{named}" if idle else ""),
        ("contention", _contention_text(report)),
        ("memory", _memory_text(report)),
        ("parameters", "; ".join(elements)),
    ]
    if measured := report.measured:
        ratio = "" if measured.ratio is None else f", {measured.ratio:.2f} x predicted"
        text = (
            f"makespan {ms_text(measured.makespan_ms, top)} ms on rank {measured.busiest}, "
            f"imbalance {measured.imbalance:.2%}{ratio}"
        )
        found += [("measured", text), ("verdict", _verdict(measured, top))]
    return [(label, sentence) for label, sentence in found if sentence]


def _compared(report: LoadBalanceReport) -> Iterator[str]:
    """The makespans of the other solvers, relative to this plan's."""
    for name, ms in report.plan.alternatives:
        more = f" ({ms / report.makespan_ms - 1:+.1%})" if report.makespan_ms else ""
        yield f"{_WORDS.get(name, name)} {ms_text(ms, _top_ms(report))} ms{more}"


def _kernels_text(plan: OwnershipPlan) -> str:
    uses = _kernel_uses(plan)
    if [kernel for kernel, _, _ in uses] == [""]:
        return 'chosen by the fixed rule at run time: Muon.stats()["kernels"] names them'
    return ", ".join(
        f"{kernel or 'by the fixed rule'} {count_text(batches, 'batch', 'batches')}"
        for kernel, batches, _ in uses
    )


def _bottleneck_text(found: Bottleneck | None, top: float) -> str:
    """The busiest rank and what it spends its time on."""
    if found is None:
        return "no matrix to orthogonalize"
    others = len(found.matrices) - 1
    text = (
        f"rank {found.rank}, {ms_text(found.ms, top)} ms; its costliest "
        f"{f'batch, {others + 1} matrices' if others else 'matrix'} of {found.rows} x "
        f"{found.cols}: {found.matrices[0]}{f' and {others} more' if others else ''}, "
        f"{ms_text(found.batch_ms, top)} ms"
    )
    if not found.movable:
        text += ". All of its matrices are whole on that rank alone, so no plan can move them"
    return text


def _split_text(report: LoadBalanceReport) -> str:
    """Whether one matrix is the floor, and what splitting it, or several, would save."""
    found, top = report.bottleneck, _top_ms(report)
    if found is None or not found.movable:
        return ""
    split = found.split
    saved = split.saves_ms / report.makespan_ms if report.makespan_ms else 0.0
    if found.floor:
        others = f" (and {split.count - 1} more that cost as much)" if split.count > 1 else ""
        text = (
            f"{split.name}{others}, {split.rows} x {split.cols}, {ms_text(split.ms, top)} ms, is "
            "the floor: no plan is faster than its owner. "
        )
        what = "them all" if split.count > 1 else "it"
    else:
        text = "no single matrix is the floor. "
        what = f"all {split.count} of {split.rows} x {split.cols}" if saved >= 0.005 else "more"
    if saved < 0.005:
        return text + f"Splitting {what} in two by rows would save about nothing"
    return text + (
        f"Splitting {what} in two by rows, as heads= or splits= do, would save about "
        f"{ms_text(split.saves_ms, top)} ms of the makespan ({saved:.0%}), but changes the update: "
        "each half is orthogonalized by itself"
    )


def _fused(plan: OwnershipPlan) -> Iterator[str]:
    """Weights that hold several projections, by their names, but are orthogonalized as one."""
    parameters = plan.specs.parameters
    tall: list[str] = []
    wide: list[str] = []
    for matrix in plan.specs.matrices:
        parameter = parameters[matrix.parameter]
        end = parameter.name.split(".")[-2:]
        whole = matrix.start == 0 and matrix.shape == parameter.shape[-2:]
        if whole and _FUSED.search(".".join(end).lower()):
            # Projections lie below each other, so a fused weight has more rows than columns
            # unless it is stored (in, out).
            (tall if matrix.rows >= matrix.cols else wide).append(parameter.name)
    hold = "hold several projections each, by name, but are taken whole"
    if tall:
        end = tall[0].split(".")[-2:]
        pattern = "*." + ".".join(end if end[-1] == "weight" else end[-1:])
        how = f"splits={{{pattern!r}: [rows of each]}} would orthogonalize them one by one"
        yield f"{_folded(tall)} {hold}: {how}"
    if wide:
        yield f"{_folded(wide)} {hold}: side by side as columns, which splits= does not cut"


def _folded(names: Iterable[str]) -> str:
    return ", ".join(pattern for pattern, _ in fold_names(names))


def _pools(plan: OwnershipPlan) -> Iterator[str]:
    """Which ranks may own how many matrices, where not every rank may own all."""
    matrices: dict[int, int] = Counter()  # by size of the pool
    pools: dict[int, int] = Counter()
    for pool, count in Counter(plan.limits.pool_of).items():
        matrices[len(plan.limits.pools[pool])] += count
        pools[len(plan.limits.pools[pool])] += 1
    for size in sorted(matrices, reverse=True):
        where = f"{size} ranks a pool, {count_text(pools[size], 'pool')}"
        if size in (1, plan.topology.world):
            where = "any rank" if size > 1 else "a single rank, which has it whole"
        yield f"{count_text(matrices[size], 'matrix', 'matrices')}: {where}"


def _contention_text(report: LoadBalanceReport) -> str:
    """How crowded nodes get, against ranks taking turns row by row."""
    if report.contention is None:
        return ""
    plan, rows = report.contention["plan"], report.contention["row_major"]
    return (
        f"of {plan.window} consecutive matrices on one node: at most {plan.node_max} (mean "
        f"{plan.node_mean:.1f}), row by row {rows.node_max} ({rows.node_mean:.1f}); in one column: "
        f"{plan.column_max} ({plan.column_mean:.1f}), row by row {rows.column_max} "
        f"({rows.column_mean:.1f})"
    )


def _memory_text(report: LoadBalanceReport) -> str:
    """Optimizer state of a rank, and its cap."""
    state, cap = [r.state_bytes for r in report.ranks], report.plan.limits.memory_bytes
    sharded = report.plan.layout is Layout.SHARDED
    return (
        f"state a rank: min {bytes_text(min(state))}, mean {bytes_text(sum(state) / len(state))}, "
        f"max {bytes_text(max(state))}"
        + ("" if cap is None else f", cap {bytes_text(cap)}")
        + (". It lies with the parameters' shards, whoever owns a matrix" if sharded else "")
    )


def _verdict(measured: MeasuredBalance, top: float) -> str:
    """Whether a new plan would pay and how to get one; and a rank that is slow in itself."""
    saving, makespan = ms_text(measured.saving_ms, top), ms_text(measured.makespan_ms, top)
    text = f"the plan fits: a new one could save {saving} of {makespan} ms at most"
    if measured.replan:
        text = (
            f"re-planning would pay: it could save up to {saving} of {makespan} ms "
            f"({measured.saving_ms / measured.makespan_ms:.0%}). How: {_REPLAN_HOW}"
        )
    if _matters(measured.straggles_ms, measured.makespan_ms):
        text += (
            f". Rank {measured.busiest} takes {ms_text(measured.straggles_ms, top)} ms more than "
            "the mean of the ranks that do the same work: see what slows that rank down"
        )
    return text


# ---- tables ------------------------------------------------------------------------------


def _tables(report: LoadBalanceReport) -> list[Table]:
    return [_rank_table(report), _shape_table(report), _parameter_table(report)]


def _rank_table(report: LoadBalanceReport) -> Table:
    """Every rank, or the busiest and the idlest with the mean of all."""
    top, bound, measured = _top_ms(report), report.lower_bound_ms, report.measured
    headings = ["rank", "matrices", "predicted ms", "to the bound", "state"]
    headings += ["measured ms", "ratio"] if measured else []

    def row(name: str, matrices: str, ms: float, state: float, *found: float | None) -> list[str]:
        over = f"{ms / bound - 1:+.2%}" if bound else ""
        cells = [name, matrices, ms_text(ms, top), over, bytes_text(state)]
        if measured:
            load, ratio = found
            cells += [ms_text(load or 0.0, top), "" if ratio is None else f"{ratio:.2f}"]
        return cells

    def row_of(r: RankLoad) -> list[str]:
        found = (measured.loads_ms[r.rank], measured.ratios[r.rank]) if measured else ()
        return row(str(r.rank), str(r.matrices), r.ms, r.state_bytes, *found)

    count = len(report.ranks)
    if count <= FOLD_ABOVE:
        return Table("Ranks", headings, [row_of(r) for r in report.ranks])
    by_load = [row_of(r) for r in sorted(report.ranks, key=lambda r: (-r.ms, r.rank))]
    more = [f"{count - 2 * SHOWN} more ranks"] + [""] * (len(headings) - 1)
    state = sum(r.state_bytes for r in report.ranks) / count
    means = (sum(measured.loads_ms) / count, measured.ratio) if measured else ()
    mean = row("mean", f"{len(report.plan.owners) / count:.1f}", report.mean_ms, state, *means)
    rows = [*by_load[:SHOWN], more, *by_load[-SHOWN:], mean]
    return Table("Busiest and idlest ranks", headings, rows)


def _shape_table(report: LoadBalanceReport) -> Table:
    top, shapes = _top_ms(report), report.shapes
    rows = [
        [
            f"{s.rows} x {s.cols}",
            s.dtype,
            str(s.count),
            ", ".join(f"{size}" if n == 1 else f"{size} x{n}" for size, n in s.batches),
            ms_text(s.each_ms, top),
            ms_text(s.total_ms, top),
            "" if s.single_ms is None else ms_text(s.single_ms, top),
            ", ".join(s.origins),
        ]
        for s in shapes[:_MOST_SHAPES]
    ]
    more = shapes[_MOST_SHAPES:]
    if more:
        count, total = sum(s.count for s in more), ms_text(sum(s.total_ms for s in more), top)
        rows.append([f"{len(more)} more shapes", "", str(count), "", "", total, "", ""])
    numbers = ["batch sizes", "ms each", "ms in all", "ms alone", "prices"]
    headings = ["shape", "dtype", "matrices", *numbers]
    return Table("Shapes", headings, rows, ("shape", "dtype", "batch sizes", "prices"))


def _parameter_table(report: LoadBalanceReport) -> Table:
    """Which algorithm updates what, and why; names that differ in numbers alone are folded."""
    specs = report.plan.specs
    alike: dict[tuple[Algorithm, tuple[int, ...], str], list[str]] = defaultdict(list)
    for p in specs.parameters + specs.frozen:
        alike[p.algorithm, p.shape, p.reason].append(p.name)
    rows = [
        [pattern, str(count), " x ".join(map(str, shape)), algorithm.value, reason]
        for algorithm in Algorithm
        for (found, shape, reason), names in alike.items()
        for pattern, count in fold_names(names)
        if found is algorithm
    ]
    if len(rows) > _MOST_NAMES:
        more = f"{len(rows) - _MOST_NAMES} more patterns: see to_dict()"
        rows = [*rows[:_MOST_NAMES], [more, "", "", "", ""]]
    headings = ("parameter", "number", "shape", "by", "why")
    return Table("Parameters", headings, rows, ("parameter", "shape", "by", "why"))


# ---- the page ----------------------------------------------------------------------------


def _page(report: LoadBalanceReport) -> str:
    top, measured = _top_ms(report), report.measured
    proven = "" if report.certificate.proven else ", not proven"
    tiles = [
        ("makespan", f"{ms_text(report.makespan_ms, top)} ms"),
        (f"lower bound{proven}", f"{ms_text(report.lower_bound_ms, top)} ms"),
        ("gap to the bound", f"{report.gap:.2%}"),
        ("imbalance over the mean", f"{report.imbalance:.2%}"),
        ("matrices on ranks", f"{len(report.plan.specs.matrices)} on {len(report.ranks)}"),
    ]
    mesh, caption = html.mesh_picture(report.plan.topology.slots(), [r.ms for r in report.ranks])
    pictures = [("Load per rank", *_loads_picture(report)), ("Load by place", mesh, caption)]
    verdict = (_verdict(measured, top), measured.replan) if measured else None
    return html.page(_title(report), tiles, _facts(report), verdict, pictures, _tables(report))


def _loads_picture(report: LoadBalanceReport) -> tuple[str, str]:
    """A bar a rank; of many ranks, sorted by load, a bar for several. And its caption."""
    top, measured = _top_ms(report), report.measured
    zero = report.lower_bound_ms or report.mean_ms or 1.0
    many = len(report.ranks) > html.MOST_SHOWN
    order = sorted(report.ranks, key=lambda r: (-r.ms, r.rank)) if many else report.ranks
    bars = html.MOST_SHOWN // 2 if many else len(order)
    # Ranks may all be slower than predicted; the strokes show how they differ among themselves.
    speed = (measured.ratio if measured else None) or 1.0
    drawn = []
    for a, b in pairwise(i * len(order) // bars for i in range(bars + 1)):
        members, stroke = order[a:b], None
        ms = sum(r.ms for r in members) / len(members)
        some = ", ".join(str(r.rank) for r in members[:8]) + ", ..." * (len(members) > 8)
        title = f"rank {some}: {ms_text(ms, top)} ms"
        if measured:
            found = sum(measured.loads_ms[r.rank] for r in members) / len(members)
            stroke = found / speed / zero - 1
            title += f", measured {ms_text(found, top)} ms"
        idle = not ms and not any(r.matrices for r in members)
        name = f"{a + 1}-{b}" if many else f"rank {a}"
        drawn.append(html.Bar(name, None if idle else ms / zero - 1, title, stroke))
    what = "lower bound" if report.lower_bound_ms else "mean"
    caption = (
        f"Predicted load relative to the {what} of {ms_text(zero, top)} ms, the vertical line."
    )
    if many:
        caption += " Ranks are sorted by load, the busiest first; a bar is the mean of its ranks."
    if measured:
        caption += f" Strokes: measured, divided by {speed:.2f}, the ratio of all ranks together."
    return html.loads_picture(drawn), caption
