"""What do the layouts cost on one model: time of a step, traffic, memory?

``python -m benchmarks.layouts --json out.json`` (docs/layouts.md). ``bytes``: received by a rank in
a step for matrices, mean over ranks, counted from every collective of dmuon; ``theory_bytes`` and
``framework_bytes`` are formulas of `benchmarks.layout_theory`. ``rest_bytes``: everything else that
dmuon sends (flags, and the parameters that are no matrices).
"""

from __future__ import annotations

import gc
import statistics
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dmuon
from benchmarks.baselines import local
from benchmarks.layout_theory import (
    Matrices,
    all_reduce,
    dedicated,
    fsdp,
    received,
    replicated,
    sharded,
)
from benchmarks.models import Stack, Training, shard
from benchmarks.results import Row, command, read_rows, table, write
from benchmarks.timing import on_ranks, ratio, take_turns, timed_row
from dmuon.comm.transport import C10dTransport, Work

WARM_UP = 2
PHASES = ("backward", "step", "forward")
WIDTH, LAYERS = 256, 8
BATCH = (4, 128)  # tokens of a rank


# ---- contenders ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One way to train: who keeps the matrices, who the rest, on how many replicas.

    ``around``: "FSDP2" or "DDP", what distributes the rest and all of the AdamW model; dmuon itself
    takes DDP's part in plain models, which "dedicated" and "reduce_to_owner" have there. ``freed``:
    `DedicatedOptions.free_after_forward`.
    """

    optimizer: str
    layout: str
    around: str
    replicas: int = 1
    freed: bool | None = None

    @property
    def baseline(self) -> Kind:
        """AdamW on the same model."""
        layout = "replicated" if self.around == "DDP" else "sharded"
        return Kind("AdamW", layout, self.around, self.replicas)

    @property
    def keeps_gradients(self) -> bool:
        """Whether every rank has all gradients, which `DistributedDataParallel` averages."""
        return self.layout == "replicated"

    def mesh_shape(self, world: int) -> tuple[int, ...]:
        return (world,) if self.replicas == 1 else (self.replicas, world // self.replicas)

    def label(self, world: int) -> str:
        words = ["AdamW" if self.optimizer == "AdamW" else self.layout]
        if self.freed is not None:
            words.append("freed" if self.freed else "kept")
        around = self.around if self.around == "FSDP2" or self.keeps_gradients else "plain"
        hsdp = "HSDP " + "x".join(map(str, self.mesh_shape(world)))
        return ", ".join([*words, hsdp if self.replicas > 1 else around])

    def theory(self, matrices: Matrices, world: int) -> dict[str, float]:
        """What dmuon should move for matrices."""
        shards = world // self.replicas
        if self.layout == "dedicated":
            return dedicated(matrices, shards, self.replicas, freed=bool(self.freed))
        if self.layout == "sharded":
            return sharded(matrices, shards, self.replicas)
        found = replicated(matrices, world)
        return {"updates": found["updates"]} if self.keeps_gradients else found


def kinds(world: int) -> list[Kind]:
    """All of them; those on two replicas where there are ranks for it."""
    found = [
        Kind("AdamW", "replicated", "DDP"),
        Kind("AdamW", "sharded", "FSDP2"),
        Kind("dmuon", "replicated", "DDP"),
        Kind("dmuon", "reduce_to_owner", "DDP"),
        Kind("dmuon", "sharded", "FSDP2"),
        *(Kind("dmuon", "dedicated", around, freed=freed)
          for around in ("FSDP2", "DDP") for freed in (True, False)),
    ]  # fmt: skip
    if world >= 4 and world % 2 == 0:
        found += [
            Kind("AdamW", "sharded", "FSDP2", replicas=2),
            Kind("dmuon", "sharded", "FSDP2", replicas=2),
            Kind("dmuon", "dedicated", "FSDP2", replicas=2, freed=True),
        ]
    return found


COLLECTIVES = ("broadcast", "reduce_scatter", "all_gather", "all_reduce", "all_to_all")


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Bytes that this rank receives in it, by tag; a mean over ranks, but for all-to-alls."""
    found: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Work]:
        issue = getattr(C10dTransport, name)

        def call(self: C10dTransport, sent: Any, *given: Any, tag: str, **how: Any) -> Work:
            parts: Sequence[Tensor] = [sent] if isinstance(sent, Tensor) else sent
            nbytes: float = sum(part.nbytes for part in parts)
            if name == "all_to_all":
                nbytes -= given[1][self.rank] * sent.itemsize
            found[tag] += received(name, nbytes, self.world)  # type: ignore[assignment]
            return issue(self, sent, *given, tag=tag, **how)  # type: ignore[no-any-return]

        return call

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(C10dTransport, name, counted(name)))
        yield found


