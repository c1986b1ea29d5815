"""The operands of Newton-Schulz on this rank's blocks, and the blocks' state.

A *block* is the part of one matrix that this rank holds. The operands of all blocks lie in one
workspace, in the order in which a step needs them (`Operands`), so that one call serves many:
norms, scaling, casts, masks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon import devices
from dmuon.comm.params_runtime import ParamsRuntime
from dmuon.dtensors import stored_tensor
from dmuon.rule import MASTER, MOMENTUM, Hyper, Rule, list_kernels
from dmuon.tensors import Tensors, finite_norms, into_range, norms_into, scale_into
from dmuon.types import runs_of

Bad = TypeVar("Bad", Tensor, Tensor | None)
Outlet = tuple[int, Tensor | Tensors]
"""Position of the first operand, and the buffer from which the operands leave."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The inputs of operands: gradients, hyperparameters, and scales and masks by position."""

    grads: Sequence[Tensor]
    hypers: Sequence[Hyper]
    scales: Tensor | None  # None: operands travel unscaled
    bad: Tensor | None


@dataclass(frozen=True, slots=True)
class Block:
    """This rank's part of a matrix: ``index`` selects it from the local part of its parameter
    (None: all of it). ``rows`` and ``cols`` are the part's own; ``is_whole`` says that they are the
    matrix's. ``counts``: of the replicas of the matrix, this rank's is the one that sends."""

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
        rows, cols = matrix.form.matrix_shape(piece.shape)
        here = whole.intersection(local).within(local)
        yield Block(
            matrix=i,
            parameter=matrix.parameter,
            group=groups[i],
            index=None if piece.numel == local.numel else here.slices(),
            rows=rows,
            cols=cols,
            is_whole=(rows, cols) == matrix.shape,
            counts=shards.replica_of(i, rank) == shards.replica_of(i, plan.owners[i]),
        )


