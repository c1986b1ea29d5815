"""Steps of the `sharded` layout on fake CUDA tensors at the sizes of real models: one rank of many.

Planning, binding and `step` are the real ones; tensors have shapes, dtypes, storages and no memory,
and a process group that moves nothing. So it can be counted what a step dispatches, which
``_foreach_`` calls leave the fast route, and which bytes are alive, in seconds and without a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dmuon
import dmuon.step.on_params
from dmuon import devices
from dmuon.api import Given, Request, assemble
from dmuon.scheduler.shards import RankShards
from dmuon.scheduler.specs import Box, LocalShard
from dmuon.scheduler.topology import Topology
from tests.unit.models import tree

Shapes = dict[str, tuple[int, ...]]
Sent = list[tuple[str, tuple[Any, ...]]]  # (tag, arguments) of collectives


def llama(layers: int) -> Shapes:
    """The matrices of Llama-3-8B, and what AdamW updates between them."""
    hidden, kv, inner = 4096, 1024, 14336
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "norm": (hidden,),
    }  # fmt: skip
    return {f"layers.{i}.{n}.weight": s for i in range(layers) for n, s in layer.items()}


def largest(shapes: Shapes) -> int:
    """Elements of the largest matrix."""
    return max(math.prod(shape) for shape in shapes.values() if len(shape) == 2)


# ---- what is not there ---------------------------------------------------------------------


class _Work:
    def wait(self) -> None:
        """Nothing travels."""


class _Transport:
    """The first rank's, of a group in which all say the same; tensors are noted in ``sent``."""

    rank, failed = 0, False

    def __init__(
        self, world: int, mesh: DeviceMesh, reports: Sequence[RankShards], sent: Sent
    ) -> None:
        self.world, self._mesh, self._reports, self.sent = world, mesh, reports, sent

    def _go(self, *args: Any, tag: str, **kwargs: Any) -> _Work:
        self.sent.append((tag, args))
        return _Work()

    reduce = all_reduce = broadcast = all_to_all = all_gather = reduce_scatter = _go

    def gather_objects(self, value: Any) -> list[Any]:
        if isinstance(value, RankShards):
            return list(self._reports)
        return [value] * self.world

    def broadcast_object(self, value: Any, src: int) -> Any:
        return value

    def subgroup(self, partition: Sequence[Sequence[int]]) -> _Transport:
        return _Transport(len(partition[0]), self._mesh, (), self.sent)

    def meet(self, *args: Any) -> None:
        """All are there."""

    def mesh(self, device: Any) -> DeviceMesh:
        return self._mesh

    def close(self) -> None:
        """Nothing is open."""


class _Watch:
    """A `Stopwatch` that never has a time."""

    def __init__(self, device: torch.device) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def ready(self) -> bool:
        return False


class _HostCopy:
    """It never arrives; nothing bad is in it."""

    def __init__(self, tensor: Tensor) -> None:
        self._count = tensor.numel()

    def read(self) -> list[float]:
        return [0.0] * self._count


class _Replay:
    """A captured call, which launches one graph; what it touches is not counted."""

    def __init__(self, call: Callable[[], object]) -> None:
        call()

    def __call__(self) -> None:
        for count in _COUNTS:
            count.calls["graph"] += 1


