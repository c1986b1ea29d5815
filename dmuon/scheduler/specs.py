"""The scheduler's view of a model: its parameters and its matrices."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import add, floordiv, sub

import numpy as np
import torch
from torch import Tensor

from dmuon.types import Algorithm, Layout, PlanError

# Parts that wrappers add to the user's names: DDP, torch.compile, checkpointing.
_WRAPPER_COMPONENTS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
_MOST_ELEMENTS = 1 << 40  # of a parameter
_MOST_DIMS = 64
_COPY = re.compile(r" \(copy \d+ of \d+\)$")
_MOST_FIXED = 1 << 60  # bytes

ShapeKey = tuple[int, int, str]  # rows, cols, dtype of the parameter
ITEM_SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes, by dtype name


def canonical_name(name: str) -> str:
    """Return the user's own name of a parameter or module, without wrapper components.

    >>> canonical_name("module._orig_mod.my_module.0.weight")
    'my_module.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_COMPONENTS)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Box:
    """Elements ``offset .. offset + shape`` of a tensor; with ``steps``, for interleaved matrices,
    every ``step``-th element of a dim, in which other boxes have the same step or 1.

    >>> Box((2, 0), (4, 3)).intersection(Box((0, 1), (3, 9)))
    Box(offset=(2, 1), shape=(1, 2))
    >>> Box((1,), (4,), (2,)).intersection(Box((2,), (4,))).slices()  # 1, 3, 5, 7 and 2, 3, 4, 5
    (slice(3, 6, 2),)
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    steps: tuple[int, ...] = field(default=(), repr=False)  # empty: 1 in all dims

    @classmethod
    def at_origin(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        if not self.steps:
            return tuple(map(add, self.offset, self.shape))
        dims = zip(self.offset, self.shape, self.steps, strict=True)
        return tuple(start + max(0, (size - 1) * step + 1) for start, size, step in dims)

    def intersection(self, other: Box) -> Box:
        """Return the elements that both contain; numel is 0 if there are none."""
        if self.steps or other.steps:
            return self._every_nth(other)
        low = tuple(map(max, self.offset, other.offset))
        high = map(min, self.ends, other.ends)
        return Box(low, tuple(max(0, end - start) for start, end in zip(low, high, strict=True)))

    def _every_nth(self, other: Box) -> Box:
        """Return the intersection if one of the boxes has steps."""
        dims, every = [], (1,) * len(self.shape)
        both = (zip(b.offset, b.ends, b.steps or every, strict=True) for b in (self, other))
        for (start, end, step), (its_start, its_end, its_step) in zip(*both, strict=True):
            first = start if step > 1 else its_start
            meet = (start - its_start) % min(step, its_step) == 0
            low, step = max(start, its_start), max(step, its_step)
            low += (first - low) % step
            dims.append((low, max(0, -((low - min(end, its_end)) // step)) if meet else 0, step))
        return Box(*zip(*dims))

    def reaches(self, index: tuple[int, ...]) -> bool:
        """Return whether the box has elements at this index of the first dims."""
        return all(o <= i < o + n for o, i, n in zip(self.offset, index, self.shape))

    def is_range_of(self, shape: Sequence[int]) -> bool:
        """Return whether these elements are consecutive in a tensor of ``shape``."""
        cut = [dim for dim, size in enumerate(shape) if size != self.shape[dim]]
        return not self.steps and all(size == 1 for size in self.shape[: cut[-1]]) if cut else True

    def within(self, outer: Box) -> Box:
        """Return the same elements, relative to the corner of ``outer``."""
        offset = tuple(map(sub, self.offset, outer.offset))
        if not outer.steps:
            return Box(offset, self.shape, self.steps)
        return Box(tuple(map(floordiv, offset, outer.steps)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the index that takes these elements out of a tensor."""
        return tuple(map(slice, self.offset, self.ends, self.steps or (None,) * len(self.shape)))


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The ``box`` of a parameter that one rank holds, the rank's coordinates along the mesh axes
    that replicate, and the sorted global ``ranks`` that hold the parameter together."""

    ranks: tuple[int, ...]
    replica: tuple[int, ...]
    box: Box


class Form(str, Enum):
    """How to read a box of a parameter as a matrix (outputs, inputs). ``..._in_out`` are stored
    inputs first, as `x @ W` needs them."""

    FLAT = "flat"  # dim 0 is the rows, all other dims together the columns
    FLAT_IN_OUT = "flat_in_out"  # FLAT after dims 0 and 1 swap, as in transposed convolutions
    STACK = "stack"  # the last two dims; all dims before them have size 1
    STACK_IN_OUT = "stack_in_out"  # the last two dims, swapped

    @property
    def is_stack(self) -> bool:
        return self in (Form.STACK, Form.STACK_IN_OUT)

    @property
    def is_in_out(self) -> bool:
        return self in (Form.FLAT_IN_OUT, Form.STACK_IN_OUT)

    def stored(self, *, in_out: bool) -> Form:
        """Return the same form, stored inputs first or outputs first."""
        return Form(self.value.removesuffix("_in_out") + "_in_out" * in_out)

    def dims(self, ndim: int) -> tuple[int, int]:
        """Return the dims of the rows and (first) columns in a parameter of ``ndim`` dims."""
        first = ndim - 2 if self.is_stack else 0
        return (first + 1, first) if self.is_in_out else (first, first + 1)

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of a box of ``shape``."""
        rows, cols = self.dims(len(shape))
        return shape[rows], shape[cols] * (1 if self.is_stack else math.prod(shape[2:]))

    def rows_first(self, box: Tensor) -> Tensor:
        """Return a view ``(rows, ...)`` of a box; a convolution has several trailing dims."""
        box = box[(0,) * (box.ndim - 2)] if self.is_stack else box
        return box.transpose(0, 1) if self.is_in_out else box


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter, the algorithm that updates it, and the reason."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    algorithm: Algorithm
    reason: str

    def __post_init__(self) -> None:
        if len(self.shape) > _MOST_DIMS or self.numel > _MOST_ELEMENTS:
            most = f"{_MOST_DIMS} dims and {_MOST_ELEMENTS:,} elements"
            raise PlanError(f"expected a parameter of at most {most}, found {self.shape[:8]}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """One operand of Newton-Schulz: a box of a parameter (an index into `ModelSpecs.parameters`),
    read by ``form`` from element ``start`` on, with every ``steps``-th of the (rows, columns)."""

    name: str
    parameter: int
    rows: int
    cols: int
    dtype: str
    start: int = 0
    form: Form = Form.FLAT
    steps: tuple[int, int] = (1, 1)

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.cols)

    @property
    def key(self) -> tuple[int, int, str]:
        """(short side, long side, dtype), which decides costs and batches."""
        return (min(self.shape), max(self.shape), self.dtype)

    def box(self, shape: Sequence[int]) -> Box:
        """Return the box of the matrix in a parameter of this shape.

        >>> MatrixSpec("w[1][:, 2:5]", 0, 3, 4, "float32", 22, Form.STACK_IN_OUT).box((6, 4, 5))
        Box(offset=(1, 0, 2), shape=(1, 4, 3))
        """
        offset = tuple(map(int, np.unravel_index(self.start, shape)))
        others = [1] * (len(shape) - 2) if self.form.is_stack else list(shape[2:])
        pair = [self.rows, self.cols // math.prod(others)]
        pair = pair[::-1] if self.form.is_in_out else pair
        steps = [1] * len(shape) if max(self.steps) > 1 else []
        for dim, step in zip(self.form.dims(len(shape)) if steps else (), self.steps):
            steps[dim] = step
        return Box(offset, tuple(others + pair if self.form.is_stack else pair + others), (*steps,))

    def copy(self, number: int, count: int) -> MatrixSpec:
        """Return one of ``count`` copies, each of which has its own set of ranks."""
        name = f"{self.name} (copy {number} of {count})" if count > 1 else self.name
        return replace(self, name=name)

    @property
    def original(self) -> MatrixSpec:
        """The matrix that this is a `copy` of, or this one."""
        return replace(self, name=_COPY.sub("", self.name))

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a parameter of this shape can contain the matrix."""
        if len(shape) < 2:
            return False
        box = self.box(shape)
        inside = box.intersection(Box.at_origin(tuple(shape))) == box
        return inside and self.form.matrix_shape(box.shape) == self.shape

    def view(self, parameter: Tensor) -> Tensor:
        """Return this matrix as a view ``(rows, ...)`` of a tensor of its parameter's shape."""
        return self.form.rows_first(parameter[self.box(parameter.shape).slices()])


@dataclass(frozen=True, slots=True)
class ModelSpecs:
    """The trainable parameters in registration order, their matrices, and frozen parameters."""

    parameters: tuple[ParameterSpec, ...]
    matrices: tuple[MatrixSpec, ...]
    frozen: tuple[ParameterSpec, ...] = ()

    def __post_init__(self) -> None:
        for name, times in Counter(p.name for p in self.parameters + self.frozen).items():
            if times > 1:
                raise PlanError(f"found two parameters named {name!r}, expected one")
        for matrix in self.matrices:
            if not 0 <= matrix.parameter < len(self.parameters):
                raise PlanError(f"matrix {matrix.name!r} has no parameter #{matrix.parameter}")
            parameter = self.parameters[matrix.parameter]
            inside = 0 <= matrix.start <= parameter.numel - matrix.numel
            inside &= min(*matrix.shape, *matrix.steps) >= 1
            if parameter.algorithm is not Algorithm.MUON or not inside:
                raise PlanError(f"matrix {matrix.name!r} is no part of parameter {parameter}")
            if matrix.dtype != parameter.dtype or matrix.dtype not in ITEM_SIZE:
                expected = f"{parameter.dtype!r}, and one of {', '.join(ITEM_SIZE)}"
                raise PlanError(
                    f"matrix {matrix.name!r}: expected the dtype of its parameter, {expected}, "
                    f"found {matrix.dtype!r}"
                )

    def adamw_parameters(self) -> tuple[int, ...]:
        """Return the indices of the parameters that AdamW updates."""
        return tuple(i for i, p in enumerate(self.parameters) if p.algorithm is Algorithm.ADAMW)

    def muon_parameters(self) -> tuple[int, ...]:
        """Return the indices of the parameters that consist of matrices."""
        return tuple(i for i, p in enumerate(self.parameters) if p.algorithm is Algorithm.MUON)


@dataclass(frozen=True, slots=True)
class OwnerLimits:
    """Fixed state, the memory cap, and which ranks may own which matrix.

    ``fixed_bytes``: optimizer state that each rank has whatever it owns (empty: none).
    `dedicate_params` counts AdamW's state and momentum that lies with the parameters.
    ``memory_bytes`` caps the optimizer state of a rank, fixed bytes included. ``matrix_bytes`` is
    the state that each matrix puts on its owner; empty means momentum in the parameter's dtype if
    momentum lies with the owners, and none otherwise.

    A *domain* is a set of ranks that may own a matrix: the ranks of ``dp`` for dense matrices, of
    one ``ep`` coordinate for its experts, a single rank for a matrix that is whole there.
    ``domain_of`` is the domain of each matrix; empty: every rank may own every matrix. Only
    matrices of one domain are batched together."""

    fixed_bytes: tuple[int, ...] = ()
    memory_bytes: int | None = None
    domains: tuple[tuple[int, ...], ...] = ()
    domain_of: tuple[int, ...] = ()
    matrix_bytes: tuple[int, ...] = ()

    def check(self, matrices: int, world: int) -> None:
        """Raise PlanError unless everything has the right length and range."""
        for name, count, what in (
            ("fixed_bytes", world, "ranks"),
            ("domain_of", matrices, "matrices"),
            ("matrix_bytes", matrices, "matrices"),
        ):
            if (found := len(getattr(self, name))) not in (0, count):
                raise PlanError(f"OwnerLimits.{name} has {found} entries for {count} {what}")
        if not all(0 <= nbytes <= _MOST_FIXED for nbytes in self.fixed_bytes):
            raise PlanError(f"OwnerLimits.fixed_bytes must be from 0 to {_MOST_FIXED:,}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise PlanError(f"owner_memory_bytes must be at least 1, found {self.memory_bytes}")
        ranks = frozenset(range(world))
        for domain in self.domains:
            if not domain or len(set(domain)) != len(domain) or not ranks.issuperset(domain):
                raise PlanError(
                    f"a domain of OwnerLimits must name ranks of 0..{world - 1}, each once, "
                    f"found {domain[:8]}"
                )
        known = range(len(self.domains))
        if bool(known) != bool(self.domain_of) or not {*known}.issuperset(self.domain_of):
            raise PlanError("OwnerLimits.domain_of must number its domains: give both or none")

    def fixed_bytes_of(self, rank: int) -> int:
        return self.fixed_bytes[rank] if self.fixed_bytes else 0

    def is_forced(self, matrix: int) -> bool:
        """Return whether only one rank may own the matrix."""
        return bool(self.domain_of) and len(self.domains[self.domain_of[matrix]]) == 1

    def state_bytes(self, number: int, matrix: MatrixSpec, layout: Layout) -> int:
        """Return the bytes of state that the matrix of this number puts on its owner."""
        if self.matrix_bytes:
            return self.matrix_bytes[number]
        return matrix.numel * ITEM_SIZE[matrix.dtype] if layout.keeps_state_at_owners else 0


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes of optimizer state: per element of each parameter, and of each matrix at its owner."""

    per_element: tuple[int, ...]
    at_owners: tuple[int, ...]

    @classmethod
    def plain(cls, specs: ModelSpecs) -> StateSizes:
        """Return the sizes of momentum and AdamW's two moments in the parameters' dtypes."""
        moments = {Algorithm.MUON: 1, Algorithm.ADAMW: 2}
        each = (ITEM_SIZE.get(p.dtype, 4) * moments[p.algorithm] for p in specs.parameters)
        return cls(tuple(each), (0,) * len(specs.matrices))

    def limits(
        self, specs: ModelSpecs, layout: Layout, world: int, memory_bytes: int | None
    ) -> OwnerLimits:
        """Return limits without domains, and with AdamW's state only in `reduce_to_owner`."""
        adamw = [i for i in specs.adamw_parameters() if layout is Layout.REDUCED]
        whole = sum(specs.parameters[i].numel * self.per_element[i] for i in adamw)
        each = self.at_owners
        if layout.keeps_state_at_owners and self != self.plain(specs):
            momentum = [m.numel * self.per_element[m.parameter] for m in specs.matrices]
            each = tuple(map(sum, zip(momentum, each, strict=True)))
        return OwnerLimits(
            fixed_bytes=(whole,) * world if whole else (),
            memory_bytes=memory_bytes,
            matrix_bytes=each if any(each) else (),
        )
