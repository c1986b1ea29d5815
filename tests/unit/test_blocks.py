"""Wait points: no operation reads a parameter before its published value is there."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dmuon.comm.hooks import Coverage, attach, wait_points
from tests.unit.models import WIDTH, AllDifferent, Block, Mixed, TinyGPT

# ---- models of many habits ---------------------------------------------------------------

ROWS = torch.zeros(3, WIDTH)
TOKENS = torch.zeros(3, 5, dtype=torch.long)

Build, Call = Callable[[], nn.Module], Callable[[nn.Module], object]


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


def chain(modules: Iterable[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x


def called_one_by_one(*layers: nn.Module) -> Build:
    """A list of layers, of which each is called, or its parts where it is a bare container."""

    def parts(layer: nn.Module) -> Iterable[nn.Module]:
        return layer.values() if isinstance(layer, nn.ModuleDict) else layer

    def use(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            bare = isinstance(layer, (nn.ModuleList, nn.ModuleDict))
            x = chain(parts(layer) if bare else [layer], x)
        return x

    # A copy each time: hooks of one test must not be there in the next.
    return lambda: Made(use, layers=copy.deepcopy(nn.ModuleList(layers)))


def model_model_layers() -> nn.Module:
    """As `transformers` nests: model.model.layers and a head beside."""
    inner = Made(
        lambda m, x: chain(m.layers, m.proj(m.embed_tokens(x))),
        embed_tokens=nn.Embedding(11, WIDTH),
        layers=blocks(),
        proj=linear(),
    )
    return Made(lambda m, x: m.lm_head(m.model(x)), model=inner, lm_head=nn.Linear(WIDTH, 11))


def list_in_dict() -> nn.Module:
    """As nanoGPT holds its blocks: transformer = ModuleDict(h=ModuleList(...))."""
    parts = {"wte": nn.Embedding(11, WIDTH), "h": blocks(), "ln_f": nn.LayerNorm(WIDTH)}
    return Made(
        lambda m, x: m.lm_head(m.transformer.ln_f(chain(m.transformer.h, m.transformer.wte(x)))),
        transformer=nn.ModuleDict(parts),
        lm_head=nn.Linear(WIDTH, 11),
    )


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

    return Made(
        lambda m, x: chain(m.blocks, x[None] + m.first(x[None], x[None], x[None])[0])[0],
        first=made(),
        blocks=nn.ModuleList(Made(one, attention=made(), mlp=Block()) for _ in range(2)),
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
    return called_one_by_one(block, other, block)()


def stage() -> nn.Module:
    return nn.Sequential(Block(), nn.Sequential(linear(), Block()))


def through_a_method() -> nn.Module:
    """Used through its children, as autoencoders and agents are; forward is never called."""
    decoder = nn.Sequential(linear(), nn.Tanh(), linear())
    return Made(lambda m, x: x, encoder=linear(), decoder=decoder)


def on_rows(m: nn.Module) -> object:
    return m(ROWS)


CASES: dict[str, tuple[Build, Call]] = {
    "embedding, blocks, head": (TinyGPT, lambda m: m(TOKENS)),
    "model.model.layers": (model_model_layers, lambda m: m(TOKENS)),
    "model.model called": (model_model_layers, lambda m: m.model(TOKENS)),
    "transformer.h": (list_in_dict, lambda m: m(TOKENS)),
    "list of lists": (called_one_by_one(blocks(), blocks()), on_rows),
    "list of dicts": (
        called_one_by_one(*(nn.ModuleDict({"mix": linear(), "mlp": Block()}) for _ in range(2))),
        on_rows,
    ),
    "root calls into blocks": (lambda: Made(calls_into_blocks, blocks=blocks()), on_rows),
    "weights of blocks read": (lambda: Made(reads_weights_of_blocks, blocks=blocks()), on_rows),
    "attention": (attention, on_rows),
    "children read, not called": (reads_children, on_rows),
    "shared block": (shared_block, on_rows),
    "nested stages": (called_one_by_one(stage(), stage()), on_rows),
    "convolutions": (AllDifferent, lambda m: m(torch.zeros(3, 2, 6))),
    "mixed": (Mixed, on_rows),
    "sequential of layers": (lambda: nn.Sequential(linear(), nn.Tanh(), linear()), on_rows),
    "sequential of blocks": (lambda: nn.Sequential(Block(), Block()), on_rows),
    "sequential of sequentials": (
        lambda: nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block())),
        on_rows,
    ),
    "a leaf as root": (linear, on_rows),
    "a list as root": (blocks, lambda m: m[1](m[0](ROWS))),
    "a block called": (TinyGPT, lambda m: m.blocks[1](ROWS)),
    "a child of a block called": (TinyGPT, lambda m: m.blocks[1].up(ROWS)),
    "a method called": (through_a_method, lambda m: m.decoder(m.encoder(ROWS))),
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


def watch(model: nn.Module, ready: set[int]) -> list[Callable[[], None]]:
    removers = []
    for point in wait_points(model):
        removers += attach(point, lambda point=point: ready.update(point.parameters), lambda: None)
    return removers


# Reads a weight inside a block without calling anything.
REACHES_INTO_BLOCKS = ("weights of blocks read",)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training", [True, False])
def test_what_is_read_too_early_is_known_to_be_missed(case, training):
    """Reaching into a block passes no wait point of it; then `step` itself has to wait."""
    build, call = CASES[case]
    model = build().train(training)
    ready: set[int] = set()
    points = wait_points(model)
    coverage = Coverage(points)
    for number, point in enumerate(points):

        def wait(number=number, point=point):
            coverage.passed(number)
            ready.update(point.parameters)

        attach(point, wait, lambda: None)
    with Reads(model, ready) as reads:
        call(model)
    missed = coverage.take_missed()
    assert reads.read
    assert reads.early <= {reads.names[i] for i in missed}
    assert bool(reads.early) == (case in REACHES_INTO_BLOCKS)
    assert len(coverage.take_missed()) == len(reads.names), "begins anew"


def test_the_check_above_notices_a_missing_wait_point():
    model = TinyGPT()
    ready: set[int] = set()
    forgotten = set(model.blocks[-1].modules())
    for point in wait_points(model):
        if point.module in forgotten:
            continue
        attach(point, lambda point=point: ready.update(point.parameters), lambda: None)
    with Reads(model, ready) as reads:
        model(TOKENS)
    assert reads.early


@pytest.mark.parametrize("case", CASES)
def test_wait_points_cover_all_parameters_and_have_one_root(case):
    model = CASES[case][0]()
    points = wait_points(model)
    covered = frozenset().union(*(point.parameters for point in points))
    assert covered == {id(p) for p in model.parameters()}
    assert [point.module for point in points if point.is_root] == [model]
    assert len({id(point.module) for point in points}) == len(points)


_LEAVES = st.sampled_from([lambda: nn.Linear(2, 2), lambda: nn.Conv1d(1, 1, 1), nn.Identity])


def _parents(children):
    lists = st.lists(children, max_size=3)
    return st.one_of(
        lists.map(nn.ModuleList),
        lists.map(lambda ms: nn.Sequential(*ms)),
        lists.map(lambda ms: nn.ModuleDict({f"k{i}": m for i, m in enumerate(ms)})),
        lists.map(_holder),
    )


def _holder(children: list[nn.Module]) -> nn.Module:
    module = nn.Module()
    module.own = nn.Parameter(torch.zeros(2, 2))
    for i, child in enumerate(children):
        module.add_module(f"c{i}", child)
    return module


@settings(max_examples=80)
@given(st.recursive(_LEAVES.map(lambda build: build()), _parents, max_leaves=10))
def test_wait_points_of_any_model_cover_all_parameters(model):
    points = wait_points(model)
    covered = [p for point in points for p in point.parameters]
    assert set(covered) == {id(p) for p in model.parameters()}


# ---- nothing is waited for too early -----------------------------------------------------


@pytest.mark.parametrize(
    ("build", "blocks", "batch"),
    [
        (lambda: TinyGPT(blocks=3), lambda m: m.blocks, TOKENS),
        (model_model_layers, lambda m: m.model.layers, TOKENS),
        (list_in_dict, lambda m: m.transformer.h, TOKENS),
    ],
)
def test_a_block_starts_while_later_blocks_still_travel(build, blocks, batch):
    model = build()
    ready: set[int] = set()
    watch(model, ready)
    seen: list[list[bool]] = []
    for block in blocks(model):

        def note(*_):
            seen.append([{id(p) for p in b.parameters()} <= ready for b in blocks(model)])

        block.register_forward_pre_hook(note)
    model(batch)
    n = len(blocks(model))
    assert seen == [[j <= i for j in range(n)] for i in range(n)]


# ---- state dicts, removal, copies --------------------------------------------------------


class Counting:
    """A model with wait points whose actions are counted."""

    def __init__(self) -> None:
        self.model = TinyGPT()
        self.waits = self.drains = 0
        self.removers = []
        for point in wait_points(self.model):
            # Functions, for copying a bound method would copy this object with it.
            self.removers += attach(point, lambda: self.wait(), lambda: self.drain())

    def wait(self) -> None:
        self.waits += 1

    def drain(self) -> None:
        self.drains += 1


def test_state_dicts_of_the_model_and_of_its_blocks_drain():
    counting = Counting()
    state = counting.model.state_dict()
    assert counting.drains > 0
    for read_or_write in (
        lambda: counting.model.load_state_dict(state),
        lambda: counting.model.blocks[1].state_dict(),
        lambda: counting.model.blocks[1].load_state_dict(counting.model.blocks[0].state_dict()),
    ):
        before = counting.drains
        read_or_write()
        assert counting.drains > before
    assert counting.waits == 0


def test_removing_leaves_no_hook_behind():
    plain = TinyGPT()
    counting = Counting()
    for remove in counting.removers:
        remove()
    hook_tables = [name for name in vars(plain) if name.endswith("hooks")]
    assert "_forward_pre_hooks" in hook_tables
    for module in counting.model.modules():
        assert not any(getattr(module, name) for name in hook_tables)
    counting.model(TOKENS)
    counting.model.state_dict()
    assert (counting.waits, counting.drains) == (0, 0)


def saved_whole(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved_whole],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_of_a_hooked_model_has_inert_hooks(duplicate):
    counting = Counting()
    copied = duplicate(counting.model)
    copied = duplicate(copied)  # a copy of a copy too
    (counting.waits, counting.drains) = (0, 0)
    torch.testing.assert_close(copied(TOKENS), counting.model(TOKENS), rtol=0, atol=0)
    waits = counting.waits
    copied(TOKENS)
    copied.load_state_dict(copied.state_dict())
    assert (counting.waits, counting.drains) == (waits, 0)
    assert waits > 0
