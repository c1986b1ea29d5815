"""Every default of the package, in frozen dataclasses, the allowed values of each setting, and the
schedule of full steps."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, fields
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch

from dmuon.types import Adjustment, BackendName, Coefficients, warn

T = TypeVar("T")

MiB = 1 << 20

# ---- allowed values ----------------------------------------------------------------------


class Allowed(NamedTuple):
    """The allowed values of a setting: ``read`` converts a value or raises TypeError, ``fits`` says
    whether the converted value is in range, ``expected`` describes both in words."""

    expected: str
    read: Callable[[Any], Any]
    fits: Callable[[Any], bool] = lambda value: True

    def or_none(self) -> Allowed:
        """Allow None as well."""
        return Allowed(
            f"{self.expected} or None",
            lambda value: None if value is None else self.read(value),
            lambda value: value is None or self.fits(value),
        )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _rate(value: Any) -> Any:
    """Read a number, or a tensor, which torch's optimizers accept as lr and keep as it is."""
    if isinstance(value, torch.Tensor):
        return value
    number = _number(value)
    # A schedule that ends at zero, such as LinearLR, may end slightly below it.
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


def _one_of(*values: str) -> Allowed:
    return Allowed(f"one of {', '.join(map(repr, values))}", _of_type(str), values.__contains__)


def _is_rate(value: Any) -> bool:
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
        return False
    return 0.0 <= float(value) < math.inf


