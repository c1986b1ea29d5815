"""The update is never changed: owners' layouts against Muon in one process on everybody's data."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call
from torch.optim.lr_scheduler import CosineAnnealingLR

import dmuon
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.select import trainable_parameters
from tests.distributed.harness import distributed
from tests.distributed.models import (
    Net,
    assert_equal_on_all_ranks,
    batch,
    loss_of,
    seeded,
    weights,
)
from tests.distributed.owners import (
    DDP,
    FSDP,
    IN_TURN,
    KEPT,
    LAYOUTS,
    PLAIN,
    REPLICATED,
    Casting,
    Ordered,
    Pieces,
    ZooBlocks,
    assert_bitwise,
    assert_close,
    both,
    follow,
    gathered,
    layouts,
    mesh_of,
    shard_rest,
    whole,
)

BF16 = torch.bfloat16

# ---- whole runs ------------------------------------------------------------------------------


@layouts(*LAYOUTS)
@distributed(2)
def test_training_follows_the_reference(rank, world, layout):
    follow(Net, layout, steps=5)
    follow(ZooBlocks, layout)
    with both(Pieces, layout, **IN_TURN) as pair:
        for name, pieces in {"qkv.weight": 3, "o_proj.weight": 4, "w1": 5, "w2": 5}.items():
            owners = pair.own.owner_of(f"blocks.0.{name}")
            assert len(owners) == pieces and set(owners) == {0, 1}, name
        pair.train(range(3))
        pair.check()


@pytest.mark.parametrize("adjust", ["original", None])
@layouts(PLAIN, REPLICATED)
@distributed(1, 2)
def test_a_shape_and_its_transpose_in_one_batch(rank, world, layout, adjust):
    """Each matrix is updated by its own rows and columns."""
    for build in (Net, Pieces, ZooBlocks):
        with both(build, layout, muon={"adjust_lr_fn": adjust}) as pair:
            matrices, batches = pair.own.plan.specs.matrices, pair.own.plan.batches
            mixed = any(len({matrices[i].shape for i in b.matrices}) > 1 for b in batches)
            assert mixed or world > 1 or build is not Net
            pair.train(range(2))
            pair.check()


@distributed(1)
def test_a_group_of_one_rank(rank, world):
    for layout in (PLAIN, FSDP, REPLICATED):
        follow(Net, layout)


@distributed(4)
def test_meshes_of_other_shapes(rank, world):
    """Replicas; two axes; two ownerships on halves of the world."""
    follow(Pieces, FSDP, mesh=(2, 2), **IN_TURN)
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("stage", "dp"))
    report = dmuon.check_step_equivalence(
        lambda: seeded(Net), loss_of, batch, mesh, steps=2, lr=0.02, ns_dtype=torch.float32
    )
    assert report.passed and report.rows[0].mesh == "2x2"
    stage, data_rank = divmod(rank, 2)
    half = {"mesh": mesh["dp"], "data_rank": data_rank, "data_world": 2}
    with both(lambda: Net(layers=1 + stage), REPLICATED, **half) as pair:
        assert pair.own.plan.topology.world == 2 and pair.own.rank == data_rank
        pair.train(range(2))
        pair.check()


@layouts(PLAIN, FSDP, REPLICATED)
@distributed(4)
def test_a_mesh_whose_ranks_are_in_another_order(rank, world, layout):
    names = ("replicate", "shard")
    follow(
        Net,
        layout,
        mesh=DeviceMesh(torch.get_default_device().type, [[0, 2], [1, 3]], mesh_dim_names=names),
    )


# ---- settings --------------------------------------------------------------------------------


def two_groups(model):
    """The parameters of the embedding and the first block by name, and all the others."""
    named = dict(model.named_parameters())
    first = {n: p for n, p in named.items() if n.startswith(("tok.", "blocks.0."))}
    return first, {n: p for n, p in named.items() if n not in first}


def an_optimizer_each(model, rates, matrices):
    """What two groups must amount to: Muon and AdamW for each of them."""
    made = []
    for group, lr in zip(two_groups(model), rates):
        muon = [p for n, p in group.items() if n in matrices]
        rest = [p for n, p in group.items() if n not in matrices]
        made.append(ReferenceMuon(muon, lr=lr, ns_dtype=torch.float32))
        made.append(torch.optim.AdamW(rest, lr=lr, weight_decay=0.1, betas=(0.9, 0.95)))
    return made


@layouts(PLAIN, FSDP, REPLICATED)
@distributed(2)
def test_param_groups_and_schedules(rank, world, layout):
    model, twin, mesh = seeded(), seeded(), mesh_of((world,))
    asked = {"layout": "dedicated"}
    if layout == REPLICATED:
        asked = {"options": dmuon.ReplicatedOptions(reduce_to_owner=True)}
    own = dmuon.dedicate_params(model, mesh, solver="greedy", **asked)
    if layout == FSDP:
        shard_rest(model, own, mesh)
    first, second = two_groups(model)
    groups = [{"params": first.values(), "lr": 0.04}, {"params": second.values()}]
    opt = dmuon.Muon(groups, lr=0.01, ns_dtype=torch.float32)
    matrices = {m.name for m in own.plan.specs.matrices}
    others = an_optimizer_each(twin, (0.04, 0.01), matrices)
    schedules = [CosineAnnealingLR(each, T_max=6) for each in (opt, *others)]
    for step in range(4):
        loss_of(model, batch(step, rank)).backward()
        (sum(loss_of(twin, batch(step, r)) for r in range(world)) / world).backward()
        for each in (opt, *others, *schedules):
            each.step()
        opt.zero_grad()
        twin.zero_grad()
    assert {group["lr"] for group in opt.param_groups}.isdisjoint({0.04, 0.01})
    assert_close(whole(model, own), weights(twin))
    own.close()


SINGLY = {"planner": dmuon.PlannerOptions(max_batch=1)}
SMALL = {"bucket_bytes": 4096, "publish_bucket_bytes": 4096}
SWITCHES = {
    PLAIN: [
        {"options": {"free_after_forward": False}},
        {"options": {"prefetch": 0}},
        {"options": {"prefetch": 3, "free_after_forward": False}},
        {"options": {"prefetch": 3}, "only": {"publish": "sync"}},
    ],
    REPLICATED: [{"options": SMALL}, {"options": SMALL, "only": {"publish": "sync"}}],
}
SWITCHES |= {FSDP: SWITCHES[PLAIN], DDP: SWITCHES[REPLICATED]}


def trained(layout, **kwargs):
    """The weights after some steps without the twin."""
    # A batch may be two buckets, and batches of other sizes round otherwise.
    kwargs = {"only": {"publish": "async"}, "request": SINGLY} | kwargs
    with both(Net, layout, **kwargs) as pair:
        pair.train_alone(range(3))
        return pair.whole()


@layouts(PLAIN, FSDP, REPLICATED, DDP)
@distributed(2)
def test_switches_change_nothing_bitwise(rank, world, layout):
    expected = trained(layout)
    for switch in SWITCHES[layout]:
        assert_bitwise(trained(layout, **switch), expected)


@distributed(4)
def test_switches_change_nothing_bitwise_with_replicas(rank, world):
    expected = trained(PLAIN, mesh=(2, 2))
    assert_bitwise(trained(PLAIN, mesh=(2, 2), **SWITCHES[PLAIN][2]), expected)


# ---- gradients -------------------------------------------------------------------------------


class Sums(nn.Module):
    """Every weight's gradient is ``scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SumsBlock(3 + i) for i in range(5))

    def forward(self, scale):
        return sum((block(scale) for block in self.blocks), torch.zeros(()))


class SumsBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 7))
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, scale):
        return scale * (self.weight.sum() + self.scale.sum())


@distributed(2, 4)
def test_owners_alone_have_momentum_of_the_exact_mean(rank, world):
    """Of two backwards, which add up, and exactly, because one half is a power of two."""
    grids = [(layout, (world,)) for layout in (PLAIN, REPLICATED, DDP)]
    for layout, mesh in grids + [(PLAIN, (2, 2))] * (world == 4):
        with both(Sums, layout, mesh=mesh, muon={"momentum": 0.5}) as pair:
            mean = (world + 1) / 2 + 8
            for scale in (rank + 1.0, 8.0):
                pair.model(torch.tensor(scale)).backward()
            parameters = dict(pair.bare.named_parameters())
            for name, p in parameters.items():
                alone = name in pair.matrices
                assert p.grad is None if alone else torch.equal(p.grad, torch.full_like(p, mean))
            pair.opt.step()
            state = {n: pair.opt.state[p] for n, p in parameters.items()}
            buffers = {n: s["momentum_buffer"] for n, s in state.items() if "momentum_buffer" in s}
            buffers = {n: buffer for n, buffer in buffers.items() if len(buffer)}
            assert set(buffers) == set(pair.own.owned_by(rank))
            for name, found in buffers.items():
                expected = torch.full(pair.own.shape_of(name), 0.5 * mean)
                assert torch.equal(found, expected), name
            assert sorted(n for each in gathered(list(buffers)) for n in each) == sorted(
                pair.matrices
            )


