"""Writes dmuon/presets.json anew: ``python -m tests.make_presets``.

Each preset is the model that transformers builds from the configuration in preset_configs.json
beside this file. Two have no such model and are kept as they are: ``vla``, because transformers
does not know pi0, and ``moe-60x256``, which is made up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import nn

from dmuon.catalogue import PRESETS, build

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("preset_configs.json").read_text(encoding="utf-8")
)
TARGET = Path(__file__).parents[1] / "dmuon" / "presets.json"
_TYPES = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Conv2d)

Row = list[Any]


def kind_of(module: nn.Module) -> str:
    """What of its type decides how its parameters are routed."""
    if type(module).__name__ == "Conv1D":
        return "Conv1D"
    return next((t.__name__ for t in _TYPES if isinstance(module, t)), "")


def rows(model: nn.Module) -> list[Row]:
    """Name, kind, and shape or the name of the same parameter before, of every parameter."""
    names: dict[int, str] = {}
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        for own, p in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{own}" if path else own
            first = names.setdefault(id(p), name)
            found.append([name, kind_of(module), [*p.shape] if first == name else first])
    return found


def folded(found: Iterable[Row]) -> list[Row]:
    """Consecutive blocks that differ in their number alone as one: ``h.{0..11}.attn``."""

    def block(row: Row) -> tuple[str, int] | None:
        match = re.match(r"(.*?\.)(\d+)\.", row[0])
        return match and (match[1], int(match[2]))

    blocks: list[tuple[str, int, int, list[Row]]] = []
    for at, group in groupby(found, block):
        if at is None:
            blocks.append(("", 0, 0, [*group]))
            continue
        head, number = at
        mine = [[row[0][len(f"{head}{number}") :], *row[1:]] for row in group]
        if blocks and blocks[-1][0] == head and blocks[-1][3] == mine:
            blocks[-1] = (head, blocks[-1][1], number, mine)
        else:
            blocks.append((head, number, number, mine))
    return [
        [f"{head}{{{first}..{last}}}{name}" if head else name, *rest]
        for head, first, last, some in blocks
        for name, *rest in some
    ]


def preset(source: str, model: nn.Module) -> dict[str, Any]:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    name = next((n for n, m in model.named_modules() if head is not None and m is head), "")
    found = {"source": source, "head": name, "parameters": folded(rows(model))}
    return {key: value for key, value in found.items() if value}


def text(presets: dict[str, Any]) -> str:
    """JSON with two lines a preset."""
    lines = []
    for name, found in presets.items():
        head = json.dumps({key: found[key] for key in found if key != "parameters"})[1:-1]
        lines.append(f'"{name}": {{{head},\n "parameters": {json.dumps(found["parameters"])}}}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def made() -> dict[str, Any]:
    return {
        name: preset(of["source"], build(of["config"], "bfloat16"))
        if "config" in of
        else dict(PRESETS[name])
        for name, of in CONFIGS.items()
    }


if __name__ == "__main__":
    TARGET.write_text(text(made()), encoding="utf-8")
