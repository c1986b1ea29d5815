"""The two kinds of steps of the `sharded` layout.

A full step, on every rank::

    operands    momentum and Nesterov on the local blocks, into a workspace: nothing is changed yet
    verdict     one all-reduce: every matrix's squared norm, who has gradients, who found an inf
    commit      the momentum; AdamW on the rest, while the first buckets travel
    pipeline    normalized blocks to the owners, Newton-Schulz there, updates back to the blocks

A block step (MuonBP, arXiv 2510.16981, Algorithm 1) orthogonalizes each local block by itself and
issues no collective.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.comm.pipeline import in_parameter_dims
from dmuon.comm.shard_routes import Part
from dmuon.comm.sharded import ShardedRuntime
from dmuon.comm.streams import Stopwatch
from dmuon.comm.transport import Work
from dmuon.engine import Settings
from dmuon.kernels.newton_schulz import iterate, resolve_coefficients
from dmuon.rest import adamw_step
from dmuon.scheduler.specs import local_tensor
from dmuon.shard_state import ShardState
from dmuon.update import (
    Rates,
    advance_momentum,
    apply_updates,
    nesterov_operands,
    scale_into,
    update_rms,
)
from dmuon.verdict import Verdict, VerdictMessage

__all__ = ["Bench", "BlockStep", "FullStep", "Outcome"]

_BLOCK_BATCH = 16  # blocks of one shape that a block step orthogonalizes together

Scale = float | Tensor
Gradients = Sequence[Tensor | None]


@dataclass
class Outcome:
    """What a step did. ``finite`` is a 0-d device bool where the host has not read it.

    ``values[n]`` is the RMS of the update of matrix ``matrices[n]``, after `settle`.
    """

    full: bool = True
    finite: bool | Tensor = True
    matrices: Sequence[int] = ()
    values: Tensor | None = None
    work: Work | None = None

    def settle(self) -> None:
        """Wait for what is still travelling."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def rms(self) -> Iterator[tuple[int, float]]:
        """(matrix, RMS of its update)."""
        values = [] if self.values is None else self.values.tolist()
        return zip(self.matrices, values)


