"""The update is never changed: owners' layouts against Muon in one process on everybody's data.

``rest`` says how the model is laid out: `dedicated` beside plain or FSDP2 parameters, or
`replicated` on a plain module or under DistributedDataParallel.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.checkpoint import checkpoint

import dmuon
import dmuon.comm.owners
from dmuon.comm.routes import Unit, units_of
from dmuon.reference import ReferenceMuon
from dmuon.scheduler.select import trainable_parameters
from tests.distributed.dedicated import MUON, mesh_of, shard_rest, whole
from tests.distributed.dedicated_models import (
    ALL_MODES,
    DDP,
    FSDP,
    KEPT,
    PLAIN,
    REPLICATED,
    Checkpointed,
    Pieces,
    Skipping,
    Sums,
    ZooBlocks,
    assert_bitwise,
    both,
    follow,
    trained,
)
from tests.distributed.harness import distributed
from tests.distributed.models import (
    Block,
    Net,
    Zoo,
    assert_equal_on_all_ranks,
    batch,
    loss_of,
    seeded,
    weights,
    wrap,
)


def layouts(*names):
    return pytest.mark.parametrize("rest", names)


SMALL = {"bucket_bytes": 4096, "publish_bucket_bytes": 4096}

# ---- whole runs ------------------------------------------------------------------------------


@ALL_MODES
@distributed(2)
def test_training_follows_the_reference(rank, world, mode):
    follow(steps=5, **mode)


@distributed(1)
def test_a_group_of_one_rank(rank, world):
    follow()
    follow(rest=FSDP, options=KEPT)
    follow(rest=REPLICATED)


@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
@distributed(4)
def test_the_check_of_replicated_weights_passes(rank, world, ddp):
    check = partial(
        dmuon.check_step_equivalence, loss_fn=loss_of, batches=batch, lr=0.02,
        parallelize=lambda m: wrap(m, ddp),
    )  # fmt: skip
    for kind in (Net, Zoo):
        row = check(lambda kind=kind: seeded(kind, seed=rank), ns_dtype=torch.float32).rows[0]
        assert row.passed and row.max_abs_diff <= 1e-5 and row.max_loss_diff <= 1e-5, str(row)
    report = check(lambda: seeded(Net, width=64, hidden=160), ns_dtype=torch.bfloat16, steps=5)
    assert report.passed, str(report)
    for reduce in (torch.float32, None):
        row = check(
            lambda: seeded(Net).to(torch.bfloat16),
            options=dmuon.ReplicatedOptions(reduce_dtype=reduce),
            ns_dtype=torch.bfloat16,
            steps=5,
        ).rows[0]
        assert row.dtype == "bfloat16" and row.passed, str(row)


@pytest.mark.parametrize(
    "muon",
    [
        {"weight_decay": 0.7, "adamw_weight_decay": 0.3, "adamw_betas": (0.8, 0.9)},
        {"momentum_mode": "sgd", "dampening": 0.1, "nesterov": False, "weight_decay": 0.0},
        {"adjust_lr_fn": "original", "ns_coefficients": "quintic", "ns_steps": 4},
        {"adjust_lr_fn": None, "ns_steps": 3},
    ],
    ids="-".join,
)
@layouts(PLAIN, REPLICATED)
@distributed(2)
def test_hyperparameters_mean_the_same(rank, world, rest, muon):
    follow(rest=rest, muon=muon)


SCHEDULES = {
    "cosine": lambda opt: CosineAnnealingLR(opt, T_max=6),
    "lambda": lambda opt: LambdaLR(opt, lambda step: 1 / (1 + step)),
}


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


@pytest.mark.parametrize(
    "rest, schedule", [(PLAIN, "cosine"), (FSDP, "lambda"), (REPLICATED, "cosine")]
)
@distributed(2)
def test_param_groups_and_schedules(rank, world, rest, schedule):
    model, twin, mesh = seeded(), seeded(), mesh_of((world,))
    layout = "replicated" if rest == REPLICATED else "dedicated"
    own = dmuon.dedicate_params(model, mesh, layout=layout, solver="greedy")
    if rest == FSDP:
        shard_rest(model, own, mesh)
    first, second = two_groups(model)
    groups = [{"params": first.values(), "lr": 0.04}, {"params": second.values()}]
    opt = dmuon.Muon(groups, lr=0.01, ns_dtype=torch.float32)
    matrices = {m.name for m in own.plan.specs.matrices}
    others = an_optimizer_each(twin, (0.04, 0.01), matrices)
    schedules = [SCHEDULES[schedule](each) for each in (opt, *others)]
    for step in range(5):
        loss_of(model, batch(step, rank)).backward()
        (sum(loss_of(twin, batch(step, r)) for r in range(world)) / world).backward()
        for each in (opt, *others, *schedules):
            each.step()
        opt.zero_grad()
        twin.zero_grad()
    assert {group["lr"] for group in opt.param_groups}.isdisjoint({0.04, 0.01})
    found, expected = whole(model, own), weights(twin)
    for name, weight in found.items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=1e-5), name
    own.close()


@layouts(PLAIN, REPLICATED)
@distributed(2)
def test_a_rate_changed_right_after_step_does_not_touch_that_step(rank, world, rest):
    with both(rest=rest) as pair:
        pair.train(range(2))
        for group in pair.opt.param_groups:
            group["lr"] = 100.0
        pair.check()


@distributed(4)
def test_meshes_of_other_shapes(rank, world):
    """Two axes, and two ownerships on halves of the world: pipeline stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    report = dmuon.check_step_equivalence(
        lambda: seeded(Net), loss_of, batch, mesh, steps=3, lr=0.02, ns_dtype=torch.float32
    )
    assert report.passed and report.rows[0].mesh == "2x2"
    stage, dp_rank = rank // 2, rank % 2
    model, twin = (seeded(Net, seed=stage, layers=1 + stage) for _ in range(2))
    own = dmuon.dedicate_params(model, mesh["dp"])
    opt, reference = dmuon.Muon(model, **MUON), ReferenceMuon(twin, **MUON)
    assert own.plan.topology.world == 2 and own.rank == dp_rank
    for step in range(3):
        loss_of(model, batch(step, 10 * stage + dp_rank)).backward()
        for r in range(2):
            (loss_of(twin, batch(step, 10 * stage + r)) / 2).backward()
        opt.step(), opt.zero_grad(), reference.step(), reference.zero_grad()
    found, expected = whole(model, own), weights(twin)
    assert all(float((found[n] - expected[n]).abs().max()) <= 1e-5 for n in expected)
    own.close()


