"""Newton-Schulz as an optimizer runs it: planned choices, one workspace, graphs on CUDA."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from dmuon.config import KernelOptions
from dmuon.kernels.choice import METHODS, fixed_choice, is_safe, restarts_of
from dmuon.kernels.footprint import call_bytes
from dmuon.kernels.graphs import Graphs
from dmuon.kernels.iterations import Program, Shape
from dmuon.kernels.newton_schulz import no_autocast, program_of
from dmuon.kernels.workspace import Workspace, aligned_bytes
from dmuon.types import KernelChoice, Triple

__all__ = ["Call", "Orthogonalizer", "check_graphs", "orthogonalize"]


@dataclass(frozen=True, slots=True)
class Call:
    """Batches that run together: ``[b, rows, cols]`` each, of one short side.

    ``kernel`` is the planned choice as text; "" leaves it to the fixed rule.
    """

    shapes: tuple[Shape, ...]
    coefficients: tuple[Triple, ...]
    kernel: str = ""


def check_graphs(options: KernelOptions, device: torch.device) -> None:
    """Raise ValueError where CUDA graphs are asked for on another device."""
    if options.cuda_graphs and device.type != "cuda":
        raise ValueError(
            f"KernelOptions.cuda_graphs=True needs a CUDA device, found {device}: leave it None"
        )


class Orthogonalizer:
    """Runs calls in a workspace that is allocated once; owned by an optimizer.

    ``dtype`` is the Newton-Schulz dtype. A planned choice for another dtype, or that would diverge
    over the steps of a call, gives way to the fixed rule; `report` says what ran.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        options: KernelOptions = KernelOptions(),  # noqa: B008  frozen
        graphs: Graphs | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self._options = options
        check_graphs(options, device)
        self._workspace = workspace or Workspace(device)
        wants_graphs = options.cuda_graphs is not False and device.type == "cuda"
        self._graphs = graphs or (Graphs(device) if wants_graphs else None)
        self._choices: dict[Call, KernelChoice] = {}
        self._ran: dict[Call, KernelChoice] = {}
        self._planned: frozenset[Call] = frozenset()
        self._programs: dict[Call, tuple[list[Tensor], Program]] = {}  # with their operands

    def choice(self, call: Call) -> KernelChoice:
        """What runs a call.

        Raises ValueError where the options ask for what cannot run here.
        """
        found = self._choices.get(call)
        if found is None:
            found = self._choices[call] = self._choose(call)
        return found

    def _choose(self, call: Call) -> KernelChoice:
        steps = len(call.coefficients)
        if call.kernel:
            planned = KernelChoice.parse(call.kernel)
            same = planned.dtype == str(self.dtype).removeprefix("torch.")
            is_standard = planned.method == "standard"
            if same and (is_standard or is_safe(planned.restarts, self.dtype, steps)):
                return planned
        # Batches of one call share the m x m part, so one rule has to serve all of them.
        rows = min(call.shapes[0][1:])
        cols = max(max(shape[1:]) for shape in call.shapes)
        method = self._options.method
        if method not in METHODS and not is_safe(restarts_of(method), self.dtype, steps):
            method = "gram"  # ns_steps has changed since the optimizer was made
        return fixed_choice(
            rows, cols, self.dtype, self.device, steps, method, self._options.backend
        )

    def call_bytes(self, call: Call) -> int:
        """Bytes of workspace that a call takes, with its operands."""
        operands = sum(aligned_bytes(shape, self.dtype) for shape in call.shapes)
        if not call.coefficients:
            return operands
        return operands + call_bytes(
            call.shapes, self.choice(call), len(call.coefficients), self.device
        )

    def reserve(self, calls: Iterable[Call]) -> None:
        """Allocate the workspace for these calls, one at a time; they will be captured as graphs.

        Raises ValueError where a choice cannot run on this device.
        """
        calls = list(calls)
        self._programs.clear()
        self._planned = frozenset(calls)
        self._workspace.reserve(max(map(self.call_bytes, calls), default=0))
        if self._graphs is not None:
            self._graphs.forget()
            self._graphs.announce(calls)

    def operands(self, call: Call) -> list[Tensor]:
        """Where to write the normalized matrices of a call; valid until its results are used up."""
        with self._workspace.frame():
            return self._take(call)

    def _take(self, call: Call) -> list[Tensor]:
        return [self._workspace.take(shape, self.dtype) for shape in call.shapes]

    def run(self, call: Call, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of a call on ``xs``, its `operands` or tensors like them, which are
        overwritten. Results are valid until the next call of this object."""
        with no_autocast(self.device):
            if self._graphs is None:
                return self._program(call, xs).run()
            own = self.operands(call)
            # A graph works on the same memory each time.
            for mine, x in zip(own, xs, strict=True):
                if mine.data_ptr() != x.data_ptr():
                    mine.copy_(x)

            def body() -> None:
                for mine, result in zip(own, self._program(call, own).run(), strict=True):
                    if mine.data_ptr() != result.data_ptr():
                        mine.copy_(result)

            self._graphs.run(call, body)
            return own

    def _program(self, call: Call, xs: Sequence[Tensor]) -> Program:
        known = self._programs.get(call)
        if known is not None and all(map(is_, known[0], xs)):
            return known[1]
        choice = self._ran[call] = self.choice(call)
        with self._workspace.frame():
            own = self._take(call)
            beside = self._workspace.beside
            program = program_of(xs, call.coefficients, choice, self._workspace)
            # Kept only if it is about memory that stays, the workspace's, and of a call that will
            # come again: batches of what happens to have a gradient are without number.
            stays = all(map(is_, own, xs)) and self._workspace.beside == beside
            if stays and call in self._planned:
                self._programs[call] = own, program
        return program

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace."""
        return self._workspace.nbytes

    def is_fused(self, call: Call) -> bool:
        """Whether the elementwise work around a call runs in Triton kernels too."""
        return self.choice(call).backend.startswith("triton")

    def report(self) -> dict[str, Any]:
        """What ran so far: a choice a set of shapes; the workspace; the state of CUDA graphs."""
        ran: dict[str, str] = {}
        for call, choice in self._ran.items():
            shapes = " + ".join(f"{b} x [{m}, {n}]" for b, m, n in call.shapes)
            known = ran.get(shapes, str(choice)).split(" and ")
            ran[shapes] = " and ".join(dict.fromkeys([*known, str(choice)]))
        graphs = "off" if self._graphs is None else self._graphs.state()
        return {"ran": ran, "workspace_bytes": self.nbytes, "cuda_graphs": graphs}


def orthogonalize(kernels: Orthogonalizer, call: Call, xs: Sequence[Tensor]) -> list[Tensor]:
    """`Orthogonalizer.run`: the one place through which all engines go."""
    return kernels.run(call, xs)