class Bench:
    """What the steps of one ownership work on.

    ``on_host``: whether verdicts are read by the host. If not, every decision is a mask on the
    device, so that a step needs no synchronization.
    """

    def __init__(
        self,
        runtime: ShardedRuntime,
        optimizer: Optimizer,
        settings: Settings,
        kept: ShardState,
        rest: dict[int, list[Tensor]],
        on_host: bool,
    ) -> None:
        self.runtime = runtime
        self.optimizer = optimizer
        self.settings = settings
        self.kept = kept
        self.rest = rest
        self.on_host = on_host
        self.block_of = {block.matrix: k for k, block in enumerate(kept.blocks)}
        self.forms = [box.form for box in runtime.shards.boxes]
        self._index: dict[Tensor, int] = {p: i for i, p in enumerate(runtime.parameters)}
        self._zero = torch.zeros((), dtype=torch.float32, device=runtime.parameters[0].device)
        self._skipped: int | Tensor = 0

    # ---- momentum ------------------------------------------------------------------------

    def gradient(self, grads: Gradients, k: int) -> Tensor:
        """The gradient of block k in the momentum's dtype; zero where there is none."""
        buffer = self.kept.momentum[k]
        grad = grads[k]
        if grad is None:
            return self._zero.to(buffer.dtype).expand(buffer.shape)
        return grad if grad.dtype is buffer.dtype else grad.to(buffer.dtype)

    def operands(self, grads: Gradients) -> list[Tensor]:
        """Fill the workspace; the norm of the operand of each block, 0-d float64."""
        kept = self.kept
        norms: list[Tensor] = [self._zero] * len(kept.blocks)
        for chunk in kept.chunks:
            operands = [kept.operands[k] for k in chunk]
            nesterov_operands(
                operands,
                [kept.momentum[k] for k in chunk],
                [self.gradient(grads, k) for k in chunk],
                self.optimizer.param_groups[kept.blocks[chunk[0]].group],
            )
            # float64: the square of 1e30 overflows in float32, and long float32 sums are off.
            found = torch._foreach_norm(operands, 2.0, torch.float64)
            for k, norm in zip(chunk, found, strict=True):
                norms[k] = norm
        return norms

    def commit(self, grads: Gradients, which: Sequence[bool], ok: Sequence[Tensor] | None) -> None:
        """Advance the momentum of the blocks that take part."""
        kept = self.kept
        for chunk in kept.chunks:
            members = [k for k in chunk if which[k]]
            if members:
                advance_momentum(
                    [kept.momentum[k] for k in members],
                    [self.gradient(grads, k) for k in members],
                    self.optimizer.param_groups[kept.blocks[chunk[0]].group],
                    None if ok is None else [ok[k] for k in members],
                )

    # ---- Newton-Schulz -------------------------------------------------------------------

    def orthogonalize(self, group: int, batch: Tensor, watch: Stopwatch) -> Tensor:
        """Newton-Schulz on normalized matrices ``[b, rows, cols]`` with a group's settings."""
        settings = self.optimizer.param_groups[group]
        triples = resolve_coefficients(settings["ns_coefficients"], settings["ns_steps"])
        watch.start()
        update = iterate(batch, triples)
        watch.stop()
        return update

    def stacked(
        self, members: Sequence[int], scales: Sequence[Scale], ok: Sequence[Tensor] | None
    ) -> Tensor:
        """Equal blocks, scaled, as a batch ``[b, rows, cols]`` in the Newton-Schulz dtype."""
        first = self.kept.blocks[members[0]]
        tall = first.rows > first.cols
        shape = (first.cols, first.rows) if tall else (first.rows, first.cols)
        batch = torch.empty(
            (len(members), *shape), dtype=self.settings.ns_dtype, device=self.runtime.device
        )
        batch = batch.mT if tall else batch
        views = self.unstacked(members, batch)
        scale_into(views, [self.kept.operands[k] for k in members], scales)
        if ok is not None:
            for view, k in zip(views, members, strict=True):
                view.masked_fill_(ok[k].logical_not().to(view.device), 0.0)
        return batch

    def unstacked(self, members: Sequence[int], batch: Tensor) -> list[Tensor]:
        """Views of a batch in the dims that the blocks have in their parameters."""
        kept = self.kept
        return [
            in_parameter_dims(batch[n], self.forms[kept.blocks[k].matrix], kept.operands[k].shape)
            for n, k in enumerate(members)
        ]

    # ---- weights -------------------------------------------------------------------------

    def apply(
        self,
        members: Sequence[int],
        updates: Sequence[Tensor],
        decay: float,
        lr: float,
        ok: Tensor | None,
    ) -> None:
        """Decay and update the weights of blocks; ``ok`` false leaves them as they are."""
        kept = self.kept
        targets = [kept.targets[k] for k in members]
        where = targets[0].device
        # With CPU offload the weights lie elsewhere than the updates.
        moved = [u if u.device == where else u.to(where) for u in updates]
        factor = decay if ok is None else torch.where(ok.to(where), decay, 1.0).float()
        apply_updates(targets, moved, decay=factor, lr=lr)
        if kept.targets is not kept.weights:
            torch._foreach_copy_([kept.weights[k] for k in members], targets)

    # ---- the rest ------------------------------------------------------------------------

    def rest_peaks(self, grads: Gradients) -> list[Tensor]:
        """The largest absolute value of each of AdamW's gradients; not finite if one is not."""
        members = [
            g
            for params in self.rest.values()
            for g in (grads[self._index[p]] for p in params)
            if g is not None and g.numel()
        ]
        return list(torch._foreach_norm(members, math.inf)) if members else []

    def update_rest(
        self, grads: Gradients, absent: frozenset[int], found_inf: Tensor | None
    ) -> None:
        """AdamW, after a verdict that all ranks share.

        ``absent``: parameters without a gradient anywhere. One that is missing only here counts as
        zero. Where ``found_inf`` (0-d float32) is not zero, nothing changes.
        """
        for g, params in self.rest.items():
            members = [p for p in params if self._index[p] not in absent]
            found = [grads[self._index[p]] for p in members]
            self._adamw(
                g,
                members,
                [
                    torch.zeros_like(local_tensor(p)) if grad is None else grad
                    for p, grad in zip(members, found, strict=True)
                ],
                found_inf,
            )

    def update_rest_alone(self, grads: Gradients) -> None:
        """AdamW on what this rank knows: parameters without a gradient here, or with one that is
        not finite, are left alone. Replicas know the same."""
        for g, params in self.rest.items():
            members = [p for p in params if grads[self._index[p]] is not None]
            found = [x for x in (grads[self._index[p]] for p in members) if x is not None]
            if not self.on_host:
                # A mask each, for the fused form takes one for all that it is given.
                for p, grad in zip(members, found, strict=True):
                    self._adamw(g, [p], [grad], grad.isfinite().all().logical_not().float())
                continue
            finite = [bool(grad.isfinite().all()) for grad in found]
            self._adamw(
                g,
                [p for p, ok in zip(members, finite, strict=True) if ok],
                [grad for grad, ok in zip(found, finite, strict=True) if ok],
                None,
            )

    def _adamw(
        self, group: int, params: list[Tensor], grads: list[Tensor], found_inf: Tensor | None
    ) -> None:
        adamw_step(
            self.optimizer.param_groups[group],
            self.optimizer.state,
            params,
            grads,
            master_weights=self.settings.master_weights,
            found_inf=found_inf,
        )

    # ---- verdicts ------------------------------------------------------------------------

    def count_skip(self, bad: bool | Tensor) -> None:
        """Add one skipped step if ``bad``."""
        self._skipped = self._skipped + bad

    def skipped(self) -> int:
        """How many steps were skipped, wholly or in part, because of non-finite gradients."""
        return int(self._skipped)


