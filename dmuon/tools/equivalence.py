"""`check_step_equivalence`: does dmuon on W ranks do what Muon does in one process?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dmuon.api import dedicate_params
from dmuon.comm.consensus import attempt
from dmuon.meshes import check_launched
from dmuon.ownership import Ownership
from dmuon.scheduler.topology import Topology
from dmuon.tools.equivalence_report import EquivalenceReport, EquivalenceRow
from dmuon.tools.equivalence_trial import Rounding, Trial
from dmuon.types import DmuonError, Layout

__all__ = ["EquivalenceReport", "EquivalenceRow", "check_step_equivalence"]


def check_step_equivalence(
    build_model: Callable[[], nn.Module],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batches: Callable[[int, int], Any],
    mesh: DeviceMesh | None = None,
    *,
    parallelize: Callable[[nn.Module], nn.Module] | None = None,
    tensor_parallel: Callable[[nn.Module], nn.Module] | None = None,
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
            the parallelized model has (rank 0's in the `replicated` and the `dedicated` layout;
            FSDP2 takes each shard from its own rank).
        loss_fn: ``(model, inputs) -> loss``, a mean over the inputs.
        batches: ``(step, data_rank) -> inputs``; make them differ from data rank to data rank. The
            reference takes the mean of the data ranks' losses, which is the loss of the joint
            batch when all have as many inputs.
        mesh: for `dedicate_params`.
        parallelize: wraps or parallelizes the model: `DistributedDataParallel`, a function that
            calls `fully_shard` or `parallelize_module`; identity by default. In the `dedicated`
            layout it gets the model after `dedicate_params`, and `fully_shard` inside it does not
            see what dmuon keeps; None leaves all gradients to dmuon.
        tensor_parallel: applied before ``parallelize``, and in the `dedicated` layout before
            `dedicate_params`, as tensor parallelism must be there.
        layout: for `dedicate_params`.
        steps: how many steps to compare.
        options: for `dedicate_params`.
        data_axes: the mesh axes along which data differ; all but "tp" by default. Data ranks are
            numbered along them in mesh order; ranks that differ in other axes only are one.
        muon_kwargs: for `dmuon.Muon` and, except what concerns distribution, `ReferenceMuon`.

    Raises:
        ValueError: ``data_axes`` names no axis of the mesh, ``parallelize`` renamed parameters, or
            several processes were launched and no process group was made.

    Where NS runs in the weights' own precision (or better) the weights and losses must agree to
    1e-5. In half precision a difference of 1e-7 in a gradient can flip roundings worth percents of
    an update, so there each step starts from the same weights, and two things of each matrix's
    change beyond what rounding to its dtype explains (in the `replicated` layout also of each
    published update) are judged: its direction, by the Frobenius norm of the difference, and its
    norm. How far rounding alone carries them is measured in the same run: a second reference gets
    the same gradients, summed in the dtype in which dmuon sums them and each entry moved by one
    rounding. The most that this changes the matrix's update in any step is its yardstick, at least
    one unit in the last place of the coarsest dtype; 5 yardsticks are allowed. An error of less
    than that in an update's direction passes there: compare with ``ns_dtype=torch.float32``, too,
    where it does not. Losses must agree to 1e-5, if forward runs in float32. Weights are read after
    the forward and backward pass
    that follows a step, never right after the step: reading waits for what was published, which the
    pass must do by itself.

    The reference shares the choice of matrices and the Newton-Schulz iteration with dmuon; those
    are tested on their own against `torch.optim.Muon` and the singular value decomposition.
    """
    check_launched("dmuon.check_step_equivalence")
    model = build_model()
    twin = copy.deepcopy(model)  # now: a parallelized model cannot be copied
    if tensor_parallel is not None:
        model = tensor_parallel(model)
    wrapped, own = _distribute(model, mesh, parallelize, layout, options)
    try:
        place = _data_rank(own.plan.topology, own.rank, data_axes)
        rounding = Rounding.of(options, own.plan.topology.world)
        trial = Trial(own, twin, wrapped, place, rounding, muon_kwargs)
        trial.run(steps, loss_fn, batches)
        findings = trial.gather_findings()
    finally:
        own.close()
    replicated = own.plan.layout is Layout.REPLICATED
    ddp = isinstance(wrapped, DistributedDataParallel)
    return EquivalenceReport(
        (
            trial.row(
                findings,
                steps=steps,
                layout=own.plan.layout.value + " (DDP)" * ddp,
                mesh=_mesh_text(own.plan.topology, named=not replicated),
            ),
        )
    )


def _distribute(
    model: nn.Module,
    mesh: DeviceMesh | None,
    parallelize: Callable[[nn.Module], nn.Module] | None,
    layout: str,
    options: Any,
) -> tuple[nn.Module, Ownership]:
    """The model as it is trained, and its ownership, made in the order that the layout needs."""
    if layout != Layout.DEDICATED:
        wrapped = model if parallelize is None else parallelize(model)
        return wrapped, dedicate_params(wrapped, mesh, layout=layout, options=options)
    own = dedicate_params(model, mesh, layout=layout, options=options)
    if parallelize is None:
        return model, own

    def wrap() -> nn.Module:
        with own.ignored_by_fully_shard():
            wrapped = parallelize(model)
        own.adopt()  # fully_shard has made new parameters of the others
        return wrapped

    try:
        wrapped = attempt(own.runtime.transport, wrap, what="parallelize", digest=lambda _: "")
    except Exception:  # raised on every rank, so all of them close
        own.close()
        raise
    return wrapped, own


def _mesh_text(topology: Topology, *, named: bool) -> str:
    sizes = "x".join(map(str, topology.shape))
    return f"{sizes} {' x '.join(topology.axes)}" if named else sizes


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
