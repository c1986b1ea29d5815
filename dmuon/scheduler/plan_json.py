"""The parts of a plan as plain data for JSON, and back.

::

    format 1    owners and batches
           2    limits, prices and proof too
           3    kernels and groups of batches, and the times of m x m parts
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dmuon.scheduler.batches import Batch, PriceRow, SquareRow
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.proof import Proof
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError

__all__ = ["FORMAT_VERSION", "by_name", "fields_of", "identity", "plain_prices", "plain_squares"]

FORMAT_VERSION = 3
_READABLE = (1, 2, FORMAT_VERSION)


def identity(
    specs: ModelSpecs, topology: Topology, batches: Iterable[Batch], layout: Layout
) -> dict[str, Any]:
    """What runs where, matrices by their indices."""
    return {
        "format": FORMAT_VERSION,
        "specs": specs.to_dict(),
        "topology": topology.to_dict(),
        "batches": [[b.owner, list(b.matrices), b.ms, b.kernel, b.group] for b in batches],
        "layout": layout.value,
    }


def by_name(
    specs: ModelSpecs, topology: Topology, batches: Iterable[Batch], layout: Layout
) -> dict[str, Any]:
    """What runs where, in terms of names: independent of the order of the parameters."""
    matrices = [
        [m.name, specs.parameters[m.parameter].name, *m.to_list()[2:]] for m in specs.matrices
    ]
    return {
        "format": FORMAT_VERSION,
        "parameters": sorted((p.to_dict() for p in specs.parameters), key=lambda p: p["name"]),
        "frozen": sorted((p.to_dict() for p in specs.frozen), key=lambda p: p["name"]),
        "matrices": sorted(matrices),
        "topology": topology.to_dict(),
        "batches": [
            [b.owner, [matrices[i][0] for i in b.matrices], b.ms, b.kernel, b.group]
            for b in batches
        ],
        "layout": layout.value,
    }


def plain_prices(prices: Sequence[PriceRow]) -> list[Any]:
    return [[list(r.key), list(r.ms), list(r.origin), list(r.kernels)] for r in prices]


def plain_squares(squares: Sequence[SquareRow]) -> list[Any]:
    return [[list(row.key), list(row.ms)] for row in squares]


# ---- reading -----------------------------------------------------------------------------


def fields_of(data: Any) -> dict[str, Any]:
    """The fields of a plan from the data that were saved of it.

    Raises:
        PlanError: a plan of a format that is not known.
        LookupError, TypeError, ValueError, AttributeError: not a plan.
    """
    version = data["format"]
    if version not in _READABLE:
        raise PlanError(
            f"the plan has format {version}, this version reads {', '.join(map(str, _READABLE))}"
        )
    return {
        "specs": ModelSpecs.from_dict(data["specs"]),
        "topology": Topology.from_dict(data["topology"]),
        "batches": tuple(_batch(*fields) for fields in data["batches"]),
        "layout": Layout(data["layout"]),
        "solver": data["solver"],
        "status": data["status"],
        "cost_source": data["cost_source"],
        "lower_bound_ms": _number(data["lower_bound_ms"]),
        "alternatives": tuple((name, ms) for name, ms in data["alternatives"]),
        "seconds": data["seconds"],
        **({} if version == 1 else _evidence(data)),
    }


def _batch(owner: Any, matrices: Any, ms: Any, kernel: Any = "", group: Any = -1) -> Batch:
    members = tuple(map(_whole, matrices))
    return Batch(_whole(owner), members, _number(ms), _text(kernel), _whole(group))


def _evidence(data: dict[str, Any]) -> dict[str, Any]:
    """What a saved plan tells of how it was made."""
    return {
        "limits": OwnerLimits.from_dict(data["limits"]),
        "prices": tuple(_price_row(*fields) for fields in data["prices"]),
        "squares": tuple(
            SquareRow((_whole(m), _text(dtype)), tuple(map(_number, ms)))
            for (m, dtype), ms in data.get("squares", ())
        ),
        "proof": None if data["proof"] is None else Proof.from_dict(data["proof"]),
        "engine": data["engine"],
        "note": data["note"],
        "hit_time_limit": data["hit_time_limit"],
    }


def _price_row(key: Any, ms: Any, origin: Any, kernels: Any = ()) -> PriceRow:
    rows, cols, dtype = key
    return PriceRow(
        (int(rows), int(cols), str(dtype)),
        tuple(map(_number, ms)),
        tuple(origin),
        tuple(map(_text, kernels)),
    )


def _number(value: Any) -> float:
    """A finite number from JSON, as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, found {value!r}")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number, found {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a text, found {value!r}")
    return value
