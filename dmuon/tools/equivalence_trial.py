"""One model trained by dmuon beside its twin in one process, and how far they are apart.

How far they may be apart is measured in the same trial, because it depends on the matrices, on the
dtypes and on how this machine multiplies: a second reference gets the same gradients, each entry
moved by a rounding, and what that does to an update is the update's *yardstick*.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from dmuon.comm.replicated import ReplicatedRuntime
from dmuon.config import DedicatedOptions, ReplicatedOptions
from dmuon.dtensors import whole_tensor
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.optim import Muon
from dmuon.ownership import Ownership
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.specs import canonical_name, dtype_name
from dmuon.tools.equivalence_report import EquivalenceRow
from dmuon.types import Algorithm, DmuonError, Layout
from dmuon.update import merged_master

__all__ = ["Findings", "Rounding", "Trial"]

ABSOLUTE = 1e-5  # weights and losses, where nothing is rounded to half precision
# What an update may differ by, in yardsticks. Sums in another order carry up to 1 yardstick far,
# kernels that round twice as often as the reference's up to 2.5 (measured): twice that must pass.
YARDSTICKS = 5.0

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


@dataclass
class Measured:
    """Something about one update: how far it was off at most, and the yardstick for that."""

    criterion: str
    yardstick: float  # at first the least that it can be
    difference: Worst = field(default_factory=Worst)

    def see(self, difference: float, moved: float, where: str) -> None:
        """``moved``: by how much moved gradients changed it."""
        self.difference.see(difference, where)
        # Of an update that is zero nothing can be told.
        self.yardstick = max(self.yardstick, moved if moved < float("inf") else 0.0)

    @property
    def tolerance(self) -> float:
        return YARDSTICKS * self.yardstick

    @property
    def exhausted(self) -> float:
        """Difference over tolerance."""
        return self.difference.value / self.tolerance


@dataclass
class Findings:
    """What a rank has seen. ``moved``: how far moved gradients carried any weight."""

    weights: Worst = field(default_factory=Worst)
    losses: Worst = field(default_factory=Worst)
    moved: float = 0.0
    updates: dict[str, tuple[Measured, Measured]] = field(default_factory=dict)

    def all_measured(self) -> Iterable[Measured]:
        return chain.from_iterable(self.updates.values())


@dataclass(frozen=True, slots=True)
class Rounding:
    """In which dtypes dmuon uses weights and sums gradients, None for the parameters' own."""

    used: torch.dtype | None = None
    summed: torch.dtype | None = None

    @classmethod
    def of(cls, options: object, world: int) -> Rounding:
        """By what ``options`` of a layout ask for, on that many ranks."""
        used = options.param_dtype if isinstance(options, DedicatedOptions) else None
        if world == 1 or not isinstance(options, DedicatedOptions | ReplicatedOptions):
            return cls(used)
        return cls(used, options.reduce_dtype)