class ListKernels:
    """Stands for `dmuon.kernels.triton_lists`, which launches one kernel for all tensors of the
    same dtypes, reads each tensor once and writes it once: counted as a call for each such set."""

    @staticmethod
    def _note(
        name: str, read: Sequence[Sequence[Tensor]], written: Sequence[Sequence[Tensor]]
    ) -> None:
        lists = [*map(list, (*read, *written))]
        kinds = {tuple(t.dtype for t in tensors) for tensors in zip(*lists, strict=True)}
        for count in _COUNTS:
            count.calls[f"list of {name}"] += len(kinds)
            count.touched[f"list of {name}"] += sum(map(_nbytes, lists))

    @classmethod
    def norms(cls, buffers: list[Tensor], grads: list[Tensor], *args: Any, **how: Any) -> Tensor:
        cls._note("norms", [buffers, grads], [])
        parts = torch.zeros(2, len(buffers), 1, dtype=torch.float64, device=buffers[0].device)
        return parts.sum(2).sqrt_()

    @classmethod
    def advance(cls, out: Any, buffers: list[Tensor], grads: Any, *args: Any, **how: Any) -> None:
        cls._note("advance", [buffers, grads], [buffers] if out is None else [buffers, out])

    @classmethod
    def update(cls, targets: list[Tensor], updates: Any, weights: Any, **how: Any) -> None:
        masters = [] if weights is None or weights[0].dtype is targets[0].dtype else [weights]
        cls._note("update", [targets, updates, *masters], [targets, *masters])

    @classmethod
    def copier(
        cls, targets: list[Tensor], sources: list[Tensor], *, turned: bool
    ) -> Callable[[], None]:
        return lambda: cls._note("copy", [sources], [targets])


