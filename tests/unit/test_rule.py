"""Muon's rule on plain tensors: momentum, rates, decay, masters, variants; what goes to Triton."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from dmuon.reference import ReferenceMuon
from dmuon.rule import (
    Hyper,
    NorMuon,
    Rule,
    StateSpec,
    copier,
    follow_weights,
    momentum_update,
    rule_of,
)
from dmuon.tensors import wide_norms
from tests.accelerator import host_cannot_read

RULE = Rule()
EMA = Hyper(0.1, 0.5, None, momentum=0.9)
SGD = Hyper(0.1, 0.5, None, momentum=0.9, mode="sgd", dampening=0.25)


SHAPES = [(), (3,), (0, 4), (64, 96), (300, 512), (3, 200, 300)]  # joined, alone, and in parts


def follow_blindly(masters, weights):
    with host_cannot_read():
        follow_weights(masters, weights)


BOTH = pytest.mark.parametrize("follow", [follow_weights, follow_blindly])


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_what_is_written_to_weights_and_nothing_else(dtype, follow):
    torch.manual_seed(0)
    masters = [torch.randn(shape) for shape in SHAPES]
    masters[2] = masters[2].mT
    masters[4] = torch.randn(512, 300).mT  # as an owner may hold it
    weights = [m.to(dtype) for m in masters]
    # Of another dtype in one list; and no master at all.
    masters += [torch.randn(5), torch.randn(6)]
    weights += [masters[-2].to(torch.bfloat16), masters[-1]]
    before = [m.clone() for m in masters]
    follow(masters, weights)
    for now, was in zip(masters, before, strict=True):
        assert torch.equal(now, was)
    for n, weight in enumerate(weights[:-1]):
        expected, changed = masters[n].clone(), torch.rand(weight.shape) < 0.1
        changed.view(-1)[-1:] = True
        weight[changed] = weight[changed] * 2 + 10
        expected[changed] = weight[changed].float()
        follow(masters, weights)
        assert torch.equal(masters[n], expected), n
        assert masters[n].stride() == before[n].stride()
    assert torch.equal(masters[-1], before[-1])


@BOTH
def test_what_is_no_number_counts_too(follow):
    """A weight that overflowed has a finite master; a nan or inf that somebody wrote is taken, and
    a number in its place. Zeros of both signs are one."""
    inf, nan = math.inf, math.nan
    master = torch.tensor([7e4, 1.0, 1.0, nan, nan, -1e-9, 1.0, inf])
    weight = torch.tensor([inf, nan, inf, nan, 2.0, 0.0, 0.0, 3.0], dtype=torch.float16)
    expected = torch.tensor([7e4, nan, inf, nan, 2.0, -1e-9, 0.0, 3.0])
    follow([master], [weight])
    assert torch.equal(master.nan_to_num(0.5), expected.nan_to_num(0.5))
    assert torch.equal(master.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_of_lists_are_right_over_the_whole_range(dtype):
    """Where the host cannot look whether squares fit, they are squared in float64."""
    sizes = [(3, 5), (4097,), (64, 128), (1,), (7, 0)]
    tensors = [torch.randn(size, dtype=torch.float64) for size in sizes]
    for power in (-30, -22, 0, 22, 30):
        given = [(t * 10.0**power).to(dtype) for t in tensors]
        given.append(given[0].double())  # another dtype in the list
        for order in (1.0, 2.0, 3.0, math.inf):
            held = [t for t in given if t.numel()]
            for norm, t in zip(wide_norms(held, order), held, strict=True):
                expected = torch.linalg.vector_norm(t.double(), order)
                assert norm.dtype is torch.float64 and norm.ndim == 0
                assert abs(norm - expected) <= 1e-12 * expected


class Noted:
    """In place of `dmuon.kernels.triton_lists`: what is asked of it, by name."""

    def __init__(self):
        self.seen = []

    def norms(self, buffers, grads, working, **how):
        self.seen.append(("norms", [b.shape for b in buffers], working, how))
        return torch.stack(RULE._norms_of_some(buffers, grads, SGD, working), 1)

    def advance(self, out, buffers, grads, working, *, scales=None, stays=None, **how):
        self.seen.append(("advance", [b.shape for b in buffers], working, how))
        RULE._advance_some(out, buffers, grads, SGD, working, stays, scales)

    def update(self, targets, updates, weights, *, decay, lr, stays, cautious):
        self.seen.append(("update", [t.shape for t in targets], decay, lr, cautious))
        h = replace(EMA, decay=decay, cautious=cautious)
        kept = decay if stays is None else torch.where(stays, 1.0, decay)
        RULE._apply_some(targets, updates, h, lr, kept, weights)

    def copier(self, targets, sources, *, turned):
        self.seen.append(("copier", [t.shape for t in targets], turned))
        return lambda: torch._foreach_copy_(targets, sources)


@pytest.fixture
def noted(monkeypatch):
    kernels = Noted()
    monkeypatch.setattr("dmuon.rule.list_kernels", lambda device: kernels)
    with host_cannot_read():
        yield kernels


def test_list_kernels_get_the_groups_settings_and_what_suits_them(noted):
    """Contiguous tensors of up to 32 bits; the others go by torch's operations, to the same."""
    shapes = [(6, 9), (9, 6), (4, 4)]
    buffers = [torch.randn(6, 9), torch.randn(6, 9).mT, torch.randn(4, 4, dtype=torch.float64)]
    grads, wanted = [torch.randn(shape) for shape in shapes], [b.clone() for b in buffers]
    outs = [torch.full(shape, math.nan) for shape in shapes]
    norms = RULE.operand_norms(buffers, grads, SGD, torch.float32)
    torch.testing.assert_close(norms[1].float(), torch.stack([g.norm() for g in grads]))
    stays, scales = torch.tensor([False, False, True]), torch.tensor([0.5, 2.0, 1.0])
    how = {"scales": scales, "stays": stays}
    RULE.advance_into(outs, buffers, grads, SGD, torch.float32, **how)
    settings = {"momentum": 0.9, "weight": 0.75, "EMA": False, "NESTEROV": False}
    assert noted.seen == [
        (name, [torch.Size([6, 9])], torch.float32, settings) for name in ("norms", "advance")
    ]
    for n, (was, grad) in enumerate(zip(wanted, grads)):
        if n < 2:
            was.copy_(momentum_update(was.clone(), grad, SGD))
            torch.testing.assert_close(norms[0, n].float(), was.norm())
            torch.testing.assert_close(outs[n], was * scales[n])
        assert torch.equal(buffers[n], was)
    assert not outs[2].any()