class Trial:
    """``wrapped`` trained by dmuon, and ``twin`` by the reference.

    ``place``: which data rank this is, and of how many. Takes the memory of two more copies of the
    model and of their optimizers' states.
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
        self.opt = Muon(wrapped, **muon_kwargs)
        self.ns_dtype: torch.dtype = getattr(torch, self.opt.stats()["ns_dtype"])
        distributed = ("publish", "master_weights", "period", "block_lr_ratio", "ns_dtype")
        shared = {k: v for k, v in muon_kwargs.items() if k not in distributed}
        names = [spec.name for spec in own.plan.specs.parameters]
        masters = bool(muon_kwargs.get("master_weights"))
        self.reference = _Reference(twin, names, self.ns_dtype, masters, shared)
        self.moved = _Reference(copy.deepcopy(twin), names, self.ns_dtype, masters, shared)
        # What uses weights as dmuon does where it casts them for that.
        self.cast = None if rounding.used is None else _Cast(twin, names, own, rounding.used)
        self.pieces = self._pieces()
        self.publishes_updates = own.plan.layout is Layout.REPLICATED and not muon_kwargs.get(
            "master_weights"
        )
        self._updated: list[bool] = []  # which parameters the last step changed
        self._before: list[Tensor] = []  # the whole weights before it
        # One rounding of what? Of the coarsest that a gradient goes through: Newton-Schulz rounds
        # a matrix to its dtype, wherever the last bits of a sum put it.
        matrices = {m.parameter for m in own.plan.specs.matrices}
        self.roundings = [
            _coarsest(
                p.dtype, rounding.used, rounding.summed, self.ns_dtype if i in matrices else None
            )
            for i, p in enumerate(self.parameters)
        ]
        self.forward_in_half = any(
            _coarsest(p.dtype, rounding.used).itemsize < 4 for p in self.parameters
        )
        self.absolute = all(dtype.itemsize >= 4 for dtype in (*self.roundings, self.ns_dtype))
        # Nobody is asked to know an update better than to one unit in its entries' last place.
        self.least = torch.finfo(_coarsest(*self.roundings)).eps
        self.findings = Findings()

    def _pieces(self) -> list[Piece]:
        index = {spec.name: i for i, spec in enumerate(self.own.plan.specs.parameters)}
        specs = collect(self.twin)
        pieces: list[Piece] = [
            (m.name, index[specs.parameters[m.parameter].name], m.view) for m in specs.matrices
        ]
        rest = [p.name for p in specs.parameters if p.algorithm is Algorithm.ADAMW]
        return pieces + [(name, index[name], lambda t: t) for name in rest]

    # ---- a step --------------------------------------------------------------------------

    def run(self, steps: int, loss_fn: Loss, batches: Batches) -> None:
        """Train and compare; a collective call."""
        generator = torch.Generator().manual_seed(0)
        for step in range(steps):
            loss = loss_fn(self.model, batches(step, self.data_rank))
            # Only now, for reading waits for everything that was published, and a forward pass that
            # does not wait by itself would go unseen. Backward may overwrite what was published.
            self._compare_published(step - 1)
            loss.backward()
            self._compare_weights(step - 1)
            expected = self._joint_backward(loss_fn, batches, step, generator)
            found = float(whole_tensor(loss))
            difference = abs(found - expected[self.data_rank])
            self.findings.losses.see(difference, f"loss at step {step}")
            self._updated = [t.grad is not None for t in self.reference.weights]
            self.opt.step()
            self.opt.zero_grad()
            self.reference.step()
            self.moved.step()
        self._compare_published(steps - 1)
        self._compare_weights(steps - 1)

    def _joint_backward(
        self, loss_fn: Loss, batches: Batches, step: int, generator: torch.Generator
    ) -> list[float]:
        """Give both references the mean gradient over all data ranks' inputs; returns their losses.

        The reference's is summed in float32 or better whatever the parameters' dtype, because an
        oracle must not round. The moved one's is summed as dmuon's may be, and where dmuon casts
        weights to use them it is that of cast weights.
        """
        sums: list[Tensor | None] = [None] * len(self.parameters)
        rounded = list(sums)
        losses = []
        for r in range(self.data_ranks):
            inputs = batches(step, r)
            loss, grads = _gradients(self.twin, self.reference.weights, loss_fn, inputs)
            losses.append(loss)
            sums = [_sum(s, g, _wide(g)) for s, g in zip(sums, grads, strict=True)]
            if self.cast is not None:
                _, grads = _gradients(self.cast.model, self.cast.weights, loss_fn, inputs)
            rounded = [
                _sum(s, g, self.rounding.summed) for s, g in zip(rounded, grads, strict=True)
            ]
        for i, (p, moved) in enumerate(zip(self.reference.weights, self.moved.weights)):
            total, in_turn = sums[i], rounded[i]
            if total is None or in_turn is None:
                continue
            p.grad = (total / self.data_ranks).to(p.dtype)
            mean = in_turn.to(total.dtype) / self.data_ranks
            moved.grad = _moved(mean, self.roundings[i], generator).to(p.dtype)
        return losses

    def _see(
        self, name: str, ours: tuple[float, float], moved: tuple[float, float], where: str
    ) -> None:
        """How far ours and the moved reference's update are from the reference's, by `_apart`."""
        new = (
            Measured("of an update", self.least),
            Measured("of an update's norm", self.least),
        )
        kept = self.findings.updates.setdefault(name, new)
        for measured, found, by_moving in zip(kept, ours, moved, strict=True):
            measured.see(found, by_moving, where)

    def _compare_published(self, step: int) -> None:
        """What this rank received, before it is rounded into weights, with the reference's."""
        if step < 0 or not self.publishes_updates:
            return
        published = cast(ReplicatedRuntime, self.own.runtime).published()
        matrices = [m for m in self.own.plan.specs.matrices if self._updated[m.parameter]]
        results = zip(self.reference.updates, self.moved.updates, strict=True)
        for matrix, (theirs, moved) in zip(matrices, results, strict=True):
            where = f"update of {matrix.name} at step {step}"
            ours = _apart(published[matrix.name], theirs)
            self._see(f"published {matrix.name}", ours, _apart(moved, theirs), where)

    @torch.no_grad()
    def _compare_weights(self, step: int) -> None:
        """The weights after a step, and the next step's start; a collective call."""
        with self.own.materialized(self.model):
            after = [whole_tensor(p).clone() for p in self.parameters]
        if step >= 0:
            for name, i, view in self.pieces:
                ours = view(after[i])
                if not ours.numel():
                    continue
                where = f"{name} at step {step}"
                theirs, moved = (view(side.weights[i]) for side in (self.reference, self.moved))
                self.findings.weights.see(_largest(ours - theirs), where)
                self.findings.moved = max(self.findings.moved, _largest(moved - theirs))
                expected = theirs.double() - view(self.reference.before[i]).double()
                # What storing the weights in their dtype may cost is not a difference of the
                # updates: each side rounds to half a unit in the last place.
                free = torch.finfo(theirs.dtype).eps * float(theirs.double().norm())
                change = ours.double() - view(self._before[i]).double()
                moved_change = moved.double() - view(self.moved.before[i]).double()
                self._see(
                    name,
                    _apart(change, expected, free),
                    _apart(moved_change, expected, free),
                    where,
                )
        for side in (self.reference, self.moved):
            side.begin(None if self.absolute else after)
        if self.cast is not None:
            torch._foreach_copy_([w.detach() for w in self.cast.weights], after)
        self._before = after

    # ---- the verdict ---------------------------------------------------------------------

    def gather_findings(self) -> list[Findings]:
        """Those of all ranks; a collective call."""
        mine = self.findings
        for worst in (mine.weights, mine.losses, *(m.difference for m in mine.all_measured())):
            worst.where += f", rank {self.own.rank}"
        return self.own.runtime.transport.gather_objects(mine)

    def row(
        self, findings: list[Findings], *, steps: int, layout: str, mesh: str
    ) -> EquivalenceRow:
        """The verdict on the worst findings of all ranks."""
        weights = max((f.weights for f in findings), key=lambda w: w.value)
        losses = max((f.losses for f in findings), key=lambda w: w.value)
        updates = [measured for f in findings for measured in f.all_measured()]
        change = max(
            (m.difference.value for m in updates if m.criterion == "of an update"), default=0.0
        )
        # (difference, yardstick, tolerance, what it is, where)
        moved = max(f.moved for f in findings)
        limits = [(weights.value, moved, ABSOLUTE, "absolute", weights.where)]
        if not self.absolute and updates:
            worst = max(updates, key=lambda m: m.exhausted)
            found, where = worst.difference.value, worst.difference.where
            limits = [(found, worst.yardstick, worst.tolerance, worst.criterion, where)]
        # Where forward runs in float32 and each step starts from equal weights, losses are equal.
        if not self.forward_in_half and (self.absolute or losses.value > ABSOLUTE):
            limits.append((losses.value, moved, ABSOLUTE, "absolute", losses.where))
        deciding = max(limits, key=lambda limit: limit[0] / limit[2])
        difference, yardstick, tolerance, criterion, where = deciding
        return EquivalenceRow(
            layout=layout,
            mesh=mesh,
            dtype=", ".join(sorted({dtype_name(p.dtype) for p in self.parameters})),
            ns_dtype=dtype_name(self.ns_dtype),
            steps=steps,
            max_abs_diff=weights.value,
            max_loss_diff=losses.value,
            max_update_diff=change,
            criterion=criterion,
            difference=difference,
            yardstick=yardstick,
            tolerance=tolerance,
            worst=where,
            passed=difference <= tolerance,
        )


