"""docs/errors.md quotes messages that exist: each is looked for in the sources.

A comment right above one, ``<!-- not checked: why -->``, leaves it out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "errors.md").read_text(encoding="utf-8")
FOUND = re.findall(r"^(<!-- not checked: .* -->\n)?> `(.*)`$", PAGE, re.MULTILINE)
QUOTED = [message for comment, message in FOUND if not comment]


def text(node: ast.AST) -> str | None:
    """A string of the source, with … where values are put in; None for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) or "…" for part in node.values)
    return None


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        found = text(node)
        if found:
            yield " ".join(found.split())


@cache
def sources() -> str:
    files = sorted((REPOSITORY / "dmuon").rglob("*.py"))
    return "\n".join(s for f in files for s in strings(ast.parse(f.read_text(encoding="utf-8"))))


def exists(message: str) -> bool:
    """Whether one string has the message; its … stand for anything."""
    return re.search("[^\n]*".join(map(re.escape, message.split("…"))), sources()) is not None


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_in_the_sources(message):
    assert exists(message)


def test_a_message_that_is_not_there_is_not_found():
    assert len(QUOTED) > 40 and len(set(QUOTED)) == len(QUOTED)
    assert len(re.findall(r"^>", PAGE, re.MULTILINE)) == len(FOUND)
    assert not exists("this model is dedicated already: call open() on its Ownership")
    assert exists("this model is dedicated already: call … on its Ownership")