# ---- what must not change anything -----------------------------------------------------------

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


@layouts(PLAIN, FSDP, REPLICATED, DDP)
@distributed(2)
def test_switches_change_nothing_bitwise(rank, world, rest):
    expected = trained(rest=rest)
    for switch in SWITCHES[rest]:
        assert_bitwise(trained(rest=rest, **switch), expected)


@distributed(4)
def test_switches_change_nothing_bitwise_with_replicas(rank, world):
    expected = trained(mesh=(2, 2))
    for switch in SWITCHES[PLAIN][::2]:
        assert_bitwise(trained(mesh=(2, 2), **switch), expected)


# ---- gradients -------------------------------------------------------------------------------


@distributed(2, 4)
def test_gradients_reduce_to_the_exact_mean_at_the_owner_and_nowhere_else(rank, world):
    shapes = [(world,)] + ([(2, 2)] if world == 4 else [])
    for layout, shape in [("replicated", (world,)), *(("dedicated", s) for s in shapes)]:
        model = Sums()
        own = dmuon.dedicate_params(model, mesh_of(shape), layout=layout, costs="analytic")
        dmuon.Muon(model, **MUON)
        model(torch.tensor(rank + 1.0)).backward()
        own.runtime.reduce_gradients()
        mean = (world + 1) / 2
        found = own.runtime.gradients().counted
        assert all(torch.equal(g, torch.full_like(g, mean)) for g in found)
        sizes = {m.name: m.numel for m in own.plan.specs.matrices}
        mine = sorted(sizes[name] for name in own.owned_by(rank))
        assert sorted(g.numel() for g in found) == mine
        for name, p in model.named_parameters():
            if name.endswith("weight"):
                assert p.grad is None, name
            else:
                assert torch.equal(p.grad, torch.full_like(p, mean)), name
        own.close()


