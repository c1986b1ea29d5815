"""The states of weights, passes and rounds: what may follow what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmuon.comm.prefetch import PassState
from dmuon.comm.reducer import RoundState
from dmuon.comm.storage import Layer, WeightState
from dmuon.comm.transport import Transport
from tests.unit.models import reducer_of


@pytest.mark.parametrize("kind", [WeightState, PassState, RoundState])
def test_the_table_in_the_docstring_is_the_table(kind):
    first, *_ = kind
    reached = {first.name}
    for _ in kind:
        reached.update(new for name in reached.copy() for new in kind[name].follows)
    assert reached == set(kind.__members__), "every state can be reached"
    rows = [line.split() for line in kind.__doc__.splitlines()]
    documented = {row[0]: row[1:] for row in rows if row and row[0] in kind.__members__}
    for state in kind:
        assert documented[state.name][-len(state.follows) :] == ", ".join(state.follows).split()
        assert state.to(state) is state
        for new in kind:
            if new.name in state.follows:
                assert state.to(new) is new
            elif new is not state:
                message = f"internal error.*{state.name} to {new.name}"
                with pytest.raises(RuntimeError, match=message):
                    state.to(new)


def test_a_round_that_is_owed_is_made():
    model = nn.Linear(3, 2)
    reducer = reducer_of(model, Transport())
    model(torch.ones(1, 3)).sum().backward()
    reducer.begin()
    with pytest.raises(RuntimeError, match="OPEN to NONE, only to DONE, OPEN_OWED"):
        reducer.state.to(RoundState.NONE)
    reducer.set_sync(False)
    reducer.set_sync(True)
    reducer.finish()
    assert reducer.state is RoundState.OWED, "what was accumulated meanwhile is still to be reduced"
    reducer.ensure(lambda: None)
    assert (reducer.state, reducer.rounds) == (RoundState.DONE, 2)
    reducer.clear()
    assert (reducer.state, reducer.rounds) == (RoundState.NONE, 0)


def test_what_breaks_the_rules_raises():
    layer = Layer("layers.0", (0,), is_root=False, occurrences=1)
    with pytest.raises(RuntimeError, match="FREED to IN_USE, only to LAUNCHED"):
        layer.use()  # before any broadcast
    layer.state = layer.state.to(WeightState.LAUNCHED)
    with pytest.raises(RuntimeError, match="LAUNCHED to HELD"):
        layer.record(hold=True)
    layer.use()
    assert layer.record(hold=False) and not layer.record(hold=True)
    assert layer.state is WeightState.HELD
    layer.free()
    assert layer.state is WeightState.FREED
