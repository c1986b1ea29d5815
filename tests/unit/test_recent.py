"""A table of bounded size."""

from __future__ import annotations

from dmuon.kernels.recent import Recent


def test_what_was_not_used_for_longest_goes_first():
    table: Recent[str, int] = Recent(2)
    assert table.add("a", 1) == []
    assert table.add("b", 2) == []
    assert table.get("a") == 1
    assert table.add("c", 3) == ["b"]
    assert table.get("b") is None
    assert table.items() == [("a", 1), ("c", 3)]
    assert table.add("a", 4) == []
    assert table.items() == [("c", 3), ("a", 4)]
    assert len(table) == 2
    table.clear()
    assert table.items() == []