class Contender:
    """One kind on its own copy of the model."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.own: dmuon.Ownership | None = None
        world = dist.get_world_size()
        torch.manual_seed(0)
        model: nn.Module = Stack(LAYERS, WIDTH)
        axes = ("shard",) if kind.replicas == 1 else ("replicate", "shard")
        mesh = init_device_mesh("cpu", kind.mesh_shape(world), mesh_dim_names=axes)
        if kind.layout == "dedicated":  # before fully_shard, which leaves the matrices alone then
            self.own = self._dedicate(model, mesh)
        if kind.around == "FSDP2":
            ignored = set() if self.own is None else self.own.dedicated_params
            shard(model, mesh=mesh, ignored_params=ignored)
        elif kind.keeps_gradients:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if kind.optimizer == "AdamW":
            opt: Any = torch.optim.AdamW(model.parameters(), fused=True)
        else:
            around = mesh if kind.around == "FSDP2" else None
            self.own = self.own or self._dedicate(model, around)
            opt = dmuon.Muon(model)
        self.training = Training(model, (*BATCH, WIDTH), [opt], self.own)

    def _dedicate(self, model: nn.Module, mesh: DeviceMesh | None) -> dmuon.Ownership:
        layout: Any = self.kind.layout
        options: Any = None
        if layout == "reduce_to_owner":
            layout, options = "replicated", dmuon.ReplicatedOptions(reduce_to_owner=True)
        elif layout == "dedicated":
            options = dmuon.DedicatedOptions(free_after_forward=bool(self.kind.freed))
        return dmuon.dedicate_params(model, mesh, layout=layout, options=options)

    def whole_step(self) -> None:
        """Forward, backward and step, with nothing left on its way."""
        training = self.training
        training.forward()
        training.backward()
        del training.loss  # and what it holds
        training.step()
        (opt,) = training.optimizers
        opt.zero_grad()
        if self.own is not None:
            opt.synchronize()

    def matrices(self) -> Matrices:
        """Bytes of the matrices: as they are kept, used and reduced, and as updates travel."""
        assert self.own is not None
        specs = self.own.plan.specs
        (kept,) = {getattr(torch, m.dtype).itemsize for m in specs.matrices}
        updates = getattr(torch, self.training.optimizers[0].stats()["ns_dtype"]).itemsize
        return Matrices.of(sum(m.numel for m in specs.matrices), kept, updates=updates)

    def persistent_bytes(self) -> int:
        """Weights (placeholders too) and optimizer state on this rank, each storage once."""
        model, (opt,) = self.training.model, self.training.optimizers
        tensors = [*model.parameters(), *model.buffers()]
        for state in opt.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        storages = [local(tensor.detach()).untyped_storage() for tensor in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


# ---- measuring -----------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes behind the tensors of this process, looked at after each operation inside.

    Not by torch's profiler: gloo's threads free tensors when it may already have ended, which
    crashes. What an operation allocates for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        for found in gc.get_objects():
            if issubclass(type(found), Tensor):
                self._note(found)
        self.most = self.now()

    def _note(self, tensor: Tensor) -> None:
        storage = local(tensor).untyped_storage()
        known = self._storages.get(id(storage))
        if known is None or known() is not storage:
            self._storages[id(storage)] = weakref.ref(storage)

    def now(self) -> int:
        """Those of all storages that are still there, as large as they are now."""
        alive = {key: storage for key, known in self._storages.items() if (storage := known())}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for found in tree_leaves(result):
            if isinstance(found, Tensor):
                self._note(found)
        self.most = max(self.most, self.now())
        return result


def built(kind: Kind) -> tuple[Contender, Row]:
    """A contender that trained a little, and the memory that this takes on the ranks at most."""
    before = LiveBytes().now()
    contender = Contender(kind)
    for _ in range(WARM_UP):
        contender.whole_step()
    kept = LiveBytes().now() - before
    with LiveBytes() as live:
        start = live.most
        contender.whole_step()
    above = live.most - start
    found = [contender.persistent_bytes(), kept, above, kept + above]
    largest = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    names = ("state_bytes", "kept_bytes", "step_bytes", "peak_bytes")
    return contender, dict(zip(names, map(round, largest.tolist()), strict=True))


def traffic(contender: Contender) -> Row:
    """What one step moves, and what it should move."""
    if contender.own is None:
        return {}
    world, kind, matrices = dist.get_world_size(), contender.kind, contender.matrices()
    theory = kind.theory(matrices, world)
    with counting() as sent:
        contender.whole_step()
    mine = dict.fromkeys([*theory, "rest"], 0.0)
    for tag, nbytes in sent.items():
        # A tag is a purpose, or a purpose and the name of what is sent.
        known = [p for p in (tag, tag.split(" ")[0]) if p in theory]
        mine[known[0] if known else "rest"] += nbytes
    means = torch.tensor(list(mine.values()), dtype=torch.float64)
    dist.all_reduce(means)
    found = dict(zip(mine, means.div_(world).tolist(), strict=True))
    rest = found.pop("rest")
    by_framework = 0.0
    if kind.layout == "sharded":
        by_framework = sum(fsdp(matrices, world // kind.replicas, kind.replicas).values())
    elif kind.keeps_gradients:
        by_framework = all_reduce(matrices.gradients, world)
    return {
        "matrix_bytes": round(matrices.kept),
        "bytes": round(sum(found.values())),
        "theory_bytes": round(sum(theory.values())),
        "bytes_by_purpose": {key: round(value) for key, value in found.items() if value},
        "framework_bytes": round(by_framework),
        "rest_bytes": round(rest),
    }


def work(rank: int, rounds: int) -> list[Row]:
    """Every rank gets the same rows."""
    # The groups of a mesh wait as long as torch has it, and not as long as `timing.joined` says.
    warnings.filterwarnings("ignore", "dmuon: the default process group waits")
    world = dist.get_world_size()
    field, facts = {}, {}
    for kind in kinds(world):
        contender, found = built(kind)
        field[name := kind.label(world)] = contender
        facts[name] = found | traffic(contender)
    for contender in field.values():
        contender.training.forward()
    turns = {name: contender.training.turn for name, contender in field.items()}
    times = take_turns(turns, rounds, warm_up=WARM_UP)
    rows = []
    for name, contender in field.items():
        kind = contender.kind
        whole, *phases = zip(*times[name], strict=True)
        baseline = kind.baseline.label(world)
        row = timed_row(f"{LAYERS} layers, w={WIDTH}", kind.optimizer, kind.layout, world, whole)
        row |= {
            "name": name,
            "mesh": "x".join(map(str, kind.mesh_shape(world))),
            "baseline": baseline,
            "ratio_to_adamw": ratio(whole, [laps[0] for laps in times[baseline]]),
        }
        row |= {f"{phase}_ms": statistics.median(ms) for phase, ms in zip(PHASES, phases)}
        rows.append(row | facts[name])
        if contender.own is not None:
            contender.own.close()
    return rows


# ---- the command ---------------------------------------------------------------------------

HEADINGS = ("layout", "ms (p10-p90)", "x AdamW", "bwd, step, fwd ms", "MB received", "theory",
            "framework's", "MB state", "kept", "peak")  # fmt: skip
BYTES = ("bytes", "theory_bytes", "framework_bytes", "state_bytes", "kept_bytes", "peak_bytes")


def page(rows: Sequence[Row]) -> str:
    """The table of ``docs/layouts.md``."""
    size = max(row.get("matrix_bytes", 0) for row in rows) / 1e6
    cells = (
        (
            row["name"],
            "{median_ms:.0f} ({p10_ms:.0f}-{p90_ms:.0f})".format(**row),
            f"{row['ratio_to_adamw']:.2f}",
            ", ".join(f"{row[f'{phase}_ms']:.0f}" for phase in PHASES),
            *(f"{row[key] / 1e6:.2f}" if row.get(key) else None for key in BYTES),
        )
        for row in rows
    )
    title = "**{set}: P = {size:.2f} MB of matrices, {world} processes, {rounds} rounds**"
    return f"{title.format(size=size, **rows[0])}\n\n{table(HEADINGS, cells)}"


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--rounds", type=int, default=13, help=f"after {WARM_UP} to warm up")
    parser.add_argument("--world", type=int, default=4, help="processes")
    parser.add_argument("--table", metavar="PATH", help="print these results as Markdown and stop")
    args = parser.parse_args()
    if args.table:
        print(page(read_rows(args.table)))
        return
    rows = on_ranks(args.world, work, args.rounds)
    write(args.json, rows)
    print(page(rows))


if __name__ == "__main__":
    main()
