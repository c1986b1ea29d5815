"""Which matrices the kernel benchmark runs, who takes part, and how much arithmetic that is.

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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.results import dtype_name
from dmuon.config import KernelOptions, PlannerOptions
from dmuon.kernels.choice import default_backend, default_restarts
from dmuon.kernels.newton_schulz import newton_schulz, normalize, resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer, orthogonalize
from dmuon.types import KernelChoice

STEPS = 5
TRIPLES = resolve_coefficients("polar_express", STEPS)
MAX_BATCH = PlannerOptions().max_batch

Shape = tuple[int, int, int]
Kernels = dict[tuple[int, int, str], dict[int, str]]
"""The chosen kernel, by key of the shape and batch."""


# ---- what is orthogonalized ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """What is orthogonalized in one go: stacks ``(matrices, rows, cols)``."""

    name: str
    stacks: tuple[Shape, ...]

    @property
    def count(self) -> int:
        return sum(stack[0] for stack in self.stacks)

    def sources(self, device: torch.device) -> list[Tensor]:
        """Normalized Gaussian stacks in float32, the same in each run."""
        generator = torch.Generator(device).manual_seed(0)
        stacks = (torch.empty(s, device=device).normal_(generator=generator) for s in self.stacks)
        return [normalize(stack, torch.float32) for stack in stacks]


def _alone(*shapes: tuple[int, int]) -> tuple[Case, ...]:
    return tuple(Case(f"{rows} x {cols}", ((1, rows, cols),)) for rows, cols in shapes)


def _layer(name: str, *stacks: Shape) -> tuple[Case, ...]:
    """Every shape once alone, then all matrices of a layer."""
    return (*_alone(*((rows, cols) for _, rows, cols in stacks)), Case(f"{name} layer", stacks))


SETS: dict[str, tuple[Case, ...]] = {
    "llama-8b": _layer("llama-8b", (2, 4096, 4096), (2, 1024, 4096), (3, 4096, 14336)),
    "experts": (Case("128 experts 768 x 2048", ((128, 768, 2048),)),),
    # One layer of each of the three towers of the preset "vla": vision, language, action head.
    "vla": (Case("vla layers", (
        (4, 1152, 1152), (2, 1152, 4304), (2, 2048, 2048), (2, 256, 2048), (3, 2048, 16384),
        (2, 256, 1024), (2, 1024, 2048), (3, 1024, 4096))),),
    "qwen2.5-7b": _layer("qwen2.5-7b", (2, 3584, 3584), (2, 512, 3584), (3, 3584, 18944)),
    "small-experts": (Case("16 experts 128 x 512", ((16, 128, 512),)),),
    "sweep": _alone((256, 256), (256, 1024), (512, 512), (512, 2048), (1024, 1024), (1024, 4096)),
    "gpt2": _layer("gpt2", (1, 768, 768), (1, 768, 2304), (2, 768, 3072)),
    "odd": _alone((17, 33), (65, 100), (127, 127), (130, 520)),
    "tiny": tuple(
        Case(f"{b} of {m} x {n}", ((b, m, n),))
        for b, m, n in ((1, 16, 16), (64, 16, 16), (16, 16, 64), (16, 32, 32), (16, 64, 64))
    ),
}  # fmt: skip
"""Layers have the shapes of the presets of `dmuon.catalogue.presets`; a weight ``[n, m]`` that is
taller than wide counts as its transpose, which is how it runs. What the targets are about comes
first: a run that is short of time leaves out the last ones."""

DEFAULT_SETS = {"cuda": tuple(SETS), "cpu": ("sweep", "odd", "tiny", "gpt2", "small-experts")}
"""On a CPU the others take from ten seconds to minutes a call."""
QUICK_SETS = {"cpu": ("odd", "small-experts"), "cuda": ("llama-8b", "experts")}


# ---- how much arithmetic that is -----------------------------------------------------------


def _flops(stack: Shape, restarts: Sequence[int], share: float) -> float:
    """Of the Gram form, which is the standard one where it restarts after each step; ``share``:
    of a symmetric product that is computed.

    A segment of s steps multiplies X Xt (symmetric), 4s - 3 symmetric products of m x m, and Q X.
    """
    b, (m, n) = stack[0], sorted(stack[1:])
    lengths = [high - low for low, high in pairwise((0, *restarts, STEPS))]
    return b * m * m * sum(2 * n + share * (2 * n + (8 * s - 6) * m) for s in lengths)


_EVERY = tuple(range(1, STEPS))


def standard_flops(case: Case) -> float:
    """Of the plain standard form, (20 n/m + 10) m^3: effective rates are given for it."""
    return sum(_flops(stack, _EVERY, 1.0) for stack in case.stacks)


def floor_flops(case: Case, dtype: torch.dtype) -> float:
    """Of the form with the fewest that is safe in ``dtype``, with exactly half of each symmetric
    product computed."""
    forms = _EVERY, default_restarts(dtype, STEPS)
    return sum(min(_flops(stack, form, 0.5) for form in forms) for stack in case.stacks)


def executed_flops(stack: Shape, choice: KernelChoice) -> float:
    """What a choice really multiplies on a stack: (t + 1) / 2t of a symmetric product in t block
    rows."""
    blocks = 1
    if choice.backend in ("torch_strips", "torch_rounded"):
        blocks = max(1, min(4, min(stack[1:]) // 256))
    elif choice.backend == "triton" and choice.tile:
        blocks = -(-min(stack[1:]) // int(choice.tile.split("x")[0]))
    restarts = choice.restarts if choice.method == "gram" else _EVERY
    return _flops(stack, restarts, (blocks + 1) / (2 * blocks))


# ---- who takes part ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """One call. ``refill`` writes its operand and is not timed; ``run`` returns a stack, of which
    the first matrix is that of ``stack`` in the case (None: of none)."""

    refill: Callable[[], object]
    run: Callable[[], Tensor]
    stack: int | None


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


def standard_form(x: Tensor) -> Tensor:
    """The iteration of `torch.optim.Muon` on one normalized matrix
    (https://kellerjordan.github.io/posts/muon/)."""
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    for a, b, c in TRIPLES:
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


def _standard_function(x: Tensor, dtype: torch.dtype) -> Tensor:
    is_tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if is_tall else x).to(dtype)
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    y = _standard_stack(y) if len(y) > 1 else standard_form(y[0])[None]
    return y.mT if is_tall else y


