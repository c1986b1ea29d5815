"""Every default of the package, in frozen dataclasses, and what else a setting may be."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch

from dmuon.types import Coefficients

MiB = 1 << 20

ADJUST_LR = (None, "original", "match_rms_adamw")
MOMENTUM_MODES = ("ema", "sgd")
PUBLISH_MODES = ("async", "sync")

# ---- what a setting may be ---------------------------------------------------------------


class Rule(NamedTuple):
    """``read`` gives a value as it is kept and raises TypeError for a wrong type; ``fits`` says
    whether what it gave is in range. ``expected`` says both in words."""

    expected: str
    read: Callable[[Any], Any]
    fits: Callable[[Any], bool] = lambda value: True

    def or_none(self) -> Rule:
        """The same, and None."""
        return Rule(
            f"{self.expected} or None",
            lambda value: None if value is None else self.read(value),
            lambda value: value is None or self.fits(value),
        )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _rate(value: Any) -> Any:
    """A number, or a tensor, which torch's optimizers take for lr and keep as it is."""
    if isinstance(value, torch.Tensor):
        return value
    number = _number(value)
    # A schedule that ends at zero, such as LinearLR, may miss it by a rounding.
    return 0.0 if -1e-12 < number < 0 else number


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _of_type(*types: Any) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, types):
            raise TypeError
        return value

    return read


def _betas(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError
    return tuple(_number(beta) for beta in value)


def _function(value: Any) -> Any:
    if not callable(value):
        raise TypeError
    return value


def _one_of(values: tuple[str | None, ...]) -> Rule:
    names = ", ".join(map(repr, values))
    return Rule(f"one of {names}", _of_type(str, type(values[0])), lambda value: value in values)


def _is_rate(value: Any) -> bool:
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
        return False
    return 0.0 <= float(value) < math.inf


FINITE = Rule("a finite number >= 0", _number, _is_rate)
RATE = Rule("a finite number >= 0", _rate, _is_rate)
POSITIVE = Rule("a number > 0", _number, lambda value: value > 0)
FINITE_POSITIVE = Rule("a finite number > 0", _number, lambda value: 0 < value < math.inf)
COUNT = Rule("an integer >= 1", _integer, lambda value: value >= 1)
FLAG = Rule("True or False", _of_type(bool))
TEXT = Rule("a string", _of_type(str))
FLOAT_DTYPE = Rule(
    "a floating dtype such as torch.bfloat16",
    _of_type(torch.dtype),
    lambda dtype: dtype.is_floating_point,
)

MUON_RULES = {
    "lr": RATE,
    "weight_decay": FINITE,
    "momentum": FINITE,
    "nesterov": FLAG,
    "ns_coefficients": Rule(
        "a name, one triple (a, b, c) or one triple a step", _of_type(str, Iterable)
    ),
    "eps": FINITE_POSITIVE,  # it keeps a zero matrix zero
    "ns_steps": COUNT,
    "adjust_lr_fn": _one_of(ADJUST_LR),
    "momentum_mode": _one_of(MOMENTUM_MODES),
    "dampening": FINITE,
}
ADAMW_RULES = {
    "lr": RATE,
    "betas": Rule(
        "two numbers >= 0 and < 1",
        _betas,
        lambda betas: len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas),
    ),
    "eps": FINITE,
    "weight_decay": FINITE,
}
SWITCH_RULES = {
    "publish": _one_of(PUBLISH_MODES),
    "master_weights": FLAG,
    "block_lr_ratio": FINITE_POSITIVE.or_none(),
}


def checked(
    rules: Mapping[str, Rule], values: Mapping[str, Any], *, owner: str = "", place: str = ""
) -> dict[str, Any]:
    """The values that there are rules for, as they are kept: numbers as Python's own.

    ``owner`` is put before a name, ``place`` after what was found there.

    Raises:
        TypeError: a value is of a wrong type; the message names it, what was found and expected.
        ValueError: it is out of range.
    """
    kept = {}
    for name, rule in rules.items():
        value = values[name]
        try:
            kept[name] = rule.read(value)
        except (TypeError, OverflowError):
            raise TypeError(_complaint(owner + name, rule, value, place)) from None
        if not rule.fits(kept[name]):
            raise ValueError(_complaint(owner + name, rule, value, place))
    return kept


