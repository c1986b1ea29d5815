"""Every layout with every option and every kind of gradients, beside one process; see `matrix`.

`python -m tests.distributed.test_matrix --rounds 50` draws other cases than the tests do.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import tempfile
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.distributed import matrix
from tests.distributed.compare import assert_bitwise
from tests.distributed.harness import Pools
from tests.distributed.matrix import (
    KINDS_OF_LAYOUTS,
    LAYOUTS,
    OPTIONS,
    Case,
    Piece,
    copies,
    covering,
    expected_of,
    has,
    legal,
    simplest,
)  # fmt: skip

TOLERANCE = 1e-6


def found_of(
    cases: list[Case], pools: Pools, module: str = matrix.__name__
) -> list[dict[str, Any]]:
    """What the ranks of each case have: all cases of a world in one call of the module's `half`."""
    found: list[dict[str, Any]] = [{} for _ in cases]
    with tempfile.TemporaryDirectory() as folder:
        work = [(case, f"{folder}/{n}") for n, case in enumerate(cases)]

        def run(numbers: list[int], layout: str, **more: Any) -> None:
            if not numbers:
                return
            ranks = pools(LAYOUTS[layout].world).run(
                module, "half", {"work": [work[n] for n in numbers], **more}
            )
            for n, results in zip(numbers, zip(*ranks), strict=True):
                losses, states, stats = zip(*results)
                for other in {*states[1:]} - {states[0], hashlib.sha256(states[0]).digest()}:
                    assert copies(layout) > 1, f"ranks differ: {cases[n]}"
                    assert_near(matrix.unpacked(other), matrix.unpacked(states[0]))
                sums = [sum(each) / copies(layout) for each in zip(*losses)]
                sums = found[n].get("losses", []) + sums
                found[n] = {"losses": sums, "state": states[0], "stats": stats}

        for name in LAYOUTS:
            run([n for n, case in enumerate(cases) if case.layout == name], name)
        for name in LAYOUTS:
            then = [n for n, case in enumerate(cases) if case.then and case.other == name]
            run(then, name, saved=[found[n]["state"] for n in then])
    return found


def assert_near(found: Any, expected: Any) -> None:
    """Of two states: AssertionError where they differ by more than rounding."""
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if isinstance(one, Tensor) and one.numel():
            assert off(one, other).max() <= TOLERANCE, (one, other)
        elif not isinstance(one, Tensor):
            assert one == other, (one, other)


def off(found: Tensor, expected: Tensor) -> Tensor:
    return (found.double() - expected.double()).abs()


def compare(case: Case, found: dict[str, Any]) -> None:
    """Raise AssertionError where losses, weights or state are not those of one process."""
    expected = expected_of(case)
    # bfloat16 outputs of a forward pass are not exact.
    exact = not case.masters and case.ns_dtype == "float32"
    tolerances = (1e-5, 1e-4) if exact else (2e-2, 0.5)
    for step, (one, other) in enumerate(zip(found["losses"], expected["losses"], strict=True)):
        if not (case.is_bad(step) and case.gradients == "not finite"):
            told = f"loss {one} at step {step}, not {other}"
            assert math.isclose(one, other, rel_tol=tolerances[0], abs_tol=tolerances[1]), told
    # The last bit of an operand may round otherwise in half precision, as may momentum of gradients
    # that are multiplied with a norm.
    is_rounded = case.ns_dtype == "bfloat16" or bool(case.momentum_dtype and case.clip)
    whole = matrix.unpacked(found["state"])
    weights, state = whole["model"], whole["optim"]["state"]
    for name, weight in expected["weights"].items():
        mine = state.get(name, {})
        now = mine.get("master_weight", weights[name])
        if not now.numel():
            continue
        difference, change = off(now, weight), weight - expected["start"][name]
        rounded = case.masters and "master_weight" not in mine
        allowed = 2**-8 * float(weight.abs().max()) if rounded else TOLERANCE
        if is_rounded:
            ratio = float(difference.norm() / (change.norm() + allowed))
            assert ratio <= 0.1, (name, ratio)
        elif case.cautious:  # where an update is all but zero, rounding decides what decays
            assert (difference > allowed).float().mean() <= 0.02, (name, float(difference.max()))
        else:
            assert difference.max() <= allowed, (name, float(difference.max()))
        if "master_weight" in mine:
            assert torch.equal(weights[name], now.to(torch.bfloat16)), name
        for key, value in expected["state"].get(name, {}).items():
            value = torch.as_tensor(value)
            unit = 2**-7 if is_rounded and mine[key].dtype == torch.bfloat16 else TOLERANCE
            allowed = unit * max(1.0, float(value.abs().max()))
            assert off(mine[key], value).max() <= allowed, (name, key)
    groups = whole["optim"]["param_groups"]
    assert all(g.get("muon_step", matrix.STEPS) == matrix.STEPS for g in groups)
    bad = sum(map(case.is_bad, range(matrix.STEPS))) if not case.then else 0
    for told in found["stats"]:
        assert told["finite"] and told["skipped"] >= bad
        # Block steps show the norm of the last full step.
        if case.host == "reads" and case.period == 1 and (norm := expected["grad_norm"]) < math.inf:
            shown = told.get("grad_norm", 0.0)
            assert math.isclose(shown, norm, rel_tol=1e-5, abs_tol=1e-9), (shown, norm)


