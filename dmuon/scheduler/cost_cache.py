"""Measured costs on disk: one file a device and version, shared by all processes of a user.

A file is a cost table (``costs=path`` reads it too) that names the key it belongs to, and has a
digest: one that is damaged is ignored and measured again. Nothing that
goes wrong here stops training: functions return the problem in words, for the caller to warn of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dmuon.scheduler import cost_files
from dmuon.scheduler.costs import (
    AnalyticDevice,
    CostTable,
    ShapeKey,
    SquareKey,
    canonical_key,
    merge_slowest,
)
from dmuon.scheduler.json_files import cut, read_text, row, text, whole, wholes
from dmuon.types import PlanError

__all__ = ["CacheKey", "add", "default_directory", "path_of", "read"]

_LOCK_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a measured time depends on besides shape, parameter dtype and batch size.

    ``device`` names the hardware and how much of it a process has; ``kernels`` the backend and
    the version of the kernels.
    """

    device: str
    torch: str
    kernels: str
    ns_dtype: str
    ns_steps: int

    def file_name(self) -> str:
        """
        >>> CacheKey("H200", "2.13.0", "torch-1", "float16", 5).file_name()
        'H200-torch2.13.0-float16-5f4053fcd1.json'
        """
        readable = f"{self.device[:60]}-torch{self.torch}-{self.ns_dtype}"
        text = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', readable).strip('-')}-{digest}.json"


@dataclass(frozen=True, slots=True)
class Found:
    """What `read` found: entries by canonical shape and batch size, and what was wrong.

    ``kernels`` are those that the times of ``entries`` were measured with, where they were named,
    and ``squares`` the times of the m x m part by (m, dtype) and batch size. A time counts only
    with the kernel that it was measured with. ``tuned``: the batch sizes whose kernel was chosen by
    measurement; the others have what the fixed rule said when there was no time for that.
    """

    entries: dict[ShapeKey, dict[int, float]]
    problem: str | None = None
    kernels: dict[ShapeKey, dict[int, str]] = field(default_factory=dict)
    squares: dict[SquareKey, dict[int, float]] = field(default_factory=dict)
    tuned: dict[ShapeKey, set[int]] = field(default_factory=dict)


def default_directory() -> Path | None:
    """``$XDG_CACHE_HOME/dmuon``, else ``~/.cache/dmuon``; None without a home directory.

    https://specifications.freedesktop.org/basedir-spec/latest/ (a relative path does not count).
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser(os.path.join("~", ".cache"))
    return Path(base) / "dmuon" if os.path.isabs(base) else None


def path_of(directory: str | os.PathLike[str], key: CacheKey) -> Path:
    """The file of ``key``."""
    return Path(directory) / key.file_name()


def read(directory: str | os.PathLike[str], key: CacheKey) -> Found:
    """The entries cached for ``key``; none, and a problem, if the file cannot be used."""
    path = path_of(directory, key)
    try:
        content = read_text(path, cost_files.MOST_CHARACTERS)
    except FileNotFoundError:
        return Found({})
    except (OSError, ValueError) as error:
        return Found({}, f"{path} cannot be read ({error}); it is ignored")
    try:
        data = cost_files.parsed(content, str(path))
        table = CostTable.from_dict(data, str(path))
    except PlanError as error:
        return Found({}, f"{error}. It is ignored and rebuilt")
    if data.get("digest") != _digest(data):
        return Found({}, f"{path} is damaged (its digest differs); it is ignored and rebuilt")
    if data.get("key") != asdict(key):
        return Found(
            {},
            f"{path} is for {cut(repr(data.get('key')))}, expected {asdict(key)}; it is ignored "
            "and rebuilt",
        )
    return Found(
        merge_slowest([{canonical_key(k): by} for k, by in table.entries.items()]),
        None,
        {key: dict(by) for key, by in table.kernels.items()},
        {key: dict(by) for key, by in table.squares.items()},
        _tuned(data.get("tuned")),
    )


def _digest(data: dict[str, Any]) -> str:
    """Of everything else in a file: a changed digit in a time looks like a time."""
    text = json.dumps({**data, "digest": None}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _tuned(rows: object) -> dict[ShapeKey, set[int]]:
    """What `add` wrote of it; nothing of what is not in that form: then it is chosen again."""
    found: dict[ShapeKey, set[int]] = {}
    for fields in rows if isinstance(rows, list) else []:
        try:
            row(fields, "tuned", 4, 4)
            shape = whole(fields, 0, "", 1), whole(fields, 1, "", 1), text(fields, 2, "")
            found[canonical_key(shape)] = set(wholes(fields, 3, "tuned", 1))
        except PlanError:
            continue
    return found


def add(
    directory: str | os.PathLike[str],
    key: CacheKey,
    entries: Mapping[ShapeKey, Mapping[int, float]],
    device: AnalyticDevice | None = None,
    *,
    kernels: Mapping[ShapeKey, Mapping[int, str]] | None = None,
    squares: Mapping[SquareKey, Mapping[int, float]] | None = None,
    tuned: Mapping[ShapeKey, Collection[int]] | None = None,
) -> str | None:
    """Merge ``entries`` into the file of ``key``, over what it has; a problem, or None.

    ``kernels`` are those of ``entries``, and ``tuned`` the batch sizes whose kernel was chosen by
    measurement. An entry replaces the kernel of the one before it too: one
    that comes without a kernel has none afterwards.

    The file is replaced in one step, so that readers see the old or the new one, and writers take
    turns, so that none undoes what another wrote.
    """
    path = path_of(directory, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _turn(path):
            found = read(directory, key)
            _merge(found, entries, kernels or {}, squares or {}, tuned or {})
            table = CostTable(
                f"measured on {key.device}",
                found.entries,
                device,
                key.ns_steps,
                "measured",
                {shape: names for shape, names in found.kernels.items() if names},
                found.squares,
            )
            ours = {
                "key": asdict(key),
                "tuned": [[*k, sorted(some)] for k, some in sorted(found.tuned.items()) if some],
            }
            data = table.to_dict() | ours
            data["digest"] = _digest(data)
            _replace(path, json.dumps(data, indent=1) + "\n")
    except OSError as error:
        return f"measured costs cannot be kept in {path} ({error})"
    return None


def _merge(
    found: Found,
    entries: Mapping[ShapeKey, Mapping[int, float]],
    kernels: Mapping[ShapeKey, Mapping[int, str]],
    squares: Mapping[SquareKey, Mapping[int, float]],
    tuned: Mapping[ShapeKey, Collection[int]],
) -> None:
    """Put these over what was ``found``: entries with their kernels, and squares."""
    for shape, by_batch in entries.items():
        names = found.kernels.setdefault(canonical_key(shape), {})
        for batch in by_batch:
            names.pop(batch, None)
        found.tuned.get(canonical_key(shape), set()).difference_update(by_batch)
        found.entries.setdefault(canonical_key(shape), {}).update(by_batch)
    for shape, by_name in kernels.items():
        found.kernels.setdefault(canonical_key(shape), {}).update(by_name)
    for shape, some in tuned.items():
        found.tuned.setdefault(canonical_key(shape), set()).update(some)
    for square, by_batch in squares.items():
        found.squares.setdefault(square, {}).update(by_batch)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        # Not tempfile, whose files no one else may read: a cache directory may be shared.
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock of ``path``; after some seconds, or where there are no locks, go on without.

    The operating system frees the lock of a process that dies.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path.with_name(f".{path.name}.lock"), "a", encoding="utf-8") as lock:
        deadline = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.005)
            except OSError:  # this file system has no locks
                break
        yield
