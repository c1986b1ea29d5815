"""`check_step_equivalence`: whether dmuon on W ranks trains as Muon does in one process.

The allowed difference of two updates depends on the matrices, on the dtypes and on how this machine
multiplies, so it is measured in the same trial: a second reference gets the same gradients, each
entry moved by a rounding, and the change of an update by that is the update's *yardstick*.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dmuon.api import Given, Request, plan_given
from dmuon.comm.owners_runtime import OwnersRuntime, Parts
from dmuon.comm.process_groups import attempt_in_all, check_launched
from dmuon.comm.transport import Transport
from dmuon.config import DedicatedOptions, KernelOptions, PlannerOptions, ReplicatedOptions
from dmuon.dtensors import is_distributed, whole_tensor
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.optim import Muon
from dmuon.ownership import Ownership
from dmuon.reference import ReferenceMuon
from dmuon.report.render import grid, printed
from dmuon.rule import merged_master
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.specs import Box, canonical_name, dtype_name
from dmuon.scheduler.topology import Topology
from dmuon.step.verify import Finding, Verifier, matrices_of
from dmuon.types import DmuonError, Layout, LayoutName

ABSOLUTE = 1e-5  # for weights and losses, if nothing is rounded to half precision
# Allowed difference of an update in yardsticks. Sums in another order, and kernels that round
# elsewhere, make up to 1.2 yardsticks (measured, with the kernels of five kinds of CPU).
YARDSTICKS = 4.0


Loss = Callable[[nn.Module, Any], Tensor]
Batches = Callable[[int, int], Any]


@dataclass(frozen=True, slots=True)
class EquivalenceRow:
    """The outcome of one comparison, the same on every rank: the largest difference of any weight
    element after any step, of any loss, and (relative, Frobenius) of any update. ``difference``
    decides; ``criterion`` names its kind, ``worst`` its place, and ``yardstick`` is the difference
    made by moving gradients by a rounding (for a loss: the weights' difference). ``bitwise``:
    whether every matrix equals that of a single process to the bit; None if kernels are "auto"."""

    layout: str
    mesh: str
    dtype: str
    ns_dtype: str
    steps: int
    max_abs_diff: float
    max_loss_diff: float
    max_update_diff: float
    criterion: str
    difference: float
    yardstick: float
    tolerance: float
    worst: str
    case: str = ""
    seed: int = 0
    bitwise: bool | None = None

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance, and bits are equal where promised."""
        return self.difference <= self.tolerance and self.bitwise is not False

    def _cells(self) -> list[str]:
        """Return the cells of a table row, in the order of `_HEADINGS`."""
        where = f"{self.layout} {self.case}".strip() + f", {self.mesh}"
        short = f"{self.dtype}/{self.ns_dtype}".replace("bfloat", "bf").replace("float", "fp")
        allowed = f"{self.tolerance:.1e} {self.criterion.removeprefix('of an ')}"
        numbers = f"{self.difference:.1e}", f"{self.yardstick:.1e}", allowed
        bits = {None: "", True: "yes", False: "NO"}[self.bitwise]
        return [where, short, str(self.seed), *numbers, bits, "equal" if self.passed else "DIFFERS"]


_HEADINGS = (
    "layout and ranks", "dtype/NS", "seed", "found", "yardstick", "tolerance", "bits", "verdict"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EquivalenceReport:
    """Rows of comparisons; true when all passed."""

    rows: tuple[EquivalenceRow, ...]

    @property
    def passed(self) -> bool:
        """Whether every row is within its tolerance."""
        return all(row.passed for row in self.rows)

    def __bool__(self) -> bool:
        return self.passed

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the verdict and a dict per row."""
        rows = [asdict(row) | {"passed": row.passed} for row in self.rows]
        return {"passed": self.passed, "rows": rows}

    def __str__(self) -> str:
        columns = zip(_HEADINGS, *(row._cells() for row in self.rows), strict=True)
        # A column says nothing if all its cells are empty, or the first seed.
        shown = [column for column in columns if {*column[1:]} - {"", "0"}]
        (headings, *lines), notes = zip(*shown, strict=True), []
        table = grid(headings, headings, no_wrap=True)
        table.columns[0].no_wrap = False
        for line, row in zip(lines, self.rows, strict=True):
            table.add_row(*line)
            if not row.passed:
                what = ", ".join(filter(None, (row.layout, row.case, row.mesh)))
                bits = ", other bits than of one process" if row.bitwise is False else ""
                notes.append(f"{what}, NS {row.ns_dtype}: worst at {row.worst}{bits}")
        return printed(table, *notes)


def check_step_equivalence(
    build_model: Callable[[], nn.Module],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Callable[[int, int], Any],
    mesh: DeviceMesh | None = None,
    *,
    parallelize: Callable[[nn.Module], nn.Module] | None = None,
    tensor_parallel: Callable[[nn.Module], nn.Module] | None = None,
    layout: LayoutName = "auto",
    steps: int = 10,
    options: Any = None,
    kernels: KernelOptions = KernelOptions(),  # noqa: B008  frozen
    planner: PlannerOptions = PlannerOptions(),  # noqa: B008  frozen
    data_axes: Sequence[str] | None = None,
    **muon_kwargs: Any,
) -> EquivalenceReport:
    """Train with dmuon on all ranks and with `ReferenceMuon` on the joint batch; compare each step.

    Call it on every rank of an initialized group (or in a single process).

    Args:
        build_model: makes the model, unparallelized.
        loss_fn: ``(model, inputs) -> loss``, a mean over the inputs.
        batches: ``(step, data_rank) -> inputs``, different for each data rank and equally many. The
            reference takes the mean of the data ranks' losses.
        mesh: for `dedicate_params`, as are ``layout``, ``options`` and ``planner``.
        parallelize: `DistributedDataParallel`, or a function that calls `fully_shard` or
            `parallelize_module`; identity by default. In the `dedicated` layout it gets the model
            after `dedicate_params`, and `fully_shard` inside it ignores the parameters that dmuon
            keeps; None leaves all gradients to dmuon.
        tensor_parallel: applied before ``parallelize``, and in the `dedicated` layout before
            `dedicate_params`.
        steps: the number of steps to compare.
        kernels: for `dedicate_params`. With a fixed choice (neither ``method`` nor ``backend`` is
            "auto") every rank also computes each update itself, from the whole gradient and
            momentum, and the weights that it stores must be equal to the bit.
        data_axes: the mesh axes along which data differ; all but "tp" by default.
        muon_kwargs: for `dmuon.Muon` and, except for distributed settings, `ReferenceMuon`.

    Raises:
        ValueError: ``data_axes`` names no axis of the mesh, ``parallelize`` renamed parameters, or
            several processes were launched and no process group was made.

    If NS runs in the weights' own precision (or better), the weights must agree to 1e-5, and so
    must losses if forward runs in float32. In half precision a difference of 1e-7 in a gradient can
    flip roundings worth percents of an update, so each step starts from the same weights, and each
    matrix's change beyond rounding (with ``reduce_to_owner`` also each published update) is judged
    by its norm and the norm of the difference: 4 yardsticks are allowed, and at least 4 units in
    the last place of the coarsest dtype. Smaller errors pass: compare with
    ``ns_dtype=torch.float32``, too. The reference shares routing and Newton-Schulz with dmuon.
    """
    check_launched("dmuon.check_step_equivalence")
    model = build_model()
    twin = copy.deepcopy(model)  # a parallelized model cannot be copied
    model = model if tensor_parallel is None else tensor_parallel(model)
    # Plan for the dtype that Newton-Schulz runs in, as the optimizer does.
    ns_dtype = muon_kwargs.get("ns_dtype", "auto")
    request = Request(
        layout, options=options, planner=planner, kernels=kernels, mesh=mesh, ns_dtype=ns_dtype
    )
    wrapped, own = _distribute(model, parallelize or (lambda model: model), request)
    try:
        trial = _Trial(own, twin, wrapped, data_axes, muon_kwargs)
        return EquivalenceReport((trial.run(steps, loss_fn, batches),))
    finally:
        own.close()


def _distribute(
    model: nn.Module, parallelize: Callable[[nn.Module], nn.Module], request: Request
) -> tuple[nn.Module, Ownership]:
    """Return the model to train and its ownership, made in the order that the layout needs."""
    if request.layout != Layout.DEDICATED:
        wrapped = parallelize(model)
        others_average = isinstance(wrapped, DistributedDataParallel) or any(
            map(is_distributed, wrapped.parameters())
        )
        if request.options is None and not others_average:
            request = replace(request, options=ReplicatedOptions(reduce_to_owner=True))
        return wrapped, plan_given(Given(wrapped), request)
    own = plan_given(Given(model), request)

    def wrap() -> nn.Module:
        with own.ignored_by_fully_shard():
            wrapped = parallelize(model)
        own.find_parameters()  # fully_shard has replaced the other parameters
        return wrapped

    try:
        return attempt_in_all([own.runtime.transport], wrap, what="parallelize"), own
    except Exception:  # raised on every rank, so all of them close
        own.close()
        raise


def _data_rank(
    topology: Topology, rank: int, data_axes: Sequence[str] | None = None
) -> tuple[int, int]:
    """Return the data rank of a mesh rank, and the number of data ranks.

    >>> mesh = Topology((2, 3, 2), ("replicate", "shard", "tp"), 12)
    >>> [_data_rank(mesh, r) for r in (0, 1, 2, 11)]
    [(0, 6), (0, 6), (1, 6), (5, 6)]
    >>> _data_rank(mesh, 11, ["replicate"])
    (1, 2)
    """
    axes = list(topology.axes)
    chosen = [a for a in axes if a != "tp"] if data_axes is None else list(data_axes)
    if unknown := [axis for axis in chosen if axis not in axes]:
        raise DmuonError(
            f"data_axes names {unknown}, but the mesh has the axes {axes}: name some of these"
        )
    index, count, places = 0, 1, np.unravel_index(rank, topology.shape)
    for axis, size, place in zip(axes, topology.shape, places, strict=True):
        if axis in chosen:
            index, count = index * size + int(place), count * size
    return index, count


@dataclass
class Measured:
    """The largest difference of a quantity, and its largest change by moved gradients."""

    criterion: str
    yardstick: float = 0.0
    value: float = 0.0
    where: str = "-"

    def see(self, difference: float, moved: float, where: str) -> None:
        """Record a difference, and the change by moved gradients."""
        if math.isnan(difference):  # the worst difference, and lost in comparisons
            difference = math.inf
        if difference > self.value:
            self.value, self.where = difference, where
        # A reference update of zero gives no yardstick.
        self.yardstick = max(self.yardstick, moved if moved < math.inf else 0.0)

    @property
    def tolerance(self) -> float:
        return ABSOLUTE if self.criterion == _ABSOLUTE else YARDSTICKS * self.yardstick


class _Bits(Verifier):
    """Finds matrices that differ by a bit from any rank's own result: ``different``, on all."""

    def __init__(self) -> None:
        super().__init__()
        self.different: set[str] = set()

    def sample(self, plan: OwnershipPlan, count: int) -> list[tuple[int, Box]]:
        return matrices_of(plan)

    def judge(self, found: list[Finding], plan: OwnershipPlan, transport: Transport) -> None:
        known: dict[tuple[int, Box], int] = {}
        for f in chain.from_iterable(transport.gather_objects(found)):
            if not f.exact or known.setdefault((f.matrix, f.box), f.checksum) != f.checksum:
                self.different.add(plan.specs.matrices[f.matrix].name)


_ABSOLUTE, _UPDATE, _NORM = "absolute", "of an update", "of an update's norm"
Findings = dict[str, Measured]  # "weights", "losses", updates by shape: each has one yardstick


class _Trial:
    """Trains ``wrapped`` by dmuon, ``twin`` by the reference, and a copy by the moved one."""

    def __init__(
        self,
        own: Ownership,
        twin: nn.Module,
        wrapped: nn.Module,
        data_axes: Sequence[str] | None,
        muon_kwargs: dict[str, Any],
    ) -> None:
        self.own, self.model, self.twin = own, wrapped, twin
        self.bits = _Bits() if own.asked.kernels.is_fixed else None
        self.data = _data_rank(own.plan.topology, own.rank, data_axes)
        self.parameters = list(own.parameters)
        with own.materialized(wrapped):
            _copy_weights(wrapped, twin)
        self.opt = Muon(wrapped, **muon_kwargs, verify_every=None if self.bits is None else 1)
        if self.bits is not None:
            for engine in self.opt._run.engines:
                engine.verifier = self.bits
        self.ns_dtype: torch.dtype = getattr(torch, self.opt.stats()["ns_dtype"])
        distributed = ("master_weights", "period", "block_lr_ratio", "ns_dtype")
        shared = {k: v for k, v in muon_kwargs.items() if k not in distributed}
        names = [spec.name for spec in own.plan.specs.parameters]
        masters = bool(muon_kwargs.get("master_weights"))
        how = names, self.ns_dtype, masters, shared, _forms(own.plan, dtype_name(self.ns_dtype))
        self.reference, self.moved = _Reference(twin, *how), _Reference(copy.deepcopy(twin), *how)
        momentum = self.opt.param_groups[0].get("momentum_dtype")
        rounded = self.ns_dtype, self.ns_dtype if momentum is None else getattr(torch, momentum)
        self.roundings = _Roundings(own, rounded)
        # A third model and its weights, for options that make dmuon cast weights before their use.
        self.cast: tuple[nn.Module, list[nn.Parameter]] | None = None
        if self.roundings.used is not None:
            cast_twin = copy.deepcopy(twin)
            self.cast = cast_twin, _in_order(cast_twin, names)
            for p in {self.cast[1][m.parameter] for m in own.plan.specs.matrices}:
                p.data = p.data.to(self.roundings.used)
        specs = collect(twin)
        number = [names.index(p.name) for p in specs.parameters]
        # Pieces to compare separately: (name, index of the parameter, view of its whole tensor).
        self.pieces: list[tuple[str, int, Callable[[Tensor], Tensor]]] = [
            *((m.name, number[m.parameter], m.view) for m in specs.matrices),
            *((names[number[i]], number[i], lambda t: t) for i in specs.adamw_parameters()),
        ]
        self._before: list[Tensor] = []  # whole weights before the step
        self._published: dict[str, Tensor] = {}  # updates of a step that this rank received
        if isinstance(own.runtime, OwnersRuntime) and own.plan.layout is Layout.REDUCED:
            self._note_published(own.runtime)
        self.findings = {"weights": Measured(_ABSOLUTE), "losses": Measured(_ABSOLUTE)}

    def run(self, steps: int, loss_fn: Loss, batches: Batches) -> EquivalenceRow:
        """Train, compare, and judge the worst findings of all ranks; a collective call."""
        # Each rank moves gradients in its own way, because one sample can be too small by chance.
        generator = torch.Generator().manual_seed(self.own.rank)
        for step in range(steps):
            loss = loss_fn(self.model, batches(step, self.data[0]))
            loss.backward()
            # Only now, because reading waits for all published updates: earlier it would hide a
            # forward pass that does not wait.
            self._compare_weights(step - 1)
            expected = self._joint_backward(loss_fn, batches, step, generator)
            difference = abs(float(whole_tensor(loss)) - expected[self.data[0]])
            self.findings["losses"].see(difference, 0.0, f"loss at step {step}")
            updated = [t.grad is not None for t in self.reference.weights]
            self.opt.step()
            self.opt.zero_grad()
            for side in (self.reference, self.moved):
                side.step()
            self._compare_published(step, updated)
        self._compare_weights(steps - 1)
        for measured in self.findings.values():
            measured.where += f", rank {self.own.rank}"
        return self._row(self.own.runtime.transport.gather_objects(self.findings), steps)

    def _joint_backward(
        self, loss_fn: Loss, batches: Batches, step: int, generator: torch.Generator
    ) -> list[float]:
        """Give both references the mean gradient over all data ranks' inputs; return the losses.
        The moved reference takes gradients of cast weights if dmuon casts them, and sums as dmuon
        may; the other sums in float32 or better, because an oracle must not round."""
        sums: list[Tensor | None] = [None] * len(self.parameters)
        rounded, losses, count = list(sums), [], self.data[1]
        for r in range(count):
            inputs = batches(step, r)
            loss, grads = _gradients(self.twin, self.reference.weights, loss_fn, inputs)
            losses.append(loss)
            wide = [torch.promote_types(p.dtype, torch.float32) for p in self.reference.weights]
            sums = list(map(_sum, sums, grads, wide))
            if self.cast is not None:
                _, grads = _gradients(*self.cast, loss_fn, inputs)
            rounded = list(map(_sum, rounded, grads, [self.roundings.summed] * len(grads)))
        weights = zip(self.reference.weights, self.moved.weights, strict=True)
        for (p, moved), total, in_turn, dtype in zip(weights, sums, rounded, self.roundings.each):
            if total is not None and in_turn is not None:
                p.grad = (total / count).to(p.dtype)
                moved.grad = _moved(in_turn.to(total.dtype) / count, dtype, generator).to(p.dtype)
        return losses

    def _see(
        self, kind: str, where: str, ours: Tensor, theirs: Tensor, moved: Tensor, free: float = 0.0
    ) -> None:
        """Record the `_difference` of ours, and of the moved reference, from the reference."""
        both = _difference(ours, theirs, free), _difference(moved, theirs, free)
        for criterion, found, by_moving in zip((_UPDATE, _NORM), *both, strict=True):
            key = f"{kind} {[*theirs.shape]}, {criterion}"
            new = Measured(criterion, self.roundings.least)
            self.findings.setdefault(key, new).see(found, by_moving, where)

    def _note_published(self, runtime: OwnersRuntime) -> None:
        update, matrices = runtime.update, runtime.plan.specs.matrices

        def noted(apply: Any, present: Sequence[bool], unit: Any, parts: Parts) -> None:
            for _, i, view in parts:
                rows = matrices[i].form.rows_first(view)
                self._published[matrices[i].name] = rows.reshape(matrices[i].shape).clone()
            update(apply, present, unit, parts)

        runtime.update = noted  # type: ignore[method-assign]

    def _compare_published(self, step: int, updated: Sequence[bool]) -> None:
        """Compare the updates that this rank received, before they are rounded into weights."""
        published, self._published = self._published, {}
        # The reference records updates as Newton-Schulz returns them.
        has_variant = any(g.get("variant") is not None for g in self.opt.param_groups)
        if self.own.plan.layout is not Layout.REDUCED or self.reference.masters or has_variant:
            return
        matrices = [m for m in self.own.plan.specs.matrices if updated[m.parameter]]
        updates = self.reference.updates, self.moved.updates
        for matrix, theirs, moved in zip(matrices, *updates, strict=True):
            # A step that was skipped because of non-finite values has published nothing.
            ours = published.get(matrix.name, torch.full_like(theirs, math.nan))
            self._see("published", f"update of {matrix.name} at step {step}", ours, theirs, moved)

    @torch.no_grad()
    def _compare_weights(self, step: int) -> None:
        """Compare the weights after a step, and begin the next one; a collective call."""
        with self.own.materialized(self.model):
            after = [whole_tensor(p).clone() for p in self.parameters]
        if step >= 0:
            for name, i, view in self.pieces:
                if not (ours := view(after[i])).numel():
                    continue
                where = f"{name} at step {step}"
                theirs, moved = (view(side.weights[i]) for side in (self.reference, self.moved))
                found, by_moving = (float((t - theirs).abs().max()) for t in (ours, moved))
                self.findings["weights"].see(found, by_moving, where)
                expected = theirs.double() - view(self.reference.before[i]).double()
                # Each side rounds to half a unit in the last place when it stores the weights.
                free = torch.finfo(theirs.dtype).eps * float(theirs.double().norm())
                change = ours.double() - view(self._before[i]).double()
                moved_change = moved.double() - view(self.moved.before[i]).double()
                self._see("stored", where, change, expected, moved_change, free)
        for side in (self.reference, self.moved):
            side.begin(None if self.roundings.absolute else after)
        if self.cast is not None:
            torch._foreach_copy_([w.detach() for w in self.cast[1]], after)
        self._before = after

    def _row(self, findings: list[Findings], steps: int) -> EquivalenceRow:
        worst: Findings = {}
        for key, measured in chain.from_iterable(found.items() for found in findings):
            worst.setdefault(key, measured).see(measured.value, measured.yardstick, measured.where)
        weights, losses = worst.pop("weights"), worst.pop("losses")
        losses.yardstick, updates = weights.yardstick, list(worst.values())
        absolute = self.roundings.absolute
        limits = [weights] if absolute or not updates else [*updates]
        # If forward runs in float32 and each step starts from equal weights, losses are equal.
        if not self.roundings.forward_in_half and (absolute or losses.value > ABSOLUTE):
            limits.append(losses)
        deciding = max(limits, key=lambda measured: measured.value / measured.tolerance)
        plan = self.own.plan
        mesh, layout = "x".join(map(str, plan.topology.shape)), Layout.REPLICATED.value
        if plan.layout not in (Layout.REPLICATED, Layout.REDUCED):
            mesh, layout = f"{mesh} {' x '.join(plan.topology.axes)}", plan.layout.value
        forms = ["DDP"] * isinstance(self.model, DistributedDataParallel)
        forms += [Layout.REDUCED.value] * (plan.layout is Layout.REDUCED)
        return EquivalenceRow(
            layout=layout + (f" ({', '.join(forms)})" if forms else ""), mesh=mesh, steps=steps,
            dtype=", ".join(sorted({dtype_name(p.dtype) for p in self.parameters})),
            ns_dtype=dtype_name(self.ns_dtype),
            max_abs_diff=weights.value, max_loss_diff=losses.value,
            max_update_diff=max((m.value for m in updates if m.criterion == _UPDATE), default=0.0),
            criterion=deciding.criterion, difference=deciding.value, worst=deciding.where,
            yardstick=deciding.yardstick, tolerance=deciding.tolerance,
            bitwise=None if self.bits is None else not self.bits.different,
        )  # fmt: skip


def _forms(plan: OwnershipPlan, ns_dtype: str) -> list[tuple[int, str]]:
    """Return each matrix's parameter and the form of Newton-Schulz that its owner runs, because in
    half precision two forms differ by more than rounding explains."""
    kernels = {i: batch.kernel for batch in plan.batches for i in batch.matrices}
    chosen = {i: k.partition("/")[0] for i, k in kernels.items() if k.endswith(f"/{ns_dtype}")}
    return [(m.parameter, chosen.get(i, "auto")) for i, m in enumerate(plan.specs.matrices)]


class _Reference:
    """`ReferenceMuon` on a model, with its updates and its starting weights in the last step.

    With ``masters`` it updates matrices in float32, and the model has these rounded."""

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        ns_dtype: torch.dtype,
        masters: bool,
        settings: dict[str, Any],
        forms: Sequence[tuple[int, str]],
    ) -> None:
        held = copy.deepcopy(model) if masters else model
        self.weights, self._held = _in_order(model, names), _in_order(held, names)
        for p in {self._held[i] for i, _ in forms} if masters else ():
            p.data = p.data.float()
        self.masters = [(p, h) for p, h in zip(self.weights, self._held) if h is not p]
        self.before: list[Tensor] = []  # the weights before the step
        self.updates: list[Tensor] = []  # in the order of its matrices
        self._forms = forms
        self._due: Iterator[str] = iter(())  # the forms of this step's matrices
        how = {"steps": settings.get("ns_steps", 5), "eps": settings.get("eps", 1e-7)}
        how["coefficients"] = settings.get("ns_coefficients", "polar_express")

        def orthogonalize(x: Tensor) -> Tensor:
            self.updates.append(newton_schulz(x, method=next(self._due), dtype=ns_dtype, **how))
            return self.updates[-1]

        self._optimizer = ReferenceMuon(held, orthogonalize=orthogonalize, **settings)

    @torch.no_grad()
    def begin(self, weights: list[Tensor] | None) -> None:
        """Start the next step from these weights; None: from the weights of the step before."""
        if weights is not None:
            for p, weight in zip(self.weights, weights, strict=True):
                p.copy_(weight)
            for p, master in self.masters:
                master.copy_(merged_master(master, p))
        self.before = [w.clone() for w in self.weights]

    @torch.no_grad()
    def step(self) -> None:
        for p, master in self.masters:
            master.grad, p.grad = None if p.grad is None else p.grad.to(master.dtype), None
        self.updates.clear()
        self._due = iter([form for i, form in self._forms if self._held[i].grad is not None])
        self._optimizer.step()
        self._optimizer.zero_grad()
        for p, master in self.masters:
            p.copy_(master)


class _Roundings:
    """The dtypes to which gradients are rounded on their way.

    ``used``, ``summed``: dtypes in which dmuon uses weights and sums gradients, None for the
    parameters' own. ``each``: the coarsest dtype that each parameter's gradient goes through; for
    matrices that includes ``of_matrices``, the dtypes of Newton-Schulz and of momentum."""

    def __init__(self, own: Ownership, of_matrices: Sequence[torch.dtype]) -> None:
        plan, parameters, options = own.plan, list(own.parameters), own.asked.options
        self.used = options.param_dtype if isinstance(options, DedicatedOptions) else None
        self.summed: torch.dtype | None = None
        if isinstance(options, DedicatedOptions | ReplicatedOptions) and plan.topology.world > 1:
            self.summed = options.reduce_dtype
        matrices = {m.parameter for m in plan.specs.matrices}
        self.each = [
            _coarsest(p.dtype, self.used, self.summed, *(of_matrices if i in matrices else ()))
            for i, p in enumerate(parameters)
        ]
        forward = [_coarsest(p.dtype, self.used) for p in parameters]
        self.forward_in_half = any(dtype.itemsize < 4 for dtype in forward)
        # Without half precision anywhere, the tolerance of weights is absolute.
        self.absolute = all(dtype.itemsize >= 4 for dtype in (*self.each, *of_matrices))
        # No update is more exact than one unit in the last place of its entries.
        self.least = torch.finfo(_coarsest(*self.each)).eps


def _in_order(model: nn.Module, names: list[str]) -> list[nn.Parameter]:
    return [*map(dict(trainable_parameters(model)).__getitem__, names)]


@torch.no_grad()
def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy weights of a parallelized module to its plain counterpart; a collective call."""
    found, expected = (dict(trainable_parameters(m)).keys() for m in (source, target))
    if found != expected:
        raise DmuonError(
            f"parallelize turned the parameters {sorted(expected - found)} of the model into "
            f"{sorted(found - expected)}: it must keep their names"
        )

    def tensors(model: nn.Module) -> dict[str, Tensor]:  # including frozen parameters and buffers
        found = chain(model.named_parameters(), model.named_buffers())
        return {canonical_name(n): t for n, t in found} | dict(trainable_parameters(model))

    ours = tensors(target)
    for name, tensor in tensors(source).items():
        if name in ours:
            ours[name].copy_(whole_tensor(tensor))


def _gradients(
    model: nn.Module, parameters: list[nn.Parameter], loss_fn: Loss, inputs: Any
) -> tuple[float, list[Tensor | None]]:
    """Return the loss and its gradients, and leave none in ``p.grad``."""
    loss = loss_fn(model, inputs)
    loss.backward()
    grads = [p.grad for p in parameters]
    model.zero_grad()
    return float(loss.detach()), grads


def _sum(so_far: Tensor | None, grad: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    grad = None if grad is None else grad.to(dtype or grad.dtype)
    return so_far if grad is None else grad if so_far is None else so_far + grad


def _moved(grad: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return ``grad`` with each nonzero entry moved by a rounding to ``dtype``: by the difference
    of two roundings, each of which may be off by half a unit in the last place."""
    how: dict[str, Any] = {"dtype": grad.dtype, "generator": generator}
    by = torch.rand(grad.shape, **how) - torch.rand(grad.shape, **how)
    _, exponent = torch.frexp(grad)
    unit = torch.ldexp(torch.full_like(grad, torch.finfo(dtype).eps / 2), exponent)
    return torch.where(grad == 0, grad, grad + by.to(grad.device) * unit)


def _coarsest(*dtypes: torch.dtype | None) -> torch.dtype:
    return max(filter(None, dtypes), key=lambda dtype: torch.finfo(dtype).eps)


def _difference(ours: Tensor, theirs: Tensor, free: float) -> tuple[float, float]:
    """Return the Frobenius norm of the difference of two updates, and the difference of their
    norms, which rounding changes ten times less: both beyond ``free``, relative to ``theirs``."""
    ours, theirs = ours.double(), theirs.double()
    size = float(theirs.norm())
    both = float((ours - theirs).norm()), abs(float(ours.norm()) - size)
    direction, norm = (0.0 if d <= free else (d - free) / size if size else math.inf for d in both)
    return direction, norm