def _complaint(name: str, rule: Rule, value: Any, place: str) -> str:
    found = f"{name} must be {rule.expected}, found {value!r}{place}"
    numbers = "number" in rule.expected or "integer" in rule.expected
    if isinstance(value, str) and numbers:
        return f"{found}: a string; convert it (YAML reads 1e-3 as text, 1.0e-3 as a number)"
    if isinstance(value, float) and value.is_integer() and "integer" in rule.expected:
        return f"{found}: write {int(value)}"
    return found


def _check_options(options: Any, rules: Mapping[str, Rule]) -> None:
    values = {name: getattr(options, name) for name in rules}
    checked(rules, values, owner=f"{type(options).__name__}.")


# ---- defaults ----------------------------------------------------------------------------


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
    cache_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        _check_options(self, _PLANNER_RULES)


_PLANNER_RULES = {
    "time_limit_s": POSITIVE,
    "owner_memory_bytes": COUNT.or_none(),
    "max_batch": COUNT,
    "profile_budget_s": POSITIVE,
    "ranks_per_node": COUNT.or_none(),
    "cache_dir": Rule("a path", _of_type(str, os.PathLike)).or_none(),
}


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """How owners compute Newton-Schulz.

    ``method``: "standard", "gram" (with the restarts that are safe), "gram[2]" and so on fix the
    form for every matrix; "auto" takes for each shape and batch what measures fastest with
    ``costs="measured"``, and what a fixed rule says otherwise. ``backend``: one of
    `dmuon.kernels.choice.BACKENDS`, or "auto". What is fixed here or saved in a plan runs the
    same after every restart. ``tune_budget_s``: seconds for measuring what was not measured before
    (kept in the cache of the costs). ``cuda_graphs``: replay an owner's Newton-Schulz as CUDA
    graphs (None: on CUDA, for the shapes of the plan).
    """

    method: str = "auto"
    backend: str = "auto"
    tune_budget_s: float = 30.0
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        _check_options(self, _KERNEL_RULES)


_KERNEL_RULES = {
    "method": TEXT,
    "backend": TEXT,
    "tune_budget_s": Rule("a number >= 0", _number, lambda value: value >= 0),
    "cuda_graphs": Rule("True, False or None", _of_type(bool, type(None))),
}


@dataclass(frozen=True, slots=True)
class ReplicatedOptions:
    """How the `replicated` layout moves bytes.

    ``bucket_bytes``: gradients of about this many bytes are reduced together in backward (with
    `DistributedDataParallel` as it hands over its own buckets). ``publish_bucket_bytes``: updates
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
        _check_options(self, _REPLICATED_RULES)


_REPLICATED_RULES = {
    "bucket_bytes": COUNT,
    "publish_bucket_bytes": COUNT,
    "reduce_dtype": FLOAT_DTYPE.or_none(),
    "broadcast_parameters": FLAG,
    "timeout_s": FINITE_POSITIVE.or_none(),
}


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
        _check_options(self, _SHARDED_RULES)


_SHARDED_RULES = {
    "bucket_bytes": COUNT,
    "min_buckets": COUNT,
    "buffers": COUNT,
    "timeout_s": FINITE_POSITIVE.or_none(),
}


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
        _check_options(self, _DEDICATED_RULES)


_DEDICATED_RULES = {
    "prefetch": Rule("an integer >= 0", _integer, lambda value: value >= 0),
    "free_after_forward": FLAG,
    "groups": Rule("a function (name, module) -> bool", _function).or_none(),
    "param_dtype": FLOAT_DTYPE.or_none(),
    "reduce_dtype": FLOAT_DTYPE.or_none(),
    "broadcast_parameters": FLAG,
    "timeout_s": FINITE_POSITIVE.or_none(),
}


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


def check_muon_group(group: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """The hyperparameters of a Muon group, as `checked` gives them; ``place`` as there.

    Raises:
        TypeError: a hyperparameter is of a wrong type.
        ValueError: it is out of range, or two do not go together.
    """
    kept = checked(MUON_RULES, group, place=place)
    if kept["momentum_mode"] == "ema" and kept["momentum"] > 1.0:
        raise ValueError(
            f"momentum must be <= 1 with momentum_mode='ema', found {kept['momentum']}{place}"
        )
    if kept["momentum_mode"] == "ema" and kept["dampening"] != 0.0:
        raise ValueError(
            "dampening belongs to momentum_mode='sgd'; with 'ema' it must be 0, found "
            f"{kept['dampening']}{place}"
        )
    return kept


def check_adamw_group(group: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """The same of an AdamW group."""
    return checked(ADAMW_RULES, group, owner="AdamW ", place=place)
