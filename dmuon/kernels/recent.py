"""A table of bounded size."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["Recent"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The ``limit`` entries that were used last.

    For what is worth keeping while it comes again, where what may come is without number.
    """

    __slots__ = ("_entries", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """The value, or None."""
        value = self._entries.pop(key, None)
        if value is not None:
            self._entries[key] = value  # the last of a dict is its youngest
        return value

    def add(self, key: K, value: V) -> list[K]:
        """Keep a value; which keys had to go for it."""
        self._entries.pop(key, None)
        self._entries[key] = value
        excess = len(self._entries) - self.limit
        gone = list(islice(self._entries, max(0, excess)))
        for old in gone:
            del self._entries[old]
        return gone

    def items(self) -> list[tuple[K, V]]:
        """What is kept, the one used last at the end."""
        return list(self._entries.items())

    def clear(self) -> None:
        """Keep nothing."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
