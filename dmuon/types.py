"""Enums, aliases and error classes shared by the whole package."""

from __future__ import annotations

import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

if TYPE_CHECKING:  # the command line shows its help without torch
    from torch import Tensor

S = TypeVar("S", bound="State")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Triple = tuple[float, float, float]
# Values of string options for type checkers. The same values are checked at run time.
LayoutName = Literal["auto", "sharded", "replicated", "dedicated"]
SolverName = Literal["auto", "milp", "greedy", "round_robin"]
BackendName = Literal["auto", "torch", "torch_strips", "torch_rounded", "triton"]
DtypeName = Literal["auto", "float16", "bfloat16", "float32", "float64"]
Adjustment = Literal["original", "match_rms_adamw", "spectral_unclamped"]
CoefficientSet = Literal["polar_express", "quintic", "you_jiacheng", "simple"]
Coefficients = CoefficientSet | Triple | Sequence[Triple]


class OthersFlags(TypedDict, total=False):
    """Flags of torch's optimizers, at the values that change nothing here."""

    amsgrad: Literal[False] | None
    capturable: Literal[False] | None
    decoupled_weight_decay: Literal[True] | None
    differentiable: Literal[False] | None
    foreach: Literal[False] | None
    fused: Literal[False] | None
    maximize: Literal[False] | None


Select = Callable[[str, "Tensor"], bool]
# Both map name patterns; docs/routing.md describes the values.
Splits = Mapping[str, str | Sequence[int] | Mapping[str, Any]]
Heads = Mapping[str, int | Mapping[str, Any]]
INTERLEAVED = "Interleaved shards cannot be routed; shard it with fully_shard or parallelize_module"


@dataclass(slots=True)
class HyperDigest:
    """The hyperparameters that ranks compare: a number per group, texts by name, Muon's eps."""

    numbers: list[int]
    texts: dict[str, str] = field(default_factory=dict)
    eps: dict[int, float] = field(default_factory=dict)


class Layout(str, Enum):
    """Where parameters and momentum live between steps. REDUCED is `replicated` with
    ``reduce_to_owner=True``: it keeps momentum with the owners, as `dedicated` does."""

    AUTO = "auto"
    SHARDED = "sharded"
    REPLICATED = "replicated"
    REDUCED = "reduce_to_owner"
    DEDICATED = "dedicated"

    @property
    def keeps_state_at_owners(self) -> bool:
        return self in (Layout.REDUCED, Layout.DEDICATED)


class Algorithm(str, Enum):
    """How a parameter is updated."""

    MUON = "muon"
    ADAMW = "adamw"
    FROZEN = "frozen"


class State(Enum):
    """A state that all ranks share: its label and the names of the states that may follow. No
    transition depends on timing, so every rank issues the same collectives in a state."""

    def __init__(self, label: str, follows: str) -> None:
        self.label = label
        self.follows = follows.split()

    def to(self, new: S) -> S:
        """Return ``new``, the same state or one that may follow; RuntimeError, a bug, otherwise."""
        if new is not self and new.name not in self.follows:
            raise RuntimeError(
                f"internal error of dmuon: {type(self).__name__} cannot change from {self.name} to "
                f"{new.name}, only to {', '.join(self.follows)}. Please report it, with the "
                "model's forward pass"
            )
        return new


def grouped(pairs: Iterable[tuple[K, V]]) -> defaultdict[K, list[V]]:
    """Group the values of (key, value) pairs by key, in their order.

    >>> dict(grouped((n % 2, n) for n in range(5)))
    {0: [0, 2, 4], 1: [1, 3]}
    """
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return found


def runs_of(
    members: Iterable[V],
    size: Callable[[V], int],
    most: int,
    kind: Callable[[V], object] = lambda _: None,
) -> Iterator[list[V]]:
    """Cut ``members``, in order, where their kind changes and once their size reaches ``most``.

    >>> list(runs_of("aaabb", lambda c: 2, 4, kind=str))
    [['a', 'a'], ['a'], ['b', 'b']]
    """
    found: list[V] = []
    total = 0
    for member in members:
        if found and (total >= most or kind(member) != kind(found[0])):
            yield found
            found, total = [], 0
        found.append(member)
        total += size(member)
    if found:
        yield found


