"""A model in one of the layouts, beside a twin in one process: the one fixture of these tests.

::

    with both(Net, "dedicated kept", mesh=(2, 2)) as pair:
        pair.train(range(3))   # the twin on everybody's data, by the reference
        pair.check()           # the same weights

    follow(layout="hsdp", muon={"momentum_mode": "sgd"})    # the same in a line

Newton-Schulz runs in float32, and what differs is at most 1e-5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.dtensors import covering_mesh, whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.select import trainable_parameters
from dmuon.scheduler.topology import Topology
from tests.distributed.compare import TOLERANCE, assert_close, average_gradients, snapshot, whole
from tests.distributed.layouts import (
    LAYOUTS,
    Layout,
    data_mesh,
    data_place,
    in_ddp,
    mesh_of,
    shard_units,
)
from tests.distributed.models import batch, loss_of, weights
from tests.internals import C10dTransport, Given, Request, Transport, assemble, mesh_topology
from tests.transports import Event

# AdamW amplifies rounding where gradients are nearly zero, the more the larger its rate and the
# smaller its eps.
MUON: dict[str, Any] = {
    "lr": 0.02, "adamw_lr": 1e-3, "adamw_eps": 1e-6, "ns_dtype": torch.float32
}  # fmt: skip

# ---- the reference -----------------------------------------------------------------------------


def grouped_references(
    groups: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], matrices: Any
) -> list[Any]:
    """What param groups of ``(name, parameter)`` must amount to: Muon and AdamW for each, with its
    ``number``."""
    found: list[Any] = []
    for number, group in enumerate(groups):
        own = {key: value for key, value in group.items() if key != "params"}
        rate = own.get("adamw_lr", own.get("lr", settings.get("adamw_lr", settings["lr"])))
        decay = own.get("adamw_weight_decay", own.get("weight_decay", 0.1))
        muon = [p for name, p in group["params"] if name in matrices]
        adamw = [p for name, p in group["params"] if name not in matrices]
        shared = {k: v for k, v in (dict(settings) | own).items() if not k.startswith("adamw")}
        made = [ReferenceMuon(muon, **shared)] if muon else []
        options = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": decay}
        options["eps"] = settings.get("adamw_eps", 1e-8)
        made += [torch.optim.AdamW(adamw, **options)] if adamw else []
        for reference in made:
            reference.number = number
        found += made
    return found


# ---- the fixture -----------------------------------------------------------------------------

Loss = Callable[[nn.Module, Any], Tensor]
# (model, step, data rank): sets up what differs from step to step and from rank to rank.
Prepare = Callable[[nn.Module, int, int], Any]


@dataclass
class Both:
    """``model`` on every rank and its ``twin``.

    ``context`` is what their forwards run in, ``round`` what comes before both optimizers' step.
    """

    model: nn.Module
    twin: nn.Module
    opt: dmuon.Muon
    ref: Any
    mesh: DeviceMesh
    transport: Any = None  # the wrapped one, if any
    loss_of: Loss = loss_of
    prepare: Prepare = lambda model, step, rank: None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    round: Callable[[Both, int], Any] = lambda pair, step: pair.both_backward(step)
    averages: bool = False  # the gradients of ranks, after each backward, by hand

    def __post_init__(self) -> None:
        self.data_rank, self.data_world = data_place(self.mesh)
        part = self.mesh.size() < dist.get_world_size()
        self._group = self.mesh.get_group() if part else None

    @property
    def own(self) -> dmuon.Ownership:
        return self.opt.ownership

    @property
    def bare(self) -> Any:
        return getattr(self.model, "module", self.model)

    @property
    def events(self) -> list[Event]:
        return self.transport.events

    @property
    def matrices(self) -> dict[str, int]:
        """Their sizes by name."""
        return {m.name: m.numel for m in self.own.plan.specs.matrices}

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        self.prepare(getattr(model, "module", model), step, rank)
        with self.context():
            return self.loss_of(model, batch(step, rank))

    def backward(self, step: int, parts: int = 1) -> None:
        (self.loss(self.model, step, self.data_rank) / parts).backward()
        if self.averages:
            average_gradients(self.model)

    def joint_backward(self, step: int, parts: int = 1, without: int | None = None) -> None:
        """The twin's gradients of everybody's data, but those of the data rank ``without``.

        A collective call, in which each rank computes its part; with ``without``, none, because
        that rank may not have run a backward of the model that the others wait for.
        """
        if without is not None:
            for rank in range(self.data_world):
                if rank != without:
                    (self.loss(self.twin, step, rank) / (self.data_world * parts)).backward()
            return
        earlier = [p.grad for p in self.twin.parameters()]
        self.twin.zero_grad()
        (self.loss(self.twin, step, self.data_rank) / parts).backward()
        average_gradients(self.twin, self._group)
        for p, before in zip(self.twin.parameters(), earlier, strict=True):
            if before is not None:
                p.grad = before if p.grad is None else before.add_(p.grad)

    def both_backward(self, step: int) -> None:
        self.backward(step)
        self.joint_backward(step)

    def step(self) -> None:
        """The model's, without its twin."""
        self.opt.step()
        self.opt.zero_grad()

    def advance(self) -> None:
        self.step()
        if self.ref is not None:
            self.ref.step()
        self.twin.zero_grad()

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.round(self, step)
            self.advance()

    def train_alone(self, steps: Sequence[int]) -> None:
        """The model without its twin."""
        for step in steps:
            self.backward(step)
            self.step()

    def whole(self) -> dict[str, Tensor]:
        return whole(self.bare, self.own)

    def check(self, tolerance: float = TOLERANCE) -> None:
        assert_close(self.whole(), weights(self.twin), tolerance)

    def copy_weights(self) -> None:
        """Set the twin to the model's weights, so that one step is compared, and no trajectory."""
        found = self.whole()
        with torch.no_grad():
            for name, p in trainable_parameters(self.twin):
                p.copy_(found[name])

    def assert_same_loss(self, step: int) -> None:
        with torch.no_grad():
            found = self.loss(self.model, step, self.data_rank)
            expected = self.loss(self.twin, step, self.data_rank)
        assert abs(float(found) - float(expected)) <= TOLERANCE

    def snapshot(self) -> list[Tensor]:
        return snapshot(self.bare, self.opt)


