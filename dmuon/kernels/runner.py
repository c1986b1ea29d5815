"""Newton-Schulz in an optimizer: planned choices, one workspace, graphs.

reserve   once: allocates the workspace, and prepares every planned call in it
step      operand -> (the caller writes it) -> run -> result, valid until the next run
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dmuon import devices
from dmuon.config import KernelOptions
from dmuon.devices import Capture, CudaGraphs
from dmuon.kernels.choice import (
    Speeds,
    fixed_choice,
    is_safe,
    ops_of,
    restarts_of,
    segments_of,
)
from dmuon.kernels.newton_schulz import no_autocast, prepared
from dmuon.kernels.ops import Take
from dmuon.tensors import normalize_
from dmuon.types import KernelChoice, Triple, warn

Shape = tuple[int, int, int]  # matrices, rows, cols

_ALIGNMENT = 256
_OTHERS = 128  # unplanned calls that are kept as well
_SMALL = 1 << 15  # elements


@dataclass(frozen=True, slots=True)
class Call:
    """One shape's batch. ``kernel``: planned, "" to follow the rule; ``eps``: see `normalize_`."""

    shape: Shape
    coefficients: tuple[Triple, ...]
    kernel: str = ""
    eps: float | None = None


def _range(shape: Shape) -> AbstractContextManager[object]:
    """Return the profiler range of a call. A range costs some microseconds even without a profiler,
    which is too much for small calls."""
    if prod(shape) < _SMALL:
        return nullcontext()
    b, m, n = shape
    return record_function(f"dmuon::newton_schulz {b}x[{m},{n}]")


class _Memory:
    """Hands out pieces of memory in order; without memory it only counts. ``taken`` has the bytes
    requested, including those beyond the end, which are allocated separately."""

    def __init__(self, memory: Tensor | None = None) -> None:
        if memory is None:
            memory = torch.empty(0, dtype=torch.uint8, device="meta")
        self.memory, self.taken = memory, 0

    @property
    def fits(self) -> bool:
        return self.taken <= self.memory.numel()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        start = self.taken
        self.taken += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if not self.fits:
            return torch.empty(shape, dtype=dtype, device=self.memory.device)
        return self.memory[start : start + nbytes].view(dtype).view(shape)


@dataclass(slots=True)
class _Prepared:
    """A call with fixed memory. Its ``result`` is set by the first run; then it may be captured."""

    x: Tensor
    kernel: str
    run: Callable[[], Tensor]
    may_capture: bool
    range: AbstractContextManager[object]
    result: Tensor | None = None
    replay: Callable[[], object] | None = None