FINITE = Allowed("a finite number >= 0", _number, _is_rate)
RATE = Allowed("a finite number >= 0", _rate, _is_rate)
POSITIVE = Allowed("a number > 0", _number, lambda value: value > 0)
FINITE_POSITIVE = Allowed("a finite number > 0", _number, lambda value: 0 < value < math.inf)
# The reciprocal of a smaller number is infinite in float32, and zeros would become nan.
EPS = Allowed(
    "a finite number >= 1.2e-38 (the smallest normal float32)",
    _number,
    lambda value: torch.finfo(torch.float32).tiny <= value < math.inf,
)
COUNT = Allowed("an integer >= 1", _integer, lambda value: value >= 1)
NS_STEPS = Allowed("an integer from 1 to 100", _integer, lambda value: 1 <= value <= 100)
STEP = Allowed("an integer from 0 to 2**62", _integer, lambda value: 0 <= value <= 1 << 62)
BETAS = Allowed(
    "two numbers >= 0 and < 1",
    lambda value: tuple(map(_number, _of_type(list, tuple)(value))),
    lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
)
COEFFICIENTS = Allowed(
    "a name, one triple (a, b, c) or one triple per step", _of_type(str, Iterable)
)
ADJUSTMENTS = get_args(Adjustment)
ADJUSTMENT = Allowed(
    f"None, one of {', '.join(map(repr, ADJUSTMENTS))}, or a number, the RMS of an update",
    lambda v: v if v is None or isinstance(v, str) else _number(v),
    lambda v: v is None or (v in ADJUSTMENTS if isinstance(v, str) else 0 < v < math.inf),
)
FLAG = Allowed("True or False", _of_type(bool))
TEXT = Allowed("a string", _of_type(str))
VARIANT = Allowed("a variant", lambda value: value)  # see `dmuon.rule.rule_of`
MOMENTUM_DTYPE = Allowed(
    "None or one of 'bfloat16', 'float32'",
    lambda value: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value,
    lambda value: value is None or value in ("bfloat16", "float32"),
)
PATH = Allowed("a path", _of_type(str, os.PathLike))
GROUPS = Allowed("a function (name, module) -> bool", _of_type(Callable))
FLOAT_DTYPE = Allowed(
    "a floating dtype such as torch.bfloat16", _of_type(torch.dtype), lambda v: v.is_floating_point
)
SECONDS = Allowed("a number > 0 and <= 1e9", _number, lambda value: 0 < value <= 1e9).or_none()
REDUNDANCY = Allowed(
    "'auto' or an integer >= 1",
    lambda value: value if value == "auto" else _integer(value),
    lambda value: value == "auto" or value >= 1,
)
NIC = r"(?=[0-9.]*[1-9])([0-9]{1,6}(?:\.[0-9]{1,6})?) ?((?i:[GT]))b/((?i:gpu|node))"
LINKS = Allowed(
    "'measured', or bits per second as in '400Gb/gpu' or '400Gb/node'",
    _of_type(str),
    lambda text: text == "measured" or re.fullmatch(NIC, text.strip()) is not None,
)
FINITE_PERIOD = Allowed("a finite number >= 1", _number, lambda value: 1 <= value < math.inf)
PERIOD_OF_STEP = Allowed(
    "a number >= 1 (math.inf: no full step)", _number, lambda value: value >= 1
)
PERIOD = Allowed(
    "a whole number of steps >= 1 (1: plain Muon), math.inf, or a function of the step",
    lambda value: value if callable(value) else _number(value),
    lambda value: callable(value) or (value >= 1 and value in (math.inf, value // 1)),
)


def checked(
    rules: Mapping[str, Allowed], values: Mapping[str, Any], *, owner: str = "", place: str = ""
) -> dict[str, Any]:
    """Check the values that have rules, and return them converted to Python's own numbers.

    Messages put ``owner`` before a name and ``place`` after the value found.

    Raises:
        TypeError: a value has a wrong type; the message says what was found and expected.
        ValueError: a value is out of range.
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


def _complaint(name: str, rule: Allowed, value: Any, place: str) -> str:
    found = f"{name} must be {rule.expected}, found {value!r}{place}"
    if isinstance(value, str) and any(word in rule.expected for word in ("number", "integer")):
        with suppress(ValueError):
            float(value)
            is_yaml = "e" in value.lower() and "." not in value
            why = " (YAML reads 1e-3 as text, 1.0e-3 as a number)" if is_yaml else ""
            return f"{found}: a string; convert it{why}"
    if isinstance(value, float) and value.is_integer() and "integer" in rule.expected:
        return f"{found}: write {int(value)}"
    return found


def _default(value: T, rule: Allowed) -> T:
    """Make a dataclass field of its default and its allowed values."""
    return field(default=value, metadata={"rule": rule})


def _rules(options: type) -> dict[str, Allowed]:
    return {f.name: f.metadata["rule"] for f in fields(options)}


def _values(options: Any) -> dict[str, Any]:
    return {f.name: getattr(options, f.name) for f in fields(options)}


# Names accepted for one more release, with a warning, and the names that replace them; None:
# nothing does.
RETIRED: dict[str, dict[str, str | None]] = {
    "Muon": {"betas": "adamw_betas", "publish": None},
    "PlannerOptions": {"profile_budget_s": None},
    "KernelOptions": {"tune_budget_s": None},
    "ShardedOptions": {"buffers": None},
}


def renamed(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Move retired arguments of ``owner`` to their current names, with one warning."""
    every = RETIRED.get(owner, {})
    retired = {name: new for name, new in every.items() if given.get(name) is not None}
    if retired:
        notes = [f"{n}= ({(new and f'pass {new}=') or 'ignored'})" for n, new in retired.items()]
        text = f"dmuon.{owner} will not take {', '.join(notes)} after this release"
        warn(text, FutureWarning)
    kept = {name: value for name, value in given.items() if name not in every}
    return kept | {new: given[name] for name, new in retired.items() if new}


class Checked:
    """Options that are checked when they are made. Retired options are `InitVar`s."""

    __slots__ = ()

    def __post_init__(self, *retired: object) -> None:
        owner = type(self).__name__
        renamed(owner, dict(zip(RETIRED.get(owner, ()), retired, strict=True)))
        checked(_rules(type(self)), _values(self), owner=f"{owner}.")


# ---- options -----------------------------------------------------------------------------

BUCKET_BYTES = 32 * MiB
BATCH_BUCKETS = 2  # the most buckets' worth of operands in a batch, unless one matrix is larger
BATCH_BYTES = BATCH_BUCKETS * BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class PlannerOptions(Checked):
    """Limits of planning.

    ``time_limit_s`` bounds the solver, in seconds. ``owner_memory_bytes`` caps the optimizer state
    of one rank, AdamW's included. ``max_batch`` bounds the number of matrices of one shape that are
    orthogonalized in one batch; large matrices come in smaller batches, of at most two buckets of
    the layout. ``ranks_per_node`` counts global ranks; None takes torchrun's ``LOCAL_WORLD_SIZE``,
    or one node if that is not set. ``cache_dir`` holds measured costs (None:
    ``$XDG_CACHE_HOME/dmuon``, else ``~/.cache/dmuon``).

    ``redundancy``: how many parts of the mesh orthogonalize a matrix independently, so that nothing
    is published across them: 1, the number of replicas (HSDP), of nodes or of ranks (DDP). "auto"
    chooses for each matrix the number with the shortest simulated step. ``links``: the network of
    the simulation, "measured" at planning, or a rate such as "400Gb/node" or "50Gb/gpu"
    (docs/network.md).
    """

    time_limit_s: float = _default(10.0, POSITIVE)
    owner_memory_bytes: int | None = _default(None, COUNT.or_none())
    max_batch: int = _default(16, COUNT)
    profile_budget_s: InitVar[float | None] = None
    ranks_per_node: int | None = _default(None, COUNT.or_none())
    cache_dir: str | os.PathLike[str] | None = _default(None, PATH.or_none())
    redundancy: Literal["auto"] | int = _default("auto", REDUNDANCY)
    links: str = _default("measured", LINKS)


@dataclass(frozen=True, slots=True)
class KernelOptions(Checked):
    """How owners compute Newton-Schulz.

    ``method``: "standard", "gram" (with safe restarts), "gram[2]" and so on fix the form for every
    matrix; "auto" takes the fastest measured form for each shape and batch with
    ``costs="measured"``, and follows a fixed rule otherwise. ``backend``: one of
    `dmuon.kernels.choice.BACKENDS`, or "auto". A choice fixed here or saved in a plan is the same
    after every restart. ``cuda_graphs``: replay an owner's Newton-Schulz as CUDA graphs (None:
    on CUDA, for the shapes of the plan).

    With neither ``method`` nor ``backend`` "auto", an update has the same bits on every mesh, in
    every layout and plan: each matrix is computed on its own (docs/same-bits.md).
    """

    method: str = _default("auto", TEXT)
    backend: BackendName = _default("auto", TEXT)
    tune_budget_s: InitVar[float | None] = None
    cuda_graphs: bool | None = _default(None, FLAG.or_none())

    @property
    def is_fixed(self) -> bool:
        """Whether an update's bits depend on the matrix and its gradients alone."""
        return "auto" not in (self.method, self.backend)


@dataclass(frozen=True, slots=True)
class ReplicatedOptions(Checked):
    """How the `replicated` layout works.

    ``publish_bucket_bytes``: updates of about this many bytes per owner travel in one collective
    (None: as planned). ``broadcast_parameters``: `dedicate_params` starts a plain module from the
    weights and buffers of the mesh's first rank. ``timeout_s``: seconds after which a collective of
    dmuon's own process group gives up (None: as in the default group, and torch's default for new
    groups during planning).

    ``reduce_to_owner``: dmuon averages the gradients in backward, each matrix's at its owner only,
    where the momentum lies. It takes less traffic and memory, and more care
    (docs/frameworks/ddp.md). Then ``bucket_bytes``: gradients of about this many bytes are reduced
    together (with `DistributedDataParallel`, in its own buckets); ``reduce_dtype``: the dtype in
    which gradients travel and are averaged (None: the gradient's own).
    """

    reduce_to_owner: bool = _default(False, FLAG)
    bucket_bytes: int = _default(25 * MiB, COUNT)
    publish_bucket_bytes: int | None = _default(None, COUNT.or_none())
    reduce_dtype: torch.dtype | None = _default(None, FLOAT_DTYPE.or_none())
    broadcast_parameters: bool = _default(True, FLAG)
    timeout_s: float | None = _default(None, SECONDS)


@dataclass(frozen=True, slots=True)
class ShardedOptions(Checked):
    """How the `sharded` layout moves bytes.

    ``bucket_bytes``: matrices of about this many bytes per rank, in the Newton-Schulz dtype, travel
    in one collective. ``min_buckets``: a smaller model is still cut into this many buckets, so that
    traffic overlaps with computation (None: into 4, but none below 2 MiB, because each collective
    has a fixed cost). ``timeout_s``: see `ReplicatedOptions`.
    """

    bucket_bytes: int | None = _default(None, COUNT.or_none())
    min_buckets: int | None = _default(None, COUNT.or_none())
    buffers: InitVar[int | None] = None
    timeout_s: float | None = _default(None, SECONDS)


@dataclass(frozen=True, slots=True)
class DedicatedOptions(Checked):
    """How the `dedicated` layout moves bytes.

    ``prefetch``: how many groups of modules are gathered ahead of the running one.
    ``free_after_forward``: drop a group's weights after it has run, and gather them again for
    backward; False keeps them until backward ends. ``groups``: ``(name, module) -> bool`` picks
    the modules whose weights travel together (None: the members of the outermost `ModuleList`,
    `ModuleDict` and `Sequential`). ``param_dtype``: the dtype in which weights travel and are used
    (None: their own). ``reduce_dtype``: the dtype in which gradients travel and are averaged (None:
    the parameter's own). ``broadcast_parameters``: start from the weights and buffers of the mesh's
    first rank. ``timeout_s``: see `ReplicatedOptions`.
    """

    prefetch: int = _default(1, Allowed("an integer >= 0", _integer, lambda value: value >= 0))
    free_after_forward: bool = _default(True, FLAG)
    groups: Callable[[str, torch.nn.Module], bool] | None = _default(None, GROUPS.or_none())
    param_dtype: torch.dtype | None = _default(None, FLOAT_DTYPE.or_none())
    reduce_dtype: torch.dtype | None = _default(None, FLOAT_DTYPE.or_none())
    broadcast_parameters: bool = _default(True, FLAG)
    timeout_s: float | None = _default(None, SECONDS)


# ---- hyperparameters ---------------------------------------------------------------------

# This table of the hyperparameters in a param group serves to complete, check, compare (between
# ranks), save and load groups. `check_muon_group` refuses combinations that exclude each other.


@dataclass(frozen=True, slots=True)
class MuonDefaults:
    """Hyperparameters of a Muon group; names and meanings are those of `torch.optim.Muon`."""

    lr: float | torch.Tensor = _default(1e-3, RATE)
    weight_decay: float = _default(0.1, FINITE)
    momentum: float = _default(0.95, FINITE)
    nesterov: bool = _default(True, FLAG)
    ns_coefficients: Coefficients = _default("polar_express", COEFFICIENTS)
    eps: float = _default(1e-7, EPS)  # keeps a zero matrix zero
    ns_steps: int = _default(5, NS_STEPS)
    adjust_lr_fn: str | float | None = _default("match_rms_adamw", ADJUSTMENT)
    momentum_mode: str = _default("ema", _one_of("ema", "sgd"))
    dampening: float = _default(0.0, FINITE)
    variant: Any = _default(None, VARIANT)
    cautious_weight_decay: bool = _default(False, FLAG)
    momentum_dtype: str | torch.dtype | None = _default(None, MOMENTUM_DTYPE)

    def group(self) -> dict[str, Any]:
        """Return the checked hyperparameters by name."""
        return check_muon_group(_values(self))


@dataclass(frozen=True, slots=True)
class AdamWDefaults:
    """Hyperparameters of an AdamW group; None means the same as the Muon group's."""

    lr: float | torch.Tensor | None = _default(None, RATE.or_none())
    betas: tuple[float, float] = _default((0.9, 0.95), BETAS)
    eps: float = _default(1e-8, FINITE)
    weight_decay: float | None = _default(None, FINITE.or_none())

    def group(self) -> dict[str, Any]:
        """Return the checked hyperparameters; errors use the names of `dmuon.Muon`'s arguments."""
        return checked(_rules(AdamWDefaults), _values(self), owner="adamw_")


# The rules of a group by the algorithms of its parameters: Muon, AdamW, and the keys that a Muon
# group has in addition if AdamW updates some of its parameters.
MUON_RULES = _rules(MuonDefaults)
ADAMW_RULES = _rules(AdamWDefaults) | {"lr": RATE, "weight_decay": FINITE}
MIXED_RULES = {
    "adamw_lr_ratio": FINITE,  # AdamW's learning rate over the group's
    "adamw_betas": BETAS,
    "adamw_eps": FINITE,
    "adamw_weight_decay": FINITE.or_none(),
}
# Settings for all groups, which only `dmuon.Muon` takes as arguments.
SWITCH_RULES = {
    "master_weights": FLAG,
    "block_lr_ratio": FINITE_POSITIVE.or_none(),
    "nonfinite": _one_of("skip", "raise"),
    "verify_every": COUNT.or_none(),
}


def check_muon_group(group: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Check a Muon group's hyperparameters as `checked` does, with its errors. ValueError also if
    two of them exclude each other."""
    kept = checked(MUON_RULES, group, place=place)
    momentum, dampening = kept["momentum"], kept["dampening"]
    if kept["momentum_mode"] == "ema" and momentum > 1.0:
        raise ValueError(f"momentum must be <= 1 with momentum_mode='ema', found {momentum}{place}")
    if kept["momentum_mode"] == "ema" and dampening != 0.0:
        raise ValueError(
            "dampening belongs to momentum_mode='sgd'; with 'ema' it must be 0, found "
            f"{dampening}{place}"
        )
    return kept


# ---- steps -------------------------------------------------------------------------------

# A full step of MuonBP orthogonalizes whole matrices, a block step only the block of each rank;
# Algorithm 1 of https://openreview.net/forum?id=mHouLSUQP5. The kind of step depends on the step
# count alone, so that all ranks agree without communication.

Period = float | Callable[[int], float]
"""A whole number of steps >= 1, `math.inf` (never a full step), or a function of the step."""

_NEVER = -1


@dataclass(frozen=True, slots=True)
class LinearPeriod(Checked):
    """A period that goes linearly from ``start`` at step 0 to ``end`` at step ``steps``, and stays.

    Raises:
        TypeError: an argument is not a number, or ``steps`` not an integer.
        ValueError: a period is below 1 or not finite, or ``steps`` is below 1.
    """

    start: float = field(metadata={"rule": FINITE_PERIOD})
    end: float = field(metadata={"rule": FINITE_PERIOD})
    steps: int = field(metadata={"rule": COUNT})

    def __call__(self, t: int) -> float:
        """Return the period at step ``t``."""
        if t >= self.steps:
            return float(self.end)
        # Multiply first, so that whole periods at whole steps stay whole: `Schedule` rounds down.
        return self.start + (self.end - self.start) * t / self.steps


class Schedule:
    """The step counter of an optimizer, which knows which steps are full.

    With an integer period P step t is full when ``t % P == 0``; with `math.inf` never. With a
    function the first step is full, and then every step with ``t - last_full >= floor(P(t))``.
    A step skipped because of non-finite gradients counts like any other.

    ``t`` is the next step, counted from 0; ``last_full`` is the last full step taken, or -1 if
    there was none.
    """

    def __init__(self, period: Period) -> None:
        self.t = 0
        self.last_full = _NEVER
        kept = checked({"period": PERIOD}, {"period": period})["period"]
        self._period: Period = kept if callable(kept) or kept == math.inf else int(kept)

    @property
    def always_full(self) -> bool:  # plain Muon
        return self._period == 1

    @property
    def never_full(self) -> bool:
        return self._period == math.inf

    def is_full(self, t: int) -> bool:
        """Whether step ``t`` is full, given the full steps so far. Changes nothing."""
        if not callable(self._period):
            return self._period != math.inf and t % self._period == 0
        # Called even if the answer is known, so that a bad function fails at once.
        name = f"the period at step t={t}, from {self.describe()},"
        period = checked({name: PERIOD_OF_STEP}, {name: self._period(t)})[name]
        whole = period if period == math.inf else math.floor(period)
        return self.last_full == _NEVER or t - self.last_full >= whole

    def advance(self) -> None:
        """Count the step, which has been taken, or skipped on all ranks."""
        if self.is_full(self.t):
            self.last_full = self.t
        self.t += 1

    def describe(self) -> str:
        """Describe the period, with the same text on all ranks that were given the same period."""
        if isinstance(self._period, LinearPeriod) or not callable(self._period):
            return str(self._period)
        # The repr of another callable holds an address, which differs between ranks.
        named = self._period if hasattr(self._period, "__qualname__") else type(self._period)
        return f"{named.__module__}.{named.__qualname__}"

    def state(self) -> dict[str, int | str]:
        """Return counter, last full step and period as plain numbers and text, for a checkpoint."""
        return {"step": self.t, "last_full": self.last_full, "period": self.describe()}

    def read(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Read (step, last full step) from the result of `state`. Changes nothing."""
        if missing := self.state().keys() - state.keys():
            raise ValueError(
                f"the state of a period schedule lacks {sorted(missing)}; it has {sorted(state)}"
            )
        try:
            step, last_full = STEP.read(state["step"]), STEP.read(state["last_full"])
        except (TypeError, ValueError):
            step, last_full = -1, _NEVER
        if not (STEP.fits(step) and _NEVER <= last_full < step):
            raise ValueError(
                "the state of a period schedule must have integers step >= 0 and -1 <= last_full < "
                f"step, found step={state['step']}, last_full={state['last_full']}"
            )
        return step, last_full

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, also in the middle of a period.

        If the saved period differs from this schedule's, that warns, and this schedule's counts."""
        step, last_full = self.read(state)
        if state["period"] != self.describe():
            warn(
                f"dmuon: the saved state has period {state['period']}, this optimizer has "
                f"{self.describe()}: it continues at step {step} with its own"
            )
        self.t, self.last_full = step, last_full


def is_exchange_step(step: int) -> bool:
    """Whether ranks exchange their times at the end of this step, counted from 1."""
    return step in (4, 16, 64) or (step > 0 and step % 256 == 0)


# ---- names in other optimizers -----------------------------------------------------------

# Names of hyperparameters elsewhere, and the names here.
_WORDS = {
    "backend_steps": "ns_steps",
    "adamw_wd": "adamw_weight_decay",
    "epsilon": "eps",
    "learning_rate": "lr",
    "momentum_beta": "momentum",
    "mu": "momentum",
    "ns_coefs": "ns_coefficients",
    "ns_iters": "ns_steps",
    "use_nesterov": "nesterov",
    "muon_lr": "lr",
    "wd": "weight_decay",
}
# Flags of torch's optimizers: the value that changes nothing, and why the other is not supported.
FLAGS = {
    "amsgrad": (False, "its AdamW keeps no maximum"),
    "capturable": (False, "a step has collectives, and CUDA graphs of its own"),
    "decoupled_weight_decay": (True, "decay is always decoupled"),
    "differentiable": (False, "a step has no gradient"),
    "foreach": (False, "lists of tensors are updated together anyway"),
    "fused": (False, "everything that can be is fused anyway"),
    "maximize": (False, "it minimizes (negate the loss)"),
}


def is_idle(name: str, value: Any, *, in_group: bool = False) -> bool:
    """Whether this value of a flag of torch's optimizers changes nothing here.

    ``in_group``: torchtitan's container puts ``fused`` and ``foreach`` into every group of any
    optimizer, and neither changes an update.
    """
    is_speed = in_group and name in ("foreach", "fused")
    return name in FLAGS and (value is None or value is FLAGS[name][0] or is_speed)


def instead(name: str, known: Iterable[str]) -> str:
    """Advise on a name that is not among the ``known``."""
    if name in FLAGS:
        return f"dmuon has no such flag, because {FLAGS[name][1]}: leave the flag out"
    meant = near(name, known)
    return f"did you mean {meant!r}? Else remove it" if meant else "remove it"


def near(name: str, known: Iterable[str]) -> str | None:
    """Return the ``known`` name that this is a misspelling or a synonym of, or None.

    >>> near("momentm", ["momentum"]), near("weight_decay_mult", ["weight_decay"])
    ('momentum', None)
    """
    name = str(name).lower()
    known = [word for word in known if abs(len(word) - len(name)) <= 2 or word == _WORDS.get(name)]
    is_word = _WORDS.get(name) in known
    return next(iter([_WORDS[name]] if is_word else get_close_matches(name, known, 1, 0.83)), None)