@dataclass
class _InFlight:
    """What the buckets of one full step need until the last of their updates is applied."""

    rates: list[Rates]
    watch: Stopwatch
    scales: dict[int, Scale]
    absent: frozenset[int]
    ok: Tensor | None
    rms: Tensor = field(default_factory=lambda: torch.empty(0))


class FullStep:
    """See the module's docstring."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        runtime, blocks = bench.runtime, bench.kept.blocks
        self._counted = [k for k, b in enumerate(blocks) if b.travels and b.counts]
        self._message = VerdictMessage(
            runtime.shards,
            runtime.transport.rank,
            runtime.device,
            [blocks[k].matrix for k in self._counted],
        )
        rank = runtime.transport.rank
        self._local_units = [
            u for u, unit in enumerate(runtime.units)
            if runtime.is_local(unit) and unit.owner == rank
        ]  # fmt: skip
        self._rms_index = {
            u: torch.tensor(unit.matrices, dtype=torch.int64, device=runtime.device)
            for u, unit in enumerate(runtime.units)
            if unit.owner == rank
        }
        # By the identity of a message's parts: its blocks, unit by unit.
        self._runs: dict[int, list[tuple[int, list[int], slice]]] = {}

    def run(
        self,
        grads: Gradients,
        rates: list[Rates],
        watch: Stopwatch,
        found_inf: Tensor | None,
    ) -> Outcome:
        """Take the step; the updates of the last buckets are applied later."""
        bench, runtime = self._bench, self._bench.runtime
        blocks = bench.kept.blocks
        of_blocks = bench.kept.gradients_of_blocks(grads)
        norms = bench.operands(of_blocks)
        here = [g is not None for g in grads]
        vector = self._message.fill(
            [norms[k] for k in self._counted], norms + bench.rest_peaks(grads), here, found_inf
        )
        runtime.all_reduce(vector, "norms").wait()
        verdict = self._message.read(vector, here, on_host=bench.on_host)
        if verdict.finite is False:
            bench.count_skip(True)
            return Outcome(full=True, finite=False)
        ok = verdict.ok
        which = [b.matrix not in verdict.absent_matrices for b in blocks]
        bench.commit(of_blocks, which, None if ok is None else [ok] * len(blocks))
        flight = _InFlight(
            rates, watch, self._scales(verdict, norms), verdict.absent_matrices, ok,
            torch.zeros(len(bench.forms), dtype=torch.float32, device=runtime.device),
        )  # fmt: skip
        bad = None if ok is None else ok.logical_not()
        work = _Buckets(self, flight)

        def meanwhile() -> None:
            for u in self._local_units:
                self._local_unit(work, u)
            inf = None if bad is None else bad.float()
            bench.update_rest(grads, verdict.absent_parameters, inf)

        runtime.run(work, meanwhile)
        if bad is not None:
            bench.count_skip(bad)
        rms_work = runtime.all_reduce(flight.rms, "rms")
        finite = True if ok is None else ok
        return Outcome(True, finite, range(len(bench.forms)), flight.rms, rms_work)

    def _scales(self, verdict: Verdict, norms: Sequence[Tensor]) -> dict[int, Scale]:
        """One over the norm of each matrix that this rank holds a part of."""
        groups = self._bench.optimizer.param_groups
        found: dict[int, Scale] = {}
        for block, own in zip(self._bench.kept.blocks, norms, strict=True):
            norm: Scale = verdict.norms.get(block.matrix, own)
            if self._bench.on_host:
                norm = float(norm)
            found[block.matrix] = _reciprocal(norm, float(groups[block.group]["eps"]))
        return found

    def _local_unit(self, work: _Buckets, u: int) -> None:
        """A unit whose matrices lie whole on this rank: no traffic."""
        bench, flight = self._bench, work.flight
        unit = bench.runtime.units[u]
        members = [bench.block_of[i] for i in unit.matrices if i not in flight.absent]
        if not members:
            return
        oks = None if flight.ok is None else [flight.ok] * len(bench.kept.blocks)
        scales = [flight.scales[bench.kept.blocks[k].matrix] for k in members]
        update = bench.orthogonalize(unit.group, bench.stacked(members, scales, oks), flight.watch)
        rate = flight.rates[unit.group]
        lr = rate.adjusted(unit.rows, unit.cols)
        index = [bench.kept.blocks[k].matrix for k in members]
        values = update_rms(update, lr / rate.lr if rate.lr else 0.0)
        flight.rms.index_copy_(0, torch.tensor(index, device=flight.rms.device), values)
        bench.apply(members, bench.unstacked(members, update), rate.decay, lr, flight.ok)

    def runs(self, parts: Sequence[Part]) -> list[tuple[int, list[int], slice]]:
        """(unit, blocks, where) of the parts of a message, unit by unit."""
        key = id(parts)
        if key not in self._runs:
            found: list[tuple[int, list[int], slice]] = []
            start = 0
            for end in range(1, len(parts) + 1):
                if end == len(parts) or parts[end].unit != parts[start].unit:
                    members = [self._bench.block_of[p.matrix] for p in parts[start:end]]
                    found.append((parts[start].unit, members, slice(start, end)))
                    start = end
            self._runs[key] = found
        return self._runs[key]


class _Buckets:
    """`dmuon.comm.pipeline.BucketWork` of one full step."""

    def __init__(self, step: FullStep, flight: _InFlight) -> None:
        self._step = step
        self._bench = step._bench
        self.flight = flight

    def pack(self, parts: Sequence[Part], views: list[Tensor]) -> None:
        flight, kept = self.flight, self._bench.kept
        blocks = [self._bench.block_of[p.matrix] for p in parts]
        scales = [flight.scales[p.matrix] for p in parts]
        scale_into(views, [kept.operands[k] for k in blocks], scales)
        if flight.absent:
            for part, view in zip(parts, views, strict=True):
                if part.matrix in flight.absent:
                    view.zero_()
        if flight.ok is not None:
            bad = flight.ok.logical_not()
            for view in views:
                view.masked_fill_(bad, 0.0)

    def compute(self, unit: int, batch: Tensor) -> Tensor:
        bench, flight = self._bench, self.flight
        which = bench.runtime.units[unit]
        if flight.absent.issuperset(which.matrices):
            return batch  # of zeros, which nobody applies
        update = bench.orthogonalize(which.group, batch, flight.watch)
        rate = flight.rates[which.group]
        lr = rate.adjusted(which.rows, which.cols)
        values = update_rms(update, lr / rate.lr if rate.lr else 0.0)
        flight.rms.index_copy_(0, self._step._rms_index[unit], values)
        return update

    def apply(self, parts: Sequence[Part], views: list[Tensor]) -> None:
        bench, flight = self._bench, self.flight
        for u, members, where in self._step.runs(parts):
            updates = views[where]
            if flight.absent:
                kept = [
                    (k, v)
                    for k, v, part in zip(members, updates, parts[where], strict=True)
                    if part.matrix not in flight.absent
                ]
                if not kept:
                    continue
                members, updates = [k for k, _ in kept], [v for _, v in kept]
            unit = bench.runtime.units[u]
            rate = flight.rates[unit.group]
            lr = rate.adjusted(unit.rows, unit.cols)
            bench.apply(members, updates, rate.decay, lr, flight.ok)


class BlockStep:
    """See the module's docstring.

    A block without a gradient here, or with one that is not finite, is left alone: without a
    collective that is all a rank can know, and replicas know the same.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def run(
        self,
        grads: Gradients,
        rates: list[Rates],
        watch: Stopwatch,
        found_inf: Tensor | None,
    ) -> Outcome:
        """Take the step. ``found_inf`` says nothing that is not seen here, block by block."""
        bench, blocks = self._bench, self._bench.kept.blocks
        of_blocks = bench.kept.gradients_of_blocks(grads)
        norms = bench.operands(of_blocks)
        checked = norms + bench.rest_peaks(grads)
        which = [g is not None for g in of_blocks]
        oks: list[Tensor] | None = None
        values: Sequence[Scale] = norms
        finite: bool | Tensor = True
        if bench.on_host:
            found = torch.stack([c.double() for c in checked]).tolist() if checked else []
            finite = all(map(math.isfinite, found))
            values = found[: len(norms)]
            which = [
                w and math.isfinite(v) for w, v in zip(which, found[: len(norms)], strict=True)
            ]
        else:
            oks = [norm.isfinite() for norm in norms]
            if checked:
                finite = torch.stack([c.double() for c in checked]).isfinite().all()
        bench.count_skip(not finite if isinstance(finite, bool) else finite.logical_not())
        bench.commit(of_blocks, which, oks)
        members = [k for k in range(len(blocks)) if which[k]]
        rms = self._orthogonalize(members, values, oks, rates, watch)
        bench.update_rest_alone(grads)
        matrices = [blocks[k].matrix for k, _ in rms]
        stacked = torch.stack([v for _, v in rms]) if rms else None
        return Outcome(False, finite, matrices, stacked)

    def _orthogonalize(
        self,
        members: Sequence[int],
        norms: Sequence[Scale],
        oks: list[Tensor] | None,
        rates: list[Rates],
        watch: Stopwatch,
    ) -> list[tuple[int, Tensor]]:
        """Newton-Schulz on blocks, equal ones together; (block, RMS of its update)."""
        bench, blocks = self._bench, self._bench.kept.blocks
        alike: dict[tuple[int, int, int, bool], list[int]] = defaultdict(list)
        for k in members:
            b = blocks[k]
            alike[b.group, b.rows, b.cols, b.is_whole].append(k)
        found: list[tuple[int, Tensor]] = []
        for (group, rows, cols, whole), equal in alike.items():
            eps = float(bench.optimizer.param_groups[group]["eps"])
            rate = rates[group]
            lr = self._lr(rate, rows, cols, whole)
            for start in range(0, len(equal), _BLOCK_BATCH):
                some = equal[start : start + _BLOCK_BATCH]
                scales = [_reciprocal(norms[k], eps) for k in some]
                batch = bench.stacked(some, scales, oks)
                update = bench.orthogonalize(group, batch, watch)
                values = update_rms(update, lr / rate.lr if rate.lr else 0.0)
                found += zip(some, values.unbind(), strict=True)
                views = bench.unstacked(some, update)
                if oks is None:
                    bench.apply(some, views, rate.decay, lr, None)
                else:
                    for k, view in zip(some, views, strict=True):
                        bench.apply([k], [view], rate.decay, lr, oks[k])
        return found

    def _lr(self, rate: Rates, rows: int, cols: int, whole: bool) -> float:
        """The block's own learning rate; a matrix that is whole here always takes full steps."""
        lr = rate.adjusted(rows, cols)
        ratio = self._bench.settings.block_lr_ratio
        return lr if whole or ratio is None else lr * ratio


def _reciprocal(norm: Scale, eps: float) -> Scale:
    """``1 / max(norm, eps)``, on the host or on the device."""
    if isinstance(norm, Tensor):
        return norm.clamp(min=eps).reciprocal()
    return 1.0 / max(norm, eps)