class BlockState:
    """Blocks with views of weights and momentum, in lists ordered as ``blocks``. With ``masters``
    the ``targets`` are float32 masters of lower-precision parameters and follow them (see
    `rule.follow_weights`). ``dtypes`` gives `rule.momentum_dtypes` of a matrix; ``working`` has the
    second of them for each block."""

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
        # Each kind of step lays out its own operands in it.
        self.workspace = torch.empty(0, device=self.device)
        self.copies: dict[torch.dtype, Tensor] = {}

    def is_counted(self, block: Block) -> bool:
        """Whether a block is the one that counts among all copies of its part of the parameter."""
        first = self._runtime.shards.copies[block.parameter][0]
        return block.counts and self._runtime.transport.rank in first

    def copy_of_chunk(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return memory for the momentum of a chunk, the same at every call."""
        if dtype not in self.copies:
            pairs = zip(self.momentum, self.working, strict=True)
            sizes = [m.numel() for m, working in pairs if working is dtype]
            most = min(sum(sizes), self.chunk_bytes // dtype.itemsize + max(sizes))
            self.copies[dtype] = torch.empty(most, dtype=dtype, device=self.device)
        return self.copies[dtype].narrow(0, 0, numel)

    # ---- views ---------------------------------------------------------------------------

    def _of_blocks(self, whole: Mapping[int, Tensor]) -> list[Tensor]:
        """Return each block's view of the local tensor of its parameter."""
        return [
            whole[b.parameter] if b.index is None else whole[b.parameter][b.index]
            for b in self.blocks
        ]

    def _places(self) -> tuple[int, list[int]]:
        """Return the version of the parameters' storage, and where their state is stored."""
        kept = (e[key] for e in self._entries.values() for key in (MOMENTUM, MASTER) if key in e)
        return self._runtime.locals.version, [stored_tensor(tensor).data_ptr() for tensor in kept]

    def _look_up(self) -> None:
        """Look up the storage of weights and momentum."""
        weights = {i: self._runtime.locals.tensors[i] for i in self._muon}
        entries = {i: self._optimizer.state[self._runtime.parameters[i]] for i in self._muon}
        self._entries = entries
        self._known = self._places()
        self._listed: dict[tuple[str, tuple[int, ...]], Tensors] = {}
        self.weights = self.targets = self._of_blocks(weights)
        self.momentum = self._of_blocks({i: stored_tensor(e[MOMENTUM]) for i, e in entries.items()})
        if any(MASTER in entry for entry in entries.values()):
            targets = {i: stored_tensor(e.get(MASTER, weights[i])) for i, e in entries.items()}
            self.targets = self._of_blocks(targets)

    def listed(self, name: str, blocks: Sequence[int]) -> Tensors:
        """Return blocks' "momentum", "targets" or "weights", the same list at every call."""
        key = name, tuple(blocks)
        if key not in self._listed:
            whole = getattr(self, name)
            self._listed[key] = Tensors(whole[k] for k in blocks)
        return self._listed[key]

    def begin_step(self) -> None:
        """Look up storage again if it has moved, for instance to a CPU and back."""
        if self._known != self._places():
            self._look_up()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks of one param group that are computed together in one dtype. ``operands`` are their
    views of the workspace. ``runs`` join equal neighbouring blocks: (first position, all their
    operands ``[count, numel]``). Both are empty for blocks without an operand.
    """

    group: int
    dtype: torch.dtype
    first: int
    blocks: list[int]
    operands: list[Tensor]
    runs: list[tuple[int, Tensor]]


def _cuts(kinds: Sequence[Hashable], sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of neighbours of one kind, closed once they reach the limit."""
    for run in runs_of(range(len(kinds)), sizes.__getitem__, limit, kinds.__getitem__):
        yield run[0], run[-1] + 1


class _InOrder:
    """Blocks in the order of a step: position n is block ``order[n]``. ``others`` come last; they
    have no operand, because another replica sends it, but their momentum advances too."""

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
        self._counts = [state.is_counted(state.blocks[k]) for k in self.order]
        groups = groupby(state.blocks[k].group for k in self.order)
        self._groups = [(group, len(list(members))) for group, members in groups]

    def gradients(self, grads: Mapping[int, Tensor]) -> Sequence[Tensor]:
        """Return every block's gradient, from local gradients by parameter, with zeros for missing
        ones; the other methods take this list."""
        found = []
        for b, momentum in zip(self._state.blocks, self._state.momentum, strict=True):
            grad = grads.get(b.parameter)
            if grad is None:
                grad = momentum.new_zeros(()).expand(momentum.shape)
            found.append(grad if b.index is None or b.parameter not in grads else grad[b.index])
        return found

    def scales(self, norms: Tensor, hypers: Sequence[Hyper]) -> Tensor:
        """Return `into_range` of each norm, by position."""
        if len({hypers[group].eps for group, _ in self._groups}) <= 1:
            scales = into_range(norms, hypers[self._groups[0][0]].eps if self._groups else 1.0)
        else:
            own = norms.split([count for _, count in self._groups])
            pairs = zip(own, self._groups, strict=True)
            scales = torch.cat([into_range(each, hypers[group].eps) for each, (group, _) in pairs])
        return scales if torch.float64 in self._state.working else scales.float()


class Operands(_InOrder):
    """The operands of Newton-Schulz, kept in a workspace. If they are computed in another dtype,
    each chunk is computed in a copy and cast."""

    def __init__(self, state: BlockState, *args: Any) -> None:
        super().__init__(state, *args)
        self._norms = torch.zeros(len(self.order), dtype=torch.float64, device=state.device)
        self._shapes = [(state.working[k], state.momentum[k].shape) for k in self.order]
        self._sizes = [dtype.itemsize * shape.numel() for dtype, shape in self._shapes]
        numels = [shape.numel() for _, shape in self._shapes[: self._count]]
        self._starts = [0, *accumulate(numels)]
        self._stacks: dict[tuple[int, int], Tensor] = {}  # cached views of the workspace
        kinds = [
            (state.blocks[k].group, self._shapes[n][0], n < self._count)
            for n, k in enumerate(self.order)
        ]
        self._chunks = []
        for first, last in _cuts(kinds, self._sizes, state.chunk_bytes):
            group, dtype, has_operand = kinds[first]
            end = last if has_operand else first
            stacks = [self.stack(n, n + 1)[0] for n in range(first, end)]
            runs = [(a, self.stack(a, b).flatten(1)) for a, b in self._equal(first, end)]
            blocks = self.order[first:last]
            self._chunks.append(_Chunk(group, dtype, first, blocks, stacks, runs))
        every = chain.from_iterable(chunk.runs for chunk in self._chunks)
        equal = (range(first, first + len(flat)) for first, flat in every)
        counted = ([self.order[n] for n in some if self._counts[n]] for some in equal)
        self._counted = [*filter(None, counted)]
        # The most elements whose norms are computed together.
        self.largest_run = max((x.numel() for c in self._chunks for _, x in c.runs), default=0)
        self.narrowest = min((dtype.itemsize for dtype, _ in self._shapes), default=4)

    def stack(self, first: int, last: int) -> Tensor:
        """Return the operands of equal blocks in a range, ``[count, *dims of the parameter]``."""
        if (first, last) not in self._stacks:
            _, shape = self._shapes[first]
            numel = (last - first) * shape.numel()
            flat = self._state.workspace.narrow(0, self._starts[first], numel)
            self._stacks[first, last] = flat.view(last - first, *shape)
        return self._stacks[first, last]

    def _equal(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return ranges of neighbouring equal blocks."""
        kinds = [(dtype, shape.numel()) for dtype, shape in self._shapes[first:last]]
        cuts = _cuts(kinds, self._sizes[first:last], self._state.chunk_bytes)
        return [(first + a, first + b) for a, b in cuts]

    # ---- a step --------------------------------------------------------------------------

    def fill(self, grads: Sequence[Tensor], hypers: Sequence[Hyper]) -> Tensor:
        """Write operands (momentum and Nesterov) to the workspace without changing the momentum.

        Return every operand's norm, by position, in float64, because the square of 1e30 overflows
        in float32 and long float32 sums are inexact. Valid until the next call. For blocks without
        an operand the number is merely finite where the gradient is.
        """
        # Where eps dominates such small norms, as it does zeros, they may count as zeros.
        least = -1.0 if all(hypers[chunk.group].eps > 1e-15 for chunk in self._chunks) else 1e-15
        norms = self._norms[: self._count]
        for exact in (False, True):
            for number, chunk in enumerate(self._chunks):
                self._fill(number, chunk, grads, hypers[chunk.group], exact)
            if bool(((norms > least) & (norms < 1e15)).all()):  # their squares fit into float32
                break
        return self._norms

    def _fill(
        self, number: int, chunk: _Chunk, grads: Sequence[Tensor], h: Hyper, exact: bool
    ) -> None:
        norms, found = self._norms, [grads[k] for k in chunk.blocks]
        if not chunk.operands:
            norms.narrow(0, chunk.first, len(found)).copy_(finite_norms(found))
            return
        runs, operands = chunk.runs, chunk.operands
        is_cast = operands[0].dtype is not chunk.dtype
        if is_cast:
            runs, operands = self.copies[number]
        buffers = [self._state.momentum[k] for k in chunk.blocks]
        self._rules[chunk.group].operands(operands, buffers, found, h)
        for first, flat in runs:
            norms_into(norms.narrow(0, first, len(flat)), flat, exact=exact)
        if is_cast:
            for (_, flat), (_, to) in zip(runs, chunk.runs, strict=True):
                to.copy_(flat)

    def gradient_squares(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """After `fill`, return sums of squares of the gradients counted on this rank, 0-d float64;
        all ranks together count each element once."""
        norms = [finite_norms([grads[k] for k in some]) for some in self._counted]
        return [each.dot(each) for each in norms]

    def _stays(self, bad: Tensor | None) -> list[bool]:
        """Return the mask's value for each position, read by the host."""
        count = len(self.order)
        return [False] * count if bad is None else bad.expand(count).tolist()

    def mask(self, bad: Tensor) -> None:
        """Zero the operands where a mask, by position or one for all, is true."""
        for n, stays in enumerate(self._stays(bad)[: self._count]):
            if stays:
                self.stack(n, n + 1).zero_()

    def outlets(self, first: int, last: int, send: Tensor) -> list[Outlet]:
        """Split a flat buffer among the operands that leave from these positions."""
        stacks = [(a, self.stack(a, b)) for a, b in self._equal(first, last)]
        views = send.split([stack.numel() for _, stack in stacks])
        return [(n, view.view(stack.shape)) for (n, stack), view in zip(stacks, views, strict=True)]

    def write(self, outlet: Outlet, now: Pass) -> None:
        """Copy operands, scaled if there are scales, to where they leave."""
        first, to = outlet
        assert isinstance(to, Tensor)
        source = self.stack(first, first + len(to))
        if now.scales is None:
            to.copy_(source)
        else:
            scale_into(to, source, now.scales.narrow(0, first, len(source)))

    def commit(self, grads: Sequence[Tensor], hypers: Sequence[Hyper], bad: Tensor | None) -> None:
        """Advance the momentum, except where ``bad``, one bool or one per position, is true."""
        stays = self._stays(bad)
        for number, chunk in enumerate(self._chunks):
            some = [n for n in range(len(chunk.blocks)) if not stays[chunk.first + n]]
            if not some:
                continue
            rule, hyper = self._rules[chunk.group], hypers[chunk.group]
            buffers = [self._state.momentum[chunk.blocks[n]] for n in some]
            found = [grads[chunk.blocks[n]] for n in some]
            if any(grad.dtype is not chunk.dtype for grad in found):
                found = [grad.to(chunk.dtype) for grad in found]
            if buffers[0].dtype is chunk.dtype:
                rule.advance(buffers, found, hyper)
                continue
            copies = [self.copies[number][1][n] for n in some]
            torch._foreach_copy_(copies, buffers)
            rule.advance(copies, found, hyper)
            torch._foreach_copy_(buffers, copies)

    @cached_property
    def copies(self) -> list[tuple[list[tuple[int, Tensor]], list[Tensor]]]:
        """Memory for the momentum of each chunk, shared by all: as runs, and as blocks."""
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


class PassingOperands(_InOrder):
    """`Operands` where the host cannot read from the device: no operand is kept. `fill` reads
    momentum and gradients only for their norms. After the verdict, `write` reads them again,
    advances the momentum and writes scaled operands to where they leave. So no work is stored that
    a verdict may call off, and `commit` serves ``others`` alone."""

    def __init__(self, state: BlockState, *args: Any) -> None:
        super().__init__(state, *args)
        # Norms of operands, and of gradients.
        self._both = torch.zeros(2, len(self.order), dtype=torch.float64, device=state.device)
        self._counted = torch.tensor(self._counts, dtype=torch.float64, device=state.device)
        self._kinds = [(state.blocks[k].group, state.working[k]) for k in self.order]
        kinds = [(*kind, n < self._count) for n, kind in enumerate(self._kinds)]
        self._runs = [*_cuts(kinds, [0] * len(kinds), 1)]

    @property
    def largest_piece(self) -> int:
        """Bytes of the largest temporary of torch for blocks that `list_kernels` do not take."""
        kernels, state, sizes = list_kernels(self._state.device), self._state, [0]
        for k, (_, working) in zip(self.order, self._kinds, strict=True):
            momentum = state.momentum[k]
            suits = momentum.is_contiguous() and working.itemsize <= 4
            if kernels is None or not suits:
                sizes.append(momentum.numel() * working.itemsize)
        return 2 * min(sum(sizes), state.chunk_bytes + max(sizes))

    def outlets(self, first: int, last: int, send: Tensor) -> list[Outlet]:
        shapes = [self._state.momentum[k].shape for k in self.order[first:last]]
        flats = send.split([shape.numel() for shape in shapes])
        views = [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)]
        cuts = _cuts(self._kinds[first:last], [0] * len(views), 1)
        return [(first + a, Tensors(views[a:b])) for a, b in cuts]

    def gradients(self, grads: Mapping[int, Tensor]) -> Tensors:
        """Return the blocks' gradients by position."""
        found = super().gradients(grads)
        return Tensors(found[k] for k in self.order)

    def fill(self, grads: Sequence[Tensor], hypers: Sequence[Hyper]) -> Tensor:
        """See `Operands.fill`; nothing is written."""
        for first, last in self._runs:
            (group, working), blocks = self._kinds[first], self.order[first:last]
            found = Tensors.of(grads).part(first, last)
            if first < self._count:
                buffers = self._state.listed("momentum", blocks)
                norms = self._rules[group].operand_norms(buffers, found, hypers[group], working)
            else:
                norms = finite_norms(found)  # of the gradients only
            self._both.narrow(1, first, len(blocks)).copy_(norms)
        return self._both[0]

    def gradient_squares(self, grads: Sequence[Tensor]) -> list[Tensor]:
        return [self._both[1].mul(self._counted).dot(self._both[1])]

    def write(self, outlet: Outlet, now: Pass) -> None:
        """Write scaled operands and advance momentum; where bad, write zeros and keep momentum."""
        first, to = outlet
        self._advance(first, len(to), Tensors.of([*to]) if isinstance(to, Tensor) else to, now)

    def commit(self, grads: Sequence[Tensor], hypers: Sequence[Hyper], bad: Tensor | None) -> None:
        """Advance the momentum of ``others``."""
        for first, last in self._runs:
            if first >= self._count:
                self._advance(first, last - first, None, Pass(grads, hypers, None, bad))

    def _advance(self, first: int, count: int, to: Tensors | None, now: Pass) -> None:
        (group, working), blocks = self._kinds[first], self.order[first : first + count]
        self._rules[group].advance_into(
            to,
            self._state.listed("momentum", blocks),
            Tensors.of(now.grads).part(first, first + count),
            now.hypers[group],
            working,
            scales=None if now.scales is None else now.scales.narrow(0, first, count),
            stays=at(now.bad, first, count),
        )


def at(bad: Bad, first: int, count: int) -> Bad:
    """Return the part of a mask for ``count`` positions; a 0-d mask applies to all."""
    return bad.narrow(0, first, count) if bad is not None and bad.ndim else bad
