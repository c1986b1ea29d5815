"""What `Muon` drives: one engine an ownership, one implementation a layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.period import Schedule
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import Algorithm

__all__ = ["Amp", "Engine", "Settings", "adamw_parameters", "group_of_matrices"]


@dataclass(frozen=True)
class Settings:
    """What holds for all groups of an optimizer."""

    ns_dtype: torch.dtype
    master_weights: bool
    schedule: Schedule
    block_lr_ratio: float | None


@dataclass(frozen=True, slots=True)
class Amp:
    """What `torch.amp.GradScaler` tells an optimizer: 0-d tensors.

    ``scale``: what gradients are still to be divided by; ``found_inf``: not zero where this rank
    found a non-finite gradient.
    """

    scale: Tensor | None = None
    found_inf: Tensor | None = None


class Engine(Protocol):
    """The work of one ownership in `Muon.step`, in the order in which it is called.

    ``optimizer`` holds the param groups and the state; an engine makes its state at construction.
    """

    def begin(self, amp: Amp) -> None:
        """Have gradients where they belong, and weights as they were published."""

    def launch(self) -> None:
        """Update the matrices, as far as that needs no waiting at the end."""

    def rest(self) -> None:
        """Update the parameters that are no matrices."""

    def finish(self) -> None:
        """What every rank does last in a step."""

    def stats(self) -> dict[str, Any]:
        """Numbers of the last step, without a collective; see `Muon.stats`."""

    def before_state_dict(self) -> None:
        """Have everything to be saved in the optimizer's state."""

    def check_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Raise OwnershipError if the saved entries do not fit; nothing is changed."""

    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Take over saved entries, bit for bit where they have the same precision."""


def adamw_parameters(parameters: Iterable[Tensor], optimizer: Optimizer) -> dict[int, list[Tensor]]:
    """Those of ``parameters`` that are in each AdamW group, by the group's number."""
    mine = set(parameters)
    return {
        g: [p for p in group["params"] if p in mine]
        for g, group in enumerate(optimizer.param_groups)
        if group["algorithm"] == Algorithm.ADAMW.value
    }


def group_of_matrices(
    parameters: Sequence[Tensor], specs: ModelSpecs, optimizer: Optimizer
) -> list[int]:
    """The number of the param group of each matrix of ``specs``, which are of ``parameters``."""
    group_of = {p: g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [group_of[parameters[m.parameter]] for m in specs.matrices]
