"""Wait points: no operation reads a parameter before its published value is there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmuon.comm.hooks import Hook, opaque, wait_points
from tests.unit.models import WIDTH, Block, TinyGPT

# ---- models of many habits ---------------------------------------------------------------

ROWS = torch.zeros(3, WIDTH)
TOKENS = torch.zeros(3, 5, dtype=torch.long)


class Made(nn.Module):
    """A module of these children, used as ``use(self, x)``."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], **children: nn.Module) -> None:
        super().__init__()
        self.use = use
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def blocks() -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(2))


def containers() -> nn.Module:
    """Bare containers in containers, of which the parts are called."""
    layers = nn.ModuleList([blocks(), nn.ModuleDict({"mix": linear(), "mlp": Block()})])

    def use(m: Any, x: Tensor) -> Tensor:
        for module in (*m.layers[0], *m.layers[1].values()):
            x = module(x)
        return m.head["norm"](x)

    return Made(use, layers=layers, head=nn.ModuleDict({"norm": nn.LayerNorm(WIDTH)}))


def calls_into_blocks(m: Any, x: Tensor) -> Tensor:
    """The root calls the blocks' children, never the blocks."""
    for block in m.blocks:
        x = x + block.down(torch.relu(block.up(block.norm(x))))
    return x


def reads_weights_of_blocks(m: Any, x: Tensor) -> Tensor:
    """The root reads the blocks' weights without calling anything."""
    for block in m.blocks:
        x = x + F.linear(x, block.up.weight) @ block.down.weight.t()
    return x


def attention() -> nn.Module:
    """`nn.MultiheadAttention` reads ``out_proj`` without calling it."""

    def one(m: Any, x: Tensor) -> Tensor:
        return m.mlp(x + m.attention(x, x, x, need_weights=False)[0])

    def made() -> nn.Module:
        return nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    block = Made(one, attention=made(), mlp=Block())
    return Made(
        lambda m, x: m.blocks[0](x[None] + m.first(x[None], x[None], x[None])[0])[0],
        first=made(),
        blocks=nn.ModuleList([block]),
    )


def reads_children() -> nn.Module:
    """Forward uses its children's weights without calling them."""
    return Made(
        lambda m, x: F.linear(x, m.a.weight) @ m.inner["b"].weight @ m.weights[0],
        a=linear(),
        inner=nn.ModuleDict({"b": linear()}),
        weights=nn.ParameterList([torch.randn(WIDTH, WIDTH)]),
    )


def shared_block() -> nn.Module:
    """One block under two names, and a weight that two blocks share."""
    block, other = Block(), Block()
    other.up.weight = block.up.weight
    return nn.Sequential(block, other, block)


def stages() -> nn.Module:
    inner = nn.Sequential(linear(), Block())
    return nn.Sequential(nn.Sequential(Block(), inner), nn.Sequential(Block()), nn.Tanh(), linear())


def on_rows(m: nn.Module) -> object:
    return m(ROWS)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object]]] = {
    "embedding, blocks, head": (TinyGPT, lambda m: m(TOKENS)),
    "a block called": (TinyGPT, lambda m: m.blocks[1](ROWS)),
    "a child of a block called": (TinyGPT, lambda m: m.blocks[1].up(ROWS)),
    "containers": (containers, on_rows),
    "root calls into blocks": (lambda: Made(calls_into_blocks, blocks=blocks()), on_rows),
    "weights of blocks read": (lambda: Made(reads_weights_of_blocks, blocks=blocks()), on_rows),
    "attention": (attention, on_rows),
    "children read, not called": (reads_children, on_rows),
    "shared block": (shared_block, on_rows),
    "stages": (stages, on_rows),
    "parts called alone": (stages, lambda m: m[3](m[0][1](ROWS))),
    "a leaf as root": (linear, on_rows),
    "a list as root": (blocks, lambda m: m[1](m[0](ROWS))),
}


# ---- nothing is read too early -----------------------------------------------------------


class Reads(TorchDispatchMode):
    """Notes parameters whose data an operation reads while they are not ready."""

    def __init__(self, model: nn.Module, ready: set[int]) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.ready = ready
        self.read: set[str] = set()
        self.early: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs or {})):
            if id(leaf) in self.names:
                self.read.add(self.names[id(leaf)])
                if id(leaf) not in self.ready:
                    self.early.add(self.names[id(leaf)])
        return func(*args, **(kwargs or {}))


def watch(model: nn.Module, without: Container[nn.Module] = ()) -> set[int]:
    """The ids of the parameters that wait points have waited for, as the model runs."""
    ready: set[int] = set()
    for point in wait_points(model):
        if point.module not in without:
            wait = Hook(
                opaque(partial(lambda needed, *_: ready.update(needed), point.parameters), point)
            )
            point.module.register_forward_pre_hook(wait, prepend=True)
    return ready


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_read_too_early(case, training):
    """Except where a model reaches into a block that it does not call."""
    build, call = CASES[case]
    model = build().train(training)
    with Reads(model, watch(model)) as reads:
        call(model)
    assert reads.read
    assert bool(reads.early) == (case == "weights of blocks read")


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
    points = wait_points(model)
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
