"""The `dedicated` layout on one process, without any process group, against `ReferenceMuon`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import dmuon
from dmuon.reference import ReferenceMuon
from tests.unit.models import (
    WIDTH,
    AllDifferent,
    Mixed,
    TinyGPT,
    assert_bitwise,
    assert_within,
    clone,
    inputs,
    tokens,
    train,
)


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": torch.float32}
FREED = pytest.mark.parametrize("freed", [True, False], ids=["freed", "kept"])


def dedicated(model, freed=True, **settings):
    select = {k: getattr(model, k) for k in ("splits", "heads") if hasattr(model, k)}
    options = dmuon.DedicatedOptions(free_after_forward=freed)
    own = dmuon.dedicate_params(model, layout="dedicated", options=options, **select)
    ref = ReferenceMuon(twin := clone(model), **(SETTINGS | settings), **select)
    return own, dmuon.Muon(model, **(SETTINGS | settings)), twin, ref


@FREED
@pytest.mark.parametrize(
    ("build", "batch", "settings"),
    [
        (AllDifferent, (4, 2, 6), {}),
        (AllDifferent, (4, 2, 6), {"nesterov": False, "weight_decay": 0.5}),
        (Mixed, (4, WIDTH), {}),  # experts, splits, heads: batches of pieces
    ],
)
def test_ten_steps_are_those_of_the_reference(freed, build, batch, settings):
    model = build()
    own, opt, twin, ref = dedicated(model, freed, **settings)
    ours = train(model, opt, inputs(batch), range(10))
    theirs = train(twin, ref, inputs(batch), range(10))
    assert len(set(ours)) == 10
    if build is AllDifferent:
        assert ours == theirs
        assert_bitwise(weights(model), weights(twin))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert_within(weights(model), weights(twin), 1e-5)
    own.close()


def test_no_process_group_is_made_and_nothing_is_dropped():
    """One rank owns everything: weights are there at any time, and can be saved as they are."""
    model = TinyGPT()
    own, opt, twin, ref = dedicated(model)
    assert not dist.is_initialized()
    assert {p.shape for p in model.parameters()} == {p.shape for p in twin.parameters()}
    train(model, opt, tokens(), range(2))
    train(twin, ref, tokens(), range(2))
    with own.materialized(model):
        saved = {n: v.clone() for n, v in model.state_dict().items()}
    assert_within(saved, dict(twin.state_dict()), 1e-5)
    own.close()
    assert_bitwise(weights(model), saved)