class _Cast:
    """A copy of a model whose matrices are kept in the dtype that dmuon uses them in."""

    def __init__(
        self, twin: nn.Module, names: list[str], own: Ownership, dtype: torch.dtype
    ) -> None:
        self.model = copy.deepcopy(twin)
        by_name = dict(trainable_parameters(self.model))
        self.weights = [by_name[name] for name in names]
        for matrix in own.plan.specs.matrices:
            p = self.weights[matrix.parameter]
            p.data = p.data.to(dtype)


class _Reference:
    """`ReferenceMuon` on a model, with what it orthogonalized and started from in the last step.

    With ``masters`` it updates matrices in float32, of which the model has the rounded weights.
    """

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        ns_dtype: torch.dtype,
        masters: bool,
        settings: dict[str, Any],
    ) -> None:
        held = copy.deepcopy(model) if masters else model
        if masters:
            parameters = [p for _, p in trainable_parameters(held)]
            for matrix in collect(held).matrices:
                p = parameters[matrix.parameter]
                p.data = p.data.float()
        by_name, held_by_name = dict(trainable_parameters(model)), dict(trainable_parameters(held))
        self.weights = [by_name[name] for name in names]
        self._held = [held_by_name[name] for name in names]
        self.before: list[Tensor] = []  # the weights before the step
        self.updates: list[Tensor] = []  # in the order of its matrices

        def orthogonalize(x: Tensor) -> Tensor:
            update = newton_schulz(
                x,
                steps=settings.get("ns_steps", 5),
                coefficients=settings.get("ns_coefficients", "polar_express"),
                dtype=ns_dtype,
                eps=settings.get("eps", 1e-7),
            )
            self.updates.append(update)
            return update

        self._optimizer = ReferenceMuon(held, orthogonalize=orthogonalize, **settings)

    @torch.no_grad()
    def begin(self, weights: list[Tensor] | None) -> None:
        """The next step starts from these weights; None for those of the step before."""
        if weights is not None:
            for p, held, weight in zip(self.weights, self._held, weights, strict=True):
                p.copy_(weight)
                if held is not p:
                    held.copy_(merged_master(held, weight))
        self.before = [w.clone() for w in self.weights]

    @torch.no_grad()
    def step(self) -> None:
        pairs = list(zip(self.weights, self._held, strict=True))
        for p, held in pairs:
            if held is not p:
                held.grad, p.grad = None if p.grad is None else p.grad.to(held.dtype), None
        self.updates.clear()
        self._optimizer.step()
        self._optimizer.zero_grad()
        for p, held in pairs:
            if held is not p:
                p.copy_(held)


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


