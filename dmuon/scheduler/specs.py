"""What a model asks of the scheduler: its parameters and its matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmuon.scheduler.json_files import (
    choice,
    different,
    each,
    flag,
    record,
    row,
    text,
    whole,
    wholes,
)
from dmuon.types import Algorithm, DmuonError, PlanError

__all__ = [
    "MatrixSpec",
    "ModelSpecs",
    "ParameterSpec",
    "canonical_name",
    "dtype_name",
]

# What wrappers put between the names that the user wrote: DDP, torch.compile, checkpointing.
_WRAPPER_COMPONENTS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module"})


def canonical_name(name: str) -> str:
    """The user's own name of a parameter or module, wrapper components stripped.

    >>> canonical_name("module._orig_mod.blocks.0.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_COMPONENTS)


_MOST_ELEMENTS = 1 << 40  # of a parameter
_MOST_DIMS = 64

ITEM_SIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes, by dtype name


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
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "algorithm": self.algorithm.value,
            "reason": self.reason,
            "transposed": self.transposed,
        }

    @classmethod
    def from_dict(cls, data: Any, at: str) -> ParameterSpec:
        """The parameter that `to_dict` wrote; PlanError that begins with the path of a field."""
        record(data, at, "name", "shape", "dtype", "algorithm", "reason", "transposed")
        spec = cls(
            text(data, "name", at),
            wholes(data, "shape", at, high=_MOST_ELEMENTS, most=_MOST_DIMS),
            text(data, "dtype", at),
            choice(data, "algorithm", at, Algorithm),
            text(data, "reason", at),
            flag(data, "transposed", at),
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
        """What decides its cost and with whom it can be batched: (rows, cols, dtype)."""
        return (self.rows, self.cols, self.dtype)

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
        return [
            self.name,
            self.parameter,
            self.rows,
            self.cols,
            self.dtype,
            self.start,
            self.transposed,
        ]

    @classmethod
    def from_list(cls, data: Any, at: str, parameters: Sequence[ParameterSpec]) -> MatrixSpec:
        """The matrix that `to_list` wrote; PlanError that begins with the path of a field."""
        row(data, at, 7, 7)
        spec = cls(
            text(data, 0, at),
            whole(data, 1, at, high=len(parameters) - 1),
            whole(data, 2, at, 1),
            whole(data, 3, at, 1),
            text(data, 4, at),
            whole(data, 5, at),
            flag(data, 6, at),
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
    """The trainable parameters in registration order, their matrices, and the frozen rest."""

    parameters: tuple[ParameterSpec, ...]
    matrices: tuple[MatrixSpec, ...]
    frozen: tuple[ParameterSpec, ...] = ()

    def __post_init__(self) -> None:
        for matrix in self.matrices:
            parameter = self.parameters[matrix.parameter]
            inside = 0 <= matrix.start <= parameter.numel - matrix.numel
            if parameter.algorithm is not Algorithm.MUON or not inside or matrix.numel < 1:
                raise PlanError(f"matrix {matrix.name!r} is no part of parameter {parameter}")

    def rest(self) -> tuple[int, ...]:
        """Indices of the parameters that AdamW updates."""
        return tuple(i for i, p in enumerate(self.parameters) if p.algorithm is Algorithm.ADAMW)

    def muon(self) -> tuple[int, ...]:
        """Indices of the parameters that are made of matrices."""
        return tuple(i for i, p in enumerate(self.parameters) if p.algorithm is Algorithm.MUON)

    def to_dict(self) -> dict[str, Any]:
        return {
            "parameters": [p.to_dict() for p in self.parameters],
            "matrices": [m.to_list() for m in self.matrices],
            "frozen": [p.to_dict() for p in self.frozen],
        }

    @classmethod
    def from_dict(cls, data: Any, at: str = "specs") -> ModelSpecs:
        """The specs that `to_dict` wrote; PlanError that begins with the path of a field."""
        record(data, at, "parameters", "matrices", "frozen")
        parameters = each(data, "parameters", at, ParameterSpec.from_dict)
        frozen = each(data, "frozen", at, ParameterSpec.from_dict)
        different((p.name for p in parameters + frozen), f"the names in {at}")
        return cls(
            parameters,
            each(data, "matrices", at, lambda m, a: MatrixSpec.from_list(m, a, parameters)),
            frozen,
        )


def check_parameters(named: list[tuple[str, nn.Parameter]]) -> torch.device:
    """The one device of all trainable parameters.

    Raises:
        DmuonError: a parameter is on the meta device, uninitialized, complex, or not on the
            device of the others.
    """
    device: torch.device | None = None
    first = ""
    for name, p in named:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise DmuonError(
                f"parameter {name!r} is uninitialized (a lazy module): run one forward pass "
                "before dmuon.dedicate_params(model)"
            )
        if p.device.type == "meta":
            raise DmuonError(
                f"parameter {name!r} is on the meta device: materialize the model "
                "(model.to_empty(device=...) and initialize it) before dmuon.dedicate_params(model)"
            )
        if p.is_complex():
            raise DmuonError(
                f"parameter {name!r} is complex ({p.dtype}); Newton-Schulz and AdamW here take "
                "real parameters. Freeze it, or store torch.view_as_real of it"
            )
        if device is None:
            device, first = p.device, name
        elif p.device != device:
            raise DmuonError(
                f"parameter {name!r} is on {p.device} but {first!r} is on {device}: move the "
                "model to one device before dmuon.dedicate_params(model)"
            )
    if device is None:
        raise DmuonError("the model has no trainable parameter: nothing to optimize")
    return device
