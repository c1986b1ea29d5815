"""What the report says in words and numbers, the same in a terminal and on a page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dmuon.report.balance import Balance, ShapeUse
from dmuon.report.bottleneck import Floor
from dmuon.report.kernels import kernels_text, ms_text
from dmuon.report.measured import REPLAN_FRACTION, REPLAN_MS, MeasuredBalance
from dmuon.types import Algorithm, Layout

__all__ = [
    "Routed",
    "batches_text",
    "bound_text",
    "bytes_text",
    "facts",
    "measured_text",
    "ms_text",
    "replan_text",
    "routed",
    "title_text",
    "top_ms",
]

SOLVER_NAMES = {"milp": "MILP", "round_robin": "round robin"}
STATUS_NAMES = {"time_limit": "stopped by the time limit"}

REPLAN_HOW = (
    'own.close(), then dmuon.dedicate_params(model, costs="measured") with an empty '
    "PlannerOptions.cache_dir, and dmuon.Muon again; its momentum starts anew"
)


# ---- numbers -----------------------------------------------------------------------------


def bytes_text(count: float) -> str:
    """
    >>> bytes_text(5), bytes_text(3 << 20)
    ('5 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def batches_text(shape: ShapeUse) -> str:
    """Batch sizes with how often each is used: ``16 x3, 5``."""
    return ", ".join(f"{size}" if n == 1 else f"{size} x{n}" for size, n in shape.batches)


def _count(number: int, noun: str) -> str:
    plural = "matrices" if noun == "matrix" else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def top_ms(balance: Balance) -> float:
    """The largest time in the report, which decides how many decimals all of them have."""
    return max([balance.makespan_ms, *(balance.measured_ms or ())])


# ---- sentences ---------------------------------------------------------------------------


def facts(balance: Balance) -> list[tuple[str, str]]:
    """(label, sentence) about the plan, most important first; empty ones are left out."""
    top = top_ms(balance)
    floor = None if balance.bottleneck is None else balance.bottleneck.floor
    found = [
        ("solver", _solver_text(balance)),
        ("certificate", _certificate_text(balance)),
        ("compared", _compared_text(balance, top)),
        ("kernels", kernels_text(balance.kernels)),
        ("note", balance.plan.note),
        ("bottleneck", _bottleneck_text(balance, top)),
        ("floor", "" if floor is None else _floor_text(floor, balance.makespan_ms, top)),
        ("owners", _pools_text(balance)),
        ("idle", _idle_text(balance)),
        ("contention", _contention_text(balance)),
        ("memory", _memory_text(balance)),
    ]
    return [(label, sentence) for label, sentence in found if sentence]


def title_text(balance: Balance) -> str:
    plan = balance.plan
    return (
        f"dmuon load balance: {_count(len(plan.specs.matrices), 'matrix')} on "
        f"{_count(plan.topology.world, 'rank')}, layout {plan.layout.value}, "
        f"plan {plan.fingerprint()}"
    )


def _solver_text(balance: Balance) -> str:
    """Which solver ran, its status, and how long it took."""
    plan = balance.plan
    name = SOLVER_NAMES.get(plan.solver, plan.solver) + (f" ({plan.engine})" if plan.engine else "")
    status = STATUS_NAMES.get(plan.status, plan.status)
    clock = ", depends on the clock" if plan.hit_time_limit else ""
    return f"{name}: {status}{clock}, {plan.seconds:.2f} s; costs {plan.cost_source}"


def bound_text(balance: Balance, top: float) -> str:
    """The lower bound and the gap to it, and whether it is proven."""
    unproven = "" if balance.certificate.proven else " (not proven)"
    return f"{ms_text(balance.lower_bound_ms, top)} ms{unproven}, gap {balance.gap:.2%}"


def _certificate_text(balance: Balance) -> str:
    """What an independent check of the plan found."""
    certificate = balance.certificate
    findings = "; ".join(certificate.findings)
    if not certificate.ok:
        return f"INVALID: {findings}"
    if not certificate.proven:
        return f"plan valid, bound not proven: {findings}"
    return "valid: makespan and lower bound computed anew from the stored prices and duals"


def _compared_text(balance: Balance, top: float) -> str:
    """The makespans of the other solvers, relative to this plan's."""
    parts = []
    for name, ms in balance.plan.alternatives:
        more = f" ({ms / balance.makespan_ms - 1:+.1%})" if balance.makespan_ms else ""
        parts.append(f"{SOLVER_NAMES.get(name, name)} {ms_text(ms, top)} ms{more}")
    return ", ".join(parts)


def _memory_text(balance: Balance) -> str:
    """Optimizer state of a rank, and its cap."""
    memory, cap = balance.memory, balance.plan.limits.memory_bytes
    limit = "" if cap is None else f", cap {bytes_text(cap)}"
    sharded = balance.plan.layout is Layout.SHARDED
    where = ". It lies with the parameters' shards, whoever owns a matrix" if sharded else ""
    return (
        f"state a rank: min {bytes_text(memory.min)}, mean {bytes_text(memory.mean)}, "
        f"max {bytes_text(memory.max)}{limit}{where}"
    )


def _pools_text(balance: Balance) -> str:
    """Which ranks may own how many matrices, where not every rank may own all."""
    limits, world = balance.plan.limits, balance.plan.topology.world
    matrices: Counter[int] = Counter()  # by size of the pool
    pools: Counter[int] = Counter()
    for pool, count in Counter(limits.pool_of).items():
        matrices[len(limits.pools[pool])] += count
        pools[len(limits.pools[pool])] += 1
    parts = []
    for size in sorted(matrices, reverse=True):
        if size == world:
            where = "any rank"
        elif size == 1:
            where = "a single rank, which has it whole"
        else:
            where = f"{size} ranks a pool, {_count(pools[size], 'pool')}"
        parts.append(f"{_count(matrices[size], 'matrix')}: {where}")
    return "; ".join(parts)


def _idle_text(balance: Balance) -> str:
    idle, world = balance.idle, balance.plan.topology.world
    if not idle:
        return ""
    few = f": {', '.join(map(str, idle))}" if len(idle) <= 8 else ""
    return f"{len(idle)} of {world} ranks own no matrix{few}"


def _bottleneck_text(balance: Balance, top: float) -> str:
    """The busiest rank and what it spends its time on."""
    found = balance.bottleneck
    if found is None:
        return "no matrix to orthogonalize"
    shape = f"{found.rows} x {found.cols}"
    more = f" and {len(found.matrices) - 1} more" if len(found.matrices) > 1 else ""
    what = "matrix" if not more else f"batch, {len(found.matrices)} matrices"
    text = (
        f"rank {found.rank}, {ms_text(found.ms, top)} ms; its costliest {what} of {shape}: "
        f"{found.matrices[0]}{more}, {ms_text(found.batch_ms, top)} ms"
    )
    if not found.movable:
        text += ". All of its matrices are whole on that rank alone, so no plan can move them"
    elif found.floor is None:
        text += ". No single matrix is the floor, so splitting one saves nothing by itself"
    return text


def _floor_text(floor: Floor, makespan_ms: float, top: float) -> str:
    """Which matrix is the floor, and what splitting it would save."""
    others = f" (and {floor.count - 1} more that cost as much)" if floor.count > 1 else ""
    text = (
        f"{floor.name}{others}, {floor.rows} x {floor.cols}, {ms_text(floor.ms, top)} ms: "
        "no plan is faster than its owner. "
    )
    it = "them all" if floor.count > 1 else "it"
    split = floor.split
    if split is None:
        return text + "A single row cannot be split"
    saved = split.saves_ms / makespan_ms if makespan_ms else 0.0
    if saved < 0.005:
        return text + f"Splitting {it} in two by rows would save about nothing"
    return text + (
        f"Splitting {it} in two by rows, as heads= or splits= do, would save about "
        f"{ms_text(split.saves_ms, top)} ms of the makespan ({saved:.0%}), but changes the update: "
        "each half is orthogonalized by itself"
    )


def _contention_text(balance: Balance) -> str:
    """How crowded nodes get, against ranks taking turns row by row."""
    found = balance.contention
    if found is None:
        return ""
    plan, rows = found.plan, found.row_major
    return (
        f"of {plan.window} consecutive matrices on one node: at most {plan.node_max} (mean "
        f"{plan.node_mean:.1f}), row by row {rows.node_max} ({rows.node_mean:.1f}); in one column: "
        f"{plan.column_max} ({plan.column_mean:.1f}), row by row {rows.column_max} "
        f"({rows.column_mean:.1f})"
    )


def measured_text(measured: MeasuredBalance, top: float) -> str:
    """The measured makespan, imbalance and ratio to the prediction."""
    ratio = "" if measured.ratio is None else f", {measured.ratio:.2f} x predicted"
    return (
        f"makespan {ms_text(measured.makespan_ms, top)} ms on rank {measured.busiest}, "
        f"imbalance {measured.imbalance:.2%}{ratio}"
    )


def replan_text(measured: MeasuredBalance, top: float) -> str:
    """Whether a new plan would pay, why, and how to get one."""
    saving, makespan = (ms_text(v, top) for v in (measured.saving_ms, measured.makespan_ms))
    if measured.replan:
        share = measured.saving_ms / measured.makespan_ms
        text = (
            f"re-planning would pay: it could save up to {saving} of {makespan} ms ({share:.0%}). "
            f"How: {REPLAN_HOW}"
        )
    else:
        text = f"the plan fits: a new one could save {saving} of {makespan} ms at most"
    return text + _straggler_text(measured, top)


def _straggler_text(measured: MeasuredBalance, top: float) -> str:
    """A rank that is slow in itself, which no plan mends."""
    late, rank = measured.straggles_ms, measured.busiest
    if late > max(REPLAN_MS, REPLAN_FRACTION * measured.makespan_ms):
        return (
            f". Rank {rank} takes {ms_text(late, top)} ms more than the mean of the ranks that do "
            "the same work: see what slows that rank down"
        )
    return ""


# ---- how parameters are routed -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Routed:
    """Parameters that are updated alike, for the same reason."""

    algorithm: str
    parameters: int
    elements: int
    why: str


def routed(balance: Balance) -> list[Routed]:
    """How parameters are split between algorithms, and why, the most frequent reason first."""
    specs = balance.plan.specs
    rows = []
    for algorithm in (Algorithm.MUON, Algorithm.ADAMW, Algorithm.FROZEN):
        members = specs.frozen if algorithm is Algorithm.FROZEN else specs.parameters
        chosen = [p for p in members if p.algorithm is algorithm]
        for reason, count in Counter(p.reason for p in chosen).most_common():
            same = [p for p in chosen if p.reason == reason]
            why = reason if count > 1 else f"{reason}: {same[0].name}"
            rows.append(Routed(algorithm.value, count, sum(p.numel for p in same), why))
    return rows
