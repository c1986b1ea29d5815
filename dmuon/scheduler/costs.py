"""The costs of an owner's work: batched Newton-Schulz time per shape, dtype and device.

`docs/costs.md` explains where the numbers come from and how far to trust them.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dmuon.config import NIC
from dmuon.scheduler.json_files import (
    cut,
    decode_fields,
    different,
    parse,
    read_text,
    sha256,
    write_text,
)
from dmuon.scheduler.specs import ITEM_SIZE, ShapeKey
from dmuon.types import KernelChoice, PlanError

ORIGINS = ("measured", "interpolated", "estimated", "analytic", "given")
"""How a price came about; "estimated" prices are scaled from measured times, beyond their range."""


def canonical_key(key: ShapeKey) -> ShapeKey:
    """Return the wide form of a shape; a tall matrix runs the same products, from the right.

    >>> canonical_key((6, 4, "float32"))
    (4, 6, 'float32')
    """
    rows, cols, dtype = key
    return (min(rows, cols), max(rows, cols), dtype)


MAX_BATCH = 16  # matrices
BATCH_NUMEL = 1 << 25  # two buckets of the default size in half precision


def largest_batch(rows: int, cols: int, max_batch: int, numel: int) -> int:
    """Return how many matrices one batch may have: at most ``max_batch``, with at most ``numel``
    elements in all, but at least one.

    >>> [largest_batch(4096, cols, 16, BATCH_NUMEL) for cols in (256, 4096, 14336)]
    [16, 2, 1]
    """
    return max(1, min(max_batch, numel // (rows * cols)))


# ---- the analytic model ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnalyticDevice:
    """A device class. Dense products in the NS dtype reach ``flops``, and half of that at a matrix
    dim of ``half_batch_dim``; ``bandwidth`` is in bytes per second, ``launch_s`` is the overhead of
    one kernel. A rank sends ``link`` bytes per second inside its node, and ``network`` to other
    nodes, and can receive as many meanwhile. ``triangles``: symmetric products compute one
    triangle. ``fitted`` (a CPU): the model adds the times of the standard form's operations and of
    X's bytes. Else it takes the cheaper form, and the longer time for each kind of product."""

    flops: float
    bandwidth: float
    launch_s: float
    half_batch_dim: float
    link: float = 1.5e9
    network: float = 1.5e9
    triangles: bool = False
    fitted: bool = True

    def __post_init__(self) -> None:
        if min(self.flops, self.bandwidth, self.link, self.network) < 1:
            raise PlanError(f"expected rates of at least 1 per second, found {self}")

    def standard_ms(self, rows: int, cols: int, batch: int, steps: int) -> float:
        """Return the milliseconds of the standard form on a batch, ``rows`` <= ``cols``."""
        half = 0.5 if self.triangles else 1.0
        # X is read three times and written once; a square is written, and read twice per product.
        wide = 2 * (1 + half) * steps * cols * rows**2, 4.0 * steps * rows * cols
        square = 2 * half * steps * rows**3, 5.0 * steps * rows**2
        return self._ms(batch, rows, (wide, square), 3 * steps)

    def gram_ms(self, rows: int, cols: int, batch: int, steps: int) -> float:
        """Return the milliseconds of the Gram form on a batch, ``rows`` <= ``cols``, with a restart
        before step 2 and then every 3 steps."""
        segments, half = 1 + len(range(2, steps, 3)), 0.5 if self.triangles else 1.0
        squares = 4 * steps - 3 * segments  # products of short side x short side
        wide = 2 * (1 + half) * segments * cols * rows**2, 3.0 * segments * cols * rows
        square = 2 * half * squares * rows**3, 4.0 * squares * rows**2
        return self._ms(batch, rows, (wide, square), 2 * segments + squares)

    def _ms(
        self, batch: int, rows: int, products: tuple[tuple[float, float], ...], launches: int
    ) -> float:
        """Add up ``products``, (operations, two-byte elements that move), with X and of squares."""
        work = batch * float(rows) ** 2  # one small matrix leaves the device idle, a batch does not
        rate = self.flops * work / (work + self.half_batch_dim**2)
        times = [(operations / rate, 2 * moved / self.bandwidth) for operations, moved in products]
        (wide, x), (square, _) = times
        each = wide + square + x if self.fitted else sum(map(max, times))
        return 1e3 * (batch * each + launches * self.launch_s)


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the rest of a training step, for `simulate`: operations per second of ``products``
    in forward and backward; bytes per second of elementwise passes (``copies``), and of passes into
    ``new`` memory; seconds of a host call (``call_s``), of each turn of a collective (``turn_s``),
    and of a rank's own cores per byte that it sends (``sent_s``)."""

    products: float
    copies: float
    new: float
    call_s: float
    turn_s: float
    sent_s: float


