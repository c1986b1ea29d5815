"""What a rank keeps in the `sharded` layout: its part of momentum and masters, cut into blocks.

A *block* is what this rank holds of one matrix. The operands of Newton-Schulz of all blocks lie in
one workspace, in the order in which a step needs them (`Operands`), so that what is equal is done
for many blocks in one call: norms, scaling, casts, masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.comm.sharded import ShardedRuntime
from dmuon.dtensors import layout_stamp, local_tensor, stored_tensor
from dmuon.types import OwnershipError
from dmuon.update import advance_momentum, merged_master, operands_of_newton_schulz, scale_all

__all__ = ["Block", "Operands", "ShardState", "copy_state", "mask"]

# What is worked on together: on a CPU a few passes over so much stay in its caches, elsewhere it
# bounds the copy that a masked update of momentum takes.
CHUNK_BYTES = {"cpu": 1 << 18}
_DEVICE_CHUNK_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Block:
    """What this rank holds of matrix ``matrix``, of param group ``group``.

    ``index`` takes it out of the local part of its parameter (None: it is all of it). ``rows`` and
    ``cols`` are its own; ``is_whole`` says that they are the matrix's. ``travels``: it has an owner
    elsewhere or other holders, so in a full step its norm is shared and its operand sent.
    ``counts``: among the replicas of the matrix, this rank's is the one that sends.
    """

    matrix: int
    parameter: int
    group: int
    index: tuple[slice, ...] | None
    rows: int
    cols: int
    is_whole: bool
    travels: bool
    counts: bool


def _blocks(runtime: ShardedRuntime, groups: Sequence[int]) -> Iterator[Block]:
    shards, rank, plan = runtime.shards, runtime.transport.rank, runtime.plan
    for i, matrix in enumerate(plan.specs.matrices):
        piece = shards.piece(i, rank)
        if not piece.numel:
            continue
        box, local = shards.boxes[i], shards.local_box(rank, matrix.parameter)
        rows, cols = box.matrix_shape(piece.box.shape)
        low = tuple(a + b for a, b in zip(box.box.offset, piece.box.offset, strict=True))
        here = tuple(
            slice(a - b, a - b + n)
            for a, b, n in zip(low, local.offset, piece.box.shape, strict=True)
        )
        yield Block(
            matrix=i,
            parameter=matrix.parameter,
            group=groups[i],
            index=None if piece.numel == local.numel else here,
            rows=rows,
            cols=cols,
            is_whole=(rows, cols) == matrix.shape,
            travels=not shards.is_local(i),
            counts=piece.replica == shards.replica_of(i, plan.owners[i]),
        )


class ShardState:
    """Blocks with views of weights and momentum, lists in the order of ``blocks``.

    With ``masters`` momentum is float32, and ``targets`` are float32 weights behind parameters of
    lower precision.
    """

    def __init__(
        self, runtime: ShardedRuntime, optimizer: Optimizer, groups: Sequence[int], masters: bool
    ) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._masters = masters
        self.blocks = list(_blocks(runtime, groups))
        self.block_of = {block.matrix: k for k, block in enumerate(self.blocks)}
        self._muon = runtime.plan.specs.muon_parameters()
        for i in self._muon:
            p = runtime.parameters[i].detach()
            self._state(i)["momentum_buffer"] = torch.zeros_like(
                p,
                dtype=torch.float32 if masters else p.dtype,
                memory_format=torch.contiguous_format,
            )
        self._look_up()
        sizes: dict[torch.dtype, int] = {}
        for view in self.momentum:
            sizes[view.dtype] = sizes.get(view.dtype, 0) + view.numel()
        self.device = self.momentum[0].device if self.momentum else runtime.parameters[0].device
        # Of one size with the momentum; each kind of step lays out its operands in it anew.
        self.workspace = {
            dtype: torch.empty(size, dtype=dtype, device=self.device)
            for dtype, size in sizes.items()
        }
        self.chunk_bytes = CHUNK_BYTES.get(self.device.type, _DEVICE_CHUNK_BYTES)
        self._memory: dict[torch.dtype, Tensor] = {}

    def memory_for(self, dtype: torch.dtype, numel: int) -> Tensor:
        """``numel`` elements to copy the momentum of a chunk to; the same at every call."""
        if dtype not in self._memory:
            largest = max(m.numel() for m in self.momentum if m.dtype is dtype)
            size = min(self.workspace[dtype].numel(), self.chunk_bytes // dtype.itemsize + largest)
            self._memory[dtype] = torch.empty(size, dtype=dtype, device=self.device)
        return self._memory[dtype].narrow(0, 0, numel)

    def nbytes(self) -> dict[str, int]:
        """Bytes that a step takes beside what is saved, by purpose."""
        found = {"operands": sum(memory.nbytes for memory in self.workspace.values())}
        if self._memory:
            found["commit"] = sum(memory.nbytes for memory in self._memory.values())
        return found

    # ---- views ---------------------------------------------------------------------------

    def _state(self, parameter: int) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._optimizer.state[self._runtime.parameters[parameter]]
        return state

    def _of_blocks(self, whole: Mapping[int, Tensor]) -> list[Tensor]:
        """The view of every block in the local tensor of its parameter."""
        return [
            whole[b.parameter] if b.index is None else whole[b.parameter][b.index]
            for b in self.blocks
        ]

    def _look_up(self) -> None:
        """Find where weights and momentum lie."""
        self._version = self._runtime.locals.version
        weights = {i: self._runtime.locals.tensors[i] for i in self._muon}
        self.weights = self.targets = self._of_blocks(weights)
        self.momentum = self._of_blocks(
            {i: stored_tensor(self._state(i)["momentum_buffer"]) for i in self._muon}
        )
        if self._masters and any("master_weight" in self._state(i) for i in self._muon):
            self.targets = self._of_blocks(
                {i: stored_tensor(self._state(i).get("master_weight", weights[i])) for i in weights}
            )

    def begin_step(self) -> None:
        """Someone may have moved a parameter's storage; called once a step."""
        if self._version != self._runtime.locals.version:
            self._look_up()

    def gradients_of_blocks(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradient of every block, zeros where there is none, from local ones by parameter."""
        found = []
        for k, b in enumerate(self.blocks):
            grad = grads[b.parameter]
            if grad is None:
                grad = self.momentum[k].new_zeros(()).expand(self.momentum[k].shape)
            elif b.index is not None:
                grad = grad[b.index]
            found.append(grad)
        return found

    # ---- masters -------------------------------------------------------------------------

    def make_masters(self) -> None:
        """Float32 weights behind parameters of lower precision, made at the first step, so that
        weights loaded before it count."""
        if not self._masters:
            return
        for i in self._muon:
            state, p = self._state(i), self._runtime.parameters[i]
            if "master_weight" not in state and p.dtype.itemsize < 4:
                state["master_weight"] = p.detach().float()
        if self.targets is self.weights:
            self._look_up()

    def refresh_masters(self) -> None:
        """Take over weights that were loaded into the model since the masters were made."""
        for i in self._muon:
            master = self._state(i).get("master_weight")
            if master is not None:
                local = local_tensor(master)
                local.copy_(merged_master(local, local_tensor(self._runtime.parameters[i])))

    # ---- saved state ---------------------------------------------------------------------

    def check(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Raise OwnershipError if a matrix parameter has no momentum of its shape."""
        for i in self._muon:
            p, spec = self._runtime.parameters[i], self._runtime.plan.specs.parameters[i]
            source = saved.get(p, {}).get("momentum_buffer")
            if not isinstance(source, Tensor) or source.shape != p.shape:
                found = "none" if source is None else getattr(source, "shape", type(source))
                raise OwnershipError(
                    f"the optimizer state has no momentum for parameter {spec.name!r} of shape "
                    f"{list(p.shape)} (found: {found}); it was saved by another model or layout"
                )

    def load(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Copy momentum and masters from saved entries (see `check`)."""
        for i in self._muon:
            p = self._runtime.parameters[i]
            state = self._state(i)
            copy_state(state["momentum_buffer"], saved[p]["momentum_buffer"])
            master = saved[p].get("master_weight")
            if not self._masters:
                continue
            if master is None:
                state.pop("master_weight", None)
            else:
                state["master_weight"] = torch.empty_like(p.detach(), dtype=torch.float32)
                copy_state(state["master_weight"], master)
        self._look_up()


def copy_state(target: Tensor, source: Tensor) -> None:
    """Copy a saved tensor, whether it was saved with the shards of ``target`` or otherwise."""
    stamps = layout_stamp(target), layout_stamp(source)
    if (stamps[0].placements, stamps[0].mesh) == (stamps[1].placements, stamps[1].mesh):
        local_tensor(target).copy_(local_tensor(source))
        return
    assert math.prod(target.shape) == math.prod(source.shape)
    target.copy_(source)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks ``blocks`` of one param group and dtype, which are worked on together.

    ``operands`` are their views of the workspace. ``runs`` are equal blocks that follow each other:
    (first position, all their operands ``[count, numel]``).
    """

    group: int
    dtype: torch.dtype
    first: int
    blocks: list[int]
    operands: list[Tensor]
    runs: list[tuple[int, Tensor]]

    @property
    def numel(self) -> int:
        return sum(flat.numel() for _, flat in self.runs)


class Operands:
    """The operands of Newton-Schulz in the order of a step: position n is block ``order[n]``."""

    def __init__(self, state: ShardState, order: Sequence[int]) -> None:
        self._state = state
        self.order = list(order)
        self.position_of = {k: n for n, k in enumerate(self.order)}
        self._starts = []
        ends = dict.fromkeys(state.workspace, 0)
        for k in self.order:
            momentum = state.momentum[k]
            self._starts.append(ends[momentum.dtype])
            ends[momentum.dtype] += momentum.numel()
        self._chunks = [self._chunk(first, last) for first, last in self._cuts(state.chunk_bytes)]
        self._norms = torch.zeros(len(self.order), dtype=torch.float64, device=state.device)
        self._made: dict[int, tuple[list[tuple[int, Tensor]], list[Tensor]]] = {}

    def _kind(self, position: int) -> tuple[int, torch.dtype]:
        k = self.order[position]
        return self._state.blocks[k].group, self._state.momentum[k].dtype

    def _cuts(self, limit: int) -> Iterator[tuple[int, int]]:
        first = size = 0
        for n, k in enumerate(self.order):
            if n > first and (size >= limit or self._kind(n) != self._kind(first)):
                yield first, n
                first, size = n, 0
            size += self._state.momentum[k].nbytes
        if self.order:
            yield first, len(self.order)

    def _chunk(self, first: int, last: int) -> _Chunk:
        blocks = self.order[first:last]
        runs = self.runs(first, last)
        operands = [self.stack(n, n + 1)[0] for n in range(first, last)]
        return _Chunk(*self._kind(first), first, blocks, operands, runs)

    def stack(self, first: int, last: int) -> Tensor:
        """The operands of equal blocks at these positions, ``[count, *dims of the parameter]``."""
        like = self._state.momentum[self.order[first]]
        flat = self._state.workspace[like.dtype]
        return flat.narrow(0, self._starts[first], (last - first) * like.numel()).view(
            last - first, *like.shape
        )

    def runs(self, first: int, last: int) -> list[tuple[int, Tensor]]:
        """Equal blocks that follow each other from ``first`` on: (position, ``[count, numel]``)."""
        momentum = self._state.momentum
        cuts, start = [first], first
        for n in range(first + 1, last):
            view, before = momentum[self.order[n]], momentum[self.order[n - 1]]
            is_full = (n + 1 - start) * view.nbytes > self._state.chunk_bytes
            if is_full or (view.dtype, view.numel()) != (before.dtype, before.numel()):
                cuts.append(n)
                start = n
        found = []
        for a, b in pairwise([*cuts, last]):
            view = momentum[self.order[a]]
            flat = self._state.workspace[view.dtype].narrow(
                0, self._starts[a], (b - a) * view.numel()
            )
            found.append((a, flat.view(b - a, view.numel())))
        return found

    @property
    def largest_run(self) -> int:
        """Elements of the largest run whose norms are taken together."""
        return max((flat.numel() for c in self._chunks for _, flat in c.runs), default=0)

    # ---- a step --------------------------------------------------------------------------

    def fill(self, grads: Sequence[Tensor], groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """Momentum and Nesterov into the workspace; the momentum itself stays as it is.

        Returns the norm of every operand, by position, in float64: the square of 1e30 overflows in
        float32, and long sums in float32 are off. Valid until the next call.
        """
        momentum, norms = self._state.momentum, self._norms
        for chunk in self._chunks:
            operands_of_newton_schulz(
                chunk.operands,
                [momentum[k] for k in chunk.blocks],
                [grads[k] for k in chunk.blocks],
                groups[chunk.group],
            )
            for first, flat in chunk.runs:
                out = norms.narrow(0, first, len(flat))
                torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64, out=out)
        return norms

    def scales(self, norms: Tensor, groups: Sequence[Mapping[str, Any]]) -> Tensor:
        """One over each norm, or over its group's eps where that is larger."""
        wide = torch.float64 if torch.float64 in self._state.workspace else torch.float32
        scales = norms.clone()
        for chunk in self._chunks:
            own = scales.narrow(0, chunk.first, len(chunk.blocks))
            own.clamp_(min=float(groups[chunk.group]["eps"])).reciprocal_()
        return scales.to(wide)

    def commit(
        self,
        grads: Sequence[Tensor],
        groups: Sequence[Mapping[str, Any]],
        bad: Tensor | None,
    ) -> None:
        """Advance the momentum. ``bad``: a bool, or one by position; where it is true the momentum
        stays as it is, whatever the gradient."""
        momentum = self._state.momentum
        for number, chunk in enumerate(self._chunks):
            buffers = [momentum[k] for k in chunk.blocks]
            found = [grads[k] for k in chunk.blocks]
            if any(grad.dtype is not chunk.dtype for grad in found):
                found = [grad.to(chunk.dtype) for grad in found]
            if bad is None:
                advance_momentum(buffers, found, groups[chunk.group])
                continue
            runs, copies = self._copies(number)
            torch._foreach_copy_(copies, buffers)
            advance_momentum(copies, found, groups[chunk.group])
            mask(runs, bad)
            own = bad.narrow(0, chunk.first, len(buffers)) if bad.ndim else bad
            scale_all(buffers, own.float())  # by one or by zero, which is exact
            torch._foreach_add_(buffers, copies)

    def _copies(self, number: int) -> tuple[list[tuple[int, Tensor]], list[Tensor]]:
        """Memory for the momentum of a chunk: as runs, and block by block."""
        if number not in self._made:
            chunk = self._chunks[number]
            memory = self._state.memory_for(chunk.dtype, chunk.numel)
            flats = memory.split([flat.numel() for _, flat in chunk.runs])
            runs = [
                (first, copy.view(flat.shape))
                for (first, flat), copy in zip(chunk.runs, flats, strict=True)
            ]
            views = [view for _, flat in runs for view in flat.unbind()]
            shaped = [view.view_as(o) for view, o in zip(views, chunk.operands, strict=True)]
            self._made[number] = runs, shaped
        return self._made[number]

    def prepare_masks(self) -> None:
        """Have the memory that `commit` takes where it is given ``bad``."""
        for number in range(len(self._chunks)):
            self._copies(number)


def mask(runs: Sequence[tuple[int, Tensor]], bad: Tensor) -> None:
    """Zero the blocks that are bad: a bool, or one by position; ``runs`` as of `Operands.runs`."""
    for first, stack in runs:
        own = (
            bad.narrow(0, first, len(stack)).view(-1, *(1,) * (stack.ndim - 1)) if bad.ndim else bad
        )
        stack.masked_fill_(own, 0.0)
