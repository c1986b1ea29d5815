"""One model trained by dmuon beside its twin in one process, and how far they are apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from dmuon.comm.replicated import ReplicatedRuntime
from dmuon.config import DedicatedOptions, ReplicatedOptions
from dmuon.equivalence_report import EquivalenceRow
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.optim import Muon
from dmuon.ownership import Ownership
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.dtensors import whole_tensor
from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.specs import canonical_name, dtype_name
from dmuon.types import Algorithm, DmuonError, Layout

__all__ = ["Rounding", "Trial", "Worst"]

ABSOLUTE = 1e-5  # weights and losses, where nothing is rounded to half precision
RELATIVE = 0.05  # Frobenius norm of one update, where Newton-Schulz runs in half precision
# ... and where gradients are rounded to half precision besides: Newton-Schulz amplifies that in the
# directions of small singular values (0.27 seen on a CPU that emulates bfloat16).
RELATIVE_HALF_GRADIENTS = 0.35

Loss = Callable[[nn.Module, Any], Tensor]
Batches = Callable[[int, int], Any]
# What is compared by itself: (name, index of the parameter, view of its whole tensor).
Piece = tuple[str, int, Callable[[Tensor], Tensor]]


@dataclass
class Worst:
    """The largest difference seen, and where."""

    value: float = 0.0
    where: str = "-"

    def see(self, value: float, where: str) -> None:
        """Remember it if it is larger than all before."""
        # A NaN is the worst difference there is, and must not be lost in a comparison.
        if value != value:
            value = float("inf")
        if value > self.value:
            self.value, self.where = value, where


@dataclass(frozen=True, slots=True)
class Rounding:
    """What is half precision: the weights in use; the gradients or the momentum, on one side."""

    weights: bool
    gradients: bool

    @classmethod
    def of(cls, own: Ownership, options: object, master_weights: bool) -> Rounding:
        """By the dtypes of the parameters and those that ``options`` of a layout ask for."""
        dtypes = {p.dtype for p in own.parameters}
        used = options.param_dtype if isinstance(options, DedicatedOptions) else None
        averaged = (
            options.reduce_dtype
            if isinstance(options, DedicatedOptions | ReplicatedOptions)
            else None
        )
        # The reference has none of these options: it rounds gradients and momentum to the
        # parameters' dtype, and nothing else.
        coarser = used is not None and any(used.itemsize < d.itemsize for d in dtypes)
        several = own.plan.topology.world > 1
        half = any(d.itemsize < 4 for d in dtypes)
        half_average = several and any((averaged or d).itemsize < 4 for d in dtypes)
        return cls(
            weights=coarser or half,
            gradients=coarser or half_average or (half and master_weights),
        )


class Trial:
    """``wrapped`` trained by dmuon, and ``twin`` by the reference.

    ``place``: which data rank this is, and of how many.
    """

    def __init__(
        self,
        own: Ownership,
        twin: nn.Module,
        wrapped: nn.Module,
        place: tuple[int, int],
        rounding: Rounding,
        muon_kwargs: dict[str, Any],
    ) -> None:
        self.own = own
        self.model = wrapped
        self.twin = twin
        self.data_rank, self.data_ranks = place
        self.rounding = rounding
        self.parameters = list(own.parameters)
        with own.materialized(wrapped):
            _copy_weights(wrapped, twin)
        by_name = dict(trainable_parameters(twin))
        self.twins = [by_name[spec.name] for spec in own.plan.specs.parameters]
        self.pieces = self._pieces()
        self.opt = Muon(wrapped, **muon_kwargs)
        self.ns_dtype: torch.dtype = getattr(torch, self.opt.stats()["ns_dtype"])
        self.publishes_updates = own.plan.layout is Layout.REPLICATED and not muon_kwargs.get(
            "master_weights"
        )
        self._orthogonalized: list[Tensor] = []  # by the reference in this step, in its order
        self._updated: list[bool] = []  # which parameters the last step changed
        self._before: list[Tensor] = []  # the whole weights before it, here and at the twin
        self._start: list[Tensor] = []
        distributed = ("publish", "master_weights", "period", "block_lr_ratio", "ns_dtype")
        shared = {k: v for k, v in muon_kwargs.items() if k not in distributed}
        self.reference = ReferenceMuon(
            self.twin, orthogonalize=self._recording_newton_schulz(shared), **shared
        )
        half = rounding.weights or rounding.gradients or self.ns_dtype.itemsize < 4
        self.absolute = not half
        self.weights, self.losses, self.updates = Worst(), Worst(), Worst()

    def _pieces(self) -> list[Piece]:
        index = {spec.name: i for i, spec in enumerate(self.own.plan.specs.parameters)}
        specs = collect(self.twin)
        pieces: list[Piece] = [
            (m.name, index[specs.parameters[m.parameter].name], m.view) for m in specs.matrices
        ]
        rest = [p.name for p in specs.parameters if p.algorithm is Algorithm.ADAMW]
        return pieces + [(name, index[name], lambda t: t) for name in rest]

    def _recording_newton_schulz(self, settings: dict[str, Any]) -> Callable[[Tensor], Tensor]:
        def orthogonalize(x: Tensor) -> Tensor:
            update = newton_schulz(
                x,
                steps=settings.get("ns_steps", 5),
                coefficients=settings.get("ns_coefficients", "polar_express"),
                dtype=self.ns_dtype,
                eps=settings.get("eps", 1e-7),
            )
            self._orthogonalized.append(update)
            return update

        return orthogonalize

    # ---- a step --------------------------------------------------------------------------

    def run(self, steps: int, loss_fn: Loss, batches: Batches) -> None:
        """Train both and compare; a collective call."""
        for step in range(steps):
            loss = loss_fn(self.model, batches(step, self.data_rank))
            # Only now, for reading waits for everything that was published, and a forward pass that
            # does not wait by itself would go unseen. Backward may overwrite what was published.
            self._compare_published(step - 1)
            loss.backward()
            self._compare_weights(step - 1)
            expected = _joint_backward(
                self.twin, self.twins, loss_fn, batches, step, self.data_ranks
            )
            found = float(whole_tensor(loss))
            self.losses.see(abs(found - expected[self.data_rank]), f"loss at step {step}")
            self._updated = [t.grad is not None for t in self.twins]
            self._orthogonalized.clear()
            for optimizer in (self.opt, self.reference):
                optimizer.step()
                optimizer.zero_grad()
        self._compare_published(steps - 1)
        self._compare_weights(steps - 1)

    def _compare_published(self, step: int) -> None:
        """What this rank received, before it is rounded into weights, with the reference's."""
        if step < 0 or not self.publishes_updates:
            return
        published = cast(ReplicatedRuntime, self.own.runtime).published()
        matrices = [m for m in self.own.plan.specs.matrices if self._updated[m.parameter]]
        for matrix, theirs in zip(matrices, self._orthogonalized, strict=True):
            ours, theirs = published[matrix.name].double(), theirs.double()
            size, difference = float(theirs.norm()), float((ours - theirs).norm())
            relative = difference / size if size else float("inf") if difference else 0.0
            self.updates.see(relative, f"update of {matrix.name} at step {step}")

    @torch.no_grad()
    def _compare_weights(self, step: int) -> None:
        """The weights after a step, and the next step's start; a collective call."""
        with self.own.materialized(self.model):
            after = [whole_tensor(p).clone() for p in self.parameters]
        if step >= 0:
            for name, i, view in self.pieces:
                ours, theirs = view(after[i]), view(self.twins[i])
                if not ours.numel():
                    continue
                where = f"{name} at step {step}"
                self.weights.see(float((ours - theirs).abs().max()), where)
                change = (ours - view(self._before[i])).double()
                expected = (theirs - view(self._start[i])).double()
                self.updates.see(_relative(change, expected, theirs), where)
        if not self.absolute:
            torch._foreach_copy_([t.detach() for t in self.twins], after)
        self._before = after
        self._start = [t.clone() for t in self.twins]

    # ---- the verdict ---------------------------------------------------------------------

    def gather_findings(self) -> list[Worst]:
        """The worst of all ranks: of weights, losses and updates; a collective call."""
        mine = [
            Worst(w.value, f"{w.where}, rank {self.own.rank}")
            for w in (self.weights, self.losses, self.updates)
        ]
        gathered = self.own.runtime.transport.gather_objects(mine)
        return [max(parts, key=lambda w: w.value) for parts in zip(*gathered)]

    def row(
        self,
        weights: Worst,
        losses: Worst,
        updates: Worst,
        *,
        steps: int,
        layout: str,
        mesh: str,
    ) -> EquivalenceRow:
        """The verdict on the worst findings of all ranks."""
        relative = RELATIVE_HALF_GRADIENTS if self.rounding.gradients else RELATIVE
        tolerance = ABSOLUTE if self.absolute else relative
        limits = [(weights if self.absolute else updates, tolerance)]
        if not self.rounding.weights:
            limits.append((losses, ABSOLUTE))
        deciding, _ = max(limits, key=lambda found: found[0].value / found[1])
        return EquivalenceRow(
            layout=layout,
            mesh=mesh,
            dtype=", ".join(sorted({dtype_name(p.dtype) for p in self.parameters})),
            ns_dtype=dtype_name(self.ns_dtype),
            steps=steps,
            max_abs_diff=weights.value,
            max_loss_diff=losses.value,
            max_update_diff=updates.value,
            criterion="absolute" if self.absolute else "of an update",
            tolerance=tolerance,
            worst=deciding.where,
            passed=all(worst.value <= limit for worst, limit in limits),
        )


