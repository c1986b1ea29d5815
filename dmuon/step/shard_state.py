"""What a rank keeps in the `sharded` layout: its part of momentum and masters, cut into blocks.

A *block* is what this rank holds of one matrix: the unit of work of norms, block steps and wires.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.comm.sharded import ShardedRuntime
from dmuon.dtensors import layout_stamp, local_tensor
from dmuon.types import OwnershipError
from dmuon.update import merged_master

__all__ = ["Block", "ShardState", "copy_state"]

_CHUNK_BYTES = 1 << 18  # on a CPU a few passes over this much stay in its caches


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
    """Blocks with views of weights, momentum and operands, lists in the order of ``blocks``.

    ``operands`` is a workspace of the size of the momentum. With ``masters`` momentum is float32,
    and ``targets`` are float32 weights behind parameters of lower precision.
    """

    def __init__(
        self, runtime: ShardedRuntime, optimizer: Optimizer, groups: Sequence[int], masters: bool
    ) -> None:
        self._runtime = runtime
        self._optimizer = optimizer
        self._masters = masters
        self.blocks = list(_blocks(runtime, groups))
        self._muon = runtime.plan.specs.muon()
        for i in self._muon:
            p = runtime.parameters[i].detach()
            dtype = torch.float32 if masters else p.dtype
            optimizer.state[runtime.parameters[i]]["momentum_buffer"] = torch.zeros_like(
                p, dtype=dtype, memory_format=torch.contiguous_format
            )
        self.rebind()
        self.operands = [
            torch.empty_like(view, memory_format=torch.contiguous_format) for view in self.momentum
        ]
        self.chunks = list(self._chunks())

    # ---- views ---------------------------------------------------------------------------

    def _state(self, parameter: int) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._optimizer.state[self._runtime.parameters[parameter]]
        return state

    def of_blocks(self, whole: Mapping[int, Tensor]) -> list[Tensor]:
        """The view of every block in the local tensor of its parameter."""
        return [
            whole[b.parameter] if b.index is None else whole[b.parameter][b.index]
            for b in self.blocks
        ]

    def gradients_of_blocks(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient of every block, from the local ones by parameter."""
        found: list[Tensor | None] = []
        for b in self.blocks:
            grad = grads[b.parameter]
            found.append(grad if grad is None or b.index is None else grad[b.index])
        return found

    def rebind(self) -> None:
        """Look up where weights and momentum lie."""
        weights = {i: local_tensor(self._runtime.parameters[i]) for i in self._muon}
        self.weights = self.of_blocks(weights)
        momentum = {i: local_tensor(self._state(i)["momentum_buffer"]) for i in self._muon}
        self.momentum = self.of_blocks(momentum)
        self._stamp = [w.data_ptr() for w in weights.values()]
        self.targets = self.weights
        if self._masters and any("master_weight" in self._state(i) for i in self._muon):
            masters = {i: local_tensor(self._state(i).get("master_weight", weights[i]))
                       for i in self._muon}  # fmt: skip
            self.targets = self.of_blocks(masters)

    def follow(self) -> None:
        """Someone may have moved a parameter's storage; called once a step."""
        stamp = [local_tensor(self._runtime.parameters[i]).data_ptr() for i in self._muon]
        if stamp != self._stamp:
            self.rebind()

    def _chunks(self) -> Iterator[list[int]]:
        """Blocks of one param group and dtype that are worked on together, as indices."""
        by_group: dict[tuple[int, torch.dtype], list[int]] = defaultdict(list)
        for k, block in enumerate(self.blocks):
            by_group[block.group, self.momentum[k].dtype].append(k)
        small = self._runtime.device.type == "cpu"
        for members in by_group.values():
            chunk: list[int] = []
            size = 0
            for k in members:
                chunk.append(k)
                size += self.momentum[k].numel() * self.momentum[k].element_size()
                if small and size >= _CHUNK_BYTES:
                    yield chunk
                    chunk, size = [], 0
            if chunk:
                yield chunk

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
            self.rebind()

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
        self.rebind()


def copy_state(target: Tensor, source: Tensor) -> None:
    """Copy a saved tensor, whether it was saved with the shards of ``target`` or otherwise."""
    stamps = layout_stamp(target), layout_stamp(source)
    if (stamps[0].placements, stamps[0].mesh) == (stamps[1].placements, stamps[1].mesh):
        local_tensor(target).copy_(local_tensor(source))
        return
    assert math.prod(target.shape) == math.prod(source.shape)
    target.copy_(source)
