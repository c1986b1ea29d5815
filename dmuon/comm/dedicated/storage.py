"""Where the weights of the `dedicated` layout are kept, and the buffers in which they are used.

What modules use together, a *group*, is broadcast in a few *weight buckets*: one for each shard
coordinate that keeps whole parameters of it, and one for each parameter that several keep pieces
of. Spans with one owner follow each other, so they leave in one broadcast::

    bucket 0   | a.weight  c.weight |                 kept at shard 0: one broadcast
    bucket 1   | b.weight |                           kept at shard 1
    bucket 2   | experts[0:3] | experts[3:5] |        kept at shards 0 and 1: two broadcasts

A *slot* is the tensor whose data is switched: the `Parameter` itself, or the local tensor inside a
`DTensor`. Between uses it shows what is kept: the whole weight where it is, elsewhere a placeholder
``(0, ...)``. In use it is a view of its bucket's buffer.

With replicas (HSDP) the owner's weights go once a step to the holders in the other replicas first;
forward and backward broadcast inside a replica.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dmuon.comm.buckets import Buffer, Slices, WeightBucket, weight_buckets
from dmuon.comm.consensus import attempt
from dmuon.comm.hooks import outermost_members, parameter_ids
from dmuon.comm.process_groups import ProcessGroups, start_from_first
from dmuon.comm.rows import Places, RowShards
from dmuon.comm.transport import Meter, Work
from dmuon.config import DedicatedOptions
from dmuon.dtensors import is_distributed, stored_tensor
from dmuon.scheduler.select import trainable_parameters
from dmuon.scheduler.specs import canonical_name
from dmuon.types import OwnershipError

# ---- one group -------------------------------------------------------------------------------


def _placeholder(shape: Sequence[int], like: Tensor) -> Tensor:
    return like.new_empty((0, *shape[1:]))


class _Slot:
    """One parameter's local tensor ``tensor``, and what it shows.

    ``kept`` between uses: the whole weight where it is kept, else the placeholder; ``pinned``
    replaces it while the weight is there for direct reading, for ``pins`` readers. ``view`` in use:
    a part of ``bucket`` from element ``start`` on.
    """

    __slots__ = ("bucket", "kept", "pinned", "pins", "start", "tensor", "view")

    def __init__(
        self, tensor: Tensor, shape: tuple[int, ...], bucket: _LiveBucket, start: int
    ) -> None:
        numel = math.prod(shape)
        values = tensor.detach()
        if values.numel() == numel:  # not so where it was made on the meta device
            bucket.keep(start, values.reshape(-1))
        self.tensor = tensor
        self.bucket, self.start = bucket, start
        if not bucket.is_keeper:
            self.kept = _placeholder(shape, bucket.nothing)
        else:
            self.kept = bucket.stored(start, numel).view(shape) if numel else values.view(shape)
        self.view = bucket.buffer.flat.narrow(0, start, numel).view(shape)
        self.pinned: Tensor | None = None
        self.pins = 0
        self.show_kept()

    def show_kept(self) -> None:
        self.tensor.data = self.kept if self.pinned is None else self.pinned


class _LiveBucket:
    """A bucket on this rank, at shard coordinate ``shard``; weights are used in ``dtype``.

    What this rank keeps lies in the buffer itself where it keeps all in the dtype of use, else in
    tensors of their own.
    """

    def __init__(
        self, bucket: WeightBucket, dtype: torch.dtype, shard: int, device: torch.device
    ) -> None:
        self.is_keeper = bucket.keeper == shard
        kept_dtype: torch.dtype = getattr(torch, bucket.dtype)
        lasting = self.is_keeper and dtype is kept_dtype
        flat = torch.empty(bucket.numel, dtype=dtype, device=device)
        self.buffer = Buffer(flat, lasting=lasting)
        self.nothing = torch.empty(0, dtype=kept_dtype, device=device)
        mine = [(piece.start, piece.numel) for piece in bucket.sends if piece.shard == shard]
        if self.is_keeper:
            mine = [(0, bucket.numel)]
        self._kept = [
            (start, flat if lasting else self.nothing.new_empty(numel)) for start, numel in mine
        ]
        # Views are made while there is memory behind them; they outlive its release.
        self.sends: list[tuple[int, Tensor, Tensor | None]] = []  # (shard, buffer, source here)
        for piece in bucket.sends:
            copied = piece.shard == shard and not lasting
            source = self.stored(piece.start, piece.numel) if copied else None
            self.sends.append((piece.shard, flat.narrow(0, piece.start, piece.numel), source))

    def keep(self, start: int, values: Tensor) -> None:
        """Store what is kept here of ``values``, the bucket's elements from ``start`` on."""
        for first, kept in self._kept:
            low, high = max(start, first), min(start + len(values), first + len(kept))
            if low < high:
                kept[low - first : high - first].copy_(values[low - start : high - start])

    def stored(self, start: int, numel: int) -> Tensor:
        """What is kept here of the bucket's elements ``start .. start + numel``."""
        for first, kept in self._kept:
            if first <= start and start + numel <= first + len(kept):
                return kept.narrow(0, start - first, numel)
        assert not numel, f"elements {start} to {start + numel} are not kept here"
        return self.nothing