def planned(
    model: nn.Module,
    transport: Callable[..., Any] | None = None,
    mesh: DeviceMesh | None = None,
    **asked: Any,
) -> tuple[dmuon.Ownership, Any]:
    """`dedicate_params`, over a wrapped transport if there is one; and that transport.

    The transports of a mesh's other process groups share the events of the one that is returned.
    """
    if transport is None:
        return dmuon.dedicate_params(model, mesh, **asked), None
    inner = C10dTransport(list(range(dist.get_world_size())))
    outer = transport(inner)

    planner = asked.get("planner", dmuon.PlannerOptions())

    def topology() -> Topology:
        if mesh is None and planner.ranks_per_node is None:
            return Topology.flat(inner.world)
        at = mesh or covering_mesh(trainable_parameters(getattr(model, "module", model)))
        return mesh_topology(at, inner.world, list(model.parameters()), None, planner)

    def new_group(partition: Sequence[tuple[int, ...]]) -> Transport:
        return transport(inner.subgroup(partition), events=outer.events)

    outer.subgroup = new_group
    return assemble(Given(model), Request(**asked), outer, topology), outer


def laid_out(
    layout: str | Layout = "fsdp2",
    build: Callable[[], nn.Module] | None = None,
    *,
    mesh: Sequence[int] | DeviceMesh | Callable[[], DeviceMesh] | None = None,
    seed: int = 100,
    change: Callable[[nn.Module], Any] = lambda model: None,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> tuple[Any, Any, DeviceMesh]:
    """(model, twin, mesh), before dmuon sees them; see `both`."""
    laid = LAYOUTS[layout] if isinstance(layout, str) else layout
    grid: Any = mesh() if callable(mesh) else mesh
    if not isinstance(grid, DeviceMesh):
        shape = tuple(grid or laid.mesh or (dist.get_world_size(),))
        # Of another mesh than the layout's own the axes are the usual ones.
        grid = mesh_of(shape, laid.axes if len(shape) == len(laid.axes) else None)
    torch.manual_seed(seed)
    twin = (build or laid.build)()
    torch.manual_seed(seed + (data_place(grid)[0] if laid.from_first else 0))
    model = (build or laid.build)()
    change(twin), change(model)
    return (laid.wrap(model, grid) if wrap is None else wrap(model)), twin, grid


@contextmanager
def both(
    build: Callable[[], nn.Module] | None = None,
    layout: str | Layout = "dedicated",
    *,
    options: dict[str, Any] | None = None,
    select: dict[str, Any] | None = None,
    request: dict[str, Any] | None = None,
    muon: dict[str, Any] | None = None,
    only: dict[str, Any] | None = None,
    fsdp: dict[str, Any] | None = None,
    transport: Callable[..., Any] | None = None,
    alone: bool = False,
    **more: Any,
) -> Iterator[Both]:
    """A model in this layout beside its twin, both with their optimizers.

    Every rank starts from weights of its own where those of the first count.
    ``options``: fields of the layout's options; ``select``: `select`, `splits` and `heads`;
    ``request``: other arguments of `dedicate_params`; ``muon``: hyperparameters for both
    optimizers, ``only``: for `Muon` alone; ``fsdp``: other arguments of `fully_shard` for the rest;
    ``alone``: the optimizer plans by itself. ``more``: fields of `Both`, and

    - ``mesh``: another than the layout's own, ``seed``;
    - ``change``, done to model and twin, and ``wrap``, done to the model instead of what the
      layout's framework does, both before planning.
    """
    laid = LAYOUTS[layout] if isinstance(layout, str) else layout
    made = {key: more.pop(key) for key in ("mesh", "seed", "change", "wrap") if key in more}
    model, twin, mesh = laid_out(laid, build, **made)
    select, settings = select or {}, MUON | (muon or {})
    asked = {"solver": "greedy", **laid.own, **select, **(request or {})}
    if options:
        asked["options"] = replace(laid.options, **options)
    own, outer = None, None
    if not alone:
        # Of the layouts of a framework the parameters or DDP tell the mesh.
        takes_mesh = bool(laid.own) and not (made.get("mesh") is None and laid.wrap is in_ddp)
        own, outer = planned(model, transport, mesh if takes_mesh else None, **asked)
        if laid.shard_rest:
            rest = {"ignored_params": own.dedicated_params, **(fsdp or {})}
            shard_units(model, data_mesh(mesh), **rest)
    opt = dmuon.Muon(model, **settings, **(only or {}))
    ref = ReferenceMuon(twin, **settings, **select)
    more.setdefault("averages", laid is LAYOUTS["plain"])
    try:
        yield Both(model, twin, opt, ref, mesh, outer, **more)
    finally:
        if own is not None:
            own.close()


def follow(build: Callable[[], nn.Module] | None = None, *args: Any, **kwargs: Any) -> None:
    """Train both for ``steps`` (3) steps and compare, to ``tolerance`` (1e-5)."""
    steps, tolerance = kwargs.pop("steps", 3), kwargs.pop("tolerance", TOLERANCE)
    with both(build, *args, **kwargs) as pair:
        pair.train(range(steps))
        pair.check(tolerance)


class Trained:
    """A model with its optimizer in a layout, without a twin, that is saved and loaded."""

    def __init__(
        self,
        laid: Layout,
        model: nn.Module,
        mesh: DeviceMesh | None = None,
        planning: Mapping[str, Any] | None = None,
        groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
        **muon: Any,
    ) -> None:
        assert laid.mesh is not None
        mesh = mesh or mesh_of(laid.mesh, laid.axes)
        self.rank, self.ranks = data_place(mesh)
        self.model, asked = laid.wrap(model, mesh), dict(planning or {})
        if laid.own:
            own = dmuon.dedicate_params(self.model, mesh, **{**laid.own, **asked})
            asked = {}
            if laid.shard_rest:
                fully_shard(self.model, mesh=mesh, ignored_params=own.dedicated_params)
        given = self.model if groups is None else groups(self.bare)
        self.opt = dmuon.Muon(given, **muon, dedicate=asked or None)

    @property
    def bare(self) -> Any:
        return getattr(self.model, "module", self.model)

    def state(self, **options: Any) -> dict[str, Any]:
        """Of model and optimizer, by `StateDictOptions` of this kind."""
        found = get_state_dict(self.model, self.opt, options=StateDictOptions(**options))
        return dict(zip(("model", "optim"), found, strict=True))

    def whole(self) -> dict[str, Any]:
        return copy.deepcopy(self.state(full_state_dict=True))

    def put(self, state: Mapping[str, Any], **options: Any) -> None:
        """Load what `state` gave."""
        chosen = StateDictOptions(**options)
        set_model_state_dict(self.model, dict(state["model"]), options=chosen)
        set_optimizer_state_dict(self.model, self.opt, state["optim"], options=chosen)

    def save(self, folder: str) -> None:
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.put(state)

    def weights(self) -> dict[str, Tensor]:
        """Whole, by name."""
        return {n: whole_tensor(w).clone() for n, w in self.bare.state_dict().items()}

    def close(self) -> None:
        self.opt.ownership.close()


class Rows(dict[str, tuple[int, tuple[str | Layout, ...], dict[str, Any]]]):
    """A table of what must follow the reference: by name, on how many ranks, in which layouts, and
    the arguments of `follow`, among them any of `dmuon.Muon` (``muon``, ``only``). Without
    layouts: the dedicated one."""

    def add(self, name: str, *layouts: str | Layout, world: int = 0, **case: Any) -> None:
        layouts = layouts or ("dedicated",)
        first = LAYOUTS[layouts[0]] if isinstance(layouts[0], str) else layouts[0]
        self[name] = world or first.world, layouts, case

    def each(self) -> pytest.MarkDecorator:
        return pytest.mark.parametrize(("name", "world"), [(n, row[0]) for n, row in self.items()])

    def follow(self, name: str) -> None:
        _, names, case = self[name]
        for layout in names:
            follow(layout=layout, **case)