def test_weights_are_updated_in_one_pass_where_that_is_possible(noted):
    weights = [torch.ones(4, 6), torch.ones(6, 4).mT, torch.ones(4, 6)]
    updates, stays = [torch.ones(4, 6)] * 3, torch.tensor([False, False, True])
    updates[2] = torch.zeros(4, 6)
    RULE.apply(weights, updates, replace(EMA, cautious=True), lr=0.25, stays=stays)
    assert noted.seen == [("update", [torch.Size([4, 6])] * 2, 0.5, 0.25, True)]
    assert [w.unique().tolist() for w in weights] == [[0.25], [0.25], [1.0]]


def test_parts_of_matrices_are_copied_in_few_calls(noted):
    """Rows of a matrix are one piece, columns and transposes are not."""
    memory = torch.zeros(2, 8, 12)
    targets = [memory[:, 2:4], memory[0, 4:, 3:5], memory[1, 4:].mT[2:5], memory[0, :2, :1]]
    sources = [torch.randn(t.shape) for t in targets]
    copier(targets, sources)()
    assert all(map(torch.equal, targets, sources))
    found = [(shapes, turned) for _, shapes, turned in noted.seen]
    columns, transposed = torch.Size([4, 2]), torch.Size([4, 3])
    assert found == [([columns, torch.Size([2, 1])], False), ([transposed], True)]


def test_a_rule_says_what_it_is():
    class Signs(Rule):
        def accept(self, update, state):
            return update.sign()

    assert rule_of({"variant": None}).is_plain and not Signs().is_plain
    assert repr(NorMuon()) == "NorMuon(beta2=0.95)"
    assert isinstance(rule_of({"variant": "normuon"}), NorMuon)
    update = torch.tensor([[[3.0, -2.0]]])
    Signs().accepted(update, {})
    assert update.tolist() == [[[1.0, -1.0]]]
    for variant, message in [("adam", "'normuon'"), (Signs, "call it"), (3, "found 3")]:
        with pytest.raises((TypeError, ValueError), match=message):
            rule_of({"variant": variant})
    with pytest.raises(ValueError, match="'row', 'element' or 'matrix'"):
        StateSpec("x", "column")
    with pytest.raises(TypeError, match="torch dtype"):
        StateSpec("x", dtype="float32")
    for state, message in [(StateSpec("x"), "a tuple"), ((StateSpec("x"),) * 2, "one name")]:
        with pytest.raises((TypeError, ValueError), match=message):
            rule_of({"variant": type("Odd", (Rule,), {"state": state})()})
    with pytest.raises(ValueError, match="is taken"):
        StateSpec("momentum_buffer")
    with pytest.raises(ValueError, match="beta2"):
        NorMuon(beta2=1.0)
    with pytest.raises(ValueError, match="'adam'"):
        ReferenceMuon([nn.Parameter(torch.ones(2, 2))], variant="adam")


# All that a rule does, except for what a variant may say.
CLOSED = sorted({n for n in vars(Rule) if not n.startswith("__")} - {"accept", "state"})


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("base", [Rule, NorMuon])
def test_what_counts_in_some_layouts_alone_is_refused_by_name(name, base):
    """In the class, a class between, or the instance."""
    told = rf"group 1 overrides '{name}'.*may override the method 'accept' and the tuple 'state'"
    direct = type("Mine", (base,), {name: lambda *args, **kwargs: None})
    variants = [direct(), type("Deeper", (direct,), {})()]
    if name != "is_plain":  # a property: it cannot be set
        variants.append(base())
        setattr(variants[-1], name, 3)
    for variant in variants:
        with pytest.raises(TypeError, match=told):
            rule_of({"variant": variant}, " in group 1")


def test_accept_of_an_instance_is_refused_and_names_of_ones_own_are_free():
    mine = Rule()
    mine.accept = lambda update, state: update.sign()
    with pytest.raises(TypeError, match="overrides 'accept'"):
        rule_of({"variant": mine})
    own = {"advance_all": 1, "accept": lambda self, update, state: update, "__eq__": object.__eq__}
    free = type("Free", (NorMuon,), own)()
    free.scale, free.state = 2.0, (StateSpec("size"),)
    assert rule_of({"variant": free}) is free
