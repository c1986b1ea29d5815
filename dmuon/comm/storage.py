"""Storage of the `dedicated` layout's weights, and the buffers in which they are used.

Modules that use weights together are a *layer*. Its weights lie in a few buckets: one for each
shard coordinate that keeps whole parameters of it, and one for each parameter that several
coordinates keep. An all-gather carries one span from each shard coordinate, so a layer without
split parameters needs one::

    bucket 0   | a.weight  c.weight |              kept at shard 0: leaves in the first all-gather
    bucket 1   | b.weight |                        kept at shard 1: in the first
    bucket 2   | experts[0:3] | experts[3:5] |     kept at shards 0 and 1: in the second

Between uses a parameter shows its kept data: the whole weight, or a placeholder ``(0, ...)``.
In use it shows a view of its bucket's buffer. `WeightState` lists the states of a layer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from dmuon.comm.buckets import Buffer, Slices, WeightBucket, weight_buckets
from dmuon.comm.hooks import outermost_members, parameter_ids, replaced
from dmuon.comm.pipeline import Copies
from dmuon.comm.process_groups import ProcessGroups, attempt_in_all, start_from_first
from dmuon.comm.routes import Keepers, RowShards
from dmuon.comm.transport import Work, wait_all
from dmuon.config import DedicatedOptions
from dmuon.dtensors import is_distributed, stored_tensor
from dmuon.scheduler.select import trainable_parameters
from dmuon.scheduler.specs import canonical_name
from dmuon.types import OwnershipError, State, grouped

# ---- one layer -------------------------------------------------------------------------------


class _Weight:
    """One parameter, or the local tensor inside a `DTensor`: ``tensor``, whose data is switched.
    Between uses it shows ``kept``: the whole weight where that is kept, else a placeholder, or
    ``readable`` while ``readers`` of `Storage.whole` have the weight here. In use it shows
    ``view``, a part of ``bucket`` from element ``start`` on.
    """

    def __init__(
        self, tensor: Tensor, shape: tuple[int, ...], bucket: _WeightBuffer, start: int
    ) -> None:
        numel = math.prod(shape)
        values = tensor.detach()
        if values.numel() == numel:  # False if it was made on the meta device
            bucket.keep(start, values.reshape(-1))
        self.tensor = tensor
        self.bucket, self.start = bucket, start
        if not bucket.is_keeper:
            self.kept = bucket.nothing.new_empty((0, *shape[1:]))
        else:
            self.kept = bucket.stored(start, numel).view(shape) if numel else values.view(shape)
        self.view = bucket.buffer.flat.narrow(0, start, numel).view(shape)
        self.readable: Tensor | None = None
        self.readers = 0
        self.show_kept()

    def show_kept(self) -> None:
        self.tensor.data = self.kept if self.readable is None else self.readable


class _WeightBuffer:
    """A bucket on this rank, at shard coordinate ``shard``. Its kept part lies in the buffer itself
    if that part is all of it in the ``dtype`` of use, otherwise in separate tensors."""

    def __init__(
        self, bucket: WeightBucket, dtype: torch.dtype, shard: int, device: torch.device
    ) -> None:
        self.is_keeper = bucket.keeper == shard
        kept_dtype: torch.dtype = getattr(torch, bucket.dtype)
        lasting = self.is_keeper and dtype is kept_dtype
        flat = torch.empty(bucket.numel, dtype=dtype, device=device)
        self.buffer = Buffer(flat, lasting=lasting)
        self.nothing = torch.empty(0, dtype=kept_dtype, device=device)
        mine = [span for span in bucket.sends if span.shard == shard]
        kept = [flat if lasting else self.nothing.new_empty(span.numel) for span in mine]
        self._kept = [(span.start, part) for span, part in zip(mine, kept, strict=True)]
        # Views are made while they have memory, and stay valid after its release.
        self.sends = [(s.shard, flat.narrow(0, s.start, s.numel)) for s in bucket.sends]
        # (view of the buffer, kept part) pairs to copy before the buffer leaves.
        views = [view for sender, view in self.sends if sender == shard]
        self.copies = [] if lasting else [*zip(views, kept, strict=True)]

    def keep(self, start: int, values: Tensor) -> None:
        """Store the part kept here of ``values``, the bucket's elements from ``start`` on."""
        for first, kept in self._kept:
            low, high = max(start, first), min(start + len(values), first + len(kept))
            if low < high:
                kept[low - first : high - first].copy_(values[low - start : high - start])

    def stored(self, start: int, numel: int) -> Tensor:
        """Return the bucket's elements ``start .. start + numel``, which are kept here."""
        for first, kept in self._kept:
            if first <= start and start + numel <= first + len(kept):
                return kept.narrow(0, start - first, numel)
        assert not numel, f"elements {start} to {start + numel} are not kept here"
        return self.nothing


