"""What a model asks of the scheduler: its parameters and its matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dmuon.scheduler import json_files as read
from dmuon.types import Algorithm, PlanError

__all__ = ["MatrixSpec", "ModelSpecs", "ParameterSpec", "canonical_name", "dtype_name"]

# What wrappers put between the names that the user wrote: DDP, torch.compile, checkpointing.
_WRAPPER_COMPONENTS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})
_MOST_ELEMENTS = 1 << 40  # of a parameter
_MOST_DIMS = 64

ITEM_SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes, by dtype name


def canonical_name(name: str) -> str:
    """The user's own name of a parameter or module, wrapper components stripped.

    >>> canonical_name("module._orig_mod.blocks.0.weight")
    'blocks.0.weight'
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

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape), "algorithm": self.algorithm.value}

    @classmethod
    def from_dict(cls, data: Any, at: str) -> ParameterSpec:
        """The parameter that `to_dict` wrote; PlanError that begins with the path of a field."""
        read.record(data, at, "name", "shape", "dtype", "algorithm", "reason", "transposed")
        spec = cls(
            read.text(data, "name", at),
            read.wholes(data, "shape", at, high=_MOST_ELEMENTS, most=_MOST_DIMS),
            read.text(data, "dtype", at),
            read.choice(data, "algorithm", at, Algorithm),
            read.text(data, "reason", at),
            read.flag(data, "transposed", at),
        )
        if spec.numel > _MOST_ELEMENTS:
            raise PlanError(
                f"{at}.shape: expected at most {_MOST_ELEMENTS:,} elements, found {spec.shape}"
            )
        return spec


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

    def to_list(self) -> list[Any]:
        start, turned = self.start, self.transposed
        return [self.name, self.parameter, self.rows, self.cols, self.dtype, start, turned]

    @classmethod
    def from_list(cls, data: Any, at: str, parameters: Sequence[ParameterSpec]) -> MatrixSpec:
        """The matrix that `to_list` wrote; PlanError that begins with the path of a field."""
        read.row(data, at, 7, 7)
        spec = cls(
            read.text(data, 0, at),
            read.whole(data, 1, at, high=len(parameters) - 1),
            read.whole(data, 2, at, 1),
            read.whole(data, 3, at, 1),
            read.text(data, 4, at),
            read.whole(data, 5, at),
            read.flag(data, 6, at),
        )
        dtype = parameters[spec.parameter].dtype
        if spec.dtype != dtype or dtype not in ITEM_SIZE:
            raise PlanError(
                f"{at}[4]: expected the dtype of its parameter, {dtype!r}, and one of "
                f"{', '.join(ITEM_SIZE)}, found {spec.dtype!r}"
            )
        return spec


@dataclass(frozen=True, slots=True)
class ModelSpecs:
    """The trainable parameters in registration order, their matrices, and frozen parameters."""

    parameters: tuple[ParameterSpec, ...]
    matrices: tuple[MatrixSpec, ...]
    frozen: tuple[ParameterSpec, ...] = ()

    def __post_init__(self) -> None:
        for matrix in self.matrices:
            parameter = self.parameters[matrix.parameter]
            inside = 0 <= matrix.start <= parameter.numel - matrix.numel
            if parameter.algorithm is not Algorithm.MUON or not inside or matrix.numel < 1:
                raise PlanError(f"matrix {matrix.name!r} is no part of parameter {parameter}")

    def adamw_parameters(self) -> tuple[int, ...]:
        """Indices of the parameters that AdamW updates."""
        return self._indices(Algorithm.ADAMW)

    def muon_parameters(self) -> tuple[int, ...]:
        """Indices of the parameters that are made of matrices."""
        return self._indices(Algorithm.MUON)

    def _indices(self, algorithm: Algorithm) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.parameters) if p.algorithm is algorithm)

    def to_dict(self) -> dict[str, Any]:
        return {
            "parameters": [p.to_dict() for p in self.parameters],
            "matrices": [m.to_list() for m in self.matrices],
            "frozen": [p.to_dict() for p in self.frozen],
        }

    @classmethod
    def from_dict(cls, data: Any, at: str = "specs") -> ModelSpecs:
        """The specs that `to_dict` wrote; PlanError that begins with the path of a field."""
        read.record(data, at, "parameters", "matrices", "frozen")
        parameters = read.each(data, "parameters", at, ParameterSpec.from_dict)
        frozen = read.each(data, "frozen", at, ParameterSpec.from_dict)
        read.different((p.name for p in parameters + frozen), f"the names in {at}")
        return cls(
            parameters,
            read.each(data, "matrices", at, lambda m, a: MatrixSpec.from_list(m, a, parameters)),
            frozen,
        )