def held(shapes: Shapes, rank: int, world: int, replicas: int = 1) -> RankShards:
    """What a rank has of parameters whose rows are shared out, as by FSDP2 or HSDP."""
    found, ranks, count = [], tuple(range(world)), world // replicas
    replica = (rank // count,) if replicas > 1 else ()
    for rows, *others in shapes.values():
        per, shard = -(-rows // count), rank % count
        low, high = min(rows, shard * per), min(rows, (shard + 1) * per)
        box = Box((low, *[0] * len(others)), (high - low, *others))
        found.append(LocalShard(ranks, replica, box))
    return RankShards.of(rank, found)


# Of a tensor whose device is not there these methods ask the device; what they dispatch does not.


def _index(tensor: Tensor, index: Any) -> Tensor:
    index, dim = index if isinstance(index, tuple) else (index,), 0
    if any(isinstance(i, (Tensor, list)) for i in index):
        return _GET(tensor, index)
    if Ellipsis in index:
        at, named = index.index(Ellipsis), sum(i is not None for i in index) - 1
        rest = (slice(None),) * (tensor.ndim - named)
        index = index[:at] + rest + index[at + 1 :]
    for i in index:
        if i is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(i, slice):
            start, stop, step = i.indices(tensor.shape[dim])
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, start, stop, step)
        else:
            tensor = tensor.select(dim, i)
            continue
        dim += 1
    return tensor


_GET, _SET, _COPY = Tensor.__getitem__, Tensor.__setitem__, Tensor.copy_


def _get(self: Tensor, index: Any) -> Tensor:
    return _index(self, index) if isinstance(self, FakeTensor) else _GET(self, index)


def _set(self: Tensor, index: Any, value: Any) -> None:
    if not isinstance(self, FakeTensor):
        _SET(self, index, value)
    elif isinstance(value, Tensor):
        _copy(_index(self, index), value)
    else:
        _index(self, index).fill_(value)


_COUNTS: list[Count] = []


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(self, FakeTensor):
        return _COPY(self, source, non_blocking)
    for count in _COUNTS:
        count.note("copy_", [self, source], {})
    return self


# ---- what is counted -------------------------------------------------------------------------

_VIEWS = ("_unsafe_view", "_reshape_alias", "detach", "size", "stride")
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm")
_OVERWRITES = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_")
_READS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero")


def is_fast(lists: Sequence[Sequence[Tensor]], others: Sequence[Tensor]) -> bool:
    """Whether a ``_foreach_`` call on CUDA takes one launch for all tensors of its lists."""
    first = lists[0]
    one = {t.dtype for tensors in lists for t in tensors} | {t.dtype for t in others}
    same = all(
        a.shape == b.shape and a.stride() == b.stride()
        for tensors in lists[1:]
        for a, b in zip(first, tensors, strict=True)
    )
    return len(one) == 1 and same


@dataclass
class Count(TorchDispatchMode):
    """``calls`` by name, those of ``slow`` foreach routes by tensors, and ``reads`` by the host;
    ``copied`` are bytes of copies to float64; ``touched`` bytes that calls outside of products read
    and write, by name; ``most`` and `alive` are bytes of storages that were made meanwhile."""

    calls: Counter[str] = field(default_factory=Counter)
    slow: Counter[str] = field(default_factory=Counter)
    reads: list[str] = field(default_factory=list)
    touched: Counter[str] = field(default_factory=Counter)
    copied: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def launches(self) -> int:
        """About so many kernels."""
        return self.calls.total() + self.slow.total()

    @property
    def alive(self) -> int:
        self._made = {k: v for k, v in self._made.items() if not v[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())

    def note(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
        if name in _READS:
            self.reads.append(name)
        tensors = [a for a in args if isinstance(a, Tensor)]
        if name in ("copy_", "_to_copy"):
            to = torch.device(kwargs.get("device") or tensors[0].device)
            if len({to.type, *(t.device.type for t in tensors)}) > 1 and tensors[-1].numel() > 1:
                self.reads.append(f"{name} {tensors[-1].device} -> {to}")
        # These kernels copy their operand, where it is narrower, before they begin.
        if kwargs.get("dtype") is torch.float64 and not name.startswith("_foreach"):
            self.copied += sum(8 * t.numel() for t in tensors if t.dtype is torch.float32)
        self.calls[name] += 1
        is_list = name.startswith("_foreach_") and name != "_foreach_norm"
        if is_list and not is_fast(lists, tensors):
            self.slow[name] += len(lists[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its local operations come by in turn
        name = func.name().removeprefix("aten::").split(".")[0]
        result = func(*args, **kwargs)
        if func.is_view or name in _VIEWS or "::" in name or name.startswith(("is_", "sym_")):
            return result
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_fake(t)}
        made = [t.untyped_storage() for t in tree_leaves(result) if _is_fake(t)]
        new = [storage for storage in made if storage._cdata not in given]
        self._made |= {s._cdata: (StorageWeakRef(s), s.nbytes()) for s in new}
        if new:
            self.most = max(self.most, self.alive)
        if not name.startswith(("empty", "new_empty", "promote_types")):
            self.note(name, args, kwargs)
            if name not in _PRODUCTS:
                self.touched[name] += _touched(func, name, args, kwargs, result)
        return result

    def __enter__(self) -> Count:
        _COUNTS.append(self)
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        _COUNTS.remove(self)


def _touched(func: Any, name: str, args: Sequence[Any], kwargs: Any, result: Any) -> int:
    """Bytes that a call reads and writes: what it changes in place is both."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    total, changed = 0, 0
    for argument in func._schema.arguments:
        size = _nbytes(given.get(argument.name))
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += size
            overwrites = argument.kwarg_only or name in _OVERWRITES
            total += size if overwrites else 2 * size
        else:
            total += size
    return total if changed else total + _nbytes(result)


def _nbytes(value: Any) -> int:
    """Of fake tensors in a value; what is expanded is read once."""
    found = [t for t in tree_leaves(value) if _is_fake(t)]
    sizes = (math.prod(n for n, s in zip(t.shape, t.stride(), strict=True) if s) for t in found)
    return sum(n * t.itemsize for n, t in zip(sizes, found, strict=True) if t.numel())


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.device.type == "cuda"


# ---- a rank ------------------------------------------------------------------------------------


@dataclass
class Rank:
    """A rank's optimizer on fake tensors; ``bound``: what was made when it was bound."""

    opt: dmuon.Muon
    bound: Count
    sent: Sent
    grads: list[tuple[nn.Parameter, torch.Size]]

    @property
    def engine(self) -> Any:
        return self.opt._run.engines[0]

    def step(self) -> Count:
        """Take a step with all gradients present."""
        for p, local in self.grads:
            p.grad = shard_of(local, p.shape, p.device_mesh, p.dtype)
        with Count() as count:
            self.opt.step()
        self.opt.zero_grad()
        return count


def shard_of(
    local: Sequence[int], shape: Sequence[int], mesh: DeviceMesh, dtype: torch.dtype
) -> DTensor:
    """A rank's rows of a tensor of this shape."""
    stride = torch.empty(shape, device="meta").stride()
    rows = torch.empty(local, dtype=dtype, device="cuda:0")
    places = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    return DTensor.from_local(
        rows, mesh, places, run_check=False, shape=torch.Size(shape), stride=stride
    )


@contextmanager
def rank_of(
    shapes: Shapes,
    world: int,
    *,
    replicas: int = 1,
    dtype: torch.dtype = torch.float32,
    fused: bool = True,
    **muon: Any,
) -> Iterator[Rank]:
    """The first of ``world`` ranks among which FSDP2, or HSDP, has shared out the rows of a model.
    Not ``fused``: as without Triton."""
    with ExitStack() as stack:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        stack.callback(dist.destroy_process_group)
        reports = [held(shapes, rank, world, replicas) for rank in range(world)]
        mine = dict(zip(shapes, reports[0].shards, strict=True))
        for target, attribute, value in (
            (torch.cuda, "is_available", lambda: False),  # else fake tensors ask the driver
            (torch.cuda, "device_count", lambda: 8),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "set_device", lambda *args: None),
            (Tensor, "data_ptr", lambda tensor: id(tensor)),
            (Tensor, "__getitem__", _get),
            (Tensor, "__setitem__", _set),
            (Tensor, "copy_", _copy),
            (dmuon.step.engine, "Stopwatch", _Watch),
            (dmuon.comm.transport, "Stopwatch", _Watch),
            (dmuon.step.verdict, "HostCopy", _HostCopy),
            (devices.CudaGraphs, "__call__", lambda graphs, call: _Replay(call)),
            (dmuon.kernels.choice, "offered_backends", lambda *args: ("torch",)),
            *(
                (module, "list_kernels", lambda device: ListKernels if fused else None)
                for module in (dmuon.rule, dmuon.step.operands)
            ),
            (dmuon.dtensors, "local_shard", lambda name, p, r: mine[name]),
            (dmuon.api, "reshard", lambda model: None),
            (dmuon.optim, "check_planned_together", lambda *args: None),
            (dmuon.optim, "_flaw_of_rounding", lambda *args: None),  # it reads weights
        ):
            stack.enter_context(mock.patch.object(target, attribute, value))
        size, axes = (world,), ("dp",)
        if replicas > 1:
            size, axes = (replicas, world // replicas), ("replicate", "shard")
        mesh = DeviceMesh("cuda", torch.arange(world).view(size), mesh_dim_names=axes)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model, grads = tree(dict.fromkeys(shapes, ())), []
        for name, shape in shapes.items():
            path, _, leaf = name.rpartition(".")
            local = torch.Size(mine[name].box.shape)
            p = nn.Parameter(shard_of(local, shape, mesh, dtype))
            setattr(model.get_submodule(path), leaf, p)
            grads.append((p, local))
        sent: Sent = []
        transport = _Transport(world, mesh, reports, sent)
        request = Request(
            "sharded", select=lambda name, p: p.ndim == 2, costs="analytic:h100",
            solver="greedy", mesh=mesh,
        )  # fmt: skip
        assemble(
            Given(model),
            request,
            transport,
            lambda: Topology.on_nodes(size, axes, [r // 8 for r in range(world)], "cuda"),
        )
        with Count() as bound:
            opt = dmuon.Muon(model, lr=1e-3, ns_dtype=torch.float16, **muon)
        yield Rank(opt, bound, sent, grads)
