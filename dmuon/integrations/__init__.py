"""One thin file for each framework that finds optimizers in a table or through plugins, imported by
that framework and by nobody else; what is needed without importing a framework is here."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import dmuon


class DMuon(dmuon.Muon):
    """`dmuon.Muon` by another name: nemo-automodel 0.7 takes every class called ``Muon`` for that
    of the package dion."""


def keywords(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """What a config's ``optim_args`` says: a mapping, or keyword arguments as text. ``betas`` go by
    their longer name, by which they replace a framework's own.

    >>> keywords("ns_steps=6, betas=(0.9, 0.95), ns_dtype=float32")
    {'ns_steps': 6, 'ns_dtype': 'float32', 'adamw_betas': (0.9, 0.95)}
    """
    found = _read(given) if isinstance(given, str) else dict(given or {})
    if "betas" in found and "adamw_betas" not in found:
        found["adamw_betas"] = found.pop("betas")
    return found


def _read(given: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"_({given})", mode="eval").body
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or call.args or None in [k.arg for k in call.keywords]:
        raise ValueError(f'optim_args are "name=value, name=value", found {given!r}')
    return {str(k.arg): _value(k.value) for k in call.keywords}


def _value(node: ast.expr) -> Any:
    """A literal, or the text itself."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
