"""JSON files, checked before they are believed: plans, cost tables, the cache of costs.

`parse` bounds what a text may cost. `decode` makes objects of the type that a hint names; a
PlanError names the field by its path, what was found and what was expected.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import math
import os
import re
import reprlib
import stat
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints

from dmuon.types import PlanError

# DeepSeek-V3, 45,090 matrices on 1,024 ranks: 5 million characters, 480,000 values.
MOST_CHARACTERS = 64 << 20
_MOST_VALUES = 8_000_000  # numbers, texts, lists and objects, about
_MOST_MESSAGE = 1_000  # characters of an error
_STALE_S = 3600.0
_MOST_TEXT = 100_000  # characters of one text
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can escape half a character

MOST_WHOLE = 1 << 62
MOST_MS = 1e15  # 30,000 years


def read_text(path: str | os.PathLike[str], most: int = MOST_CHARACTERS) -> str:
    """The text of a file; OSError if it cannot be read or is no regular one (a pipe may never end),
    ValueError if it has more than ``most`` bytes or is no UTF-8."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"found more than {most:,} bytes, expected at most that")
    return data.decode("utf-8")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in UTF-8 so that nobody ever sees a part of it; OSError, and the file is as it
    was, if that fails. What killed writers have left of it is removed after an hour."""
    path = Path(path)
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write {path}: the directory {path.parent} does not exist; create it first"
        )
    with contextlib.suppress(OSError):
        for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            if time.time() - left.stat().st_mtime > _STALE_S:
                left.unlink()
    # Not tempfile, whose files no one else may read: a cache directory may be shared.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def parse(
    text: str, most: int = MOST_CHARACTERS, number: Callable[[str], float] | None = None
) -> Any:
    """The data in a JSON text. PlanError, which says what was found, if it is no JSON, is more than
    any plan or table has, or has a key twice, or an infinite number or NaN unless ``number`` reads
    them."""
    if not isinstance(text, str):
        raise PlanError(f"expected a JSON text, found {type(text).__name__}")
    if len(text) > most:
        raise PlanError(f"found {len(text):,} characters, expected at most {most:,}")
    if (values := sum(map(text.count, ",[{"))) > _MOST_VALUES:
        raise PlanError(f"found about {values:,} values, expected at most {_MOST_VALUES:,}")
    try:
        how: Any = {"parse_float": number or _finite, "parse_constant": number or _finite}
        return json.loads(text, object_pairs_hook=_object, **how)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:  # also of thousands of digits, or of levels
        raise PlanError(f"expected JSON, found {_shown(text)} ({error})") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) < len(pairs):
        different([key for key, _ in pairs], "the keys of an object")
    return made


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        found = f"infinite or NaN ({digits[:40]})"
        raise PlanError(f"found a number that is {found}, expected a finite one")
    return value


def sha256(data: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> str:
    """The hash of data as JSON, in any order of its keys; ``default`` is that of `json.dumps`."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=default).encode()).hexdigest()


def decode(hint: Any, data: Any, at: str = "") -> Any:
    """An object of the type that a hint names, made from parsed JSON; ``at`` is its path.

    A dataclass is an object with all of its fields, or a list of them in order. Numbers go from 0
    to `MOST_WHOLE`, or `MOST_MS` with a fraction, unless the hint is ``Annotated`` with a range. A
    PlanError begins with the path of what is wrong."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return data
    if origin in (UnionType, Union):  # ... | None
        return None if data is None else decode(parts[0], data, at)
    if origin is Annotated:
        return _number(parts[0], data, at, *parts[1])
    if hint in (int, float):
        return _number(hint, data, at, 0, MOST_WHOLE if hint is int else MOST_MS)
    if hint is str:
        if not isinstance(data, str) or len(data) > _MOST_TEXT:
            _refuse(at, data, f"a text of at most {_MOST_TEXT:,} characters")
        if not data.isascii() and _SURROGATE.search(data):
            _refuse(at, data, "characters that can be printed")
    if hint is bool and not isinstance(data, bool):
        _refuse(at, data, "true or false")
    if hint in (str, bool):
        return data
    if origin is tuple:
        return _tuple(parts, data, at)
    if origin is dict:
        return {key: decode(parts[1], value, _path(at, key)) for key, value in _record(data, at)}
    if issubclass(hint, Enum):
        members = {member.value: member for member in hint}
        if not isinstance(data, str) or data not in members:
            _refuse(at, data, f"one of {', '.join(map(repr, members))}")
        return members[data]
    hints = _hints(hint)
    if isinstance(data, list):
        values = _tuple(tuple(hints.values()), data, at)
    else:
        values = tuple(decode_fields(hints, data, at).values())
    try:
        return hint(*values)
    except ValueError as error:
        raise PlanError(f"{at}: {error}" if at else str(error)) from error


def decode_fields(hints: Mapping[str, Any], data: Any, at: str = "") -> dict[str, Any]:
    """The values of an object by the type hint of each; other keys are left out."""
    found = dict(_record(data, at))
    for name in hints:
        if name not in found:
            raise PlanError(f"{_path(at, name)} is missing")
    return {name: decode(hint, found[name], _path(at, name)) for name, hint in hints.items()}


@lru_cache
def _hints(of: Any) -> dict[str, Any]:
    hints = get_type_hints(of, include_extras=True)
    return {one.name: hints[one.name] for one in fields(of)}


def _record(data: Any, at: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(data, dict):
        _refuse(at or "the whole", data, "an object")
    return data.items()


def _tuple(parts: tuple[Any, ...], data: Any, at: str) -> tuple[Any, ...]:
    """A list with an entry for each of ``parts``, or with any number of the first: ``int, ...``."""
    if not isinstance(data, list):
        _refuse(at, data, "a list")
    if ... in parts:
        if parts[0] is int and all(type(n) is int and 0 <= n <= MOST_WHOLE for n in data):
            return tuple(data)  # millions, in large plans
        parts = parts[:1] * len(data)
    if len(data) != len(parts):
        _refuse(at, data, f"a list of {len(parts)} entries")
    return tuple(decode(parts[i], value, f"{at}[{i}]") for i, value in enumerate(data))


def _number(hint: type, data: Any, at: str, low: float, high: float) -> Any:
    hints = (int,) if hint is int else (int, float)
    if type(data) not in hints or not low <= data <= high:
        whole = f"a whole number from {low:,} to {high:,}"
        _refuse(at, data, whole if hint is int else f"a number from {low:g} to {high:g}")
    return data


def different(values: Iterable[Hashable], what: str) -> None:
    """Raise PlanError if one of ``values`` is there twice."""
    seen: set[Hashable] = set()
    for value in values:
        if value in seen:
            raise PlanError(f"{what}: found {_shown(value)} twice, expected it once")
        seen.add(value)


def cut(message: str) -> str:
    """A message, cut to a readable size."""
    return message if len(message) <= _MOST_MESSAGE else f"{message[:_MOST_MESSAGE]} ..."


def _path(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _shown(value: Any) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 48
    short.maxlevel = 2
    return short.repr(value)


def _refuse(at: str, value: Any, expected: str) -> NoReturn:
    size = f"a list of {len(value):,}: " if isinstance(value, list) else ""
    raise PlanError(f"{at}: expected {expected}, found {size}{_shown(value)}")
