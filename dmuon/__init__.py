"""dmuon: an owner-centric distributed runtime for the Muon optimizer."""

from dmuon.api import dedicate_params
from dmuon.config import (
    DedicatedOptions,
    KernelOptions,
    PlannerOptions,
    ReplicatedOptions,
    ShardedOptions,
)
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.optim import Muon, hf_factory
from dmuon.ownership import Ownership, clip_grad_norm_, no_sync
from dmuon.period import LinearPeriod
from dmuon.report.data import LoadBalanceReport
from dmuon.rule import Rule, StateSpec
from dmuon.scheduler.costs import CostTable
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.tools.equivalence import EquivalenceReport, check_step_equivalence

__all__ = [
    "CostTable",
    "DedicatedOptions",
    "EquivalenceReport",
    "KernelOptions",
    "LinearPeriod",
    "LoadBalanceReport",
    "Muon",
    "Ownership",
    "OwnershipPlan",
    "PlannerOptions",
    "ReplicatedOptions",
    "Rule",
    "ShardedOptions",
    "StateSpec",
    "check_step_equivalence",
    "clip_grad_norm_",
    "dedicate_params",
    "hf_factory",
    "newton_schulz",
    "no_sync",
]

__version__ = "0.1.0"