# By name: a pattern of the driver's name for it, special ones first; dense half-precision TFLOP/s
# from the data sheet; the fraction that large products reach (0.75 is assumed); HBM in TB/s; GB/s
# one way to devices of the node; Gbit/s of its usual network card; `half_batch_dim`.
_Row = tuple[str, float, float, float, float, float, float]
_GPUS: Mapping[str, _Row] = {
    "a100-40gb": ("a100-sxm4-40gb", 312, 0.683, 1.555, 300, 200, 1024),
    "a100-pcie": ("a[18]00.*pcie.*", 312, 0.683, 1.94, 32, 200, 1024),
    "a100": ("a100", 312, 0.683, 2.039, 300, 200, 1024),
    "a800": ("a800", 312, 0.683, 2.039, 200, 200, 1024),
    "h100-pcie": ("h[18]00.*(pcie|hbm2e)", 756, 0.75, 2.0, 64, 400, 768),
    "h100-nvl": ("h100.*nvl", 835, 0.75, 3.9, 300, 400, 768),
    "h100": ("h100", 989, 0.774, 3.35, 450, 400, 768),
    "h800": ("h800", 989, 0.491, 3.35, 200, 400, 512),
    "h20": ("h20", 148, 0.932, 4.0, 450, 400, 768),
    "h200-nvl": ("h200.*nvl", 835, 0.75, 4.8, 450, 400, 768),
    "h200": ("h200", 989, 0.8, 4.8, 450, 400, 768),
    "b200": ("b200", 2250, 0.7, 7.7, 900, 400, 1024),
    "gb200": ("gb200", 2250, 0.7, 7.7, 900, 400, 1024),
    "b300": ("b300", 2250, 0.7, 7.7, 900, 800, 1024),
    "gb300": ("gb300", 2500, 0.7, 8.0, 900, 800, 1024),
    "rtx4090": ("rtx 4090", 165, 0.98, 1.008, 32, 10, 768),
    "mi250": ("mi250x?", 181, 0.53, 1.6, 50, 100, 768),
    "mi300x": ("mi300x", 1307, 0.5, 5.3, 448, 400, 1024),
    "ascend-910b": ("ascend ?910b.*", 313, 0.75, 1.6, 196, 200, 768),
}
_HBM_SHARE, _LINK_SHARE, NIC_SHARE = 0.9, 0.8, 0.9  # fractions of data sheets' rates


def _gpu(row: _Row) -> AnalyticDevice:
    name, peak, reached, hbm, link, nic, half = row
    rates = 1e12 * peak * reached, 1e12 * hbm * _HBM_SHARE
    links = 1e9 * link * _LINK_SHARE, 1e9 / 8 * nic * NIC_SHARE
    # Our Triton kernels run on GPUs of NVIDIA and AMD.
    return AnalyticDevice(*rates, 5e-6, half, *links, not name.startswith("ascend"), fitted=False)


# The CPU is fitted to measurements of one thread with AMX bf16, and of gloo between processes.
ANALYTIC_DEVICES: Mapping[str, AnalyticDevice] = MappingProxyType(
    {"cpu": AnalyticDevice(8.1e11, 7.3e9, 4.3e-5, 105.0)} | {n: _gpu(r) for n, r in _GPUS.items()}
)
_KNOWN = ", ".join(sorted(ANALYTIC_DEVICES))


def analytic_class(device_type: str, device_name: str = "") -> str:
    """Return the row of `ANALYTIC_DEVICES` for a device, by its type and its driver's name for it.

    Raises:
        PlanError: no row fits, for instance a part of a GPU (MIG); lists the rows.

    >>> analytic_class("cpu"), analytic_class("xpu", "NVIDIA H100 80GB HBM3")
    ('cpu', 'h100')
    """
    if device_type == "cpu":
        return "cpu"
    text = device_name.lower()
    for name, (pattern, *_) in _GPUS.items() if " mig " not in text else ():
        if re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", text):
            return name
    found = f"{device_name!r} ({device_type})" if device_name else f"a device of type {device_type}"
    raise PlanError(
        f"costs='analytic' knows no price of {found}: pass costs='analytic:<device>' with the one "
        f"most like it of {_KNOWN}, or costs='measured'"
    )


