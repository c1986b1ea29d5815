"""Choosing kernels for what is planned: cached choices first, measurements on the first rank else.

Only the mesh's first rank measures and decides, so that all ranks run the same; the result goes
into the price list, and with it into the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from dmuon.comm.streams import Stopwatch
from dmuon.config import KernelOptions, MuonDefaults
from dmuon.kernels.autotune import Case, gate_error, gate_reference, tune
from dmuon.kernels.backends import launch_errors, ops_of
from dmuon.kernels.choice import candidates, fixed_choice
from dmuon.kernels.coefficients import resolve_coefficients
from dmuon.kernels.newton_schulz import normalize
from dmuon.kernels.runner import Call, Orthogonalizer, orthogonalize
from dmuon.kernels.workspace import Workspace
from dmuon.scheduler.costs import CostTable, ShapeKey
from dmuon.scheduler.profile import Want
from dmuon.types import KernelChoice

__all__ = ["Kernels", "Tuned", "choose_kernels"]

Kernels = dict[ShapeKey, dict[int, str]]
"""The choice, as text, by canonical shape and batch size."""

Tuned = dict[ShapeKey, set[int]]
"""The batch sizes whose choice was measured."""


def choose_kernels(
    wants: Sequence[Want],
    cached: Mapping[ShapeKey, Mapping[int, str]],
    model: CostTable,
    device: torch.device,
    dtype: torch.dtype,
    options: KernelOptions,
    *,
    clock: Callable[[], float],
    progress: Callable[[int, Case], None] | None = None,
) -> tuple[Kernels, Tuned]:
    """A choice for every want: the cached one if it is still offered, else a measured one, else
    (beyond the budget) the fixed rule's. And which of them are not merely the rule's.

    ``cached`` are choices that were measured under the same ``options``.

    ``model`` estimates in advance how long a call will take.

    Raises:
        ValueError: the options ask for what cannot run on this device.
    """
    steps = MuonDefaults().ns_steps

    def offered(case: Case) -> tuple[KernelChoice, ...]:
        return candidates(
            case.rows, case.cols, dtype, device, steps, options.method, options.backend
        )

    found: Kernels = {}
    tuned: Tuned = {}
    cases: dict[Case, list[Want]] = {}
    for want in wants:
        rows, cols, _ = want.key
        choices = offered(Case(rows, cols, want.batch))
        known = cached.get(want.key, {}).get(want.batch, "")
        if known in map(str, choices):
            found.setdefault(want.key, {})[want.batch] = known
            tuned.setdefault(want.key, set()).add(want.batch)
            continue
        # Where a batch runs matrix by matrix, its size does not matter.
        batch = 1 if _one_by_one(choices, device, rows) else want.batch
        cases.setdefault(Case(rows, cols, batch), []).append(want)
    dtype_of = {case: some[0].key[2] for case, some in cases.items()}

    def estimate_ms(case: Case) -> float:
        return model.batch_ms((case.rows, case.cols, dtype_of[case]), case.batch)

    # What weighs most first, but small batches before large ones, which cost more to measure.
    order = sorted(
        cases, key=lambda c: (c.batch, -sum(w.count for w in cases[c]) * estimate_ms(c), str(c))
    )
    bench = _Bench(device, dtype, options.cuda_graphs)
    chosen = tune(
        order,
        bench,
        offered,
        estimate_ms,
        budget_s=options.tune_budget_s,
        clock=clock,
        progress=progress,
    )
    for case, some in cases.items():
        choice = chosen.get(case) or fixed_choice(
            case.rows, case.cols, dtype, device, steps, options.method, options.backend
        )
        for want in some:
            found.setdefault(want.key, {})[want.batch] = str(choice)
            if case in chosen:
                tuned.setdefault(want.key, set()).add(want.batch)
    return found, tuned


def _one_by_one(choices: Sequence[KernelChoice], device: torch.device, rows: int) -> bool:
    limit = ops_of(choices[0], device, rows).batch_rows
    return limit is not None and rows > limit


class _Bench:
    """`dmuon.kernels.autotune.TuneBench` on this process's device.

    Times calls as an optimizer makes them: in a workspace, replayed as graphs where those are on.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, graphs: bool | None) -> None:
        self._device = device
        self._dtype = dtype
        self._options = KernelOptions(cuda_graphs=graphs)
        self._triples = resolve_coefficients(
            MuonDefaults().ns_coefficients, MuonDefaults().ns_steps
        )
        self._case: Case | None = None
        self._gate: tuple[Case, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._space = Workspace(device)  # of all candidates, or they would fill the memory
        self._runners: dict[KernelChoice, tuple[Orthogonalizer, Call]] = {}

    def error(self, case: Case, choice: KernelChoice) -> float:
        failures: tuple[type[Exception], ...] = (RuntimeError, *launch_errors())
        try:
            if self._gate is None or self._gate[0] != case:
                self._gate = None  # its memory is free before the next takes its own
                dtype: torch.dtype = getattr(torch, choice.dtype)
                steps = len(self._triples)
                self._gate = case, gate_reference(case, dtype, self._device, steps)
            reference = self._gate[1]
            return gate_error(case, choice, self._device, len(self._triples), reference=reference)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None
        except failures:
            if choice.backend in ("torch", "torch_strips", "torch_rounded"):
                raise
            return math.inf  # it does not compile, or needs more than this device has

    def run(self, case: Case, choice: KernelChoice) -> float:
        if case != self._case:
            self._case = case
            self._runners.clear()
        try:
            if choice not in self._runners:
                self._runners[choice] = self._prepare(case, choice)
            return self._timed(*self._runners[choice])
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def _prepare(self, case: Case, choice: KernelChoice) -> tuple[Orthogonalizer, Call]:
        runner = Orthogonalizer(self._device, self._dtype, self._options, workspace=self._space)
        call = Call(((case.batch, case.rows, case.cols),), self._triples, str(choice))
        if runner.call_bytes(call) > self._space.nbytes:
            self._runners.clear()  # their graphs are about memory that goes now
        runner.reserve([call])
        if self._device.type == "cuda":
            for _ in range(2):  # it compiles in the first, and is captured in the second
                self._timed(runner, call)
        return runner, call

    def _timed(self, runner: Orthogonalizer, call: Call) -> float:
        (x,) = runner.operands(call)
        # A generator of our own: the user's random state does not change.
        generator = torch.Generator(self._device).manual_seed(0)
        values = torch.empty(x.shape, dtype=torch.float32, device=self._device)
        normalize(values.uniform_(-1, 1, generator=generator), x.dtype, out=x)
        watch = Stopwatch(self._device)
        watch.start()
        orthogonalize(runner, call, [x])
        watch.stop()
        return watch.milliseconds()
