"""Every default of the package, in frozen dataclasses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dmuon.types import Coefficients

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """Limits of planning.

    ``time_limit_s`` bounds the solver and ``profile_budget_s`` the cost measurement, in seconds.
    ``owner_memory_bytes`` caps the optimizer state of one rank. ``max_batch`` bounds how many
    matrices of one shape are orthogonalized in one batch. ``ranks_per_node`` counts global ranks;
    None takes torchrun's ``LOCAL_WORLD_SIZE``, or one node where that is not set.
    ``cache_dir`` is where measured costs are kept (None: ``$XDG_CACHE_HOME/dmuon``, else
    ``~/.cache/dmuon``).
    """

    time_limit_s: float = 10.0
    owner_memory_bytes: int | None = None
    max_batch: int = 16
    profile_budget_s: float = 10.0
    ranks_per_node: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"PlannerOptions.max_batch must be at least 1, found {self.max_batch}")
        for name in ("time_limit_s", "profile_budget_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"PlannerOptions.{name} must be > 0, found {getattr(self, name)}")
        if self.owner_memory_bytes is not None and self.owner_memory_bytes < 1:
            raise ValueError(
                "PlannerOptions.owner_memory_bytes must be at least 1 or None, found "
                f"{self.owner_memory_bytes}"
            )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(
                f"PlannerOptions.ranks_per_node must be at least 1, found {self.ranks_per_node}"
            )


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """How owners compute Newton-Schulz.

    ``method``: "standard", "gram" (with the restarts that are safe), "gram[2]" and so on fix the
    form for every matrix; "auto" takes for each shape and batch what measures fastest with
    ``costs="measured"``, and what a fixed rule says otherwise. ``backend``: one of
    `dmuon.kernels.backends.BACKENDS`, or "auto". What is fixed here or saved in a plan runs the
    same after every restart. ``tune_budget_s``: seconds for measuring what was not measured before
    (kept in the cache of the costs). ``cuda_graphs``: replay an owner's Newton-Schulz as CUDA
    graphs (None: on CUDA, for the shapes of the plan).
    """

    method: str = "auto"
    backend: str = "auto"
    tune_budget_s: float = 30.0
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        for name in ("method", "backend"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(
                    f"KernelOptions.{name} must be a string, found {getattr(self, name)!r}"
                )
        budget = self.tune_budget_s
        if isinstance(budget, bool) or not isinstance(budget, (int, float)):
            raise TypeError(f"KernelOptions.tune_budget_s must be a number, found {budget!r}")
        if not budget >= 0:
            raise ValueError(f"KernelOptions.tune_budget_s must be >= 0, found {budget}")
        if not (self.cuda_graphs is None or isinstance(self.cuda_graphs, bool)):
            raise TypeError(
                f"KernelOptions.cuda_graphs must be True, False or None, found {self.cuda_graphs!r}"
            )


@dataclass(frozen=True, slots=True)
class ReplicatedOptions:
    """How the `replicated` layout moves bytes.

    ``bucket_bytes``: gradients of about this many bytes are reduced together in backward (with
    `DistributedDataParallel` its own ``bucket_cap_mb`` counts). ``publish_bucket_bytes``: updates
    of one owner up to this size leave in one broadcast. ``reduce_dtype`` is the dtype in which
    gradients travel and are averaged (None: the gradient's own). ``broadcast_parameters``: start
    a plain module from the weights and buffers of the mesh's first rank. ``timeout_s``: after how
    many seconds a collective of dmuon's own process group gives up (None: torch's default for
    new groups, whatever `init_process_group` was given).
    """

    bucket_bytes: int = 25 * MiB
    publish_bucket_bytes: int = 25 * MiB
    reduce_dtype: torch.dtype | None = None
    broadcast_parameters: bool = True
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "publish_bucket_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"ReplicatedOptions.{name} must be at least 1, found {getattr(self, name)}"
                )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"ReplicatedOptions.timeout_s must be > 0, found {self.timeout_s}")
        if self.reduce_dtype is not None and not self.reduce_dtype.is_floating_point:
            raise ValueError(
                "ReplicatedOptions.reduce_dtype must be a floating dtype or None, "
                f"found {self.reduce_dtype}"
            )


@dataclass(frozen=True, slots=True)
class ShardedOptions:
    """How the `sharded` layout moves bytes.

    ``bucket_bytes``: matrices of about this many bytes a rank, in the Newton-Schulz dtype, travel
    in one collective. ``min_buckets``: a smaller model is cut into this many buckets nevertheless,
    so that traffic hides behind computing. ``buffers``: buckets that may be under way to their
    owners, and as many on their way back. ``timeout_s``: after how many seconds a collective of
    dmuon's own process group gives up (None: torch's default for new groups, whatever
    `init_process_group` was given).
    """

    bucket_bytes: int = 32 * MiB
    min_buckets: int = 3
    buffers: int = 2
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "min_buckets", "buffers"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"ShardedOptions.{name} must be at least 1, found {getattr(self, name)}"
                )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"ShardedOptions.timeout_s must be > 0, found {self.timeout_s}")


@dataclass(frozen=True, slots=True)
class DedicatedOptions:
    """How the `dedicated` layout moves bytes.

    ``prefetch``: how many groups of modules are broadcast ahead of the one that runs.
    ``free_after_forward``: drop a group's weights when it has run, and broadcast them again for
    backward; False keeps them until backward is done. ``groups``: ``(name, module) -> bool`` picks
    the modules whose weights travel together (None: the members of the outermost `ModuleList`,
    `ModuleDict` and `Sequential`). ``param_dtype``: the dtype in which weights travel and are used
    (None: their own). ``reduce_dtype``: the dtype in which gradients travel and are averaged (None:
    the parameter's own). ``broadcast_parameters``: start from the weights and buffers of the mesh's
    first rank. ``timeout_s``: after how many seconds a collective of dmuon's own process groups
    gives up (None: torch's default for new groups, whatever `init_process_group` was given).
    """

    prefetch: int = 1
    free_after_forward: bool = True
    groups: Callable[[str, torch.nn.Module], bool] | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    broadcast_parameters: bool = True
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int):
            raise TypeError(f"DedicatedOptions.prefetch must be an int, found {self.prefetch!r}")
        if self.prefetch < 0:
            raise ValueError(f"DedicatedOptions.prefetch must be >= 0, found {self.prefetch}")
        if self.groups is not None and not callable(self.groups):
            raise TypeError(
                "DedicatedOptions.groups must be a function (name, module) -> bool or None, found "
                f"{self.groups!r}"
            )
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(
                    f"DedicatedOptions.{name} must be a floating dtype or None, found {dtype}"
                )
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"DedicatedOptions.timeout_s must be > 0, found {self.timeout_s}")


ADJUST_LR = (None, "original", "match_rms_adamw")
MOMENTUM_MODES = ("ema", "sgd")
PUBLISH_MODES = ("async", "sync")


@dataclass(frozen=True, slots=True)
class MuonDefaults:
    """Hyperparameters of a Muon group; names and meanings are those of `torch.optim.Muon`."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Coefficients = "polar_express"
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = "match_rms_adamw"
    momentum_mode: str = "ema"
    dampening: float = 0.0


@dataclass(frozen=True, slots=True)
class AdamWDefaults:
    """Hyperparameters of an AdamW group; None means: the same as the Muon group's."""

    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float | None = None


def _non_negative(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"{name} must be a number, found a tensor of shape {tuple(value.shape)}")
    number = float(value)
    if not number >= 0.0 or math.isinf(number):
        raise ValueError(f"{name} must be a finite number >= 0, found {value}")


def check_muon_group(group: dict[str, Any]) -> None:
    """Raise ValueError on the first hyperparameter of a Muon group that is out of range."""
    for name in ("lr", "weight_decay", "momentum", "eps", "dampening"):
        _non_negative(name, group[name])
    if float(group["eps"]) == 0.0:
        raise ValueError("eps must be > 0: it keeps a zero matrix zero; torch.optim.Muon has 1e-7")
    if group["adjust_lr_fn"] not in ADJUST_LR:
        raise ValueError(
            f"adjust_lr_fn must be one of {ADJUST_LR}, found {group['adjust_lr_fn']!r}"
        )
    if group["momentum_mode"] not in MOMENTUM_MODES:
        raise ValueError(
            f"momentum_mode must be one of {MOMENTUM_MODES}, found {group['momentum_mode']!r}"
        )
    if group["momentum_mode"] == "ema" and not float(group["momentum"]) <= 1.0:
        raise ValueError(f"momentum must be <= 1 with 'ema', found {group['momentum']}")
    if group["momentum_mode"] == "ema" and float(group["dampening"]) != 0.0:
        raise ValueError("dampening belongs to momentum_mode='sgd'; with 'ema' it must be 0")


def check_adamw_group(group: dict[str, Any]) -> None:
    """Raise ValueError on the first hyperparameter of an AdamW group that is out of range."""
    for name in ("lr", "weight_decay", "eps"):
        _non_negative(f"AdamW {name}", group[name])
    betas = group["betas"]
    if len(betas) != 2 or not all(0.0 <= float(b) < 1.0 for b in betas):
        raise ValueError(f"AdamW betas must be two numbers in [0, 1), found {betas}")