def printable(text: str) -> str:
    """Escape the characters of ``text``, except newlines, that a terminal would obey, not show.

    >>> printable("blocks.\\x1b[2J.weight")
    'blocks.\\\\x1b[2J.weight'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


class DmuonError(ValueError):
    """The base class of errors that a user can fix."""

    def __str__(self) -> str:
        return printable(super().__str__())  # parameter names may hold any character


class SelectionError(DmuonError):
    """The selection or splitting of matrices does not fit the model."""


class PlanError(DmuonError):
    """A plan is invalid, or no plan exists."""


class SizeError(PlanError):
    """A plan, or the proof of its bound, would take too long to compute."""


class OwnershipError(DmuonError):
    """An optimizer or a call does not fit the ownership of its parameters."""


class NewParameters(OwnershipError):
    """Trained parameters are missing from the plan; ``agreed`` says whether every rank knows."""

    agreed = False


class NonFiniteError(DmuonError, ArithmeticError):
    """A gradient is not finite under ``nonfinite="raise"``; raised on every rank."""


class CorruptionError(DmuonError):
    """``verify_every`` found a weight that differs from the recomputed update."""


class ConsensusError(DmuonError):
    """Ranks disagree, or another rank failed; raised on every rank."""


def warn(message: str, category: type[Warning] = RuntimeWarning, *, of_rank: bool = False) -> None:
    """Warn at the line that called dmuon, even through frames of torch; on rank 0 alone unless
    ``of_rank``, for a fact of this rank."""
    from torch import distributed as dist

    if not of_rank and dist.is_available() and dist.is_initialized() and dist.get_rank():
        return
    frame, between = sys._getframe(1), {"dmuon", "torch", "contextlib"}
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in between:
        frame = frame.f_back
    known = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
    warnings.warn_explicit(message, category, *place, known)


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Join the first ``most`` names for a message.

    >>> first_of(["a", "b"]), first_of(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 others')
    """
    left = len(names) - most
    more = f" and {left} other{'s' if left > 1 else ''}" if left > 0 else ""
    return printable(", ".join(names[:most]).replace("\n", "\\n")) + more


_CHOICE = re.compile(
    r"(?:standard|gram\[([1-9][0-9]*(?:,[1-9][0-9]*)*)\])/([a-z_]+)(?:-([0-9a-z-]+))?/"
    r"(float16|bfloat16|float32|float64)"
)
_ROWS = re.compile("[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """How a batch is orthogonalized; ranks and restarts that share the choice agree to the bit.

    ``method`` is "standard" or "gram"; "gram" has ``restarts``, the steps after which X is formed
    anew. ``backend`` and ``tile`` (for strips, the least number of rows) name the products, see
    `dmuon.kernels.ops`. ``dtype`` is the Newton-Schulz dtype that this was chosen for."""

    method: str
    restarts: tuple[int, ...]
    backend: str
    dtype: str
    tile: str = ""

    def __str__(self) -> str:
        """
        >>> str(KernelChoice("gram", (1, 3), "triton", "float16", "128x64-w4-s3"))
        'gram[1,3]/triton-128x64-w4-s3/float16'
        """
        restarts = f"[{','.join(map(str, self.restarts))}]" if self.method == "gram" else ""
        tile = f"-{self.tile}" if self.tile else ""
        return f"{self.method}{restarts}/{self.backend}{tile}/{self.dtype}"

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, text: str) -> KernelChoice:
        """Parse a choice that `str` wrote; ValueError for any other text.

        >>> KernelChoice.parse("standard/torch/float32")
        KernelChoice(method='standard', restarts=(), backend='torch', dtype='float32', tile='')
        """
        match = _CHOICE.fullmatch(text)
        inner, backend, tile, dtype = match.groups() if match else ("", "", "", "")
        restarts = tuple(int(step) for step in (inner or "").split(",") if step)
        has_tile = backend == "triton" or (
            backend == "torch_strips" and _ROWS.fullmatch(tile or "")
        )
        if match is None or list(restarts) != sorted({*restarts}) or (tile and not has_tile):
            raise ValueError(
                f"{text!r} is no kernel choice: expected form/backend/dtype, such as "
                "'standard/torch/float32', 'gram[1,3]/torch/bfloat16' (a Gram form has restarts, "
                "in order), 'gram[2]/triton-128x64-w8-s3/float16' (a tile) or "
                "'standard/torch_strips-128/float32' (least rows of a strip)"
            )
        return cls("gram" if restarts else "standard", restarts, backend, dtype, tile or "")