# ---- weights and gradients ---------------------------------------------------------------


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, frozen ones and buffers too, by canonical name."""
    found = chain(model.named_parameters(), model.named_buffers())
    return {canonical_name(n): t for n, t in found} | dict(trainable_parameters(model))


@torch.no_grad()
def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give a plain module the weights of its parallelized like; a collective call."""
    found = dict(trainable_parameters(source)).keys()
    expected = dict(trainable_parameters(target)).keys()
    if found != expected:
        raise DmuonError(
            f"parallelize turned the parameters {sorted(expected - found)} of the model into "
            f"{sorted(found - expected)}: it must keep their names"
        )
    ours = _tensors(target)
    for name, tensor in _tensors(source).items():
        if name in ours:
            ours[name].copy_(whole_tensor(tensor))


def _joint_backward(
    twin: nn.Module,
    parameters: list[nn.Parameter],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Callable[[int, int], Any],
    step: int,
    data_ranks: int,
) -> list[float]:
    """Leave the mean gradient over all data ranks' inputs in ``p.grad``; returns their losses.

    Summed in float32 or better whatever the parameters' dtype: an oracle must not round.
    """
    sums: list[Tensor | None] = [None] * len(parameters)
    losses = []
    for r in range(data_ranks):
        loss = loss_fn(twin, batches(step, r))
        loss.backward()
        losses.append(float(loss.detach()))
        for i, p in enumerate(parameters):
            if p.grad is not None:
                wide = p.grad.to(torch.promote_types(p.dtype, torch.float32))
                so_far = sums[i]
                sums[i] = wide if so_far is None else so_far + wide
                p.grad = None
    for p, total in zip(parameters, sums, strict=True):
        p.grad = None if total is None else (total / data_ranks).to(p.dtype)
    return losses


def _relative(ours: Tensor, theirs: Tensor, weight: Tensor) -> float:
    """Frobenius norm of the difference of two updates over the second's.

    What storing the weights in their dtype may cost is not a difference of the updates: each side
    rounds to half a unit in the last place, at a norm of ``eps * |weight|`` together.
    """
    size, difference = float(theirs.norm()), float((ours - theirs).norm())
    difference -= torch.finfo(weight.dtype).eps * float(weight.detach().double().norm())
    if difference <= 0:
        return 0.0
    return difference / size if size else float("inf")