@pytest.mark.parametrize("how", ["no_sync", "each", "one batch"])
@layouts(PLAIN, FSDP, REPLICATED, DDP)
@distributed(2)
def test_three_micro_batches_are_one_batch(rank, world, rest, how):
    with both(rest=rest) as pair:
        matrices = {m.name for m in pair.own.plan.specs.matrices}
        local = [p for n, p in trainable_parameters(pair.model) if n in matrices]
        for step in range(0, 9, 3):
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


@layouts(PLAIN, REPLICATED, DDP)
@distributed(2)
def test_backward_only_inside_no_sync(rank, world, rest):
    with both(rest=rest) as pair:
        for step in range(3):
            with pair.model.no_sync() if rest == DDP else dmuon.no_sync(pair.model):
                pair.backward(step)
            pair.joint_backward(step)
            pair.advance()
        pair.check()


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


MISSING = [on_one_rank, on_no_rank, cut_off, reaches_almost_nothing]
OWNERS = pytest.mark.parametrize(
    "mode",
    [{"rest": PLAIN}, {"rest": PLAIN, "options": KEPT}, {"rest": REPLICATED}, {"rest": DDP}],
    ids=["plain", "kept", "replicated", "ddp"],
)


@pytest.mark.parametrize("prepare", MISSING, ids=lambda f: f.__name__)
@OWNERS
@distributed(2)
def test_missing_gradients(rank, world, mode, prepare):
    with both(Skipping, prepare=prepare, **mode) as pair:
        before = whole(pair.model, pair.own)
        pair.train(range(5))
        pair.check()
        after = whole(pair.model, pair.own)
        for name in ("blocks.1.up.weight", "blocks.2.up.weight"):
            untouched = prepare is on_no_rank and name.startswith("blocks.2")
            assert torch.equal(before[name], after[name]) == untouched, name
        if mode["rest"] in (REPLICATED, DDP):
            assert_equal_on_all_ranks(pair.model, pair.own.runtime.transport)


@pytest.mark.parametrize("how", ["nothing", "forward"])
@pytest.mark.parametrize("mode", [{}, {"options": KEPT}, {"rest": REPLICATED}], ids=str)
@distributed(2)
def test_a_rank_that_runs_no_backward_at_all(rank, world, mode, how):
    with both(**mode) as pair:
        for step in range(5):
            lazy = {1: 0, 3: 1}.get(step)
            if rank != lazy:
                pair.backward(step)
            elif how == "forward":
                pair.loss(pair.model, step, rank)
            for r in range(world):
                if r != lazy:
                    (pair.loss(pair.twin, step, r) / world).backward()
            pair.advance()
        pair.check()


@layouts(PLAIN, REPLICATED)
@distributed(2)
def test_gradients_dropped_by_zero_grad(rank, world, rest):
    with both(rest=rest) as pair:
        for step in range(3):
            pair.backward(10 + step)
            pair.opt.zero_grad()
            pair.backward(step)
            pair.joint_backward(step)
            pair.advance()
        pair.check()


def freeze(model):
    model.blocks[0].up.weight.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.mid.weight.requires_grad_(False)


