"""Wait points: no operation reads a parameter before its published value is there."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dmuon.comm.hooks import Hook, opaque, outermost_members, wait_points
from tests.unit.models import TinyGPT

TOKENS = torch.zeros(3, 5, dtype=torch.long)


def watch(model: nn.Module) -> set[int]:
    """The ids of the parameters that wait points have waited for, as the model runs."""
    ready: set[int] = set()
    for point in wait_points(model, {*outermost_members(model)} - {model}):
        wait = partial(lambda needed, *_: ready.update(needed), point.parameters)
        point.module.register_forward_pre_hook(Hook(opaque(wait, point)), prepend=True)
    return ready


_LEAVES = st.sampled_from([lambda: nn.Linear(2, 2), lambda: nn.Conv1d(1, 1, 1), nn.Identity])


def _holder(children: list[nn.Module]) -> nn.Module:
    module = nn.Module()
    module.own = nn.Parameter(torch.zeros(2, 2))
    for i, child in enumerate(children):
        module.add_module(f"c{i}", child)
    return module


def _parents(children):
    kinds = (nn.ModuleList, _holder, lambda modules: nn.Sequential(*modules))
    return st.one_of(*(st.lists(children, max_size=3).map(kind) for kind in kinds))


@settings(max_examples=80)
@given(st.recursive(_LEAVES.map(lambda build: build()), _parents, max_leaves=10))
def test_wait_points_cover_all_parameters_and_have_one_root(model):
    points = wait_points(model, {*outermost_members(model)} - {model})
    assert {p for point in points for p in point.parameters} == {id(p) for p in model.parameters()}
    assert [point.module for point in points if point.is_root] == [model]
    assert len({id(point.module) for point in points}) == len(points)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_hooked_model_has_inert_hooks(duplicate):
    model = TinyGPT()
    ready = watch(model)
    copied = duplicate(duplicate(model))  # a copy of a copy too
    torch.testing.assert_close(copied(TOKENS), copied(TOKENS), rtol=0, atol=0)
    assert not ready
    torch.testing.assert_close(copied(TOKENS), model(TOKENS), rtol=0, atol=0)
    assert ready