def _gradients(
    model: nn.Module, parameters: list[nn.Parameter], loss_fn: Loss, inputs: Any
) -> tuple[float, list[Tensor | None]]:
    """The loss and its gradients, of which none stays in ``p.grad``."""
    loss = loss_fn(model, inputs)
    loss.backward()
    grads = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return float(loss.detach()), grads


def _wide(grad: Tensor | None) -> torch.dtype | None:
    return None if grad is None else torch.promote_types(grad.dtype, torch.float32)


def _sum(so_far: Tensor | None, grad: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """In ``dtype``, None for that of the gradient."""
    if grad is None:
        return so_far
    grad = grad.to(dtype or grad.dtype)
    return grad if so_far is None else so_far + grad


def _moved(grad: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """``grad`` with each entry moved by a rounding to ``dtype``, zeros excepted.

    The difference of two roundings of one number, each of which may be off by half a unit in the
    last place: less than a unit, and half of that in the mean over many entries.
    """
    first, second = (
        torch.rand(grad.shape, dtype=grad.dtype, generator=generator) for _ in range(2)
    )
    _, exponent = torch.frexp(grad)
    unit = torch.ldexp(torch.full_like(grad, torch.finfo(dtype).eps / 2), exponent)
    return torch.where(grad == 0, grad, grad + (first - second).to(grad.device) * unit)


def _coarsest(*dtypes: torch.dtype | None) -> torch.dtype:
    given = [dtype for dtype in dtypes if dtype is not None]
    return max(given, key=lambda dtype: torch.finfo(dtype).eps)


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def _apart(ours: Tensor, theirs: Tensor, free: float = 0.0) -> tuple[float, float]:
    """Frobenius norm of the difference of two updates, and the difference of their norms.

    Both without what is ``free``, and relative to the second's norm. The first sees what points
    elsewhere; the second what is too long or too short, and rounding changes it ten times less.
    """
    ours, theirs = ours.double(), theirs.double()
    size = float(theirs.norm())

    def relative(difference: float) -> float:
        if difference <= free:
            return 0.0
        return (difference - free) / size if size else float("inf")

    return relative(float((ours - theirs).norm())), relative(abs(float(ours.norm()) - size))