def _loop(x: Tensor, form: Callable[[Tensor], Tensor]) -> Tensor:
    """Every matrix by itself; results are dropped but for the first."""
    first = form(x[0])
    for one in x[1:]:
        form(one)
    return first[None]


def on_stacks(
    name: str, sources: Sequence[Tensor], dtype: torch.dtype, run: Callable[[Tensor], Tensor]
) -> Contender:
    """``run`` on a copy of every stack in ``dtype``."""
    pieces = []
    for stack, source in enumerate(sources):
        x = source.to(dtype, copy=True)
        pieces.append(Piece(partial(x.copy_, source), partial(run, x), stack))
    return Contender(name, tuple(pieces))


def contenders(
    case: Case, sources: Sequence[Tensor], dtype: torch.dtype, kernels: Kernels
) -> Iterator[tuple[str, Callable[[], Contender]]]:
    """Name and constructor of everyone who takes part, the baseline first."""
    device = sources[0].device
    on_cuda = device.type == "cuda"

    def loops(name: str, dtype: torch.dtype, *, compiled: bool = False) -> Contender:
        form: Callable[[Tensor], Tensor] = standard_form
        if compiled:  # a full graph: too many recompilations are an error and not an eager run
            form = torch.compile(standard_form, fullgraph=True, dynamic=False)
        return on_stacks(name, sources, dtype, partial(_loop, form=form))

    yield "standard", partial(loops, "standard", dtype)
    if on_cuda and case.count > 1:
        yield (
            "standard_batched",
            partial(on_stacks, "standard_batched", sources, dtype, _standard_stack),
        )
    yield "compiled", partial(loops, "compiled", dtype, compiled=True)
    if on_cuda and dtype is not torch.bfloat16:
        name = "compiled_bfloat16"
        yield name, partial(loops, name, torch.bfloat16, compiled=True)
    choice = KernelChoice("gram", default_restarts(dtype, STEPS), "torch", dtype_name(dtype))
    whole = max(stack[0] for stack in case.stacks)
    sizes = dict.fromkeys((stack[0] for stack in case.stacks), str(choice))
    plain = {kernel_key(*stack[1:]): sizes for stack in case.stacks}
    yield "gram", partial(ours, case, sources, dtype, plain, whole, "gram", graphs=False)
    if not on_cuda:
        for name, run in (("standard_function", _standard_function), ("function", newton_schulz)):
            call = partial(run, dtype=dtype)
            yield name, partial(on_stacks, name, sources, torch.float32, call)
    yield "ours", partial(ours, case, sources, dtype, kernels, MAX_BATCH)
    if on_cuda and whole > MAX_BATCH:
        yield "ours_whole", partial(ours, case, sources, dtype, kernels, whole, "ours_whole")


def kernel_key(rows: int, cols: int) -> tuple[int, int, str]:
    """Under which `Kernels` has a shape."""
    return min(rows, cols), max(rows, cols), "float32"


def ours(
    case: Case,
    sources: Sequence[Tensor],
    dtype: torch.dtype,
    kernels: Kernels,
    max_batch: int,
    name: str = "ours",
    *,
    graphs: bool | None = None,
) -> Contender:
    """The calls that an owner makes for a case."""
    runner = Orthogonalizer(sources[0].device, dtype, KernelOptions(cuda_graphs=graphs))
    calls: list[tuple[int, int, Call]] = []  # stack, first matrix of it
    for stack, (count, rows, cols) in enumerate(case.stacks):
        for low in range(0, count, max_batch):
            batch = min(max_batch, count - low)
            kernel = kernels[kernel_key(rows, cols)][batch]
            calls.append((stack, low, Call((batch, rows, cols), TRIPLES, kernel)))
    runner.reserve(dict.fromkeys(call for _, _, call in calls))
    pieces = []
    for stack, low, call in calls:
        operand = runner.operand(call)
        refill = partial(operand.copy_, sources[stack][low : low + len(operand)])
        run = partial(orthogonalize, runner, call, operand)
        pieces.append(Piece(refill, run, None if low else stack))
    choices = {call.shape: runner.choice(call) for _, _, call in calls}
    text = "; ".join(f"{b} x [{m}, {n}]: {choice}" for (b, m, n), choice in choices.items())
    executed = sum(executed_flops(call.shape, choices[call.shape]) for _, _, call in calls)
    return Contender(name, tuple(pieces), text, executed, runner.nbytes)
