"""`check_step_equivalence`: does dmuon on W ranks do what Muon does in one process?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dmuon.api import dedicate_params
from dmuon.comm.replicated import ReplicatedRuntime
from dmuon.config import ReplicatedOptions
from dmuon.equivalence_report import EquivalenceReport, EquivalenceRow
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.optim import Muon
from dmuon.ownership import Ownership
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.dtensors import whole_tensor
from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.specs import canonical_name, dtype_name
from dmuon.scheduler.topology import Topology
from dmuon.types import Algorithm, DmuonError, Layout

__all__ = ["EquivalenceReport", "EquivalenceRow", "check_step_equivalence"]

ABSOLUTE = 1e-5  # weights and losses, where Newton-Schulz runs in the precision of the weights
RELATIVE = 0.05  # Frobenius norm of one update, where it runs in half precision
# ... and where the gradients are averaged in half precision besides: Newton-Schulz amplifies their
# rounding in the directions of small singular values (0.27 seen on a CPU that emulates bfloat16).
RELATIVE_HALF_REDUCE = 0.35


@dataclass
class _Worst:
    """The largest difference seen, and where."""

    value: float = 0.0
    where: str = "-"

    def see(self, value: float, where: str) -> None:
        # A NaN is the worst difference there is, and must not be lost in a comparison.
        if value != value:
            value = float("inf")
        if value > self.value:
            self.value, self.where = value, where


def check_step_equivalence(
    build_model: Callable[[], nn.Module],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Callable[[int, int], Any],
    mesh: DeviceMesh | None = None,
    *,
    parallelize: Callable[[nn.Module], nn.Module] | None = None,
    layout: str = "auto",
    steps: int = 10,
    options: Any = None,
    data_axes: Sequence[str] | None = None,
    **muon_kwargs: Any,
) -> EquivalenceReport:
    """Train with dmuon on all ranks and with `ReferenceMuon` on the joint batch; compare each step.

    Call it on every rank of an initialized group (or in a single process).

    Args:
        build_model: makes the model, unparallelized. The reference starts from the weights that
            the parallelized model has (rank 0's in the `replicated` layout; FSDP2 takes each shard
            from its own rank).
        loss_fn: ``(model, inputs) -> loss``, a mean over the inputs.
        batches: ``(step, data_rank) -> inputs``; make them differ from data rank to data rank. The
            reference takes the mean of the data ranks' losses, which is the loss of the joint
            batch when all have as many inputs.
        mesh: for `dedicate_params`.
        parallelize: wraps or parallelizes the model: `DistributedDataParallel`, a function that
            calls `fully_shard` or `parallelize_module`; identity by default.
        steps: how many steps to compare.
        options: for `dedicate_params`.
        data_axes: the mesh axes along which data differ; all but "tp" by default. Data ranks are
            numbered along them in mesh order; ranks that differ in other axes only are one.
        muon_kwargs: for `dmuon.Muon` and, except what concerns distribution, `ReferenceMuon`.

    Raises:
        ValueError: ``data_axes`` names no axis of the mesh, or ``parallelize`` renamed parameters.

    Where NS runs in the weights' own precision (or better) the weights and losses must agree to
    1e-5. In half precision a difference of 1e-7 in a gradient can flip roundings worth percents of
    an update, so there each step starts from the same weights, and each matrix's change beyond
    what rounding to its dtype explains (in the `replicated` layout also each published update)
    must agree to 5% in Frobenius norm.

    The reference shares the choice of matrices and the Newton-Schulz iteration with dmuon; those
    are tested on their own against `torch.optim.Muon` and the singular value decomposition.
    """
    model = build_model()
    twin = copy.deepcopy(model)  # now: a parallelized model cannot be copied
    wrapped = model if parallelize is None else parallelize(model)
    own = dedicate_params(wrapped, mesh, layout=layout, options=options)
    try:
        trial = _Trial(own, twin, wrapped, data_axes, muon_kwargs)
        for step in range(steps):
            trial.compare_step(step, loss_fn, batches)
        gathered = own.runtime.transport.gather_objects(trial.findings())
    finally:
        own.close()
    worst = [max(parts, key=lambda w: w.value) for parts in zip(*gathered)]
    replicated = own.plan.layout is Layout.REPLICATED
    ddp = isinstance(wrapped, DistributedDataParallel)
    return EquivalenceReport(
        (
            trial.row(
                *worst,
                steps=steps,
                layout=own.plan.layout.value + " (DDP)" * ddp,
                mesh=_mesh_text(own.plan.topology, named=not replicated),
                tolerance=ABSOLUTE if trial.absolute else _relative_tolerance(own, options),
            ),
        )
    )


def _mesh_text(topology: Topology, *, named: bool) -> str:
    sizes = "x".join(map(str, topology.shape))
    return f"{sizes} {' x '.join(topology.axes)}" if named else sizes


def _relative_tolerance(own: Ownership, options: object) -> float:
    """By the narrowest dtype in which gradients are averaged."""
    reduce_dtype = options.reduce_dtype if isinstance(options, ReplicatedOptions) else None
    narrowest = min((reduce_dtype or p.dtype).itemsize for p in own.parameters)
    averaged = own.plan.topology.world > 1
    return RELATIVE_HALF_REDUCE if averaged and narrowest < 4 else RELATIVE


def _data_rank(
    topology: Topology, rank: int, data_axes: Sequence[str] | None = None
) -> tuple[int, int]:
    """Which data rank a mesh rank is, and of how many.

    >>> mesh = Topology((2, 3, 2), ("replicate", "shard", "tp"), 12)
    >>> [_data_rank(mesh, r) for r in (0, 1, 2, 11)]
    [(0, 6), (0, 6), (1, 6), (5, 6)]
    >>> _data_rank(mesh, 11, ["replicate"])
    (1, 2)
    """
    chosen = [a for a in topology.axes if a != "tp"] if data_axes is None else list(data_axes)
    unknown = [axis for axis in chosen if axis not in topology.axes]
    if unknown:
        raise DmuonError(
            f"data_axes names {unknown}, but the mesh has the axes {list(topology.axes)}: name "
            "some of these"
        )
    index, count, below = 0, 1, topology.world
    for axis, size in zip(topology.axes, topology.shape):
        below //= size
        if axis in chosen:
            index, count = index * size + rank // below % size, count * size
    return index, count


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


class _Trial:
    """One model trained by dmuon, and its twin by the reference."""

    def __init__(
        self,
        own: Ownership,
        twin: nn.Module,
        wrapped: nn.Module,
        data_axes: Sequence[str] | None,
        muon_kwargs: dict[str, Any],
    ) -> None:
        self.own = own
        self.model = wrapped
        self.twin = twin
        self.data_rank, self.data_ranks = _data_rank(own.plan.topology, own.rank, data_axes)
        self.parameters = list(own.parameters)
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
        distributed = ("publish", "master_weights", "period", "block_lr_ratio", "ns_dtype")
        shared = {k: v for k, v in muon_kwargs.items() if k not in distributed}
        self.reference = ReferenceMuon(
            self.twin, orthogonalize=self._recording_newton_schulz(shared), **shared
        )
        wide = min(p.dtype.itemsize for p in self.parameters) >= 4
        self.absolute = self.ns_dtype.itemsize >= 4 and wide
        self.weights, self.losses, self.updates = _Worst(), _Worst(), _Worst()

    def _pieces(self) -> list[tuple[str, int, Callable[[Tensor], Tensor]]]:
        """What is compared by itself: (name, index of the parameter, view of its whole tensor)."""
        index = {spec.name: i for i, spec in enumerate(self.own.plan.specs.parameters)}
        specs = collect(self.twin)
        pieces = [
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

    def findings(self) -> tuple[_Worst, _Worst, _Worst]:
        rank = self.own.rank
        return tuple(  # type: ignore[return-value]
            _Worst(w.value, f"{w.where}, rank {rank}")
            for w in (self.weights, self.losses, self.updates)
        )

    def row(
        self,
        weights: _Worst,
        losses: _Worst,
        updates: _Worst,
        *,
        steps: int,
        layout: str,
        mesh: str,
        tolerance: float,
    ) -> EquivalenceRow:
        """The verdict on the worst findings of all ranks."""
        deciding = max((weights, losses) if self.absolute else (updates,), key=lambda w: w.value)
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
            passed=deciding.value <= tolerance,
        )

    def _whole(self) -> list[Tensor]:
        """Copies of the trained parameters, whole on every rank; a collective call."""
        return [whole_tensor(p).clone() for p in self.parameters]

    def compare_step(
        self,
        step: int,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        batches: Callable[[int, int], Any],
    ) -> None:
        before = self._whole()
        if not self.absolute:
            torch._foreach_copy_([t.detach() for t in self.twins], before)
        start = [t.detach().clone() for t in self.twins]
        loss = loss_fn(self.model, batches(step, self.data_rank))
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        expected = _joint_backward(self.twin, self.twins, loss_fn, batches, step, self.data_ranks)
        found = float(whole_tensor(loss))
        self.losses.see(abs(found - expected[self.data_rank]), f"loss at step {step}")
        updated = [t.grad is not None for t in self.twins]
        self._orthogonalized.clear()
        self.reference.step()
        self.reference.zero_grad()
        self.opt.synchronize()
        if self.publishes_updates:
            self._compare_published(step, updated)
        self._compare_weights(step, before, start)

    def _compare_published(self, step: int, updated: list[bool]) -> None:
        """What this rank received, before it is rounded into weights, with the reference's."""
        published = cast(ReplicatedRuntime, self.own.runtime).published()
        matrices = [m for m in self.own.plan.specs.matrices if updated[m.parameter]]
        for matrix, theirs in zip(matrices, self._orthogonalized, strict=True):
            ours, theirs = published[matrix.name].double(), theirs.double()
            size, difference = float(theirs.norm()), float((ours - theirs).norm())
            relative = difference / size if size else float("inf") if difference else 0.0
            self.updates.see(relative, f"update of {matrix.name} at step {step}")

    def _compare_weights(self, step: int, before: list[Tensor], start: list[Tensor]) -> None:
        after = self._whole()
        for name, i, view in self.pieces:
            ours, theirs = view(after[i]), view(self.twins[i].detach())
            if not ours.numel():
                continue
            where = f"{name} at step {step}"
            self.weights.see(float((ours - theirs).abs().max()), where)
            changes = (ours - view(before[i])).double(), (theirs - view(start[i])).double()
            self.updates.see(_relative(*changes, theirs), where)


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