@ALL_MODES
@distributed(2)
def test_frozen_parameters_let_gradients_through(rank, world, mode):
    with both(change=freeze, **mode) as pair:
        assert all(p.requires_grad for p in pair.own.dedicated_params)
        before = {n: p.clone() for n, p in pair.twin.named_parameters() if not p.requires_grad}
        pair.train(range(3))
        pair.check()
        frozen = {n: p for n, p in pair.twin.named_parameters() if n in before}
        assert_bitwise(frozen, before)


# ---- clipping --------------------------------------------------------------------------------


def clip_and_compare(norm_type, **kwargs):
    with both(muon={"adamw_eps": 1e-3}, **kwargs) as pair:  # clipped gradients come near 1e-8
        for step in range(3):
            pair.backward(step)
            pair.joint_backward(step)
            found = dmuon.clip_grad_norm_(pair.model, 0.3, norm_type)
            expected = nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.3, norm_type)
            assert abs(float(found) / float(expected) - 1) <= 1e-5
            everyone = pair.own.runtime.transport.gather_objects(found.item())
            assert everyone == [found.item()] * len(everyone)
            again = dmuon.clip_grad_norm_(pair.model, 10.0, norm_type)
            assert abs(float(again) - min(float(expected), 0.3)) <= 1e-5
            pair.advance()
        pair.check()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@layouts(PLAIN, FSDP, REPLICATED, DDP)
@distributed(2)
def test_clipping_is_that_of_the_joint_batch(rank, world, rest, norm_type):
    clip_and_compare(norm_type, rest=rest)


@layouts(PLAIN, FSDP)
@distributed(4)
def test_clipping_with_replicas(rank, world, rest):
    clip_and_compare(2.0, rest=rest, mesh=(2, 2))


# ---- activation checkpointing ----------------------------------------------------------------

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])


class CheckpointedInside(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InnerCheckpoint(reentrant) for _ in range(3))


