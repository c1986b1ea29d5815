"""What a model asks of the scheduler: its parameters and its matrices."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon.types import Algorithm, PlanError

# What wrappers put between the names that the user wrote: DDP, torch.compile, checkpointing.
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
    """
    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """How one parameter is routed, and why.

    ``transposed``: dims 0 and 1 swap to bring the output dim first (transposed convolutions).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    algorithm: Algorithm
    reason: str
    transposed: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) > _MOST_DIMS or self.numel > _MOST_ELEMENTS:
            raise PlanError(
                f"a parameter has at most {_MOST_DIMS} dims and {_MOST_ELEMENTS:,} elements, found "
                f"{self.shape[:_MOST_DIMS]}"
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def state_item(self) -> int:
        """Bytes of optimizer state for each element: Muon's momentum, or AdamW's two moments."""
        return ITEM_SIZE.get(self.dtype, 4) * (1 if self.algorithm is Algorithm.MUON else 2)


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """One operand of Newton-Schulz: ``rows x cols`` elements of one parameter.

    Every matrix is one contiguous range of its parameter in row-major order, beginning at element
    ``start`` (a transposed convolution is always one matrix, so this holds for it too).
    ``parameter`` is an index into `ModelSpecs.parameters`.
    """

    name: str
    parameter: int
    rows: int
    cols: int
    dtype: str
    start: int = 0
    transposed: bool = False

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows, self.cols)

    @property
    def key(self) -> tuple[int, int, str]:
        """What decides its cost and with whom it can be batched: (short side, long side, dtype).

        A matrix and its transpose take the same work, so they are one shape.
        """
        return (min(self.shape), max(self.shape), self.dtype)

    def view(self, parameter: Tensor) -> Tensor:
        """This matrix inside a tensor of its parameter's shape, as a view of ``(rows, ...)``.

        The trailing dims may be several (convolutions); they multiply to ``cols``.
        """
        if self.transposed:
            return parameter.transpose(0, 1)
        if self.numel == parameter.numel():
            whole = parameter.shape[0] == self.rows
            return parameter if whole else parameter[(0,) * (parameter.ndim - 2)]
        return parameter.view(-1).narrow(0, self.start, self.numel).view(self.rows, self.cols)


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
                raise PlanError(
                    f"matrix {matrix.name!r}: expected the dtype of its parameter, "
                    f"{parameter.dtype!r}, and one of {', '.join(ITEM_SIZE)}, found "
                    f"{matrix.dtype!r}"
                )

    def adamw_parameters(self) -> tuple[int, ...]:
        """Indices of the parameters that AdamW updates."""
        return self._indices(Algorithm.ADAMW)

    def adamw_state_bytes(self) -> int:
        """Of all parameters that AdamW updates, whole."""
        return sum(
            self.parameters[i].numel * self.parameters[i].state_item
            for i in self.adamw_parameters()
        )

    def muon_parameters(self) -> tuple[int, ...]:
        """Indices of the parameters that are made of matrices."""
        return self._indices(Algorithm.MUON)

    def _indices(self, algorithm: Algorithm) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.parameters) if p.algorithm is algorithm)
