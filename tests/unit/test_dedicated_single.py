"""The `dedicated` layout on one process, without any process group, against `ReferenceMuon`."""

from __future__ import annotations

import io

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
@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "weight_decay": 0.5}], ids=str)
def test_ten_steps_are_those_of_the_reference_bitwise(freed, settings):
    model = AllDifferent()
    own, opt, twin, ref = dedicated(model, freed, **settings)
    ours = train(model, opt, inputs((4, 2, 6)), range(10))
    theirs = train(twin, ref, inputs((4, 2, 6)), range(10))
    assert ours == theirs and len(set(ours)) == 10
    assert_bitwise(weights(model), weights(twin))
    own.close()


@FREED
def test_experts_splits_heads_and_blocks_follow_the_reference(freed):
    model = Mixed()
    own, opt, twin, ref = dedicated(model, freed)
    ours = train(model, opt, inputs((4, WIDTH)), range(6))
    theirs = train(twin, ref, inputs((4, WIDTH)), range(6))
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


def test_clipping_equals_torch():
    model = TinyGPT()
    own, opt, twin, ref = dedicated(model)

    def clip(m):
        if m is model:
            return dmuon.clip_grad_norm_(m, 0.1)
        return torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)

    for step in range(3):
        norms = []
        for m, o in ((model, opt), (twin, ref)):
            m(tokens()(step)).square().mean().backward()
            norms.append(float(clip(m)))
            o.step()
            o.zero_grad()
        assert norms[0] == pytest.approx(norms[1], abs=1e-6)
    assert_within(weights(model), weights(twin), 1e-5)
    own.close()


def test_async_and_sync_publish_are_bitwise_the_same():
    results = []
    for publish in ("async", "sync"):
        torch.manual_seed(0)
        model = TinyGPT()
        own = dmuon.dedicate_params(model, layout="dedicated")
        train(model, dmuon.Muon(model, **SETTINGS, publish=publish), tokens(), range(4))
        own.close()
        results.append(weights(model))
    assert_bitwise(*results)


def test_resuming_is_bitwise():
    model = TinyGPT()
    own, opt, _, _ = dedicated(model)
    train(model, opt, tokens(), range(2))
    with own.materialized(model):
        state = {n: v.clone() for n, v in model.state_dict().items()}
    saved = torch.load(_written(opt.state_dict()), weights_only=False)
    train(model, opt, tokens(), range(2, 4))
    other = TinyGPT()
    again = dmuon.dedicate_params(other, layout="dedicated", plan=own.plan)
    second = dmuon.Muon(other, **SETTINGS)
    with again.materialized(other):
        other.load_state_dict(state)
    second.load_state_dict(saved)
    train(other, second, tokens(), range(2, 4))
    assert_bitwise(weights(other), weights(model))


def _written(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
