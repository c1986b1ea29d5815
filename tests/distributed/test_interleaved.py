"""Projections whose rows or columns alternate in one parameter: saved in one layout, they train on
in any other; what is refused. `test_reference` and `test_muonbp` compare each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dmuon.types import OwnershipError
from tests.distributed.harness import Pools, distributed
from tests.distributed.test_checkpoints import CASES, Training
from tests.distributed.test_same_bits import weights_of
from tests.distributed.test_variants import far, reference

SPLITS: dict[str, Any] = {
    "*.experts.w1": "interleaved:2",  # [E, outputs, inputs], outputs
    "*.experts.w2": {"sizes": "interleaved:3", "dim": 2},  # inputs
    "*.q_proj.weight": "interleaved:4",
}
KEPT = {"variant": "normuon", "weight_decay": 8e-4}
NAMES = ["single", "ddp", "reduce_to_owner", "reduce_to_owner ddp", "fsdp3", "fsdp4", "tp+fsdp"]


def test_each_layout_goes_on_from_the_checkpoint_of_another(pools: Pools, tmp_path: Path) -> None:
    """Momentum, which lies in the parameter's shape, and what a variant keeps of each matrix."""
    names = [*NAMES, "ep"]
    given = {"folder": str(tmp_path), "dedicate": {"splits": SPLITS}, **KEPT}
    expected, module = reference({"splits": SPLITS, **KEPT}), Training.__module__
    assert far(reference(KEPT), expected) > 1e-4  # they are other matrices
    for name in names:
        pools(CASES[name].world).run(module, "save", {"name": name, **given})
        assert far(torch.load(tmp_path / f"{name}.pt"), expected) <= 1e-5, name
    for number, name in enumerate(names):
        others = [names[(number + n) % len(names)] for n in (3, 0)]
        asked = {"name": name, "others": others, **given}
        for distances in pools(CASES[name].world).run(module, "load", asked):
            assert distances[name] == 0.0 and max(distances.values()) <= 1e-5, (name, distances)


@pytest.mark.parametrize(("name", "world"), [("fsdp4", 4), ("reduce_to_owner", 2), ("tp", 2)])
@distributed()
def test_each_step_passes_its_verification(rank: int, world: int, name: str) -> None:
    training = Training(CASES[name], verify_every=1, dedicate={"splits": SPLITS})
    training.train(range(2))
    matrices = [m.original for m in training.opt.ownership.plan.specs.matrices]
    steps = {m.name.partition("experts.")[2]: m.steps for m in matrices}
    assert steps["w1[0][0::2]"] == (2, 1) and steps["w2[3][:, 1::3]"] == (1, 3)
    training.close()


WOVEN = {
    "qkv.weight": "interleaved:3",
    "experts.weight": "interleaved:4",
    "wide0.weight": {"sizes": "interleaved:2", "dim": 1},
    "large0.weight": "interleaved:8",
    "thin.weight": {"sizes": "interleaved:3", "transposed": False},
}


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_bits_are_those_of_one_process(pools: Pools, method: str) -> None:
    how = {"ns_dtype": torch.float32, "method": method, "request": {"splits": WOVEN}}

    def bits(world: int, form: str) -> list[dict[str, str]]:
        return pools(world).run(weights_of.__module__, "weights_of", {"form": form, **how})

    (expected,) = bits(1, "plain")
    for world, forms in {
        2: ["fsdp", "tp", "ddp", "reduced"],
        3: ["fsdp"],
        4: ["tp+fsdp", "hsdp"],
    }.items():
        for form in forms:
            for found in bits(world, form):
                assert found == expected, (world, form)


@distributed(2)
def test_dedicated_refuses_what_is_no_range(rank: int, world: int) -> None:
    with pytest.raises(
        OwnershipError, match=r"q_proj.weight\[0::4\].*layout='sharded' or 'replicated'"
    ):
        Training(CASES["dedicated"], dedicate={"splits": SPLITS})
