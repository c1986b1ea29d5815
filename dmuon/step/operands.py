"""The operands of Newton-Schulz on this rank's blocks, and the state beside them.

A *block* is what this rank holds of one matrix. The operands of all blocks lie in one workspace, in
the order in which a step needs them (`Operands`), so that equal work is done for many blocks in one
call: norms, scaling, casts, masks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon import devices
from dmuon.comm.params_runtime import ParamsRuntime
from dmuon.comm.routes import Part
from dmuon.devices import host_can_read
from dmuon.dtensors import stored_tensor
from dmuon.rule import MASTER, MOMENTUM, Hyper, Rule
from dmuon.tensors import finite_marks, into_range, norms_into, scale_all, scale_into, squares_fit

Bad = TypeVar("Bad", Tensor, Tensor | None)


@dataclass(frozen=True, slots=True)
class Block:
    """What this rank holds of matrix ``matrix``, of param group ``group``.

    ``index`` takes it out of the local part of its parameter (None: it is all of it). ``rows`` and
    ``cols`` are its own; ``is_whole`` says that they are the matrix's. ``counts``: among the
    replicas of the matrix, this rank's is the one that sends.
    """

    matrix: int
    parameter: int
    group: int
    index: tuple[slice, ...] | None
    rows: int
    cols: int
    is_whole: bool
    counts: bool


def _blocks(runtime: ParamsRuntime, groups: Sequence[int]) -> Iterator[Block]:
    shards, rank, plan = runtime.shards, runtime.transport.rank, runtime.plan
    for i, matrix in enumerate(plan.specs.matrices):
        piece = shards.piece(i, rank)
        if not piece.numel:
            continue
        whole, local = shards.boxes[i], shards.shard(rank, matrix.parameter).box
        rows, cols = matrix.form.matrix_shape(piece.box.shape)
        here = whole.intersection(local).within(local)
        yield Block(
            matrix=i,
            parameter=matrix.parameter,
            group=groups[i],
            index=None if piece.numel == local.numel else here.slices(),
            rows=rows,
            cols=cols,
            is_whole=(rows, cols) == matrix.shape,
            counts=piece.replica == shards.replica_of(i, plan.owners[i]),
        )


class BlockState:
    """Blocks with views of weights and momentum, lists in the order of ``blocks``.

    With ``masters`` ``targets`` are float32 weights behind parameters of lower precision, which
    follow them (see `rule.follow_weights`). ``dtypes`` gives `rule.momentum_dtypes` of a matrix;
    ``working`` has the second of each block.
    """

    def __init__(
        self,
        runtime: ParamsRuntime,
        optimizer: Optimizer,
        groups: Sequence[int],
        dtypes: Callable[[int], tuple[torch.dtype, torch.dtype]],
        masters: bool,
    ) -> None:
        self._runtime = runtime
        self.blocks = list(_blocks(runtime, groups))
        self.working = [dtypes(b.matrix)[1] for b in self.blocks]
        self.block_of = {block.matrix: k for k, block in enumerate(self.blocks)}
        self._optimizer = optimizer
        self._muon = runtime.plan.specs.muon_parameters()
        kept = {m.parameter: dtypes(i)[0] for i, m in enumerate(runtime.plan.specs.matrices)}
        for i in self._muon:
            p = runtime.parameters[i].detach()
            entry = optimizer.state[runtime.parameters[i]]
            if MOMENTUM in entry:  # it plans again
                continue
            if masters and p.dtype.itemsize < 4:
                entry[MASTER] = p.float()
            entry[MOMENTUM] = torch.zeros_like(
                p, dtype=kept[i], memory_format=torch.contiguous_format
            )
        self._look_up()
        self.device = self.momentum[0].device if self.momentum else runtime.parameters[0].device
        self.chunk_bytes = devices.of(self.device).chunk_bytes
        # Each kind of step lays out its operands in it anew.
        self.workspace: dict[torch.dtype, Tensor] = {}
        self.copies: dict[torch.dtype, Tensor] = {}

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def reserve(self, blocks: Sequence[int], ns_dtype: torch.dtype) -> None:
        """Make a workspace for the operands of these blocks, by the dtype that they are computed
        in: in the Newton-Schulz dtype where that is narrower and there is a copy of a chunk anyway.
        """
        sizes: Counter[torch.dtype] = Counter(dict.fromkeys(self.working, 0))
        for k in blocks:
            sizes[self.working[k]] += self.momentum[k].numel()
        narrows = not host_can_read(self.device)
        self.workspace = {
            dtype: self._empty(
                size, ns_dtype if narrows and ns_dtype.itemsize < dtype.itemsize else dtype
            )
            for dtype, size in sizes.items()
        }

    def copy_of_chunk(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Memory for the momentum of a chunk; the same at every call."""
        if dtype not in self.copies:
            pairs = zip(self.momentum, self.working, strict=True)
            sizes = [m.numel() for m, working in pairs if working is dtype]
            most = self.chunk_bytes // dtype.itemsize + max(sizes)
            self.copies[dtype] = self._empty(min(sum(sizes), most), dtype)
        return self.copies[dtype].narrow(0, 0, numel)

    # ---- views ---------------------------------------------------------------------------

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
        entries = {i: self._optimizer.state[self._runtime.parameters[i]] for i in self._muon}
        momentum = {i: stored_tensor(entry[MOMENTUM]) for i, entry in entries.items()}
        self.weights = self.targets = self._of_blocks(weights)
        self.momentum = self._of_blocks(momentum)
        if any(MASTER in entry for entry in entries.values()):
            targets = {i: stored_tensor(e.get(MASTER, weights[i])) for i, e in entries.items()}
            self.targets = self._of_blocks(targets)

    def begin_step(self) -> None:
        """Someone may have moved a parameter's storage."""
        if self._version != self._runtime.locals.version:
            self._look_up()

    def gradients_of_blocks(self, grads: Mapping[int, Tensor]) -> list[Tensor]:
        """The gradient of every block, zeros where there is none, from local ones by parameter."""
        found = []
        for k, b in enumerate(self.blocks):
            grad = grads.get(b.parameter)
            if grad is None:
                grad = self.momentum[k].new_zeros(()).expand(self.momentum[k].shape)
            elif b.index is not None:
                grad = grad[b.index]
            found.append(grad)
        return found


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks ``blocks`` of one param group, computed in one dtype, which are worked on together.

    ``operands`` are their views of the workspace. ``runs`` are equal blocks that follow each other:
    (first position, all their operands ``[count, numel]``). None of both for blocks without one.
    """

    group: int
    dtype: torch.dtype
    first: int
    blocks: list[int]
    operands: list[Tensor]
    runs: list[tuple[int, Tensor]]


def _cuts(kinds: Sequence[Hashable], sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of neighbours of one kind, closed once they have reached the limit.

    >>> list(_cuts("aaab", [2, 2, 2, 2], 4))
    [(0, 2), (2, 3), (3, 4)]
    """
    first = size = 0
    for n, kind in enumerate(kinds):
        if n > first and (size >= limit or kind != kinds[first]):
            yield first, n
            first, size = n, 0
        size += sizes[n]
    if kinds:
        yield first, len(kinds)