@layouts(PLAIN, FSDP, REPLICATED, DDP)
@distributed(2)
def test_three_micro_batches_are_one_batch(rank, world, layout):
    for how in ("no_sync", "each", "one batch"):
        with both(Net, layout) as pair:
            local = [p for n, p in trainable_parameters(pair.model) if n in pair.matrices]
            for step in (0, 3):
                parts = range(step, step + 3)
                if how == "one batch":
                    joined = tuple(map(torch.cat, zip(*(batch(part, rank) for part in parts))))
                    loss_of(pair.model, joined).backward()
                else:
                    for part in parts:
                        wait = how == "no_sync" and part != parts[-1]
                        with dmuon.no_sync(pair.model) if wait else nullcontext():
                            pair.backward(part, 3)
                        stays = any(p.grad is not None for p in local)
                        assert stays == wait, "gradients of matrices stay here until they sync"
                for part in parts:
                    pair.joint_backward(part, 3)
                pair.advance()
            pair.check(1e-6)


def on_one_rank(model, step, rank):
    """One rank uses the spare module, in turn, and the other all the blocks."""
    model.use_spare = rank == step % 2
    model.order = [0, 2] if rank == step % 2 else [0, 1, 2]


def on_no_rank(model, step, rank):
    """Blocks that no rank uses in some steps, and one that is never used."""
    model.order = [0, 1] if step % 2 else [0]


def cut_off(model, step, rank):
    """A rank whose backward ends early: what lies before has no gradients there."""
    model.detached = rank == step % 2


def reaches_almost_nothing(model, step, rank):
    model.order = [] if rank == 1 else [0, 1, 2]


@layouts(PLAIN, KEPT, REPLICATED, DDP)
@distributed(2)
def test_missing_gradients(rank, world, layout):
    for prepare in (on_one_rank, on_no_rank, cut_off, reaches_almost_nothing):
        with both(Ordered, layout, prepare=prepare) as pair:
            before = pair.whole()
            pair.train(range(4))
            pair.check()
            after = pair.whole()
            for name in ("blocks.1.up.weight", "blocks.2.up.weight"):
                untouched = prepare is on_no_rank and name.startswith("blocks.2")
                assert torch.equal(before[name], after[name]) == untouched, name
            if layout in (REPLICATED, DDP):
                assert_equal_on_all_ranks(pair.model)


def freeze(model):
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.mid.weight.requires_grad_(False)


@layouts(*LAYOUTS)
@distributed(2)
def test_frozen_parameters_let_gradients_through(rank, world, layout):
    with both(Net, layout, change=freeze) as pair:
        assert all(p.requires_grad for p in pair.own.dedicated_params)
        before = {n: p.clone() for n, p in pair.twin.named_parameters() if not p.requires_grad}
        pair.train(range(3))
        pair.check()
        frozen = {n: p for n, p in pair.twin.named_parameters() if n in before}
        assert_bitwise(frozen, before)


def clip_and_compare(layout, **kwargs):
    # Clipped gradients come near AdamW's usual eps.
    with both(Net, layout, muon={"adamw_eps": 1e-3}, **kwargs) as pair:
        for step, norm_type in enumerate([1.0, 2.0, float("inf")]):
            pair.both_backward(step)
            found = dmuon.clip_grad_norm_(pair.model, 0.3, norm_type)
            expected = nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.3, norm_type)
            assert abs(float(found) / float(expected) - 1) <= 1e-5
            assert set(gathered(found.item())) == {found.item()}
            again = dmuon.clip_grad_norm_(pair.model, 10.0, norm_type)
            assert abs(float(again) - min(float(expected), 0.3)) <= 1e-5
            pair.advance()
        pair.check()


@layouts(PLAIN, FSDP, REPLICATED, DDP)
@distributed(2)
def test_clipping_is_that_of_the_joint_batch(rank, world, layout):
    clip_and_compare(layout)


@distributed(4)
def test_clipping_with_replicas(rank, world):
    for layout in (PLAIN, FSDP):
        clip_and_compare(layout, mesh=(2, 2))