@dataclass(slots=True, eq=False)
class Group:
    """Modules whose weights travel together: by default what users pass to `fully_shard`, a member
    of an outermost container. What is in no such block is the root's, and stays while it runs.

    ``parameters`` are numbers of dedicated parameters, in registration order; one that several use
    (tied weights) belongs to the first. ``works``: broadcasts under way; ``valid``: the buffers
    hold the current weights, or will once these are done; ``in_use``: the slots show the buffers.
    ``publishes``: what goes to the holders in other replicas, (replica of the owner, what is kept
    here).
    """

    name: str
    parameters: tuple[int, ...]
    is_root: bool
    expected: int  # forward calls in a round, as far as known: first, places in the model
    matrices: frozenset[int] = frozenset()
    buckets: list[_LiveBucket] = field(default_factory=list)
    slots: list[_Slot] = field(default_factory=list)
    publishes: list[tuple[int, Tensor]] = field(default_factory=list)
    publishing: list[Work] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    valid: bool = False
    in_use: bool = False
    running: int = 0  # forward calls under way
    calls: int = 0  # forward calls that ended in this round
    arrived: int = 0  # gradients in this backward
    awaited: int = 1  # how many of them there will be
    keep: bool = False  # until the end of backward, for nothing would announce that
    epochs: int = 0  # recorded uses whose backward has not come yet
    recorded: bool = False  # in this use
    ran: bool = False  # since the last step, also without autograd: a checkpointed forward does

    def wait(self) -> None:
        """Have what was launched."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def wait_published(self) -> None:
        """Have what the owners published, where this rank holds it."""
        for work in self.publishing:
            work.wait()
        self.publishing.clear()

    def use(self) -> None:
        """Show the buffers in the slots."""
        self.wait()
        if not self.in_use:
            for slot in self.slots:
                slot.tensor.data = slot.view
            self.in_use = True
            self.recorded = False

    def free(self) -> None:
        """Show what is kept; the buffers' memory is given back."""
        self.wait()
        if self.in_use:
            for slot in self.slots:
                slot.show_kept()
            self.in_use = False
        for live in self.buckets:
            live.buffer.release()
        self.valid = self.keep = self.recorded = False


