"""A block step (MuonBP, arXiv 2510.16981, Algorithm 1): blocks by themselves, no collective."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dmuon.comm.streams import Stopwatch
from dmuon.kernels.runner import Call
from dmuon.step.sharded_bench import Bench, Gradients, Outcome, Scale, reciprocal
from dmuon.update import Rates, update_rms

__all__ = ["BlockStep"]

_BLOCK_BATCH = 16  # blocks of one shape that are orthogonalized together


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
        """Take the step; nothing changes where ``found_inf`` (0-d) is not zero: torch's scaler has
        shared its verdict, and lowers its scale on all ranks."""
        bench, blocks = self._bench, self._bench.kept.blocks
        bench.runtime.pass_by()
        overflow = None if found_inf is None else found_inf.to(bench.runtime.device) != 0
        if overflow is not None and bench.on_host and bool(overflow):
            bench.count_skip(True)
            return Outcome(full=False, finite=False)
        of_blocks = bench.kept.gradients_of_blocks(grads)
        norms = bench.operands(of_blocks)
        checked = norms + bench.rest_peaks(grads)
        which = [g is not None for g in of_blocks]
        oks: list[Tensor] | None = None
        values: Sequence[Scale] = norms
        finite: bool | Tensor
        if bench.on_host:
            found = torch.stack([c.double() for c in checked]).tolist() if checked else []
            finite = all(map(math.isfinite, found))
            values = found[: len(norms)]
            which = [
                w and math.isfinite(v) for w, v in zip(which, found[: len(norms)], strict=True)
            ]
        else:
            oks = [norm.isfinite() for norm in norms]
            finite = torch.stack([c.double() for c in (*checked, bench.zero)]).isfinite().all()
            if overflow is not None:
                oks = [ok & ~overflow.to(ok.device) for ok in oks]
                finite = ~overflow & finite.to(overflow.device)
        bench.count_skip(not finite if isinstance(finite, bool) else finite.logical_not())
        bench.commit(of_blocks, which, oks)
        members = [k for k in range(len(blocks)) if which[k]]
        rms = self._orthogonalize(members, values, oks, rates, watch)
        bench.update_rest_alone(grads, overflow, all_finite=finite is True)
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
                scales = [reciprocal(norms[k], eps) for k in some]
                call = bench.call(group, [(len(some), rows, cols)])
                (operand,) = bench.kernels.operands(call)
                bench.fill(operand, some, scales, oks)
                (update,) = bench.orthogonalize(call, [operand], watch)
                values = update_rms(update, lr / rate.lr if rate.lr else 0.0)
                found += zip(some, values.unbind(), strict=True)
                views = bench.unstacked(some, update)
                bench.apply(some, views, rate.decay, lr, oks)
        return found

    def calls(self) -> Iterator[Call]:
        """What a step runs where every block has a gradient."""
        bench = self._bench
        alike = Counter((b.group, b.rows, b.cols, b.is_whole) for b in bench.kept.blocks)
        for (group, rows, cols, _), members in alike.items():
            whole, left = divmod(members, _BLOCK_BATCH)
            for count in {_BLOCK_BATCH if whole else left, left} - {0}:
                yield bench.call(group, [(count, rows, cols)])

    def batch_bytes(self) -> int:
        """The most that a batch of blocks takes beside the workspace of Newton-Schulz: a float32
        copy for the RMS."""
        if self._bench.settings.ns_dtype.itemsize >= 4:
            return 0
        return 4 * max((b * m * n for call in self.calls() for b, m, n in call.shapes), default=0)

    def _lr(self, rate: Rates, rows: int, cols: int, whole: bool) -> float:
        """The block's own learning rate; a matrix that is whole here always takes full steps."""
        lr = rate.adjusted(rows, cols)
        ratio = self._bench.settings.block_lr_ratio
        return lr if whole or ratio is None else lr * ratio