@dataclass(eq=False, repr=False)
class Orthogonalizer:
    """Runs calls in a workspace that is allocated once; owned by an optimizer.

    ``dtype`` is the Newton-Schulz dtype; ``speeds`` (None: the fixed ones), equal on all ranks,
    decide where neither the call nor the options do. A planned choice for another dtype, or that
    would diverge over a call's steps, gives way to the rule; `report` lists the kernels that ran.

    A planned call runs eagerly the first time (which compiles kernels and sets up libraries), is
    captured as a graph the second time, and is replayed from then on. Capturing waits for the
    device, so `reserve` can do both. If ``capture`` (by default `Device.graphs`) fails there is one
    warning, and all calls run eagerly. A copy has its own workspace and no graphs yet.
    """

    device: torch.device
    dtype: torch.dtype
    options: KernelOptions = KernelOptions()  # noqa: RUF009  frozen
    capture: Capture | None = None
    speeds: Speeds | None = None

    def __post_init__(self) -> None:
        if self.capture is None and self.options.cuda_graphs is not False:
            self.capture = devices.of(self.device).graphs()
        self._failure = ""
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        # Keys are calls with the id of a kept operand; None: the call's own operand.
        self._prepared: dict[tuple[Call, int | None], _Prepared] = {}
        self._lasting: dict[int, Tensor] = {}  # held, so that no other tensor gets the id
        self._planned: set[Shape] = set()
        self.temporary_bytes = 0  # the most that a product allocates temporarily
        self._most = _OTHERS
        self._ran: dict[Shape, dict[str, None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Prepared calls point into this object's memory; a copy has its own.
        return vars(self) | {"_prepared": {}, "_lasting": {}}

    def reserve(
        self,
        calls: Iterable[Call],
        lasting: Iterable[tuple[Call, Tensor]] = (),
        *,
        capture: bool = False,
    ) -> None:
        """Allocate a workspace for calls and prepare them; ``capture`` overwrites their tensors.

        ``calls`` run on their `operand`, ``lasting`` on a tensor of the caller's ``[b, rows,
        cols]``, the same at each step. Calls prepared before are no longer valid. ValueError if a
        choice cannot run.
        """
        planned = [*((call, None) for call in calls), *lasting]
        self._prepared.clear()
        needed = max((self.call_bytes(call, x is None) for call, x in planned), default=0)
        if needed > self.nbytes:
            self._memory = self._memory[:0].clone()  # free it first
            self._memory = torch.empty(needed, dtype=torch.uint8, device=self.device)
        self._lasting = {id(x): x for _, x in planned if x is not None}
        self._planned = {call.shape for call, _ in planned}
        self._most = 8 * len(planned) + _OTHERS
        self._ran = {}
        if isinstance(self.capture, CudaGraphs):  # earlier graphs are gone, and so is their pool
            self.capture = CudaGraphs(self.device)
        found = [self._prepare(call, x) for call, x in planned]
        with no_autocast(self.device):
            for one in found if capture else ():
                if self.capture is not None and one.may_capture:
                    one.result = one.run()
                    one.replay = self._recorded(self.capture, one.run)

    def operand(self, call: Call) -> Tensor:
        """Return memory for the matrices of a call, for `normalize_`; valid until the next call."""
        return (self._prepared.get((call, None)) or self._prepare(call, None)).x

    def run(self, call: Call, x: Tensor) -> Tensor:
        """Return the result of a call on ``x``, its `operand` or a similar contiguous tensor, which
        is overwritten; valid until the next run. ValueError if the shapes differ."""
        found = self._prepared.get((call, id(x))) or self._prepare(call, x)
        self._ran.setdefault(call.shape, {})[found.kernel] = None
        with found.range, no_autocast(self.device):
            if found.replay is not None:
                found.replay()
            elif found.result is None:
                found.result = found.run()
            elif self.capture is None or not found.may_capture:
                found.run()
            else:
                found.replay = self._recorded(self.capture, found.run)
                (found.replay or found.run)()
            return found.result  # type: ignore[return-value]

    def _recorded(self, capture: Capture, run: Callable[[], Tensor]) -> Callable[[], object] | None:
        try:
            return capture(run)
        except Exception as error:  # of any kind: driver, allocator, torch without CUDA
            self.capture = None
            self._failure = " ".join(str(error).split())[:200] or type(error).__name__
            warn(
                f"dmuon: CUDA graphs are off, a capture failed ({self._failure}). Training goes on "
                "without them; KernelOptions(cuda_graphs=False) avoids this warning",
                of_rank=True,
            )
            for one in self._prepared.values():
                one.replay = None
            return None

    def _prepare(self, call: Call, x: Tensor | None) -> _Prepared:
        choice = self.choice(call)
        memory = _Memory(self._memory)
        own = memory.take(call.shape, self.dtype) if x is None else x
        if tuple(own.shape) != call.shape:
            raise ValueError(
                f"x must have the shape of the call, {call.shape}, found {tuple(own.shape)}"
            )
        run = self._iteration(call, choice, own, memory.take)
        may_capture = memory.fits and call.shape in self._planned
        found = _Prepared(own, str(choice), run, may_capture, _range(call.shape))
        if memory.fits and (x is None or id(x) in self._lasting):
            if len(self._prepared) > self._most:
                self._prepared.clear()  # coefficients may differ in every step
            self._prepared[call, id(own)] = found
            if x is None:
                self._prepared[call, None] = found
        return found

    def _iteration(
        self, call: Call, choice: KernelChoice, x: Tensor, take: Take
    ) -> Callable[[], Tensor]:
        if not call.coefficients or not prod(call.shape):
            return partial(normalize_, x, eps=call.eps)
        m, n = sorted(call.shape[1:])
        ops = ops_of(choice, self.device, m)
        taken = ops.temporary_bytes(call.shape[0], m, n, self.dtype.itemsize)
        self.temporary_bytes = max(self.temporary_bytes, taken)
        segments = segments_of(choice, len(call.coefficients))
        one_by_one = self.options.is_fixed
        run = prepared(x, call.coefficients, segments, ops, take, one_by_one=one_by_one)

        def normalize_and_run() -> Tensor:
            normalize_(x, eps=call.eps)
            return run()

        return normalize_and_run

    def choice(self, call: Call) -> KernelChoice:
        """Return the choice that runs a call; ValueError if the options ask for one that cannot
        run here."""
        steps = len(call.coefficients)
        if call.kernel:
            planned = KernelChoice.parse(call.kernel)
            same = planned.dtype == str(self.dtype).removeprefix("torch.")
            is_gram = planned.method == "gram" and is_safe(planned.restarts, self.dtype, steps)
            if same and (planned.method == "standard" or is_gram):
                return planned
        method = self.options.method
        restarts = restarts_of(method)
        if restarts is not None and not is_safe(restarts, self.dtype, steps):
            method = "gram"  # ns_steps has changed since the optimizer was made
        _, m, n = call.shape
        how = method, self.options.backend, self.speeds
        return fixed_choice(m, n, self.dtype, self.device, steps, *how)

    def call_bytes(self, call: Call, with_operand: bool = True) -> int:
        """Return the bytes of workspace that a call takes, with or without its operand."""
        memory = _Memory()
        x = memory.take(call.shape, self.dtype)
        if not with_operand:
            memory.taken = 0
        self._iteration(call, self.choice(call), x, memory.take)
        return memory.taken

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def report(self) -> dict[str, Any]:
        """Report the kernels that ran so far by shape, the workspace, and the state of graphs."""
        kept = {id(one): one for one in self._prepared.values() if one.may_capture}
        graphs = f"off: {self._failure}" if self._failure else "off"
        if self.capture is not None:
            captured = sum(one.replay is not None for one in kept.values())
            graphs = f"{captured} of {len(kept)} captured"
        return {
            "ran": {f"{b} x [{m}, {n}]": " and ".join(k) for (b, m, n), k in self._ran.items()},
            "workspace_bytes": self.nbytes,
            "cuda_graphs": graphs,
        }
