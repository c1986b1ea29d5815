"""dmuon: an owner-centric distributed runtime for the Muon optimizer.

Public names are imported on first use: ``import dmuon`` takes a millisecond, and ``python -m dmuon
--help`` does not load torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmuon.api import dedicate_params
    from dmuon.config import (
        DedicatedOptions,
        KernelOptions,
        LinearPeriod,
        PlannerOptions,
        ReplicatedOptions,
        ShardedOptions,
    )
    from dmuon.kernels.newton_schulz import newton_schulz
    from dmuon.optim import Muon, hf_factory
    from dmuon.ownership import Ownership, clip_grad_norm_, no_sync
    from dmuon.report.data import LoadBalanceReport
    from dmuon.rule import Rule, StateSpec
    from dmuon.scheduler.costs import CostTable
    from dmuon.scheduler.plan import OwnershipPlan
    from dmuon.tools.equivalence import EquivalenceReport, check_step_equivalence

__all__ = [
    "CostTable", "DedicatedOptions", "EquivalenceReport", "KernelOptions", "LinearPeriod",
    "LoadBalanceReport", "Muon", "Ownership", "OwnershipPlan", "PlannerOptions",
    "ReplicatedOptions", "Rule", "ShardedOptions", "StateSpec", "check_step_equivalence",
    "clip_grad_norm_", "dedicate_params", "hf_factory", "newton_schulz", "no_sync",
]  # fmt: skip

__version__ = "0.1.0"

# The same imports, at run time.
_NAMES = {
    "api": "dedicate_params",
    "config": "DedicatedOptions KernelOptions LinearPeriod PlannerOptions ReplicatedOptions "
    "ShardedOptions",
    "kernels.newton_schulz": "newton_schulz",
    "optim": "Muon hf_factory",
    "ownership": "Ownership clip_grad_norm_ no_sync",
    "report.data": "LoadBalanceReport",
    "rule": "Rule StateSpec",
    "scheduler.costs": "CostTable",
    "scheduler.plan": "OwnershipPlan",
    "tools.equivalence": "EquivalenceReport check_step_equivalence",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of the package."""
        if name in _HOMES:
            globals()[name] = found = getattr(import_module(f"dmuon.{_HOMES[name]}"), name)
            return found
        if not name.startswith("_") and find_spec(f"dmuon.{name}") is not None:
            return import_module(f"dmuon.{name}")
        raise AttributeError(f"module 'dmuon' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
