"""The scheduler's view of a model: its parameters and its matrices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from operator import add, sub

import numpy as np
import torch
from torch import Tensor

from dmuon.types import Algorithm, PlanError

# Names that wrappers add to those that the user wrote: DDP, torch.compile, checkpointing.
_WRAPPER_COMPONENTS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
_MOST_ELEMENTS = 1 << 40  # of a parameter
_MOST_DIMS = 64

ITEM_SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes, by dtype name


def canonical_name(name: str) -> str:
    """The user's own name of a parameter or module, wrapper components stripped.

    >>> canonical_name("module._orig_mod.my_module.0.weight")
    'my_module.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_COMPONENTS)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Box:
    """Elements ``offset .. offset + shape`` of a tensor.

    >>> Box((2, 0), (4, 3)).intersection(Box((0, 1), (3, 9)))
    Box(offset=(2, 1), shape=(1, 2))
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def at_origin(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(map(add, self.offset, self.shape))

    def intersection(self, other: Box) -> Box:
        """The elements that both contain; its numel is 0 if there are none."""
        low = tuple(map(max, self.offset, other.offset))
        high = map(min, self.ends, other.ends)
        return Box(low, tuple(max(0, end - start) for start, end in zip(low, high, strict=True)))

    def is_range_of(self, shape: Sequence[int]) -> bool:
        """True if a tensor of ``shape`` holds these elements one after the other."""
        cut = [dim for dim, size in enumerate(shape) if size != self.shape[dim]]
        return all(size == 1 for size in self.shape[: cut[-1]]) if cut else True

    def within(self, outer: Box) -> Box:
        """The same elements, counted from the corner of ``outer``."""
        return Box(tuple(map(sub, self.offset, outer.offset)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """The index that takes these elements out of a tensor."""
        return tuple(map(slice, self.offset, self.ends))


class Form(str, Enum):
    """How a box of a parameter reads as a matrix of (outputs, inputs). ``..._in_out`` are stored
    inputs first, as `x @ W` needs it."""

    FLAT = "flat"  # dim 0 is the rows, all other dims together the columns
    FLAT_IN_OUT = "flat_in_out"  # FLAT after dims 0 and 1 swap, as in transposed convolutions
    STACK = "stack"  # the last two dims; the ones before them have size 1
    STACK_IN_OUT = "stack_in_out"  # the last two dims, swapped

    @property
    def is_stack(self) -> bool:
        return self in (Form.STACK, Form.STACK_IN_OUT)

    @property
    def is_in_out(self) -> bool:
        return self in (Form.FLAT_IN_OUT, Form.STACK_IN_OUT)

    def stored(self, *, in_out: bool) -> Form:
        """The same, inputs first or outputs first."""
        return Form(self.value.removesuffix("_in_out") + "_in_out" * in_out)

    def dims(self, ndim: int) -> tuple[int, int]:
        """Where the rows lie in a parameter of ``ndim`` dims, and (the first of) the columns."""
        first = ndim - 2 if self.is_stack else 0
        return (first + 1, first) if self.is_in_out else (first, first + 1)

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of a box of ``shape``."""
        rows, cols = self.dims(len(shape))
        return shape[rows], shape[cols] * (1 if self.is_stack else math.prod(shape[2:]))

    def rows_first(self, box: Tensor) -> Tensor:
        """A view ``(rows, ...)`` of a box; a convolution has several trailing dims."""
        box = box[(0,) * (box.ndim - 2)] if self.is_stack else box
        return box.transpose(0, 1) if self.is_in_out else box


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """How one parameter is routed, and why."""

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

    @property
    def state_item(self) -> int:
        """Bytes of optimizer state for each element: Muon's momentum, or AdamW's two moments."""
        return ITEM_SIZE.get(self.dtype, 4) * (1 if self.algorithm is Algorithm.MUON else 2)


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """One operand of Newton-Schulz: a box of a parameter, read by ``form``. The box begins at
    element ``start`` of the parameter in row-major order; ``parameter`` is an index into
    `ModelSpecs.parameters`."""

    name: str
    parameter: int
    rows: int
    cols: int
    dtype: str
    start: int = 0
    form: Form = Form.FLAT

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.cols)

    @property
    def key(self) -> tuple[int, int, str]:
        """(short side, long side, dtype), which decide its cost and its batches: a matrix and its
        transpose take the same work, so they are one shape."""
        return (min(self.shape), max(self.shape), self.dtype)

    def box(self, shape: Sequence[int]) -> Box:
        """Its box in a parameter of this shape.

        >>> MatrixSpec("w[1][:, 2:5]", 0, 3, 4, "float32", 22, Form.STACK_IN_OUT).box((6, 4, 5))
        Box(offset=(1, 0, 2), shape=(1, 4, 3))
        """
        offset = tuple(map(int, np.unravel_index(self.start, shape)))
        others = [1] * (len(shape) - 2) if self.form.is_stack else list(shape[2:])
        pair = [self.rows, self.cols // math.prod(others)]
        pair = pair[::-1] if self.form.is_in_out else pair
        return Box(offset, tuple(others + pair if self.form.is_stack else pair + others))

    def fits(self, shape: Sequence[int]) -> bool:
        """True if a parameter of this shape can contain it."""
        if len(shape) < 2:
            return False
        box = self.box(shape)
        inside = box.intersection(Box.at_origin(tuple(shape))) == box
        return inside and self.form.matrix_shape(box.shape) == self.shape

    def view(self, parameter: Tensor) -> Tensor:
        """This matrix inside a tensor of its parameter's shape, as a view of ``(rows, ...)``."""
        return self.form.rows_first(parameter[self.box(parameter.shape).slices()])


@dataclass(frozen=True, slots=True)
class ModelSpecs:
    """The trainable parameters in registration order, their matrices, and frozen parameters."""

    parameters: tuple[ParameterSpec, ...]
    matrices: tuple[MatrixSpec, ...]
    frozen: tuple[ParameterSpec, ...] = ()

    def __post_init__(self) -> None:
        names = Counter(p.name for p in self.parameters + self.frozen)
        for name, times in names.items():
            if times > 1:
                raise PlanError(f"found two parameters named {name!r}, expected one")
        for matrix in self.matrices:
            if not 0 <= matrix.parameter < len(self.parameters):
                raise PlanError(f"matrix {matrix.name!r} has no parameter #{matrix.parameter}")
            parameter = self.parameters[matrix.parameter]
            inside = 0 <= matrix.start <= parameter.numel - matrix.numel
            if parameter.algorithm is not Algorithm.MUON or not inside or min(matrix.shape) < 1:
                raise PlanError(f"matrix {matrix.name!r} is no part of parameter {parameter}")
            if matrix.dtype != parameter.dtype or matrix.dtype not in ITEM_SIZE:
                expected = f"{parameter.dtype!r}, and one of {', '.join(ITEM_SIZE)}"
                raise PlanError(
                    f"matrix {matrix.name!r}: expected the dtype of its parameter, {expected}, "
                    f"found {matrix.dtype!r}"
                )

    def adamw_parameters(self) -> tuple[int, ...]:
        """Indices of the parameters that AdamW updates."""
        return tuple(i for i, p in enumerate(self.parameters) if p.algorithm is Algorithm.ADAMW)

    def muon_parameters(self) -> tuple[int, ...]:
        """Indices of the parameters that are made of matrices."""
        return tuple(i for i, p in enumerate(self.parameters) if p.algorithm is Algorithm.MUON)
