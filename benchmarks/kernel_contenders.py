"""Who takes part in the kernel benchmark.

==================  ============================================================================
standard            Newton-Schulz as `torch.optim.Muon` writes it, one matrix after the other
standard_batched    the same on whole stacks (CUDA, where there are stacks)
compiled            standard through `torch.compile`; compiled_bfloat16: the same in that dtype
gram                the Gram form over plain torch products
function            `dmuon.newton_schulz` as a user calls it, by the fixed rule (CPU)
standard_function   standard with the normalization before it, on whole stacks (CPU): what
                    ``function`` is compared with
ours                what tuning chose, as an optimizer runs it: batches of at most
                    `PlannerOptions.max_batch`, in a workspace, as CUDA graphs on CUDA
ours_whole          the same, but a stack in one call, however large (CUDA)
==================  ============================================================================

The others start from normalized matrices. Momentum, their normalization and the weight update are
not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernel_cases import STEPS, Case, executed_flops
from dmuon.config import KernelOptions
from dmuon.kernels.choice import default_backend, default_restarts
from dmuon.kernels.newton_schulz import newton_schulz, resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer, Shape, orthogonalize
from dmuon.types import KernelChoice, Triple

__all__ = [
    "TRIPLES",
    "Contender",
    "Piece",
    "compiled",
    "function",
    "gram",
    "is_emulated",
    "kernel_key",
    "ours",
    "standard",
    "standard_form",
    "standard_function",
]

TRIPLES = resolve_coefficients("polar_express", STEPS)
Kernels = dict[tuple[int, int, str], dict[int, str]]


@dataclass(frozen=True, slots=True)
class Piece:
    """One call. ``refill`` writes its operands and is not timed; ``run`` returns what it computed.

    ``firsts``: stack -> which result, and which matrix of it, is the stack's first one.
    """

    refill: Callable[[], None]
    run: Callable[[], list[Tensor]]
    firsts: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Contender:
    """Runs a case in pieces, one after the other. ``kernel`` and ``executed`` (FLOPs) where known,
    ``workspace_bytes`` where there is one."""

    name: str
    pieces: tuple[Piece, ...]
    kernel: str = ""
    executed: float | None = None
    workspace_bytes: int | None = None


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device has no instructions for products of a dtype."""
    return default_backend(device, dtype) == "torch_rounded"