class WeightState(State):
    """The state of the weights of a layer in the `dedicated` layout.

    ::

        state     parameters show  buffers have   reason                      may become
        FREED     the kept part    no memory      unused, or all uses ended   LAUNCHED
        LAUNCHED  the kept part    weights, soon  all-gathers were issued     IN_USE, FREED
        IN_USE    the buffers      weights        forward or backward runs    RECORDED, FREED
        RECORDED  the buffers      weights        autograd recorded a use     HELD, FREED
        HELD      the buffers      weights        the same                    FREED

    In HELD no hook will announce the backward, so the weights stay until it is done. A layer in use
    may be sent again into the same buffers; its state does not change.
    """

    FREED = "freed", "LAUNCHED"
    LAUNCHED = "launched", "IN_USE FREED"
    IN_USE = "in use", "RECORDED FREED"
    RECORDED = "recorded", "HELD FREED"
    HELD = "held", "FREED"


@dataclass(slots=True, eq=False)
class Layer:
    """Modules whose weights travel together: by default a member of an outermost container, as for
    `fully_shard`. The root's layer has the parameters in no other, and stays while it runs."""

    name: str
    parameters: tuple[int, ...]  # numbers, by registration; tied ones belong to the first layer
    is_root: bool
    occurrences: int  # of its module in the model
    matrices: frozenset[int] = frozenset()
    state: WeightState = WeightState.FREED
    buckets: list[_WeightBuffer] = field(default_factory=list)
    weights: list[_Weight] = field(default_factory=list)
    # Kept parts to send to the holders in other replicas, with the replica of their owner.
    publishes: list[tuple[int, Tensor]] = field(default_factory=list)
    exchanges: list[list[Tensor]] = field(default_factory=list)  # see `_exchanges`
    copies: Copies = field(default_factory=lambda: Copies(()))  # into buffers before they leave
    gathers: list[Work] = field(default_factory=list)  # pending, to where weights are used
    publishing: list[Work] = field(default_factory=list)  # pending, to the holders

    @property
    def in_use(self) -> bool:
        """Whether the parameters show the buffers."""
        return self.state not in (WeightState.FREED, WeightState.LAUNCHED)

    def use(self) -> None:
        wait_all(self.gathers)
        if not self.in_use:
            self.state = self.state.to(WeightState.IN_USE)
            for weight in self.weights:
                weight.tensor.data = weight.view

    def record(self, *, hold: bool) -> bool:
        """Note a use recorded by autograd; True for the first. ``hold``: until backward is done."""
        if first := self.state is WeightState.IN_USE:
            self.state = self.state.to(WeightState.RECORDED)
        if hold:
            self.state = self.state.to(WeightState.HELD)
        return first

    def free(self) -> None:
        """Show the kept parts, and free the buffers' memory."""
        wait_all(self.gathers)
        if self.in_use:
            for weight in self.weights:
                weight.show_kept()
        self.state = self.state.to(WeightState.FREED)
        for bucket in self.buckets:
            bucket.buffer.release()


def _exchanges(buckets: Sequence[_WeightBuffer], shards: int) -> list[list[Tensor]]:
    """Return the contents of a layer's all-gathers, by shard coordinate, in the same order on all
    ranks: for each dtype, first every coordinate's first span, then the second."""
    found = []
    for dtype in dict.fromkeys(bucket.buffer.flat.dtype for bucket in buckets):
        sends: list[list[Tensor]] = [[] for _ in range(shards)]
        for bucket in buckets:
            for shard, view in bucket.sends if bucket.buffer.flat.dtype is dtype else ():
                sends[shard] += [view] if view.numel() else []
        nothing = buckets[0].nothing.to(dtype)
        found += [list(parts) for parts in zip_longest(*sends, fillvalue=nothing)]
    return found