# ---- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [torch.float32, None], ids=["reduce32", "reduce16"])
@layouts(PLAIN, REPLICATED)
@distributed(2)
def test_bfloat16_parameters_with_master_weights(rank, world, layout, reduce):
    """The twin is in float32; its gradients are those of a bfloat16 copy of the real weights."""
    with both(
        Net,
        layout,
        change=lambda model: model.to(BF16),
        options={"reduce_dtype": reduce},
        only={"master_weights": True},
    ) as pair:
        working = Net().to(BF16)
        pair.twin.float()
        for step in range(4):
            pair.backward(step)
            working.load_state_dict(pair.whole(), strict=False)
            for p in pair.twin.parameters():
                p.grad = torch.zeros_like(p)
            for r in range(world):
                working.zero_grad()
                loss_of(working, batch(step, r)).backward()
                for p, twin in zip(working.parameters(), pair.twin.parameters()):
                    if p.grad is None:
                        twin.grad = None  # not used: nobody has a gradient
                    else:
                        twin.grad += p.grad.float() / world
            pair.advance()
        tolerance = 1e-5 if reduce is torch.float32 else 5e-3
        state = pair.opt.state_dict()  # makes the masters visible
        assert state["state"]
        found, expected = pair.whole(), weights(pair.twin)
        seen = 0
        for name, p in trainable_parameters(pair.model):
            assert torch.allclose(found[name].float(), expected[name], 2**-7, tolerance), name
            master = pair.opt.state[p].get("master_weight")
            if master is not None and len(master) and name in pair.own.owned_by(rank):
                seen += 1
                assert float((master - expected[name]).abs().max()) <= tolerance, name
                assert torch.equal(master.bfloat16(), found[name]), name
        assert seen >= len(pair.own.owned_by(rank)) > 0


def as_bfloat16(twin, names):
    """A model like ``twin`` whose matrices are rounded, gradients going to the twin's weights."""

    def run(tokens):
        rounded = {n: p.bfloat16() for n, p in twin.named_parameters() if n in names}
        return functional_call(twin, rounded, (tokens,))

    return run


def called_twice(model, step, rank):
    model.order = [0, 1, 2, 0]


def tied(model):
    model.blocks[2].up.weight = model.blocks[0].up.weight


def two_forwards(model, inputs):
    return loss_of(model, inputs) + loss_of(model, (inputs[0].flip(1), inputs[1]))


# Several uses are accumulated one by one, because the weight's dtype has changed in between; their
# sum is rounded to bfloat16 in another order than in the twin.
USES = {
    "once": ({}, 1e-5),
    "summed in bfloat16": ({"options": {"reduce_dtype": BF16}}, 5e-3),
    "summed in float32": ({"options": {"reduce_dtype": torch.float32}}, 1e-5),
    "called twice": ({"prepare": called_twice}, 1e-3),
    "tied": ({"change": tied}, 1e-3),
    "two forwards": ({"loss_of": two_forwards}, 1e-3),
}


@layouts(PLAIN, KEPT)
@distributed(2)
def test_weights_used_in_bfloat16(rank, world, layout):
    for kind, (settings, tolerance) in USES.items():
        options = {"param_dtype": BF16} | settings.get("options", {})
        with both(Casting, layout, **(settings | {"options": options})) as pair:
            rounded = as_bfloat16(pair.twin, set(pair.matrices))
            for step in range(2):
                pair.copy_weights()
                pair.backward(step)
                pair.prepare(pair.twin, step, rank)
                for r in range(world):
                    (pair.loss_of(rounded, batch(step, r)) / world).backward()
                pair.advance()
                pair.check(tolerance)
            assert all(block.dtypes == {BF16} for block in pair.model.blocks), kind
            assert {p.dtype for p in pair.own.dedicated_params} == {torch.float32}


@distributed(2)
def test_mixed_precision_of_both(rank, world):
    """FSDP2 casts inputs and the rest, dmuon the matrices: blocks run in bfloat16."""
    options = {"param_dtype": BF16, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(BF16, torch.float32)
    with both(Net, FSDP, options=options, fsdp={"mp_policy": policy}) as pair:
        before = weights(pair.twin)
        rounded = as_bfloat16(pair.twin, set(before))
        for step in range(3):
            pair.backward(step)
            for r in range(world):
                (loss_of(rounded, batch(step, r)) / world).backward()
            pair.advance()
        found, expected = pair.whole(), weights(pair.twin)
        for name, weight in found.items():
            change = expected[name] - before[name]
            if float(change.norm()):
                assert (weight - expected[name]).norm() <= 0.05 * change.norm(), name
