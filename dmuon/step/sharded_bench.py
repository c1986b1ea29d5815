"""What steps of the `sharded` layout have in common: blocks, and what is done to them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.adamw import adamw_step
from dmuon.comm.pipeline import in_parameter_dims
from dmuon.comm.sharded import ShardedRuntime
from dmuon.comm.streams import Stopwatch
from dmuon.comm.transport import Work
from dmuon.config import KernelOptions
from dmuon.dtensors import local_tensor
from dmuon.kernels.iterations import Shape
from dmuon.kernels.newton_schulz import resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer, orthogonalize
from dmuon.step.engine import Settings
from dmuon.step.shard_state import ShardState
from dmuon.step.verdict import Verdict
from dmuon.update import advance_momentum, apply_updates, nesterov_operands, scale_into

__all__ = ["Bench", "Gradients", "Outcome", "Scale", "reciprocal"]

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
        options: KernelOptions,
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
        self.kernels = Orthogonalizer(runtime.device, settings.ns_dtype, options)
        self.zero = torch.zeros((), dtype=torch.float32, device=runtime.parameters[0].device)
        self._skipped: int | Tensor = 0

    # ---- momentum ------------------------------------------------------------------------

    def gradient(self, grads: Gradients, k: int) -> Tensor:
        """The gradient of block k in the momentum's dtype; zero where there is none."""
        buffer = self.kept.momentum[k]
        grad = grads[k]
        if grad is None:
            return self.zero.to(buffer.dtype).expand(buffer.shape)
        return grad if grad.dtype is buffer.dtype else grad.to(buffer.dtype)

    def operands(self, grads: Gradients) -> list[Tensor]:
        """Fill the workspace; the norm of the operand of each block, 0-d float64."""
        kept = self.kept
        norms: list[Tensor] = [self.zero] * len(kept.blocks)
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

    def call(self, group: int, shapes: Sequence[Shape], kernel: str = "") -> Call:
        """Newton-Schulz on batches of these shapes with a group's settings."""
        settings = self.optimizer.param_groups[group]
        triples = resolve_coefficients(settings["ns_coefficients"], settings["ns_steps"])
        return Call(tuple(shapes), triples, kernel)

    def orthogonalize(
        self, call: Call, batches: Sequence[Tensor], watch: Stopwatch
    ) -> list[Tensor]:
        """Newton-Schulz on normalized matrices ``[b, rows, cols]`` that run together; they are
        overwritten, and the results are valid until the next call."""
        watch.start()
        updates = orthogonalize(self.kernels, call, batches)
        watch.stop()
        return updates

    def fill(
        self,
        batch: Tensor,
        members: Sequence[int],
        scales: Sequence[Scale],
        ok: Sequence[Tensor] | None,
    ) -> None:
        """Write equal blocks, scaled, into a batch ``[b, rows, cols]``."""
        views = self.unstacked(members, batch)
        scale_into(views, [self.kept.operands[k] for k in members], scales)
        if ok is not None:
            for view, k in zip(views, members, strict=True):
                view.masked_fill_(ok[k].logical_not().to(view.device), 0.0)

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
        ok: Sequence[Tensor] | None,
    ) -> None:
        """Decay and update the weights of blocks; where ``ok``, a mask of each block, is false
        they stay as they are."""
        if ok is None:
            self._apply(members, updates, decay, lr)
            return
        alike: dict[int, list[int]] = defaultdict(list)  # positions by mask
        for n, k in enumerate(members):
            alike[id(ok[k])].append(n)
        for positions in alike.values():
            some = [members[n] for n in positions]
            mask = ok[some[0]].to(self.kept.targets[some[0]].device)
            factor = torch.where(mask, decay, 1.0).float()
            self._apply(some, [updates[n] for n in positions], factor, lr)

    def _apply(
        self, members: Sequence[int], updates: Sequence[Tensor], decay: float | Tensor, lr: float
    ) -> None:
        kept = self.kept
        targets = [kept.targets[k] for k in members]
        where = targets[0].device
        # With CPU offload the weights lie elsewhere than the updates.
        moved = [u if u.device == where else u.to(where) for u in updates]
        apply_updates(targets, moved, decay=decay, lr=lr)
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

    def update_rest(self, grads: Gradients, verdict: Verdict) -> None:
        """AdamW, after a verdict that all ranks share: a gradient that is missing only here counts
        as zero. Where the verdict is on the device nothing changes unless it is ok."""
        bad = None if verdict.ok is None else verdict.ok.logical_not()
        inf = None if bad is None else bad.float()
        for g, params in self.rest.items():
            known: tuple[list[Tensor], list[Tensor]] = [], []
            for p in params:
                i = self._index[p]
                if i in verdict.absent_parameters:
                    continue
                grad = grads[i]
                if grad is None:
                    grad = torch.zeros_like(local_tensor(p))
                if bad is not None and i in verdict.present_parameters:
                    # A mask of its own, for the fused form takes one for all that it is given.
                    absent = verdict.present_parameters[i].logical_not()
                    self._adamw(g, [p], [grad], (bad | absent).float())
                else:
                    known[0].append(p)
                    known[1].append(grad)
            self._adamw(g, *known, inf)

    def update_rest_alone(
        self, grads: Gradients, overflow: Tensor | None, *, all_finite: bool
    ) -> None:
        """AdamW on what this rank knows: parameters without a gradient here, or with one that is
        not finite, are left alone, and all where ``overflow`` (0-d bool) is true. Replicas know
        the same. ``all_finite``: the host knows that there is nothing to look for."""
        for g, params in self.rest.items():
            members = [p for p in params if grads[self._index[p]] is not None]
            found = [x for x in (grads[self._index[p]] for p in members) if x is not None]
            if not self.on_host:
                # A mask each, for the fused form takes one for all that it is given.
                for p, grad in zip(members, found, strict=True):
                    bad = grad.isfinite().all().logical_not()
                    bad = bad if overflow is None else bad | overflow.to(bad.device)
                    self._adamw(g, [p], [grad], bad.float())
                continue
            finite = [all_finite or bool(grad.isfinite().all()) for grad in found]
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
            on_device=not self.on_host,
            found_inf=found_inf,
        )

    # ---- verdicts ------------------------------------------------------------------------

    def count_skip(self, bad: bool | Tensor) -> None:
        """Add one skipped step if ``bad``."""
        self._skipped = self._skipped + bad

    def skipped(self) -> int:
        """How many steps were skipped, wholly or in part, because of non-finite gradients."""
        return int(self._skipped)


def reciprocal(norm: Scale, eps: float) -> Scale:
    """``1 / max(norm, eps)``, on the host or on the device."""
    if isinstance(norm, Tensor):
        return norm.clamp(min=eps).reciprocal()
    return 1.0 / max(norm, eps)