def layers_of(
    root: nn.Module, chooses: Callable[[str, nn.Module], bool] | None, index: Mapping[int, int]
) -> dict[nn.Module, Layer]:
    """Return layers with parameters in registration order, the root's first. ``chooses`` replaces
    the default choice of modules; ``index`` has dedicated parameters' numbers by id."""
    if chooses is None:
        chosen = set(outermost_members(root)) - {root}
    else:
        named = root.named_modules()
        chosen = {m for name, m in named if m is not root and chooses(canonical_name(name), m)}
    every = root.named_modules(remove_duplicate=False)
    names = grouped((m, canonical_name(name)) for name, m in every if m is root or m in chosen)
    seen: set[int] = set()
    found = {}
    for module, where in names.items():
        numbers = dict.fromkeys(index[i] for i in parameter_ids(module, chosen) if i in index)
        mine = tuple(p for p in numbers if p not in seen)
        seen.update(mine)
        if mine:
            found[module] = Layer(where[0] or "root", mine, module is root, len(where))
    return found


# ---- the storage of a rank -------------------------------------------------------------------


@dataclass(eq=False)
class Storage:
    """The dedicated parameters on one rank, in ``layers`` in the order of their modules. At
    construction, or when the model leaves the meta device, this rank's part goes into buckets, and
    placeholders replace the rest. ``parameters``, the planned ones, is kept up to date.
    """

    slices: Slices
    model: InitVar[nn.Module]
    parameters: list[nn.Parameter]
    layers: Sequence[Layer]
    process_groups: ProcessGroups
    options: DedicatedOptions
    rows: RowShards

    def __post_init__(self, model: nn.Module) -> None:
        slices, self.world = self.slices, self.process_groups.world
        self.layer_of = {p: layer for layer in self.layers for p in layer.parameters}
        self.has_replicas = slices.grid.shape[0] > 1
        self._specs = slices.plan.specs
        self._model = weakref.ref(model)
        _, self._shard, self._tensor = slices.grid.place(self.world.rank)
        self._weights: dict[int, _Weight] = {}
        for layer in self.layers:
            layer.matrices = frozenset(i for p in layer.parameters for i in slices.matrices_of[p])
        self._on_meta = any(p.device.type == "meta" for p in self.parameters)
        if not self._on_meta:
            self._take_over()
            return
        # Placeholders on the meta device too, so that `to_empty` allocates only the kept part.
        for p in self.layer_of:
            spans = slices.spans(p, self._tensor)
            if spans and all(span.shard != self._shard for span in spans):
                local = stored_tensor(self.parameters[p])
                local.data = local.new_empty((0, *local.shape[1:]))

    @torch.no_grad()
    def _take_over(self) -> None:
        for layer in self.layers:
            for bucket in weight_buckets(self.slices, layer.parameters, self._tensor):
                dtype = self.options.param_dtype or getattr(torch, bucket.dtype)
                live, start = _WeightBuffer(bucket, dtype, self._shard, self.rows.device), 0
                for p in bucket.parameters:
                    shape = self.slices.shape(p, self._tensor)
                    local = stored_tensor(self.parameters[p])
                    self._weights[p] = _Weight(local, shape, live, start)
                    start += math.prod(shape)
                live.buffer.release()
                layer.buckets.append(live)
                layer.publishes += [
                    (span.replica, live.stored(span.start, span.numel))
                    for span in bucket.publishes
                    if span.shard == self._shard and self.has_replicas
                ]
            layer.exchanges = _exchanges(layer.buckets, self.slices.grid.shape[1])
            layer.copies = Copies(pair for bucket in layer.buckets for pair in bucket.copies)
            layer.weights = [self._weights[p] for p in layer.parameters]

    # ---- the meta device, and frameworks that make new parameters ----------------------------

    def find_parameters(self) -> None:
        """Look up the current parameters, because `fully_shard` and `to_empty` make new ones.
        OwnershipError if a dedicated one was replaced, or is still on the meta device."""
        if (model := self._model()) is None:
            return
        now = dict(trainable_parameters(model))
        found = [
            now.get(spec.name, known)
            for spec, known in zip(self._specs.parameters, self.parameters, strict=True)
        ]
        for i in sorted(self.layer_of):
            if found[i] is not self.parameters[i] and (
                not self._on_meta or is_distributed(found[i])
            ):
                name = self._specs.parameters[i].name
                if not is_distributed(found[i]):
                    raise replaced(name)
                raise OwnershipError(
                    f"fully_shard has taken parameter {name!r}, which dmuon dedicates to its "
                    "owner: pass ignored_params=own.dedicated_params to every fully_shard call, or "
                    "make the calls inside `with own.ignored_by_fully_shard():`"
                )
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
        if self.options.broadcast_parameters:
            others = [p for i, p in enumerate(found) if i not in self.layer_of]
            tensors = [t for t in [*others, *model.buffers()] if not is_distributed(t)]
            start_from_first((t, self.world) for t in tensors)
        self._take_over()
        for layer in self.layers:
            self.publish(layer)

    def ready(self) -> None:
        """Take over the weights if that is pending; OwnershipError on the meta device."""
        if self._on_meta:
            self.find_parameters()

    # ---- the kept parts ----------------------------------------------------------------------

    def casts(self, parameter: int) -> bool:
        """Whether the dtype of a parameter differs between use and storage."""
        weight = self._weights[parameter]
        return weight.view.dtype is not weight.kept.dtype

    def weight_of(self, matrix: int) -> Tensor:
        """Return this rank's part of a matrix in its parameter's dims: a view of the kept part."""
        weight = self._weights[self._specs.matrices[matrix].parameter]
        start, box = self.slices.held(matrix, self._tensor)
        return weight.bucket.stored(weight.start + start, box.numel).view(box.shape)

    def check(self) -> None:
        """Show the kept parts again if weights were moved. OwnershipError if a weight has another
        shape, dtype or device, or new values, which ranks without it cannot have received."""
        for p, weight in self._weights.items():
            data, kept = weight.tensor, weight.kept
            alike = data.dtype is kept.dtype and data.device == kept.device
            if alike and data.data_ptr() == kept.data_ptr():
                continue
            if weight.readable is not None or self.layer_of[p].in_use:
                continue
            local = stored_tensor(data.detach())
            if not alike or not torch.equal(local, kept):
                raise OwnershipError(
                    f"parameter {self._specs.parameters[p].name!r} is now {list(local.shape)} "
                    f"{data.dtype} on {data.device}, by an assignment to its data; it was kept as "
                    f"{list(kept.shape)} {kept.dtype} on {kept.device}. Move or convert the model "
                    "before dmuon.dedicate_params, and change values in own.materialized(model)"
                )
            weight.show_kept()

    # ---- collectives -------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, layer: Layer, phase: str) -> None:
        """Launch the all-gathers of a layer's weights along the shards."""
        self.process_groups.meter.wait("scatter", layer.publishing)
        wait_all(layer.gathers)
        for bucket in layer.buckets:
            bucket.buffer.hold()
        layer.copies.run()
        with record_function(f"dmuon::gather {layer.name}"):
            for parts in layer.exchanges:
                self.process_groups.meter["weights"] += sum(part.nbytes for part in parts)
                transport, tag = self.process_groups.weights, f"{phase} {layer.name}"
                layer.gathers.append(transport.all_gather(parts, tag=tag))
        if not layer.in_use:
            layer.state = layer.state.to(WeightState.LAUNCHED)

    def publish(self, layer: Layer) -> None:
        """Launch the broadcasts of a layer's new weights to their holders."""
        with record_function("dmuon::publish"):
            for replica, stored in layer.publishes:
                self.process_groups.meter["weights to holders"] += stored.nbytes
                transport = self.process_groups.replicas
                work = transport.broadcast(stored, replica, tag=f"publish {layer.name}")
                layer.publishing.append(work)

    def wait_published(self) -> None:
        """Wait until this rank has the owners' new values of the weights that it holds."""
        for layer in self.layers:
            self.process_groups.meter.wait("scatter", layer.publishing)

    # ---- direct reading ----------------------------------------------------------------------

    @torch.no_grad()
    def _gather(self, parameters: Sequence[int]) -> list[Tensor]:
        """Return whole weights (tensor-parallel slices) in their kept dtype; a weight kept whole
        here is not copied. A collective call along shards."""
        found, works = [], []
        for p in parameters:
            weight = self._weights[p]
            is_keeper, whole = weight.bucket.is_keeper, weight.kept
            if not is_keeper:
                whole = whole.new_empty(self.slices.shape(p, self._tensor))
            for span in self.slices.spans(p, self._tensor):
                piece = whole.view(-1).narrow(0, span.start, span.numel)
                if span.shard == self._shard and not is_keeper:
                    piece.copy_(weight.bucket.stored(weight.start + span.start, span.numel))
                transport = self.process_groups.weights
                works.append(transport.broadcast(piece, span.shard, tag="materialized"))
            found.append(whole)
        wait_all(works)
        return found

    def _below(self, module: nn.Module) -> list[int]:
        index = {id(self.parameters[p]): p for p in self.layer_of}
        return [index[id(p)] for p in module.parameters() if id(p) in index]

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Make the parameters of ``module`` whole inside the context; collective, may be nested."""
        numbers = self._below(module)
        fresh = [p for p in numbers if not self._weights[p].readers]
        for p, values in zip(fresh, self._gather(fresh), strict=True):
            self._weights[p].readable = values
            if not self.layer_of[p].in_use:
                self._weights[p].show_kept()
        for p in numbers:
            self._weights[p].readers += 1
        try:
            yield
        finally:
            for p, weight in ((p, self._weights[p]) for p in numbers):
                weight.readers -= 1
                if weight.readers:
                    continue
                # After the last reader, store changes where the weight is kept.
                written, weight.readable = weight.readable, None
                if written is not None and not weight.bucket.is_keeper:
                    with torch.no_grad():
                        weight.bucket.keep(weight.start, written.view(-1))
                if not self.layer_of[p].in_use:
                    weight.show_kept()

    # ---- state dicts -------------------------------------------------------------------------

    def is_read(self, parameter: int) -> bool:
        """Whether the parameter is inside `whole`."""
        return self._weights[parameter].readers > 0

    def kept_elsewhere(self, names: Mapping[str, int]) -> dict[str, int]:
        """Select parameters that are not whole on this rank now; the same on all ranks."""
        self.ready()
        is_alone = self.process_groups.weights.world == 1
        return {name: p for name, p in names.items() if not (is_alone or self.is_read(p))}

    def check_whole(self, module: nn.Module) -> None:
        """Raise OwnershipError if placeholders would be copied."""
        below = self._below(module)
        for p in self.kept_elsewhere({self._specs.parameters[p].name: p for p in below}):
            raise OwnershipError(
                f"{p!r} is stored by its owner only; the other ranks have a placeholder. Call "
                "copy.deepcopy or pickle on every rank, inside `with own.materialized(model):`"
            )

    def saved(self, parameter: int) -> Tensor:
        """Return a weight as rows on all ranks; a collective call."""
        spec = self._specs.parameters[parameter]
        keepers = self.slices.keepers(parameter, in_slices=True)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return self.rows.spread(spec.shape, dtype, keepers, self._mine(keepers))

    def flaw(self, parameter: int, value: Any) -> str | None:
        """Return the reason why ``value`` cannot be this weight, whole, or None."""
        spec = self._specs.parameters[parameter]
        if isinstance(value, Tensor) and value.shape == spec.shape:
            return None
        if isinstance(value, Tensor) and not value.numel():
            # torch's set_model_state_dict passes this for a key missing from a full state.
            return f"Missing key {spec.name!r}: a placeholder was given in its place"
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        return f"size mismatch for {spec.name}: {found} was saved, {list(spec.shape)} is here"

    def load(self, found: Mapping[int, Tensor], flaws: Sequence[str]) -> None:
        """Store whole weights, of any form, by parameter; a collective call. Nothing changes if any
        rank has ``flaws`` or other parameters: RuntimeError on a rank with flaws, ConsensusError
        on others."""

        def check() -> list[str]:
            if flaws:
                raise RuntimeError("model.load_state_dict(): " + "; ".join(flaws))
            return [f"{self._specs.parameters[p].name}: {type(v)}" for p, v in found.items()]

        self.world.meet("model.load_state_dict()")
        attempt_in_all([self.world], check, what="model.load_state_dict()", digest="\n".join)
        for p, value in found.items():
            keepers = self.slices.keepers(p, in_slices=True, replicas=True)
            self.rows.collect(value, keepers, self._mine(keepers))

    def _mine(self, keepers: Keepers) -> dict[int, Tensor]:
        rank = self.world.rank
        return {i: self.weight_of(i) for i, r, box in keepers if r == rank and box.numel}

    def restore(self) -> None:
        """Give every rank the whole weights for good, layer by layer; a collective call."""
        if self._on_meta:
            return
        self.wait_published()
        for layer in self.layers:
            for weight, whole in zip(layer.weights, self._gather(layer.parameters), strict=True):
                weight.tensor.data = whole