class InnerCheckpoint(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(24, 56)
        self.again = partial(checkpoint, use_reentrant=reentrant)

    def hidden(self, x):
        return torch.tanh(self.up(self.norm(x)))

    def forward(self, x):
        return x + self.down(self.again(self.hidden, x))


@REENTRANT
@pytest.mark.parametrize(
    "mode",
    [{}, {"options": KEPT}, {"rest": FSDP}, {"rest": REPLICATED}],
    ids=["plain", "kept", "fsdp", "replicated"],
)
@distributed(2)
def test_checkpointed_blocks(rank, world, mode, reentrant):
    follow(lambda: Checkpointed(reentrant), steps=3, **mode)
    if mode in ({}, {"rest": REPLICATED}):
        follow(lambda: Checkpointed(reentrant, (1,)), steps=3, **mode)
        follow(lambda: CheckpointedInside(reentrant), steps=3, **mode)


@pytest.mark.parametrize("impl", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
@pytest.mark.parametrize("prefetch", [0, 3])
@distributed(2)
def test_checkpoint_wrapper(rank, world, impl, prefetch):
    def wrap(model):
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=impl)

    with both(compiled=wrap, options={"prefetch": prefetch}) as pair:
        assert pair.own.owner_of("blocks.1.up.weight") in range(world)
        pair.train(range(3))
        pair.check()


# ---- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [torch.float32, None], ids=["reduce32", "reduce16"])
@layouts(PLAIN, REPLICATED)
@distributed(2)
def test_bfloat16_parameters_with_master_weights(rank, world, rest, reduce):
    """The twin is in float32; its gradients are those of a bfloat16 copy of the real weights."""
    with both(
        change=lambda model: model.to(torch.bfloat16),
        rest=rest,
        options={"reduce_dtype": reduce},
        only={"master_weights": True},
    ) as pair:
        working = Net().to(torch.bfloat16)
        pair.twin.float()
        for step in range(4):
            pair.backward(step)
            current = whole(pair.model, pair.own)
            working.load_state_dict(current, strict=False)
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
        found, expected = whole(pair.model, pair.own), weights(pair.twin)
        seen = 0
        for name, p in trainable_parameters(pair.model):
            assert torch.allclose(found[name].float(), expected[name], 2**-7, tolerance), name
            master = pair.opt.state[p].get("master_weight")
            if master is not None:
                seen += 1
                assert float((master - expected[name]).abs().max()) <= tolerance, name
                assert torch.equal(master.bfloat16(), found[name]), name
        assert seen >= len(pair.own.owned_by(rank)) > 0


@layouts(PLAIN, REPLICATED)
@distributed(2)
def test_two_steps_of_momentum_are_exact_and_lie_with_the_owner(rank, world, rest):
    with both(rest=rest, muon={"lr": 0.0, "weight_decay": 0.0, "adamw_lr": 0.0}) as pair:
        means = []
        for step in range(2):
            pair.backward(step)
            pair.opt.step(), pair.opt.zero_grad()
            pair.joint_backward(step)
            grads = {n: p.grad for n, p in pair.twin.named_parameters() if p.grad is not None}
            means.append({n: g.clone() for n, g in grads.items()})
            pair.twin.zero_grad()
        seen = set()
        for name, p in trainable_parameters(pair.model):
            state = pair.opt.state.get(p, {})
            if "momentum_buffer" in state:
                seen.add(name)
            if "momentum_buffer" in state and name in means[0]:
                expected = 0.95 * (0.05 * means[0][name]) + 0.05 * means[1][name]
                assert (state["momentum_buffer"] - expected).abs().max() <= 1e-6
        assert seen == set(pair.own.owned_by(rank)) and seen


# ---- batches of a shape and its transpose ----------------------------------------------------


mixed: list[bool] = []  # whether any unit of a plan has both


def mixed_units(plan, groups):
    """`units_of`, but a unit takes a shape and its transpose, stacked short side first."""
    together = defaultdict(list)
    for unit in units_of(plan, groups):
        shape = tuple(sorted((unit.rows, unit.cols)))
        together[unit.owner, unit.group, shape].append(unit)
    found = []
    for (owner, group, shape), units in together.items():
        members = tuple(i for unit in units for i in unit.matrices)
        turned = tuple(plan.specs.matrices[i].shape != shape for i in members)
        found.append(Unit(owner, group, members, *shape, sum(u.ms for u in units), "", turned))
    mixed.append(any(len(set(unit.transposed)) == 2 for unit in found))
    return tuple(sorted(found, key=lambda unit: min(unit.matrices)))


@pytest.mark.parametrize("adjust", ["original", None, "match_rms_adamw"])
@layouts(PLAIN, REPLICATED)
@distributed(1, 2)
def test_a_shape_and_its_transpose_in_one_batch(rank, world, rest, adjust):
    """Masters, statistics and updates are those of batches of one shape, each matrix by its own
    rows and columns."""

    def run(build, **settings):
        muon = {"adjust_lr_fn": adjust}
        with both(build, rest=rest, muon=muon, solver="round_robin", **settings) as pair:
            pair.train(range(3))
            if not settings:
                pair.check()
            rms = {n: float(v) for n, v in pair.own.runtime.update_rms().items()}
            return whole(pair.model, pair.own), rms

    mixed.clear()
    bf16 = {"change": lambda model: model.to(torch.bfloat16), "only": {"master_weights": True}}
    for build, settings in ((Net, {}), (Pieces, {}), (ZooBlocks, {}), (Net, bf16)):
        expected, rms = run(build, **settings)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dmuon.comm.owners, "units_of", mixed_units)
            found, mixed_rms = run(build, **settings)
        for name, weight in found.items():
            assert torch.allclose(weight.float(), expected[name].float(), 2**-8, 1e-5), name
        assert rms.keys() == mixed_rms.keys()
        assert all(abs(mixed_rms[n] - rms[n]) <= 1e-2 * rms[n] for n in rms)
    assert any(mixed) if world > 1 else all(mixed)