def module_groups(
    root: nn.Module, chooses: Callable[[str, nn.Module], bool] | None, index: Mapping[int, int]
) -> dict[nn.Module, Group]:
    """The groups with at least one parameter, in registration order; the root's is the first.

    ``chooses(name, module)`` says which modules are groups, instead of the default. ``index`` gives
    the numbers of the dedicated parameters by id.
    """
    if chooses is None:
        chosen = set(outermost_members(root)) - {root}
    else:
        named = root.named_modules()
        chosen = {m for name, m in named if m is not root and chooses(canonical_name(name), m)}
    names: dict[nn.Module, list[str]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if module is root or module in chosen:
            names.setdefault(module, []).append(canonical_name(name))
    seen: set[int] = set()
    found = {}
    for module, where in names.items():
        numbers = dict.fromkeys(index[i] for i in parameter_ids(module, chosen) if i in index)
        mine = tuple(p for p in numbers if p not in seen)
        seen.update(mine)
        if mine:
            found[module] = Group(where[0] or "root", mine, module is root, len(where))
    return found


# ---- all of them -----------------------------------------------------------------------------


class Storage:
    """What one rank keeps of the dedicated parameters, in ``groups`` in the order of their modules.

    ``parameters`` are the planned ones, a list that is kept up to date. Making one takes over the
    weights: what this rank keeps goes into buckets, and placeholders take the place of the rest; of
    a model on the meta device when it has left it.
    """

    def __init__(
        self,
        slices: Slices,
        model: nn.Module,
        parameters: list[nn.Parameter],
        groups: Sequence[Group],
        process_groups: ProcessGroups,
        meter: Meter,
        options: DedicatedOptions,
        device: torch.device,
    ) -> None:
        self.parameters = parameters
        self.groups = groups
        self.group_of = {p: group for group in groups for p in group.parameters}
        self.has_replicas = slices.grid.shape[0] > 1
        self._slices = slices
        self._specs = slices.plan.specs
        self._model = weakref.ref(model)
        self._process_groups = process_groups
        self._meter = meter
        self._options = options
        self._device = device
        _, self._shard, self._tensor = slices.grid.place(process_groups.world.rank)
        self._slots: dict[int, _Slot] = {}
        for group in groups:
            group.matrices = frozenset(i for p in group.parameters for i in slices.matrices_of[p])
        self._on_meta = any(p.device.type == "meta" for p in parameters)
        if self._on_meta:
            self._shed_on_meta()
        else:
            self._take_over()

    @torch.no_grad()
    def _take_over(self) -> None:
        for group in self.groups:
            for bucket in weight_buckets(self._slices, group.parameters, self._tensor):
                dtype = self._options.param_dtype or getattr(torch, bucket.dtype)
                live, start = _LiveBucket(bucket, dtype, self._shard, self._device), 0
                for p in bucket.parameters:
                    shape = self._slices.shape(p, self._tensor)
                    self._slots[p] = _Slot(stored_tensor(self.parameters[p]), shape, live, start)
                    start += math.prod(shape)
                live.buffer.release()
                group.buckets.append(live)
                group.publishes += [
                    (piece.replica, live.stored(piece.start, piece.numel))
                    for piece in bucket.publishes
                    if piece.shard == self._shard and self.has_replicas
                ]
            group.slots = [self._slots[p] for p in group.parameters]

    # ---- the meta device, and frameworks that make new parameters ----------------------------

    @torch.no_grad()
    def _shed_on_meta(self) -> None:
        """Placeholders on the meta device: `to_empty` then allocates what is kept here only."""
        for p in self.group_of:
            spans = self._slices.spans(p, self._tensor)
            if spans and all(span.shard != self._shard for span in spans):
                local = stored_tensor(self.parameters[p])
                local.data = _placeholder(local.shape, local)

    def find_parameters(self) -> None:
        """Find the parameters as they are now: `fully_shard` and `to_empty` make new ones.

        Raises:
            OwnershipError: a dedicated parameter has been replaced, or is still on the meta device.
        """
        model = self._model()
        if model is None:
            return
        now = dict(trainable_parameters(model))
        found = [
            now.get(spec.name, known)
            for spec, known in zip(self._specs.parameters, self.parameters, strict=True)
        ]
        for i in sorted(self.group_of):
            if found[i] is not self.parameters[i] and (
                not self._on_meta or is_distributed(found[i])
            ):
                raise _replaced(self._specs.parameters[i].name, found[i])
        self.parameters[:] = found
        if not self._on_meta:
            return
        for spec, p in zip(self._specs.parameters, found, strict=True):
            if p.device.type == "meta":
                raise OwnershipError(
                    f"parameter {spec.name!r} is still on the meta device: call "
                    "model.to_empty(device=...) and initialize the model before dmuon.Muon(model) "
                    "and the first forward pass"
                )
        self._on_meta = False
        if self._options.broadcast_parameters:
            rest = [p for i, p in enumerate(found) if i not in self.group_of]
            tensors = [t for t in [*rest, *model.buffers()] if not is_distributed(t)]
            start_from_first((t, self._process_groups.world) for t in tensors)
        self._take_over()
        for group in self.groups:
            self.publish(group)

    def ready(self) -> None:
        """Have taken over the weights; OwnershipError if they are still on the meta device."""
        if self._on_meta:
            self.find_parameters()

    # ---- what is kept ------------------------------------------------------------------------

    def casts(self, parameter: int) -> bool:
        """Whether a parameter is used in another dtype than it is kept in."""
        slot = self._slots[parameter]
        return slot.view.dtype is not slot.kept.dtype

    def weight_of(self, matrix: int) -> Tensor:
        """This rank's part of a matrix, in its parameter's dims: a view of what is kept here."""
        slot = self._slots[self._specs.matrices[matrix].parameter]
        part = self._slices.part(matrix, self._tensor)
        return slot.bucket.stored(slot.start + part.start, part.numel).view(part.box.shape)

    def check(self) -> None:
        """Show again what is kept where weights were moved.

        Raises:
            OwnershipError: a weight has another shape, dtype or device than it is kept in, or was
                replaced by other values, which ranks without it cannot have followed.
        """
        for p, slot in self._slots.items():
            if slot.pinned is not None or self.group_of[p].in_use:
                continue
            data, kept = slot.tensor, slot.kept
            alike = (data.dtype, data.device) == (kept.dtype, kept.device)
            if alike and data.data_ptr() == kept.data_ptr():
                continue
            local = stored_tensor(data.detach())
            if not alike or not torch.equal(local, kept):
                raise OwnershipError(
                    f"parameter {self._specs.parameters[p].name!r} is now {list(local.shape)} "
                    f"{data.dtype} on {data.device}, by an assignment to its data; it was kept as "
                    f"{list(kept.shape)} {kept.dtype} on {kept.device}. Move or convert the model "
                    "before dmuon.dedicate_params(model), and change values in place inside "
                    "`with own.materialized(model):`"
                )
            slot.show_kept()

    # ---- what travels ------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, group: Group, phase: str) -> None:
        """Broadcast the weights of a group along the shards."""
        group.wait_published()
        group.wait()
        for live in group.buckets:
            live.buffer.hold()
            for shard, target, source in live.sends:
                if source is not None:
                    target.copy_(source)
                self._meter.add("weights", target)
                transport, tag = self._process_groups.weights, f"{phase} {group.name}"
                group.works.append(transport.broadcast(target, shard, tag=tag))
        group.valid = True

    def publish(self, group: Group) -> None:
        """Launch the broadcasts of a group's new weights to their holders."""
        for replica, stored in group.publishes:
            self._meter.add("weights to holders", stored)
            transport = self._process_groups.replicas
            work = transport.broadcast(stored, replica, tag=f"publish {group.name}")
            group.publishing.append(work)

    def wait_published(self) -> None:
        for group in self.groups:
            group.wait_published()

    # ---- direct reading ----------------------------------------------------------------------

    @torch.no_grad()
    def _gather(self, parameters: Sequence[int]) -> list[Tensor]:
        """Whole weights (tensor-parallel slices) in the dtype in which they are kept.

        What is kept whole comes as it is, not as a copy. A collective call along shards.
        """
        found, works = [], []
        for p in parameters:
            slot = self._slots[p]
            is_keeper, whole = slot.bucket.is_keeper, slot.kept
            if not is_keeper:
                whole = whole.new_empty(self._slices.shape(p, self._tensor))
            for span in self._slices.spans(p, self._tensor):
                piece = whole.view(-1).narrow(0, span.start, span.numel)
                if span.shard == self._shard and not is_keeper:
                    piece.copy_(slot.bucket.stored(slot.start + span.start, span.numel))
                transport = self._process_groups.weights
                works.append(transport.broadcast(piece, span.shard, tag="materialized"))
            found.append(whole)
        for work in works:
            work.wait()
        return found

    def _below(self, module: nn.Module) -> list[int]:
        """The dedicated parameters of a module."""
        index = {id(self.parameters[p]): p for p in self.group_of}
        return [index[id(p)] for p in module.parameters() if id(p) in index]

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Inside, the parameters of ``module`` are whole; a collective call, may be nested."""
        numbers = self._below(module)
        fresh = [p for p in numbers if not self._slots[p].pins]
        for p, values in zip(fresh, self._gather(fresh), strict=True):
            self._slots[p].pinned = values
            if not self.group_of[p].in_use:
                self._slots[p].show_kept()
        for p in numbers:
            self._slots[p].pins += 1
        try:
            yield
        finally:
            for p in numbers:
                self._unpin(p)

    @torch.no_grad()
    def _unpin(self, parameter: int) -> None:
        """A placeholder again; what was written is kept where it is kept."""
        slot = self._slots[parameter]
        slot.pins -= 1
        if slot.pins:
            return
        values, slot.pinned = slot.pinned, None
        if values is not None and not slot.bucket.is_keeper:
            slot.bucket.keep(slot.start, values.view(-1))
        if not self.group_of[parameter].in_use:
            slot.show_kept()

    # ---- state dicts -------------------------------------------------------------------------

    def is_pinned(self, parameter: int) -> bool:
        return self._slots[parameter].pins > 0

    def apart(self, names: Mapping[str, int]) -> dict[str, int]:
        """Those of the parameters that are not whole on this rank now; all ranks come alike."""
        self.ready()
        if self._process_groups.weights.world == 1:
            return {}
        return {name: p for name, p in names.items() if not self.is_pinned(p)}

    def check_whole(self, module: nn.Module) -> None:
        """Raise OwnershipError if placeholders would be copied."""
        below = self._below(module)
        for p in self.apart({self._specs.parameters[p].name: p for p in below}):
            raise OwnershipError(
                f"{p!r} is stored by its owner only; the other ranks have a placeholder. Call "
                "copy.deepcopy or pickle on every rank, inside `with own.materialized(model):`"
            )

    def saved(self, parameter: int) -> Tensor:
        """A weight as rows on all ranks; a collective call."""
        spec = self._specs.parameters[parameter]
        places = self._slices.places(parameter, in_slices=True, replicas=False)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return self._rows.spread(spec.shape, dtype, places, self._pieces(places))

    def flaw(self, parameter: int, value: Any) -> str | None:
        """Why this cannot be a whole weight, if so."""
        spec = self._specs.parameters[parameter]
        if isinstance(value, Tensor) and value.shape == spec.shape:
            return None
        if isinstance(value, Tensor) and not value.numel():
            # What torch's set_model_state_dict gives for a key that is not in a full state.
            return f"Missing key {spec.name!r}: a placeholder was given in its place"
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        return f"size mismatch for {spec.name}: {found} was saved, {list(spec.shape)} is here"

    def load(self, found: Mapping[int, Tensor], flaws: Sequence[str]) -> None:
        """Keep whole weights, by parameter, in whatever form all ranks have them. A collective
        call.

        Raises:
            RuntimeError: this rank has ``flaws``; nothing is changed.
            ConsensusError: another one has, or other parameters.
        """

        def check() -> list[str]:
            if flaws:
                raise RuntimeError("model.load_state_dict(): " + "; ".join(flaws))
            return [f"{self._specs.parameters[p].name}: {type(v)}" for p, v in found.items()]

        world = self._process_groups.world
        world.meet("model.load_state_dict()")
        attempt(world, check, what="model.load_state_dict()", digest="\n".join)
        for p, value in found.items():
            places = self._slices.places(p, in_slices=True, replicas=True)
            self._rows.collect(value, places, self._pieces(places))

    def _pieces(self, places: Places) -> dict[int, Tensor]:
        """What this rank keeps of them, by matrix."""
        rank = self._process_groups.world.rank
        return {i: self.weight_of(i) for i, r, box in places if r == rank and box.numel}

    def meet(self, call: str) -> None:
        self._process_groups.world.meet(call)

    @cached_property
    def _rows(self) -> RowShards:
        return RowShards(self._process_groups.world, self._device)

    def restore(self) -> None:
        """Give every rank the whole weights for good, group by group; a collective call."""
        if self._on_meta:
            return
        self.wait_published()
        for group in self.groups:
            for slot, whole in zip(group.slots, self._gather(group.parameters), strict=True):
                slot.tensor.data = whole


def _replaced(name: str, p: nn.Parameter) -> OwnershipError:
    if is_distributed(p):
        return OwnershipError(
            f"fully_shard has taken parameter {name!r}, which dmuon dedicates to its owner: pass "
            "ignored_params=own.dedicated_params to every fully_shard call, or make the calls "
            "inside `with own.ignored_by_fully_shard():`"
        )
    return OwnershipError(
        f"{name!r} is another parameter object now than at dedicate_params: change values in "
        "place, inside `with own.materialized(module):`"
    )
