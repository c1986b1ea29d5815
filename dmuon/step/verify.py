"""Detection of silent corruption: sometimes every rank recomputes the updates of a few matrices.

::

    before a full step   every rank takes momentum and gradient of a whole matrix, and its weights
    after it             each rank computes the update itself and compares the weights that it
                         stores; equal parts on several ranks must be equal to the bit
    then                 ranks exchange their findings, so that all of them raise

Broken memory or a broken core shows on the ranks that store its results: on one rank if the fault
is that rank's, on all of them if it is the owner's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import multimode
from typing import Any

import torch
from torch import Tensor

from dmuon.comm.transport import Transport
from dmuon.config import KernelOptions
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.rule import Hyper, Rule, momentum_update
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.scheduler.specs import Box, MatrixSpec
from dmuon.types import CorruptionError

# Allowed error relative to the largest change of a weight: rounding of Newton-Schulz and a margin.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}
_COARSE = 0.5  # for half precision, where two batches of one matrix differ by percents

# (matrix of the plan, the box of the parameter that this rank stores of it, the tensor there)
Stored = list[tuple[int, Box, Tensor]]


@dataclass(frozen=True)
class Finding:
    """The check of one part of a matrix on one rank: ``far``, its error over the allowed error;
    whether it is ``exact`` to the bit; a checksum. ``momentum`` and ``gradient`` are checksums of
    the inputs before the step, from which this rank computed the expected part."""

    matrix: int
    box: Box
    far: float
    exact: bool
    checksum: int
    momentum: int
    gradient: int


def matrices_of(plan: OwnershipPlan) -> list[tuple[int, Box]]:
    """List all matrices as (parameter, box of the matrix in it)."""
    shapes = [p.shape for p in plan.specs.parameters]
    found = ((m.parameter, m.box(shapes[m.parameter])) for m in plan.specs.matrices)
    return list(dict.fromkeys(found))


class Verifier:
    """Chooses and judges the matrices to check; tools replace it. ``samples`` were taken before the
    step that is checked."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def sample(self, plan: OwnershipPlan, count: int) -> list[tuple[int, Box]]:
        """Return sample ``count`` of `matrices_of`, equal on all ranks: an eighth of an owner's."""
        every = matrices_of(plan)
        size = max(1, len(every) // (8 * plan.topology.world))
        return [every[(count * size + n) % len(every)] for n in range(min(size, len(every)))]

    def judge(self, found: list[Finding], plan: OwnershipPlan, transport: Transport) -> None:
        """Exchange findings; CorruptionError, on every rank, if any rank stores a wrong weight."""
        parts: dict[int, dict[Box, dict[int, Finding]]] = {}
        for rank, report in enumerate(transport.gather_objects(found)):
            for part in report:
                parts.setdefault(part.matrix, {}).setdefault(part.box, {})[rank] = part
        for i, boxes in parts.items():
            far = {r for ranks in boxes.values() for r, part in ranks.items() if not part.far <= 1}
            unequal = _odd_ranks(boxes, "checksum")
            if not far and not unequal:
                continue
            # A rank that began with other inputs finds the other ranks wrong.
            for source in "momentum", "gradient":
                suspects = _odd_ranks(boxes, source)
                if suspects:
                    found_there = f"its {source} differed there before the step already"
                    break
            else:
                suspects, found_there = far or unequal, "they differ there"
            owners = next(batch.ranks for batch in plan.batches if i in batch.matrices)
            by = f"rank{'s' * (len(owners) > 1)} {', '.join(map(str, owners))}"
            where = f"on rank {', '.join(map(str, sorted(suspects)))}: {found_there}"
            everyone = {r for ranks in boxes.values() for r in ranks}
            if suspects == far == everyone:
                who = "its owner" if len(owners) == 1 else "one of those that compute it"
                where = f"on all ranks that store it, so most likely by {who}, {by}"
            elif suspects == everyone:
                where += ", and which of these ranks is right cannot be told"
            name = plan.specs.matrices[i].name
            raise CorruptionError(
                f"verify_every: the weights of matrix {name!r}, updated by {by}, are not "
                f"the result of the previous gradient, momentum and weights, {where}. Something "
                "there corrupts data silently (memory, a core, a link), or they were written to. "
                "Continue from the last checkpoint, without that machine"
            )


@dataclass(frozen=True)
class Sample:
    """A matrix before a step: ``momentum`` and ``gradient`` of its whole parameter, the state
    ``kept`` by its rule, and its weights here, in the order of ``stored``, which returns the
    current ones. Momentum is advanced in dtype ``working``."""

    matrix: MatrixSpec
    momentum: Tensor
    gradient: Tensor
    kept: Mapping[str, Tensor]
    before: list[Tensor]
    stored: Callable[[], Stored]
    working: torch.dtype

    def deviations(
        self,
        rule: Rule,
        group: Mapping[str, Any],
        hyper: Hyper,
        ns_dtype: torch.dtype,
        kernels: KernelOptions,
    ) -> list[Finding]:
        """Check each part that is stored here."""
        matrix = self.matrix
        momentum, gradient = matrix.view(self.momentum), matrix.view(self.gradient)
        advanced = momentum.to(self.working, copy=True)
        operand = momentum_update(advanced, gradient.to(self.working), hyper)
        update = newton_schulz(
            operand.reshape(matrix.rows, matrix.cols), dtype=ns_dtype, eps=group["eps"],
            steps=group["ns_steps"], coefficients=group["ns_coefficients"],
            method=kernels.method, backend=kernels.backend,
        )  # fmt: skip
        if not rule.is_plain:
            rule.accepted(update.unsqueeze(0), self.kept)
        whole = update.new_zeros(self.momentum.shape)
        target = matrix.view(whole)
        target.copy_(update.reshape(target.shape))
        lr = hyper.adjusted(matrix.rows, matrix.cols)
        has_gradient = bool(self.gradient.count_nonzero())
        tolerance = _TOLERANCE.get(ns_dtype, _COARSE)
        sums = _checksum(momentum), _checksum(gradient)
        found = []
        for (i, box, now), before in zip(self.stored(), self.before, strict=True):
            expected = before
            if has_gradient or not torch.equal(now, before):  # otherwise no rank had a gradient
                expected = before.clone()
                change = whole[box.slices()].to(now.device)
                rule.apply([expected], [change], hyper, lr=lr)
            off = (expected.float() - now.float()).abs().max()
            far = 0.0
            if not bool(off == 0):
                allowed = tolerance * lr * float(change.abs().max())
                allowed += 2 * torch.finfo(now.dtype).eps * float(before.abs().max())
                far = float(off) / allowed if allowed else math.inf
            found.append(Finding(i, box, far, torch.equal(expected, now), _checksum(now), *sums))
        return found


def _checksum(values: Tensor) -> int:
    """Return a number that changes with any bit, on any device."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    bits = values.contiguous().view(kind).flatten().long()
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    return int((bits * places).sum())


def _odd_ranks(boxes: Mapping[Box, Mapping[int, Finding]], attribute: str) -> set[int]:
    """Return the ranks that differ from most others with the same part; all, without a majority."""
    odd: set[int] = set()
    for ranks in boxes.values():
        values = {r: getattr(part, attribute) for r, part in ranks.items()}
        common = multimode(values.values())
        odd |= {r for r, value in values.items() if common != [value]}
    return odd