class Operands:
    """The operands of Newton-Schulz in the order of a step: position n is block ``order[n]``.

    ``others`` come last. They have no operand: another replica has it, and their momentum follows.

    Where the workspace is narrower than the dtype of computing, an operand is computed in the copy
    of a chunk and scaled into the middle of the range by a power of two (``_moved``), which
    `scales` takes back. So it is rounded to its dtype's digits as if it were scaled by the norm of
    the whole matrix.
    """

    def __init__(
        self,
        state: BlockState,
        rules: Sequence[Rule],
        order: Sequence[int],
        others: Sequence[int] = (),
    ) -> None:
        self._state, self._rules = state, rules
        self.order = [*order, *others]
        self._count = len(order)
        self.position_of = {k: n for n, k in enumerate(self.order)}
        self._shapes = [(state.working[k], state.momentum[k].shape) for k in self.order]
        self._sizes = [dtype.itemsize * shape.numel() for dtype, shape in self._shapes]
        self._starts = []
        ends = dict.fromkeys(state.workspace, 0)
        for dtype, shape in self._shapes[: len(order)]:
            self._starts.append(ends[dtype])
            ends[dtype] += shape.numel()
        kinds = [
            (state.blocks[k].group, self._shapes[n][0], n < len(order))
            for n, k in enumerate(self.order)
        ]
        self._chunks = []
        for first, last in _cuts(kinds, self._sizes, state.chunk_bytes):
            group, dtype, has_operand = kinds[first]
            end = last if has_operand else first
            stacks = [self.stack(n, n + 1)[0] for n in range(first, end)]
            runs, blocks = self.runs(first, end), self.order[first:last]
            self._chunks.append(_Chunk(group, dtype, first, blocks, stacks, runs))
        # Elements of the most blocks whose norms are taken together.
        self.largest_run = max((x.numel() for c in self._chunks for _, x in c.runs), default=0)
        self.narrowest = min((dtype.itemsize for dtype, _ in self._shapes), default=4)
        self._norms = torch.zeros(len(self.order), dtype=torch.float64, device=state.device)
        self._moved: Tensor | None = None
        if any(dtype is not memory.dtype for dtype, memory in state.workspace.items()):
            self._moved = torch.ones_like(self._norms)

    def stack(self, first: int, last: int) -> Tensor:
        """The operands of equal blocks at these positions, ``[count, *dims of the parameter]``."""
        dtype, shape = self._shapes[first]
        flat = self._state.workspace[dtype]
        numel = (last - first) * shape.numel()
        return flat.narrow(0, self._starts[first], numel).view(last - first, *shape)

    def placed(self, parts: Iterable[Part], first: int) -> list[tuple[int, Part, Tensor]]:
        """(first position, part, its operands) of the parts of a batch that begins at ``first``."""
        starts = [(first + part.position, part) for part in parts]
        return [(n, part, self.stack(n, n + len(part.matrices))) for n, part in starts]

    def runs(self, first: int, last: int) -> list[tuple[int, Tensor]]:
        """Equal blocks that follow each other there: (first position, ``[count, numel]``)."""
        return [(a, self.stack(a, b).flatten(1)) for a, b in self._equal(first, last)]

    def _equal(self, first: int, last: int) -> list[tuple[int, int]]:
        kinds = [(dtype, shape.numel()) for dtype, shape in self._shapes[first:last]]
        cuts = _cuts(kinds, self._sizes[first:last], self._state.chunk_bytes)
        return [(first + a, first + b) for a, b in cuts]

    # ---- a step --------------------------------------------------------------------------

    def fill(self, grads: Sequence[Tensor], hypers: Sequence[Hyper]) -> Tensor:
        """Momentum and Nesterov into the workspace; the momentum itself stays as it is.

        Returns the norm of every operand, by position, in float64: the square of 1e30 overflows in
        float32, and long sums in float32 are off. Valid until the next call. Of blocks without an
        operand it is a number that is finite where the gradient is.
        """
        momentum, norms = self._state.momentum, self._norms
        on_host = host_can_read(norms.device)
        for number, chunk in enumerate(self._chunks):
            if not chunk.operands:
                marks = finite_marks([grads[k] for k in chunk.blocks])
                norms.narrow(0, chunk.first, len(marks)).copy_(marks)
                continue
            runs, operands = chunk.runs, chunk.operands
            is_narrow = operands[0].dtype is not chunk.dtype
            if is_narrow:
                runs, operands = self.copies[number]
            buffers, found = ([each[k] for k in chunk.blocks] for each in (momentum, grads))
            self._rules[chunk.group].operands(operands, buffers, found, hypers[chunk.group])
            for first, flat in runs:
                norms_into(norms.narrow(0, first, len(flat)), flat, exact=not on_host)
            if is_narrow:
                self._narrow(chunk, runs)
        if on_host and not bool(squares_fit(norms[: self._count]).all()):
            for first, flat in chain.from_iterable(chunk.runs for chunk in self._chunks):
                norms_into(norms.narrow(0, first, len(flat)), flat, exact=True)
        return norms

    def _narrow(self, chunk: _Chunk, runs: Sequence[tuple[int, Tensor]]) -> None:
        """Round the operands of a chunk, whose norms are known, into the workspace."""
        assert self._moved is not None
        here = slice(chunk.first, chunk.first + len(chunk.blocks))
        norms = self._norms[here]
        # No entry overflows in float16, and what is subnormal there vanishes beside the others.
        moved = torch.frexp(norms).mantissa.mul_(2.0**14).div_(norms)
        moved = torch.where(norms.isfinite() & (norms > 0), moved, 1.0).clamp_(2.0**-100, 2.0**100)
        self._moved[here].copy_(moved)
        moved = moved if chunk.dtype is torch.float64 else moved.float()
        for (first, flat), (_, to) in zip(runs, chunk.runs, strict=True):
            scale_into(to, flat, moved.narrow(0, first - chunk.first, len(flat)))

    def scales(self, norms: Tensor, hypers: Sequence[Hyper]) -> Tensor:
        """`into_range` of each, as it lies in the workspace."""
        each = {chunk.first: hypers[chunk.group].eps for chunk in self._chunks}
        if len(set(each.values())) <= 1:
            scales = into_range(norms, next(iter(each.values()), 1.0))
        else:
            own = norms.split([len(chunk.blocks) for chunk in self._chunks])
            scales = torch.cat([into_range(*pair) for pair in zip(own, each.values(), strict=True)])
        if self._moved is not None:
            scales = scales / self._moved
        return scales if torch.float64 in self._state.workspace else scales.float()

    def commit(self, grads: Sequence[Tensor], hypers: Sequence[Hyper], bad: Tensor | None) -> None:
        """Advance the momentum. ``bad``: a bool, or one by position; where it is true the momentum
        stays as it is, whatever the gradient."""
        for number, chunk in enumerate(self._chunks):
            rule, hyper = self._rules[chunk.group], hypers[chunk.group]
            buffers = [self._state.momentum[k] for k in chunk.blocks]
            found = [grads[k] for k in chunk.blocks]
            if any(grad.dtype is not chunk.dtype for grad in found):
                found = [grad.to(chunk.dtype) for grad in found]
            if bad is None and buffers[0].dtype is chunk.dtype:
                rule.advance(buffers, found, hyper)
                continue
            runs, copies = self.copies[number]
            torch._foreach_copy_(copies, buffers)
            rule.advance(copies, found, hyper)
            if bad is None:
                torch._foreach_copy_(buffers, copies)
                continue
            for first, stack in runs:
                mask(stack, bad, first)
            # By one or by zero, which is exact.
            scale_all(buffers, at(bad, chunk.first, len(buffers)).float())
            torch._foreach_add_(buffers, copies)

    @cached_property
    def copies(self) -> list[tuple[list[tuple[int, Tensor]], list[Tensor]]]:
        """Memory for the momentum of each chunk, one at a time: as runs, and block by block."""
        found = []
        for chunk in self._chunks:
            shapes = [shape for _, shape in self._shapes[chunk.first :][: len(chunk.blocks)]]
            equal = self._equal(chunk.first, chunk.first + len(shapes))
            sizes = [(b - a) * self._shapes[a][1].numel() for a, b in equal]
            memory = self._state.copy_of_chunk(chunk.dtype, sum(sizes)).split(sizes)
            runs = [(a, m.view(b - a, -1)) for (a, b), m in zip(equal, memory, strict=True)]
            views = chain.from_iterable(stack.unbind() for _, stack in runs)
            found.append((runs, [v.view(s) for v, s in zip(views, shapes, strict=True)]))
        return found


def fill_scaled(to: Tensor, stack: Tensor, scales: Tensor, bad: Tensor | None, first: int) -> None:
    """Scale the operands ``stack`` from position ``first`` on; zeros where they are bad."""
    scale_into(to, stack, scales.narrow(0, first, len(stack)))
    if bad is not None:
        mask(to, bad.to(to.device), first)


def mask(stack: Tensor, bad: Tensor, first: int) -> None:
    """Zero the blocks from position ``first`` on that are bad: a bool, or one by position."""
    own = at(bad, first, len(stack))
    stack.masked_fill_(own.view(-1, *(1,) * (stack.ndim - 1)) if own.ndim else own, 0.0)


def at(bad: Bad, first: int, count: int) -> Bad:
    """What a mask says of ``count`` positions: a 0-d one is for all."""
    return bad.narrow(0, first, count) if bad is not None and bad.ndim else bad
