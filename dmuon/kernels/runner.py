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
from dmuon.kernels.recent import Recent
from dmuon.kernels.workspace import Workspace, aligned_bytes
from dmuon.types import KernelChoice, Triple

__all__ = ["Call", "Orthogonalizer", "check_graphs", "orthogonalize"]

_PROGRAMS = 64  # kept at least; four times what is planned if that is more
_OTHERS = 256  # sets of shapes that were not planned, in the report


@dataclass(frozen=True, slots=True)
class Call:
    """Batches that run together: ``[b, rows, cols]`` each, of one short side.

    ``kernel`` is the planned choice as text; "" leaves it to the fixed rule.
    """

    shapes: tuple[Shape, ...]
    coefficients: tuple[Triple, ...]
    kernel: str = ""


_Key = tuple[Any, ...]  # a `Call` and the ids of its operands


def check_graphs(options: KernelOptions, device: torch.device) -> None:
    """Raise ValueError where CUDA graphs are asked for on another device."""
    if options.cuda_graphs and device.type != "cuda":
        raise ValueError(
            f"KernelOptions.cuda_graphs=True needs a CUDA device, found {device}: leave it None"
        )


class Orthogonalizer:
    """Runs calls in a workspace that is allocated once; owned by an optimizer.

    What was prepared for a call is kept for the next one like it on the same operands, where these
    stay: they are of the workspace, or were announced by `reserve`.

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
        self._choices: Recent[Call, KernelChoice] = Recent(_OTHERS)
        # The kernels that ran by shapes: of what is planned, and of what comes up now and then.
        self._ran: dict[tuple[Shape, ...], list[str]] = {}
        self._ran_too: Recent[tuple[Shape, ...], list[str]] = Recent(_OTHERS)
        # By call and operands. These are kept with a program, so that their ids stay theirs.
        self._programs: Recent[_Key, tuple[list[Tensor], Program]] = Recent(_PROGRAMS)
        self._lasting: dict[int, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Programs are about this object's memory, and a copy has its own.
        return self.__dict__ | {"_programs": Recent(self._programs.limit), "_lasting": {}}

    def choice(self, call: Call) -> KernelChoice:
        """What runs a call.

        Raises ValueError where the options ask for what cannot run here.
        """
        found = self._choices.get(call)
        if found is None:
            found = self._choose(call)
            self._choices.add(call, found)
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

    def call_bytes(self, call: Call, *, with_operands: bool = True) -> int:
        """Bytes of workspace that a call takes, with its operands or where they lie elsewhere."""
        operands = sum(aligned_bytes(shape, self.dtype) for shape in call.shapes) * with_operands
        if not call.coefficients:
            return operands
        return operands + call_bytes(
            call.shapes, self.choice(call), len(call.coefficients), self.device
        )

    def reserve(
        self, calls: Iterable[Call], lasting: Iterable[tuple[Call, Sequence[Tensor]]] = ()
    ) -> None:
        """Allocate the workspace for these calls, one at a time; they will be captured as graphs.

        ``calls`` run on `operands`; ``lasting`` run on tensors of the caller's, the same at each
        step (some of them, where others have no gradient).

        Raises ValueError where a choice cannot run on this device.
        """
        calls, lasting = list(calls), list(lasting)
        elsewhere = [call for call, _ in lasting]
        planned = len(calls) + len(elsewhere)
        self._choices = Recent(planned + _OTHERS)
        self._programs = Recent(max(_PROGRAMS, 4 * planned))
        self._ran = {call.shapes: [] for call in (*calls, *elsewhere)}
        self._lasting = {id(x): x for _, xs in lasting for x in xs}
        needed = [self.call_bytes(call) for call in calls]
        needed += [self.call_bytes(call, with_operands=False) for call in elsewhere]
        self._workspace.reserve(max(needed, default=0))
        if self._graphs is not None:
            self._graphs.forget_all()

    def operands(self, call: Call) -> list[Tensor]:
        """Where to write the normalized matrices of a call; valid until its results are used up."""
        with self._workspace.frame():
            return self._take(call)

    def _take(self, call: Call) -> list[Tensor]:
        return [self._workspace.take(shape, self.dtype) for shape in call.shapes]

    def run(self, call: Call, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of a call on ``xs``, its `operands` or tensors like them, which are
        overwritten. Results are valid until the next call of this object.

        Raises ValueError unless ``xs`` have the shapes of the call.
        """
        with no_autocast(self.device):
            key: _Key = (call, *map(id, xs))
            kept = self._programs.get(key)
            if kept is not None:
                return self._again(key, kept[1])
            program, stays = self._program(call, xs)
            if not stays:
                return program.run()
            gone = self._programs.add(key, (list(xs), program))
            if self._graphs is not None:
                for old in gone:
                    self._graphs.forget(old)
            return self._again(key, program)

    def _again(self, key: _Key, program: Program) -> list[Tensor]:
        # Of what comes up now and then graphs would fill the memory.
        if self._graphs is None or key[0].shapes not in self._ran:
            return program.run()
        self._graphs.run(key, program.run)
        return list(program.results)

    def _program(self, call: Call, xs: Sequence[Tensor]) -> tuple[Program, bool]:
        """The program of a call, and whether it is about memory that stays."""
        found = tuple(tuple(x.shape) for x in xs)
        if found != call.shapes:
            raise ValueError(f"xs must have the shapes of the call, {call.shapes}, found {found}")
        choice = self.choice(call)
        self._note(call.shapes, str(choice))
        with self._workspace.frame():
            stays = all(id(x) in self._lasting for x in xs)
            beside = self._workspace.beside
            if not stays:
                stays = all(map(is_, self._take(call), xs))
            program = program_of(xs, call.coefficients, choice, self._workspace)
            return program, stays and self._workspace.beside == beside

    def _note(self, shapes: tuple[Shape, ...], kernel: str) -> None:
        known = self._ran.get(shapes)
        if known is None:
            known = self._ran_too.get(shapes) or []
            self._ran_too.add(shapes, known)
        if kernel not in known:
            known.append(kernel)

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace."""
        return self._workspace.nbytes

    def is_fused(self, call: Call) -> bool:
        """Whether the elementwise work around a call runs in Triton kernels too."""
        return self.choice(call).backend.startswith("triton")

    def report(self) -> dict[str, Any]:
        """What ran so far: the kernels of each set of shapes, planned ones first, and of others the
        last few hundred; the workspace; the state of CUDA graphs."""
        ran = {
            " + ".join(f"{b} x [{m}, {n}]" for b, m, n in shapes): " and ".join(kernels)
            for shapes, kernels in (*self._ran.items(), *self._ran_too.items())
            if kernels
        }
        graphs = "off" if self._graphs is None else self._graphs.state()
        return {"ran": ran, "workspace_bytes": self.nbytes, "cuda_graphs": graphs}


def orthogonalize(kernels: Orthogonalizer, call: Call, xs: Sequence[Tensor]) -> list[Tensor]:
    """`Orthogonalizer.run`: the one place through which all engines go."""
    return kernels.run(call, xs)
