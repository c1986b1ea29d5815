"""JSON from outside, bounded before it is believed: plans, cost tables, the cache of costs.

`parse` bounds what a text may cost (its size, nesting and numbers) before objects are made of it.
The others take the fields of what it gives: each has one type and one range, and a PlanError names
the field by its path, what was found and what was expected::

    text  ──parse──▶  dicts and lists  ──record, row, whole, real, ...──▶  specs, batches, prices
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from itertools import accumulate
from typing import Any, NoReturn, TypeVar

from dmuon.types import PlanError

# DeepSeek-V3, 45,090 matrices on 1,024 ranks: 5 million characters, 480,000 values, 5 levels.
MOST_CHARACTERS = 64 << 20
_MOST_VALUES = 8_000_000  # numbers, texts, lists and objects, about
_MOST_LEVELS = 16
_MOST_DIGITS = 40  # of a number without a fraction
_MOST_MESSAGE = 1_000  # characters of an error
_MOST_TEXT = 100_000  # characters of one text
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_OTHERS = bytes(byte for byte in range(256) if byte not in _STEPS)
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can escape half a character

MOST_WHOLE = 1 << 62
MOST_MS = 1e15  # 30,000 years

T = TypeVar("T")
E = TypeVar("E", bound=Enum)


# ---- texts -------------------------------------------------------------------------------


def read_text(path: str | os.PathLike[str], most: int = MOST_CHARACTERS) -> str:
    """The text of a file in UTF-8, of which no more than ``most`` bytes are read.

    Raises:
        OSError: it cannot be opened or read.
        ValueError: it is larger, or no UTF-8.
    """
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"found more than {most:,} bytes, expected at most that")
    return data.decode("utf-8")


def parse(text: str, most: int = MOST_CHARACTERS) -> Any:
    """The data in a JSON text; no number in it is infinite or NaN, no key is there twice.

    Raises:
        PlanError: not JSON, or more of it than any plan or table has; says what was found.
    """
    if not isinstance(text, str):
        raise PlanError(f"expected a JSON text, found {type(text).__name__}")
    if len(text) > most:
        raise PlanError(f"found {len(text):,} characters, expected at most {most:,}")
    values = sum(map(text.count, ",[{"))
    if values > _MOST_VALUES:
        raise PlanError(f"found about {values:,} values, expected at most {_MOST_VALUES:,}")
    levels = _levels(text)
    if levels > _MOST_LEVELS:
        raise PlanError(
            f"found lists or objects nested {levels:,} deep, expected at most {_MOST_LEVELS}"
        )
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(f"expected JSON, found {_shown(text)} ({error})") from error


def _levels(text: str) -> int:
    """How deep lists and objects are nested, as far as the text is JSON. Takes linear time."""
    plain = text.replace("\\\\", "").replace('\\"', "")  # so that every quote opens or closes
    outside = re.sub(b'"[^"]*"?', b"", plain.encode("utf-8", "surrogatepass"))
    brackets = outside.translate(None, _OTHERS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        different([key for key, _ in pairs], "the keys of an object")
    return made


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise PlanError(
            f"found a number of {len(digits)} digits ({digits[:8]}...), expected at most "
            f"{_MOST_DIGITS}"
        )
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        shown = digits[:_MOST_DIGITS]
        raise PlanError(f"found a number that is infinite or NaN ({shown}), expected a finite one")
    return value


# ---- fields ------------------------------------------------------------------------------
# ``of`` is an object or a list whose keys or length have been looked at, ``at`` its path.


def record(value: Any, at: str, *names: str) -> dict[str, Any]:
    """An object with at least these keys."""
    if not isinstance(value, dict):
        _refuse(at or "the whole", value, "an object")
    for name in names:
        if name not in value:
            raise PlanError(f"{_path(at, name)} is missing")
    return value


def row(value: Any, at: str, least: int, most: int) -> list[Any]:
    """A list of ``least`` to ``most`` entries."""
    if not isinstance(value, list) or not least <= len(value) <= most:
        count = f"{least}" if least == most else f"{least} to {most}"
        _refuse(at, value, f"a list of {count} entries")
    return value


def listed(of: Any, key: Any, at: str) -> list[Any]:
    """A list, whatever is in it."""
    values = of[key]
    if not isinstance(values, list):
        _refuse(_path(at, key), values, "a list")
    return values


def each(of: Any, key: Any, at: str, make: Callable[[Any, str], T]) -> tuple[T, ...]:
    """What ``make`` makes of each entry of a list and its path."""
    path = _path(at, key)
    return tuple(make(value, f"{path}[{i}]") for i, value in enumerate(listed(of, key, at)))


def whole(of: Any, key: Any, at: str, low: int = 0, high: int = MOST_WHOLE) -> int:
    """A whole number between ``low`` and ``high``, both included."""
    value = of[key]
    if type(value) is not int or not low <= value <= high:
        _refuse(_path(at, key), value, f"a whole number from {low:,} to {high:,}")
    return value


def real(of: Any, key: Any, at: str, low: float = 0.0, high: float = MOST_MS) -> float:
    """A number between ``low`` and ``high``, both included, as it is."""
    value = of[key]
    if type(value) not in (int, float) or not low <= value <= high:
        _refuse(_path(at, key), value, f"a number from {low:g} to {high:g}")
    return value  # type: ignore[no-any-return]


def text(of: Any, key: Any, at: str, most: int = _MOST_TEXT) -> str:
    """A text of at most ``most`` characters."""
    value = of[key]
    if not isinstance(value, str) or len(value) > most:
        _refuse(_path(at, key), value, f"a text of at most {most:,} characters")
    if not value.isascii() and _SURROGATE.search(value):
        _refuse(_path(at, key), value, "characters that can be printed")
    return value


def flag(of: Any, key: Any, at: str) -> bool:
    """true or false."""
    value = of[key]
    if not isinstance(value, bool):
        _refuse(_path(at, key), value, "true or false")
    return value


def choice(of: Any, key: Any, at: str, kind: type[E]) -> E:
    """A member of an enumeration, by its value."""
    members = {member.value: member for member in kind}
    if not isinstance(of[key], Hashable) or of[key] not in members:
        _refuse(_path(at, key), of[key], f"one of {', '.join(map(repr, members))}")
    return members[of[key]]


def wholes(
    of: Any, key: Any, at: str, low: int = 0, high: int = MOST_WHOLE, most: int = _MOST_VALUES
) -> tuple[int, ...]:
    """A list of at most ``most`` whole numbers in a range."""
    values = listed(of, key, at)
    if len(values) > most:
        _refuse(_path(at, key), values, f"a list of at most {most:,} entries")
    if not all(type(value) is int and low <= value <= high for value in values):
        return tuple(whole(values, i, _path(at, key), low, high) for i in range(len(values)))
    return tuple(values)


def reals(of: Any, key: Any, at: str, low: float = 0.0, high: float = MOST_MS) -> tuple[float, ...]:
    """A list of numbers in a range."""
    values = listed(of, key, at)
    return tuple(real(values, i, _path(at, key), low, high) for i in range(len(values)))


def texts(of: Any, key: Any, at: str, most: int = _MOST_TEXT) -> tuple[str, ...]:
    """A list of texts of at most ``most`` characters."""
    values = listed(of, key, at)
    return tuple(text(values, i, _path(at, key), most) for i in range(len(values)))


def different(values: Iterable[Hashable], at: str) -> None:
    """Raise PlanError if one of ``values`` is there twice."""
    seen: set[Hashable] = set()
    for value in values:
        if value in seen:
            raise PlanError(f"{at}: found {_shown(value)} twice, expected it once")
        seen.add(value)


def cut(message: str) -> str:
    """A message about what may be of any size, at a size to read."""
    return message if len(message) <= _MOST_MESSAGE else f"{message[:_MOST_MESSAGE]} ..."


def _path(at: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{at}[{key}]"
    return f"{at}.{key}" if at else key


def _shown(value: Any) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 48
    short.maxlevel = 2
    return short.repr(value)


def _refuse(at: str, value: Any, expected: str) -> NoReturn:
    size = f"a list of {len(value):,}: " if isinstance(value, list) else ""
    raise PlanError(f"{at}: expected {expected}, found {size}{_shown(value)}")
