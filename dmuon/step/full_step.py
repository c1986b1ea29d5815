"""A full step of the `sharded` layout, on every rank::

operands    momentum and Nesterov on the local blocks, into a workspace: nothing is changed yet
verdict     one all-reduce: every matrix's squared norm, who has gradients, who found an inf
commit      the momentum; AdamW on the rest, while the first buckets travel
pipeline    normalized blocks to the owners, Newton-Schulz there, updates back to the blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmuon.comm.routes import Unit
from dmuon.comm.shard_routes import Part
from dmuon.comm.streams import Stopwatch
from dmuon.kernels.runner import Call
from dmuon.step.sharded_bench import Bench, Gradients, Outcome, Scale, reciprocal
from dmuon.step.verdict import Verdict, VerdictMessage
from dmuon.update import Rates, scale_into, update_rms

__all__ = ["FullStep"]


@dataclass
class _InFlight:
    """What the buckets of one full step need until the last of their updates is applied."""

    rates: list[Rates]
    watch: Stopwatch
    scales: dict[int, Scale]
    absent: frozenset[int]
    ok: list[Tensor] | None  # of each block, where only the device knows; mostly one and the same
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
            runtime.pass_by()
            bench.count_skip(True)
            return Outcome(full=True, finite=False)
        ok = verdict.ok
        which = [b.matrix not in verdict.absent_matrices for b in blocks]
        oks = None if ok is None else self._masks(ok, verdict)
        bench.commit(of_blocks, which, oks)
        flight = _InFlight(
            rates, watch, self._scales(verdict, norms), verdict.absent_matrices, oks,
            torch.zeros(len(bench.forms), dtype=torch.float32, device=runtime.device),
        )  # fmt: skip
        work = _Buckets(self, flight)

        def meanwhile() -> None:
            for u in self._local_units:
                self._local_unit(work, runtime.units[u])
            bench.update_rest(grads, verdict)

        runtime.run(work, meanwhile)
        if ok is not None:
            bench.count_skip(ok.logical_not())
        rms_work = runtime.all_reduce(flight.rms, "rms")
        finite = True if ok is None else ok
        return Outcome(True, finite, range(len(bench.forms)), flight.rms, rms_work)

    def _masks(self, ok: Tensor, verdict: Verdict) -> list[Tensor]:
        """Whether each block is to be updated: one mask but for what lacks a gradient here."""
        present = verdict.present_matrices
        return [
            ok & present[b.matrix] if b.matrix in present else ok for b in self._bench.kept.blocks
        ]

    def _scales(self, verdict: Verdict, norms: Sequence[Tensor]) -> dict[int, Scale]:
        """One over the norm of each matrix that this rank holds a part of."""
        groups = self._bench.optimizer.param_groups
        found: dict[int, Scale] = {}
        for block, own in zip(self._bench.kept.blocks, norms, strict=True):
            norm: Scale = verdict.norms.get(block.matrix, own)
            if self._bench.on_host:
                norm = float(norm)
            found[block.matrix] = reciprocal(norm, float(groups[block.group]["eps"]))
        return found

    def calls(self) -> Iterator[Call]:
        """What this rank runs in every step on matrices that lie here."""
        for u in self._local_units:
            yield self._call(self._bench.runtime.units[u])

    def lasting(self) -> Iterator[tuple[Call, list[Tensor]]]:
        """What it runs on matrices that arrive, and where these lie."""
        units = self._bench.runtime.units
        for batches in self._bench.runtime.bound().batches:
            for u, batch in batches:
                yield self._call(units[u]), [batch]

    def _call(self, unit: Unit) -> Call:
        return self._bench.call(unit.group, [unit.shape], unit.kernel)

    def _local_unit(self, work: _Buckets, unit: Unit) -> None:
        """A unit whose matrices lie whole on this rank: no traffic."""
        bench, flight = self._bench, work.flight
        members = [bench.block_of[i] for i in unit.matrices if i not in flight.absent]
        if not members:
            return
        call = bench.call(unit.group, [(len(members), unit.rows, unit.cols)], unit.kernel)
        (operand,) = bench.kernels.operands(call)
        matrices = [bench.kept.blocks[k].matrix for k in members]
        bench.fill(operand, members, [flight.scales[i] for i in matrices], flight.ok)
        (update,) = bench.orthogonalize(call, [operand], flight.watch)
        rate = flight.rates[unit.group]
        lr = rate.adjusted(unit.rows, unit.cols)
        values = update_rms(update, lr / rate.lr if rate.lr else 0.0)
        torch._foreach_copy_([flight.rms[i] for i in matrices], list(values.unbind()))
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
            for k, view in zip(blocks, views, strict=True):
                view.masked_fill_(flight.ok[k].logical_not(), 0.0)

    def compute(
        self, batches: Sequence[tuple[int, Tensor]], done: Callable[[int, Tensor], None]
    ) -> None:
        bench, flight = self._bench, self.flight
        for n, (u, batch) in enumerate(batches):
            unit = bench.runtime.units[u]
            if flight.absent.issuperset(unit.matrices):
                done(n, batch)  # of zeros, which nobody applies
                continue
            (update,) = bench.orthogonalize(self._step._call(unit), [batch], flight.watch)
            rate = flight.rates[unit.group]
            lr = rate.adjusted(unit.rows, unit.cols)
            values = update_rms(update, lr / rate.lr if rate.lr else 0.0)
            flight.rms.index_copy_(0, self._step._rms_index[u], values)
            done(n, update)

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
