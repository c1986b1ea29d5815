"""Pages that are whole programs: run on several processes, they train as one process does without
any distribution. `unit/test_pages` runs them in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon
from dmuon.reference import ReferenceMuon
from dmuon.types import Algorithm
from tests.distributed.compare import assert_close, whole
from tests.distributed.harness import distributed
from tests.unit.test_pages import blocks, prelude

DOCS = Path(__file__).parents[2] / "docs"
EXACT = {"ns_dtype": torch.float32}


@contextmanager
def as_a_program() -> Iterator[None]:
    """The processes have met, and will go on with other tests; Newton-Schulz in float32."""
    made = patch.object(dmuon, "Muon", partial(dmuon.Muon, **EXACT))
    with patch("torch.distributed.init_process_group"), made:
        yield


def run(page: str) -> dict[str, Any]:
    """The names of a page after all of its blocks."""
    text, names = (DOCS / page).read_text(encoding="utf-8"), prelude()
    with as_a_program():
        for block in blocks(text):
            if block.why_not is None:
                exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), names)
    return names


def alone(
    model: nn.Module, losses: Callable[[nn.Module, int], list[Tensor]], steps: int, **how: Any
) -> dict[str, Tensor]:
    """The weights after these steps in one process, on the losses of all ranks, with clipping."""
    opt = ReferenceMuon(model, **EXACT, **how)
    for step in range(steps):
        found = losses(model, step)
        (sum(found) / len(found)).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def chosen(own: dmuon.Ownership) -> Callable[[str, Tensor], bool]:
    """`select` of what this ownership gives to Muon."""
    specs = own.plan.specs.parameters
    names = {p.name for p in specs if p.algorithm is Algorithm.MUON}
    return lambda name, p: name in names


@distributed(1, 2, 4)
def test_mixture_of_experts(rank: int, world: int) -> None:
    page = run("moe.md")
    model, opt = page["model"], page["opt"]
    routed = {p.name: p.algorithm.value for p in opt.ownership.plan.specs.parameters}
    assert routed["blocks.0.router.weight"] == "adamw"
    assert routed["blocks.1.experts.gate_up_proj"] == "muon"
    names = {m.original.name for m in opt.ownership.plan.specs.matrices}
    assert {f"blocks.1.experts.gate_up_proj[{e}][:, {k}::2]" for e in range(4) for k in (0, 1)} <= names

    def losses(twin: nn.Module, step: int) -> list[Tensor]:
        return [page["loss_of"](twin, *page["batch"](step, r)) for r in range(world)]

    torch.manual_seed(0)
    how = {"lr": 1e-2, "select": chosen(opt.ownership)}
    splits = {"*.gate_up_proj": "interleaved:2"}
    expected = alone(page["Model"](), losses, 5, **how, splits=splits)
    assert_close(whole(model, opt.ownership), expected, 1e-5)
    torch.manual_seed(0)
    uncut = alone(page["Model"](), losses, 5, **how)
    assert max(float((uncut[n] - w).abs().max()) for n, w in expected.items()) > 1e-3
    opt.ownership.close()
