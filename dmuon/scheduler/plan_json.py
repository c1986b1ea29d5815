"""The parts of a plan as plain data for JSON, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dmuon.scheduler.batches import Batch, PriceRow, check_kernel
from dmuon.scheduler.json_files import (
    choice,
    different,
    each,
    flag,
    real,
    reals,
    record,
    row,
    text,
    texts,
    whole,
    wholes,
)
from dmuon.scheduler.limits import OwnerLimits
from dmuon.scheduler.proof import Proof
from dmuon.scheduler.specs import ModelSpecs
from dmuon.scheduler.topology import Topology
from dmuon.types import Layout, PlanError

__all__ = ["FORMAT_VERSION", "by_name", "fields_of", "identity", "plain_prices"]

FORMAT_VERSION = 4
_MOST_PRICE = 1e12  # milliseconds of one batch, as in planning
_MOST_KERNEL = 200  # characters of a kernel's name


def identity(
    specs: ModelSpecs, topology: Topology, batches: Iterable[Batch], layout: Layout
) -> dict[str, Any]:
    """What runs where, matrices by their indices."""
    return {
        "format": FORMAT_VERSION,
        "specs": specs.to_dict(),
        "topology": topology.to_dict(),
        "batches": [[b.owner, list(b.matrices), b.ms, b.kernel] for b in batches],
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
            [b.owner, [matrices[i][0] for i in b.matrices], b.ms, b.kernel] for b in batches
        ],
        "layout": layout.value,
    }


def plain_prices(prices: Sequence[PriceRow]) -> list[Any]:
    return [[list(r.key), list(r.ms), list(r.origin), list(r.kernels)] for r in prices]


# ---- reading -----------------------------------------------------------------------------


def fields_of(data: Any) -> dict[str, Any]:
    """The fields of a plan from the data that were saved of it.

    Raises:
        PlanError: a plan of a format that is not known; or not a plan, and which field is wrong.
        ValueError: the fields do not fit each other.
    """
    version = record(data, "", "format")["format"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise PlanError(f"the plan has format {version!r}, this version reads {FORMAT_VERSION}")
    record(data, "", "specs", "topology", "batches", "layout", "solver", "status", "cost_source")
    record(data, "", "lower_bound_ms", "alternatives", "seconds")
    specs = ModelSpecs.from_dict(data["specs"])
    evidence = _evidence(data)
    priced = {price.key for price in evidence["prices"]}
    missing = {matrix.key for matrix in specs.matrices} - priced if priced else ()
    for key in sorted(missing):
        raise PlanError(f"prices: there is none for the matrices of {key[0]} x {key[1]} {key[2]}")
    return {
        "specs": specs,
        "topology": Topology.from_dict(data["topology"], "topology"),
        "batches": each(data, "batches", "", _batch),
        "layout": choice(data, "layout", "", Layout),
        "solver": text(data, "solver", ""),
        "status": text(data, "status", ""),
        "cost_source": text(data, "cost_source", ""),
        "lower_bound_ms": real(data, "lower_bound_ms", ""),
        "alternatives": each(data, "alternatives", "", _alternative),
        "seconds": real(data, "seconds", ""),
        **evidence,
    }


def _batch(data: Any, at: str) -> Batch:
    row(data, at, 4, 4)
    return Batch(whole(data, 0, at), wholes(data, 1, at), real(data, 2, at), _kernel(data, 3, at))


def _alternative(data: Any, at: str) -> tuple[str, float]:
    row(data, at, 2, 2)
    return text(data, 0, at), real(data, 1, at)


def _evidence(data: dict[str, Any]) -> dict[str, Any]:
    """What a saved plan tells of how it was made."""
    record(data, "", "limits", "prices", "proof", "engine", "note", "hit_time_limit")
    prices = each(data, "prices", "", _price_row)
    different((price.key for price in prices), "the shapes in prices")
    return {
        "limits": OwnerLimits.from_dict(data["limits"], "limits"),
        "prices": prices,
        "proof": None if data["proof"] is None else Proof.from_dict(data["proof"], "proof"),
        "engine": text(data, "engine", ""),
        "note": text(data, "note", ""),
        "hit_time_limit": flag(data, "hit_time_limit", ""),
    }


def _price_row(data: Any, at: str) -> PriceRow:
    row(data, at, 4, 4)
    key = row(data[0], f"{at}[0]", 3, 3)
    ms, origin = reals(data, 1, at, high=_MOST_PRICE), texts(data, 2, at)
    kernels = texts(data, 3, at, _MOST_KERNEL)
    for name, values in (("origins", origin), ("kernels", kernels)):
        if len(values) != len(ms) and (values or name == "origins"):
            raise PlanError(f"{at}: found {len(ms)} prices and {len(values)} {name}")
    for i in range(len(kernels)):
        _kernel(kernels, i, f"{at}[3]")
    if not ms:
        raise PlanError(f"{at}[1]: expected the price of a batch of one at least, found none")
    shape = whole(key, 0, f"{at}[0]", 1), whole(key, 1, f"{at}[0]", 1)
    return PriceRow((*shape, text(key, 2, f"{at}[0]")), ms, origin, kernels)


def _kernel(of: Any, key: int, at: str) -> str:
    name = text(of, key, at, _MOST_KERNEL)
    try:
        check_kernel(name)
    except ValueError as error:
        raise PlanError(f"{at}[{key}]: {error}") from None
    return name