def standard_form(x: Tensor, triples: Sequence[Triple] = TRIPLES) -> Tensor:
    """The iteration of `torch.optim.Muon` on one normalized matrix
    (https://kellerjordan.github.io/posts/muon/)."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    for a, b, c in triples:
        gram = x @ x.mT
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.mT if is_tall else x


def _standard_stack(x: Tensor) -> Tensor:
    """The same on a stack of wide matrices."""
    for a, b, c in TRIPLES:
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, update, x, beta=a)
    return x


def _copies(sources: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [source.to(dtype, copy=True) for source in sources]


def _piece(index: int, x: Tensor, source: Tensor, run: Callable[[], Tensor]) -> Piece:
    def refill() -> None:
        x.copy_(source)

    return Piece(refill, lambda: [run()], {index: (0, 0)})


def standard(
    sources: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    name: str = "standard",
    form: Callable[[Tensor], Tensor] = standard_form,
) -> Contender:
    """``form`` on every matrix by itself; results are dropped but for the first of each stack."""

    def loop(x: Tensor) -> Tensor:
        first = form(x[0])
        for one in x[1:]:
            form(one)
        return first[None]

    def piece(index: int, x: Tensor, source: Tensor) -> Piece:
        return _piece(index, x, source, lambda: loop(x))

    pieces = map(piece, range(len(sources)), _copies(sources, dtype), sources)
    return Contender(name, tuple(pieces))


def standard_batched(sources: Sequence[Tensor], dtype: torch.dtype) -> Contender:
    def piece(index: int, x: Tensor, source: Tensor) -> Piece:
        return _piece(index, x, source, lambda: _standard_stack(x))

    pieces = map(piece, range(len(sources)), _copies(sources, dtype), sources)
    return Contender("standard_batched", tuple(pieces))


def function(sources: Sequence[Tensor], dtype: torch.dtype) -> Contender:
    def piece(index: int, x: Tensor, source: Tensor) -> Piece:
        return _piece(index, x, source, lambda: newton_schulz(x, dtype=dtype))

    pieces = map(piece, range(len(sources)), _copies(sources, torch.float32), sources)
    return Contender("function", tuple(pieces))


def standard_function(sources: Sequence[Tensor], dtype: torch.dtype) -> Contender:
    def run(x: Tensor) -> Tensor:
        is_tall = x.shape[-2] > x.shape[-1]
        y = (x.mT if is_tall else x).to(dtype)
        y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        y = _standard_stack(y) if len(y) > 1 else standard_form(y[0])[None]
        return y.mT if is_tall else y

    def piece(index: int, x: Tensor, source: Tensor) -> Piece:
        return _piece(index, x, source, lambda: run(x))

    pieces = map(piece, range(len(sources)), _copies(sources, torch.float32), sources)
    return Contender("standard_function", tuple(pieces))


def compiled(sources: Sequence[Tensor], dtype: torch.dtype, name: str) -> Contender:
    """Compiles at the first call of each shape, or raises RuntimeError; never runs uncompiled."""
    # A full graph, so that too many recompilations are an error and not an eager run.
    form = torch.compile(standard_form, fullgraph=True, dynamic=False)
    return standard(sources, dtype, name=name, form=form)


def gram(sources: Sequence[Tensor], dtype: torch.dtype) -> Contender:
    name = str(dtype).removeprefix("torch.")
    choice = KernelChoice("gram", default_restarts(dtype, STEPS), "torch", name)
    device = sources[0].device
    shapes: list[Shape] = [(len(x), x.shape[1], x.shape[2]) for x in sources]
    runner = Orthogonalizer(device, dtype, KernelOptions(cuda_graphs=False))
    calls = [Call(shape, TRIPLES, str(choice)) for shape in shapes]
    runner.reserve(dict.fromkeys(calls))
    pieces = [
        _our_piece(runner, call, _Part(i, 0, len(x), *call.shape[1:], call.kernel), x)
        for i, (call, x) in enumerate(zip(calls, sources))
    ]
    executed = sum(executed_flops(shape, choice) for shape in shapes)
    return Contender("gram", tuple(pieces), str(choice), executed, runner.nbytes)


# ---- ours --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """Matrices ``low`` to ``high`` of a stack, and the kernel that was chosen for so many."""

    stack: int
    low: int
    high: int
    rows: int
    cols: int
    kernel: str


def kernel_key(rows: int, cols: int) -> tuple[int, int, str]:
    """Under which `choose_kernels` answers for a shape."""
    return min(rows, cols), max(rows, cols), "float32"


def _parts(case: Case, kernels: Kernels, max_batch: int) -> list[_Part]:
    parts = []
    for stack, (count, rows, cols) in enumerate(case.stacks):
        for low in range(0, count, max_batch):
            high = min(low + max_batch, count)
            kernel = kernels[kernel_key(rows, cols)][high - low]
            parts.append(_Part(stack, low, high, rows, cols, kernel))
    return parts


def ours(
    case: Case,
    sources: Sequence[Tensor],
    dtype: torch.dtype,
    kernels: Kernels,
    *,
    max_batch: int,
    name: str = "ours",
) -> Contender:
    """The calls that an owner makes for a case."""
    parts = _parts(case, kernels, max_batch)
    calls = [Call((p.high - p.low, p.rows, p.cols), TRIPLES, p.kernel) for p in parts]
    runner = Orthogonalizer(sources[0].device, dtype, KernelOptions())
    runner.reserve(dict.fromkeys(calls))
    pieces = [
        _our_piece(runner, call, part, sources[part.stack]) for call, part in zip(calls, parts)
    ]
    executed = sum(executed_flops(call.shape, runner.choice(call)) for call in calls)
    text = "; ".join(
        dict.fromkeys(
            "{} x [{}, {}]".format(*call.shape) + f": {runner.choice(call)}" for call in calls
        )
    )
    return Contender(name, tuple(pieces), text, executed, runner.nbytes)


def _our_piece(runner: Orthogonalizer, call: Call, part: _Part, source: Tensor) -> Piece:
    operand = runner.operand(call)

    def refill() -> None:
        operand.copy_(source[part.low : part.high])

    def run() -> list[Tensor]:
        return [orthogonalize(runner, call, operand)]

    return Piece(refill, run, {part.stack: (0, 0)} if part.low == 0 else {})
