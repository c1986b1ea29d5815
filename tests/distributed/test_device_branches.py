"""The list kernels of an accelerator, interpreted: whole steps with them are those of one process.

That steps read nothing from the device is an option of the matrix, `host`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.accelerator import reading_allowed
from tests.distributed import matrix
from tests.distributed.harness import Pools
from tests.distributed.matrix import Case, Piece
from tests.distributed.test_matrix import compare, found_of

pytestmark = pytest.mark.cpu_only("a CPU that pretends to be an accelerator")


@contextmanager
def list_kernels() -> Iterator[Counter[str]]:
    """The kernels of an accelerator, interpreted; yields how often each was called."""
    from tests.unit.test_triton import interpreted

    module, counts = interpreted("triton_lists"), Counter[str]()

    def counted(name: str) -> Any:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            with reading_allowed():  # the interpreter does
                found = real(*args, **kwargs)
            return reading(found) if callable(found) else found

        return call

    def reading(run: Any) -> Any:
        def call() -> None:
            with reading_allowed():
                run()

        return call

    kernels = SimpleNamespace(**{n: counted(n) for n in ("norms", "advance", "update")})
    kernels.copier = counted("copier")
    with (
        patch("dmuon.rule.list_kernels", lambda device: kernels),
        patch("dmuon.step.operands.list_kernels", lambda device: kernels),
    ):
        yield counts


def half(rank: int, world: int, work: list[tuple[Case, str]]) -> list[matrix.Result]:
    """As in the matrix, by the kernels."""
    with list_kernels() as counts:
        found = matrix.half(rank, world, work)
    assert min(counts[name] for name in ("norms", "advance", "update")) > 0
    return found


PIECES = tuple(Piece(kind, 10, 7, 3) for kind in ("linear", "experts", "vector", "biased"))
SETTINGS: list[dict[str, Any]] = [
    {"gradients": "missing on some ranks", "clip": 0.05},
    {"gradients": "not finite", "cautious": True},
    {"gradients": "missing everywhere", "rule": "sgd"},
    {"gradients": "all", "rule": "plain ema"},
]


@pytest.mark.parametrize("layout", ["fsdp2", "dedicated2"])
def test_list_kernels_take_the_same_steps(pools: Pools, layout: str) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux")
    cases = [Case(layout, PIECES).with_(host="cannot read", **how) for how in SETTINGS]
    if layout in matrix.SHARDED:
        cases.append(cases[0].with_(clip=None, period=3))
    for case, found in zip(cases, found_of(cases, pools, __name__), strict=True):
        compare(case, found)