def check(cases: list[Case], pools: Pools, *, as_drawn: bool = False) -> None:
    """Compare each case with one process. AssertionError where something differs, of the simplest
    case that does unless ``as_drawn``."""
    failed = False
    try:
        for case, found in zip(cases, found_of(cases, pools), strict=True):
            compare(case, found)
    except AssertionError as error:
        if as_drawn:
            raise
        if len(cases) == 1:
            raise AssertionError(f"{cases[0]}: {error}") from None
        failed = True

    def fails(case: Case) -> bool:
        return case.is_consistent and why(case, pools) != ""

    for case in cases if failed else ():
        if fails(case):
            small = simplest(case, fails)
            pytest.fail(f"{small}: {why(small, pools)}")
    assert not failed, f"{cases} fail together and none alone"


def why(case: Case, pools: Pools) -> str:
    """How the case fails, if it does."""
    try:
        check([case], pools)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layouts", KINDS_OF_LAYOUTS, ids=lambda layouts: layouts[0])
def test_layouts_train_as_one_process_does(
    pools: Pools, layouts: tuple[str, ...], pytestconfig: pytest.Config
) -> None:
    check(covering(layouts), pools, as_drawn=pytestconfig.getoption("--as-drawn"))


def test_cases_cover_what_is_legal() -> None:
    """Each kind of layout with each value of each option, kinds of gradients among them."""
    drawn = [covering(layouts) for layouts in KINDS_OF_LAYOUTS]
    for layouts, cases in zip(KINDS_OF_LAYOUTS, drawn, strict=True):
        assert all(case.is_consistent for case in cases)
        assert {case.layout for case in cases} == {*layouts}
        assert all(any(has(case, choices) for case in cases) for choices in legal(layouts))
    everything = [case for cases in drawn for case in cases]
    assert {case.other for case in everything} >= {*LAYOUTS}
    assert any("interleaved" in str(case.splits()) for case in everything)


# Several of a shape, so that batches of 1, 2, 3, ... occur, and matrices beside their transposes.
SHAPES = [
    *[("linear", 48, 48)] * 5, *[("linear", 40, 96)] * 3, *[("linear", 96, 40)] * 2,
    ("linear", 33, 50), ("linear", 7, 129), ("linear", 129, 7), ("linear", 256, 320),
    *[("linear", 3, 5)] * 2, ("linear", 5, 3), ("fused", 24, 24, 3), ("experts", 12, 21, 5),
    ("embedding", 61, 33), ("vector", 129, 1),
]  # fmt: skip
SAME_BITS: list[dict[str, Any]] = [
    {"fixed_kernels": "standard", "rule": "plain sgd", "solver": "round_robin"},
    {"fixed_kernels": "gram", "ns_dtype": "bfloat16", "masters": True},
]
FEW = ("ddp2", "reduced3", "dedicated hsdp", "tp+fsdp")


@pytest.mark.parametrize("number", range(len(SAME_BITS)))
def test_with_fixed_kernels_the_bits_are_those_of_one_process(pools: Pools, number: int) -> None:
    """On every mesh, in every layout and plan."""
    pieces = tuple(Piece(*shape) for shape in SHAPES)
    layouts = [*LAYOUTS] if not number else ["single", *FEW]
    cases = [Case(layout, pieces).with_(**SAME_BITS[number]) for layout in layouts]
    alone, *others = (matrix.unpacked(f["state"]) for f in found_of(cases, pools))
    for case, state in zip(cases[1:], others, strict=True):
        assert_bitwise(state["model"], alone["model"], case.layout)
        for name, entry in alone["optim"]["state"].items():
            assert_bitwise(state["optim"]["state"][name], entry, f"{case.layout} {name}")


@pytest.mark.parametrize(
    "option",
    ["variant", "momentum_dtype", "cautious", "period", "clip", "rule", "adjust", "groups"],
)
def test_an_option_that_is_ignored_would_be_seen(option: str) -> None:
    """It moves weights further than a distributed run may be from its reference."""
    pieces = Piece("linear", 8, 5), Piece("fused", 4, 6, 2), Piece("biased", 5, 9)
    plain = Case("fsdp2", pieces)
    before = expected_of(plain)["weights"]
    for value in OPTIONS[option][1:]:
        after = expected_of(plain.with_(**{option: value}))["weights"]
        far = max(float(off(after[name], weight).max()) for name, weight in before.items())
        assert far > 10 * TOLERANCE or value == math.inf, value


def test_a_failing_case_is_made_simple() -> None:
    """A stand-in for a fault that only some shapes and one option show."""

    def fails(case: Case) -> bool:
        return case.masters and any(p.kind == "conv" and p.rows > 2 for p in case.pieces)

    case = next(c for n in count() for c in covering(("hsdp",), n) if fails(c))
    small = simplest(case, fails)
    assert fails(small) and dict(small.chosen).keys() == {"masters"} and len(small.pieces) == 2
    assert small.pieces[1].cols == 1 and small.pieces[1].rows <= 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="sets of cases per layout")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    pools = Pools()
    for seed in range(given.seed, given.seed + given.rounds):
        for layouts in KINDS_OF_LAYOUTS:
            try:
                check(covering(layouts, seed), pools)
            except (AssertionError, pytest.fail.Exception) as error:
                sys.exit(f"seed {seed}: {error}")
        print(f"seed {seed}: as one process", flush=True)
    pools.close()


if __name__ == "__main__":
    main()
