"""JSON files of plans, cost tables and cached costs.

`decode` makes objects of the type that a hint names; its PlanError gives the path of the field, the
value found and the value expected.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import reprlib
import stat
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from dmuon.types import PlanError

# A plan of DeepSeek-V3, 45,090 matrices on 1,024 ranks, has 5 million characters.
_MOST_CHARACTERS = 64 << 20
_MOST_MESSAGE = 1_000  # characters of an error
_LARGEST = {int: 1 << 62, float: 1e30}
_EXPECTED = {
    str: "a text",
    bool: "true or false",
    int: f"a whole number from 0 to {_LARGEST[int]:,}",
    float: f"a number from 0 to {_LARGEST[float]:g}",
}


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file. OSError if it cannot be read or is not a regular file (a pipe may
    never end), ValueError if it is larger than any plan or table or is not UTF-8."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    with open(path, "rb") as file:
        data = file.read(_MOST_CHARACTERS + 1)
    if len(data) > _MOST_CHARACTERS:
        raise ValueError(f"found more than {_MOST_CHARACTERS:,} bytes, expected at most that")
    return data.decode("utf-8")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file atomically, so that no reader ever sees a part of it. OSError if that
    fails; the file then stays as it was."""
    path = Path(path)
    if path.exists() and not path.is_file():  # such as /dev/stdout
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write {path}: the directory {path.parent} does not exist; create it first"
        )
    # Not tempfile, whose files other users cannot read: a cache directory may be shared.
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.tmp")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def parse(text: str) -> Any:
    """Return the data in a JSON text; raise PlanError, quoting the text, if it is not JSON."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: huge integers, too
        raise PlanError(f"expected JSON, found {_shown(text)} ({error})") from error


def sha256(data: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> str:
    """Return a hash of data as JSON, whatever the order of keys; ``default`` as in `json.dumps`."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=default).encode()).hexdigest()


def decode(hint: Any, data: Any, at: str = "") -> Any:
    """Make an object of the type that a hint names from parsed JSON; ``at`` is its path.

    A dataclass is read from a JSON object with all of its fields, or from a list of them in order.
    Numbers must be finite and not negative. A PlanError begins with the path of the wrong value."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return data
    if origin in (UnionType, Union):  # ... | None
        return None if data is None else decode(parts[0], data, at)
    if hint in _EXPECTED:
        fits = type(data) is hint or (hint is float and type(data) is int)
        if not fits or (hint in _LARGEST and not 0 <= data <= _LARGEST[hint]):
            _refuse(at, data, _EXPECTED[hint])
        return data
    if origin is tuple:
        return _tuple(parts, data, at)
    if origin is dict:
        return {key: decode(parts[1], v, _path(at, key)) for key, v in _record(data, at).items()}
    if issubclass(hint, Enum):
        if data not in (known := [member.value for member in hint]):
            _refuse(at, data, f"one of {', '.join(map(repr, known))}")
        return hint(data)
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
    """Decode the fields of a JSON object by their type hints; other keys are ignored."""
    found = _record(data, at)
    for name in hints:
        if name not in found:
            raise PlanError(f"{_path(at, name)} is missing")
    return {name: decode(hint, found[name], _path(at, name)) for name, hint in hints.items()}


@lru_cache
def _hints(of: Any) -> dict[str, Any]:
    hints = get_type_hints(of)
    return {one.name: hints[one.name] for one in fields(of)}


def _record(data: Any, at: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        _refuse(at or "the whole", data, "an object")
    return data


def _tuple(parts: tuple[Any, ...], data: Any, at: str) -> tuple[Any, ...]:
    """Decode a list with one entry per type in ``parts``, or with any number for ``int, ...``."""
    if not isinstance(data, list):
        _refuse(at, data, "a list")
    if ... in parts:
        if parts[0] is int and all(type(n) is int and 0 <= n <= _LARGEST[int] for n in data):
            return tuple(data)  # large plans have millions of numbers
        parts = parts[:1] * len(data)
    if len(data) != len(parts):
        _refuse(at, data, f"a list of {len(parts)} entries")
    return tuple(decode(parts[i], value, f"{at}[{i}]") for i, value in enumerate(data))


def different(values: Iterable[Hashable], what: str) -> None:
    """Raise PlanError if a value occurs twice."""
    seen: set[Hashable] = set()
    for value in values:
        if value in seen:
            raise PlanError(f"{what}: found {_shown(value)} twice, expected it once")
        seen.add(value)


def cut(message: str) -> str:
    """Return a message, cut to a readable size."""
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