def nearest_device(device_type: str, device_name: str) -> AnalyticDevice:
    """Return the device's row, or, without one, the H100's, which measured times will scale."""
    try:
        return ANALYTIC_DEVICES[analytic_class(device_type, device_name)]
    except PlanError:
        return ANALYTIC_DEVICES["h100"]


def nic_bandwidth(text: str, ranks_per_node: int) -> float:
    """Return bytes per second to other nodes from each rank of a node while all of them send.

    >>> nic_bandwidth("400Gb/gpu", 8), nic_bandwidth("3.2Tb/node", 8)
    (45000000000.0, 45000000000.0)
    """
    if (match := re.fullmatch(NIC, text.strip())) is None:
        raise PlanError(
            f"nic {text!r} is no link rate: write bits per second, as in 400Gb/gpu or 400Gb/node"
        )
    bits = float(match[1]) * (1e9 if match[2] in "Gg" else 1e12)
    return bits / 8 * NIC_SHARE / (1 if match[3].lower() == "gpu" else ranks_per_node)


# ---- the table ---------------------------------------------------------------------------


@dataclass(frozen=True)
class CostTable:
    """Costs in milliseconds: table entries, and estimates from them.

    ``entries`` maps ``(rows, cols, dtype)`` to milliseconds by batch size. The table keeps the wide
    form of a shape; if both forms are given, the larger time counts. A batch between two entries is
    interpolated linearly; beyond the largest entry, a matrix costs as much as in that entry. A
    shape without entries is estimated by the ``device``'s analytic model, times the median ratio of
    the entries to that model; without a ``device`` it has no price. ``entry_origin``: of `ORIGINS`.

    ``kernels`` names, likewise, the kernel with which an entry was timed, or that would run a batch
    that was not timed. ``momentum``: prices include the momentum update and the normalization, as
    for an owner that keeps the momentum; else they are of Newton-Schulz alone. ``rates`` describe
    the rest of a training step, if measured.

    Raises:
        PlanError: an entry is not a shape with positive batch sizes and finite times >= 0, or a
            kernel's name is invalid.
    """

    source: str
    entries: Mapping[ShapeKey, Mapping[int, float]] = field(default_factory=dict)
    device: AnalyticDevice | None = None
    ns_steps: int = 5
    entry_origin: str = "given"
    kernels: Mapping[ShapeKey, Mapping[int, str]] = field(default_factory=dict)
    momentum: bool = True
    rates: Rates | None = None

    def __post_init__(self) -> None:
        if self.entry_origin not in ORIGINS:
            raise PlanError(
                f"{self.source}: entry_origin must be one of {ORIGINS}, found {self.entry_origin!r}"
            )
        entries = self._canonical(self.entries, "finite milliseconds >= 0", _is_time)
        kernels = self._canonical(self.kernels, "kernels such as 'standard/torch/bfloat16'", _named)
        object.__setattr__(self, "entries", entries)
        object.__setattr__(self, "kernels", kernels)

    def _canonical(
        self, given: Mapping[Any, Any], expected: str, fits: Callable[[Any], bool]
    ) -> dict[ShapeKey, dict[int, Any]]:
        """Check values, and return them by the wide form of each shape and ascending batch size."""
        found: dict[ShapeKey, dict[int, Any]] = {}
        for key, by_batch in given.items():
            rows, cols, dtype = key if isinstance(key, tuple) and len(key) == 3 else (0, 0, "")
            if not (_is_size(rows) and _is_size(cols) and dtype in ITEM_SIZE):
                raise PlanError(
                    f"{self.source}: a shape must be (rows, cols, dtype) with dtype one of "
                    f"{', '.join(ITEM_SIZE)}, found {key!r}"
                )
            needs = f"{self.source}: {key} needs a mapping from batch sizes >= 1 to {expected}"
            if not isinstance(by_batch, Mapping):
                raise PlanError(f"{needs}, found {by_batch!r}")
            into = found.setdefault(canonical_key(key), {}) if by_batch else {}
            for batch, value in by_batch.items():
                if not (_is_size(batch) and fits(value)):
                    raise PlanError(f"{needs}, found {batch!r}: {value!r}")
                into[batch] = max(value, into.get(batch, value))
        return {key: dict(sorted(by_batch.items())) for key, by_batch in found.items()}

    @classmethod
    def analytic(cls, device: str = "cpu", ns_steps: int = 5, momentum: bool = True) -> CostTable:
        """Return a table with the model of a device class (see `ANALYTIC_DEVICES`)."""
        device = device.lower()
        if device not in ANALYTIC_DEVICES:
            raise PlanError(f"costs='analytic:{device}': unknown device class; known: {_KNOWN}")
        source = f"analytic:{device}" + (f", {ns_steps} steps" if ns_steps != 5 else "")
        return cls(source, device=ANALYTIC_DEVICES[device], ns_steps=ns_steps, momentum=momentum)

    def on_network(self, nic: str, ranks_per_node: int) -> CostTable:
        """Return the table with this network card; PlanError if `nic_bandwidth` cannot read it."""
        network, told = nic_bandwidth(nic, ranks_per_node), self.source.partition(", nic ")[0]
        device = self.device and replace(self.device, network=network)
        return replace(self, source=f"{told}, nic {nic}", device=device)

    def batch_ms(self, key: ShapeKey, batch: int) -> float:
        """Return milliseconds of one update of ``batch`` matrices; PlanError without a price."""
        return self._price(key, batch)[0]

    def origin(self, key: ShapeKey, batch: int) -> str:
        """Return how `batch_ms` came about: one of `ORIGINS`."""
        return self._price(key, batch)[1]

    @cached_property
    def _scale(self) -> float:
        """Median ratio of the entries to the analytic model."""
        every = [(key, batch, ms) for key, by in self.entries.items() for batch, ms in by.items()]
        ratios = [ms / self._modelled(key, batch) for key, batch, ms in every]
        return statistics.median(ratios) if ratios else 1.0

    def _modelled(self, key: ShapeKey, batch: int) -> float:
        """Return the milliseconds of Newton-Schulz by the analytic model, with momentum update and
        normalization if ``momentum``."""
        assert self.device is not None
        (rows, cols, dtype), device, steps = canonical_key(key), self.device, self.ns_steps
        ms = device.standard_ms(rows, cols, batch, steps)
        if not device.fitted and steps > 1:
            ms = min(ms, device.gram_ms(rows, cols, batch, steps))
        # Momentum is read and written, the gradient read; 6 launches.
        moved = 3 * ITEM_SIZE.get(dtype, 4) * batch * rows * cols
        return ms + self.momentum * 1e3 * (moved / device.bandwidth + 6 * device.launch_s)

    def _price(self, key: ShapeKey, batch: int) -> tuple[float, str]:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, found {batch}")
        if (known := self.entries.get(canonical_key(key))) is None:
            if self.device is None:
                raise PlanError(
                    f"{self.source} has no cost for {key} in a batch of {batch}, and no device to "
                    "estimate it by: add the shape to the table (python -m dmuon profile writes "
                    "one), or pass costs='measured' or 'analytic'"
                )
            ms = self._scale * self._modelled(key, batch)
            return ms, "estimated" if self.entries else "analytic"
        ms, origin = self._between(known, batch)
        smallest = min(known)
        if batch < smallest and self.device is not None:
            ms *= self._modelled(key, batch) / self._modelled(key, smallest)
        return ms, origin

    def _between(self, known: Mapping[int, float], batch: int) -> tuple[float, str]:
        """Return a batch's time and its origin; below all sizes, the time of the smallest."""
        if batch in known:
            return known[batch], self.entry_origin
        sizes = list(known)
        if (at := bisect_left(sizes, batch)) == 0:
            return known[sizes[0]], "estimated"
        if at == len(sizes):
            return known[sizes[-1]] / sizes[-1] * batch, "estimated"
        (low, first), (high, last) = ((size, known[size]) for size in sizes[at - 1 : at + 1])
        part = (batch - low) / (high - low)
        ms = first * (1 - part) + last * part
        return min(max(ms, min(first, last)), max(first, last)), "interpolated"  # despite rounding

    def kernel(self, key: ShapeKey, batch: int) -> str:
        """Return the kernel of `batch_ms`, or "" if none is named. A batch size with neither entry
        nor kernel runs like the next larger size that has one, or like the largest: a kernel chosen
        for more work fills the device."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1, found {batch}")
        names = self.kernels.get(canonical_key(key), {})
        if not (sizes := sorted({*names, *self.entries.get(canonical_key(key), ())})):
            return ""
        return names.get(sizes[min(bisect_left(sizes, batch), len(sizes) - 1)], "")

    def updated(self, newer: CostTable) -> CostTable:
        """Return this table updated with the entries and kernels of ``newer``; an entry without a
        kernel removes the earlier kernel, too."""
        kept = {
            key: {b: kernel for b, kernel in by.items() if b not in newer.entries.get(key, ())}
            for key, by in self.kernels.items()
        }
        return replace(
            newer,
            entries=_merged(self.entries, newer.entries),
            kernels=_merged(kept, newer.kernels),
        )

    def to_json(self) -> str:
        """Return one JSON object, from which `from_json` makes an equal table."""
        return json.dumps(_data_of(self), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "the cost table") -> CostTable:
        """Return the table that `to_json` wrote; unknown fields are ignored. Raise PlanError, with
        ``where``, if the text is no cost table, has another version, or has a wrong entry."""
        try:
            data = parse(text)
            form = data.get("format") if isinstance(data, dict) else type(data).__name__
            if form != _FORMAT:
                raise PlanError(f"found format {cut(repr(form))}, expected {_FORMAT!r}")
        except PlanError as error:
            raise PlanError(f"{where} is no cost table: {error}; {_HOW} writes one") from error
        if data.get("version") != _VERSION:
            raise PlanError(
                f"{where} is a cost table of version {cut(repr(data.get('version')))}, this dmuon "
                f"reads version {_VERSION}: write it again with {_HOW}"
            )
        try:
            return cls(**_fields_of(data))
        except ValueError as error:
            what = f"{where} is damaged ({cut(str(error))})"
            raise PlanError(f"{what}: write it again with {_HOW}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a file that `load` and ``costs=path`` read."""
        write_text(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostTable:
        """Return the table in a file; raise PlanError, naming the file, if it has none."""
        where = f"costs={os.fspath(path)!r}"
        return cls.from_json(_read(path, where), where)


def _merged(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[Any, dict[int, Any]]:
    return {key: {**old.get(key, {}), **new.get(key, {})} for key in {**old, **new}}


_MOST_SIZE = 1 << 40  # the largest side or batch: its price still fits a float


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_SIZE


def _is_time(value: object) -> bool:
    return type(value) is not bool and isinstance(value, (int, float)) and 0 <= value < math.inf


def _named(kernel: object) -> bool:
    try:
        return kernel == "" or (isinstance(kernel, str) and bool(KernelChoice.parse(kernel)))
    except ValueError:
        return False


def resolve_costs(costs: Any, device_type: str, *, momentum: bool = True) -> CostTable:
    """Return the prices that the ``costs=`` argument of `dedicate_params` names; ``momentum`` is
    for an analytic model.

    Raises:
        PlanError: the name or type is unknown, or the file is no cost table.
    """
    if isinstance(costs, CostTable):
        return costs
    if isinstance(costs, str) and costs.partition(":")[0] == "analytic":
        name = costs.partition(":")[2] or analytic_class(device_type)
        return CostTable.analytic(name, momentum=momentum)
    is_path = isinstance(costs, str) and (costs.endswith(".json") or os.path.isfile(costs))
    if is_path or isinstance(costs, os.PathLike):
        return CostTable.load(costs)
    if costs == "measured":
        raise PlanError(
            "costs='measured' needs the devices that will train: to plan elsewhere, write a table "
            f"there with {_HOW} and pass its path, or pass 'analytic:<device>'"
        )
    found = repr(costs) if isinstance(costs, str) else type(costs).__name__
    raise PlanError(
        f"costs={found} is unknown: pass 'measured', 'analytic', 'analytic:<device>' with one of "
        f"{_KNOWN}, the path of a cost table (.json), or a CostTable"
    )


# ---- the file format ---------------------------------------------------------------------

_FORMAT = "dmuon cost table"
_VERSION = 1
_HOW = "python -m dmuon profile --out PATH"
_BATCH_SIZE = re.compile("[1-9][0-9]{0,6}")

_FIELDS = {
    "source": str,
    "origin": str,
    "ns_steps": int,
    "momentum": bool,
    "device": AnalyticDevice | None,
    "entries": tuple[Any, ...],
    "kernels": tuple[Any, ...],
}


def _data_of(table: CostTable) -> dict[str, Any]:
    def rows(of: Mapping[ShapeKey, Mapping[int, Any]], name: str) -> list[dict[str, Any]]:
        names = "rows", "cols", "dtype", name
        values = {key: {str(batch): v for batch, v in by.items()} for key, by in of.items()}
        return [dict(zip(names, (*key, by))) for key, by in sorted(values.items())]

    made: dict[str, Any] = {} if table.rates is None else {"rates": asdict(table.rates)}
    return made | {
        "format": _FORMAT,
        "version": _VERSION,
        "source": table.source,
        "origin": table.entry_origin,
        "ns_steps": table.ns_steps,
        "momentum": table.momentum,
        "device": None if table.device is None else asdict(table.device),
        "entries": rows(table.entries, "ms"),
        "kernels": rows(table.kernels, "kernel"),
    }


def _read(path: str | os.PathLike[str], where: str) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"{where} cannot be read ({error}); {_HOW} writes one") from error


def _fields_of(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the table in a file's data."""
    optional = {"rates": Rates} if "rates" in data else {}
    found = decode_fields(_FIELDS | optional, data)
    found["entry_origin"] = found.pop("origin")
    for name, value, of in (("entries", "ms", float), ("kernels", "kernel", str)):
        hints = {"rows": int, "cols": int, "dtype": str, value: dict[str, of]}  # type: ignore[valid-type]
        rows = []
        for i, row in enumerate(found[name]):
            *key, by_text = decode_fields(hints, row, f"{name}[{i}]").values()
            if wrong := [size for size in by_text if not _BATCH_SIZE.fullmatch(size)]:
                told = cut(wrong[0])
                raise PlanError(f"{name}: expected batch sizes such as '16', found {told!r}")
            rows.append((tuple(key), {int(size): v for size, v in by_text.items()}))
        different((key for key, _ in rows), f"the shapes of {name}")
        found[name] = dict(rows)
    return found


# ---- the cache ---------------------------------------------------------------------------
# One file per key: a cost table with its key and a digest. No failure here stops training:
# functions return a description of the problem.


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Everything that a measured time depends on besides shape, parameter dtype and batch size.
    ``device``: the hardware and a process's part of it. ``kernels``: backend and version."""

    device: str
    torch: str
    kernels: str
    ns_dtype: str
    ns_steps: int
    momentum: bool = True

    def file_name(self) -> str:
        """Return the name of the cache file.

        >>> CacheKey("H200", "2.13.0", "torch-1", "float16", 5).file_name()
        'H200-torch2.13.0-float16-0a38fb6d95.json'
        """
        readable = f"{self.device[:60]}-torch{self.torch}-{self.ns_dtype}"
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", readable).strip("-")
        return f"{readable}-{sha256(asdict(self))[:10]}.json"


def cache_directory() -> Path | None:
    """Return ``$XDG_CACHE_HOME/dmuon``, else ``~/.cache/dmuon``; None without a home directory. By
    https://specifications.freedesktop.org/basedir-spec/latest/ a relative path is ignored."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser(os.path.join("~", ".cache"))
    return Path(base) / "dmuon" if os.path.isabs(base) else None


def read_cache(
    directory: str | os.PathLike[str], key: CacheKey
) -> tuple[CostTable | None, str | None]:
    """Return the table cached for ``key``, and the problem if the file cannot be used. Its kernels
    were chosen by measurement; a time without a kernel is of the fixed rule's kernel."""
    path = Path(directory, key.file_name())
    if not os.path.lexists(path):
        return None, None
    try:
        text = _read(path, str(path))
        table = CostTable.from_json(text, str(path))
    except PlanError as error:
        return None, f"{error}. It is ignored and rebuilt"
    data = json.loads(text)
    # Nothing else would notice a changed digit in a time.
    if data.get("digest") != sha256(data | {"key": asdict(key), "digest": None}):
        why = f"its digest is not that of its content for {asdict(key)}"
        return None, f"{path} is damaged ({why}); it is ignored and rebuilt"
    return table, None


def add_to_cache(directory: str | os.PathLike[str], key: CacheKey, table: CostTable) -> str | None:
    """Merge ``table`` into the file of ``key``, over its entries; return a problem, or None. If two
    processes write at the same moment, the later one wins; the other will measure again."""
    path = Path(directory, key.file_name())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        old, _ = read_cache(directory, key)
        data = _data_of(table if old is None else old.updated(table)) | {"key": asdict(key)}
        content = json.dumps(data | {"digest": sha256(data | {"digest": None})}, indent=1)
        write_text(path, content + "\n")
    except OSError as error:
        return f"measured costs cannot be kept in {path} ({error})"
    return None
