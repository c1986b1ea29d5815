"""dmuon on W ranks against Muon in one process: the update is never changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import dmuon
from tests.distributed.harness import distributed
from tests.distributed.models import (
    Net,
    Zoo,
    assert_equal_on_all_ranks,
    batch,
    largest_difference,
    loss_of,
    reference_for,
    seeded,
    weights,
    wrap,
)

DDP = pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
FP32 = {"ns_dtype": torch.float32, "lr": 0.02}


def joint_step(twin, reference, step, world, present=None):
    """One reference step on every rank's batch; returns the mean loss."""
    total = 0.0
    for r in range(world):
        if present is not None:
            twin.use_spare = present(step, r)
        loss = loss_of(twin, batch(step, r)) / world
        loss.backward()
        total += float(loss)
    reference.step()
    reference.zero_grad()
    return total


@DDP
@pytest.mark.parametrize("kind", [Net, Zoo], ids=["net", "zoo"])
@distributed(1, 2, 4)
def test_ten_steps_equal_the_reference(rank, world, ddp, kind):
    report = dmuon.check_step_equivalence(
        lambda: seeded(kind, seed=rank),
        loss_of,
        batch,
        parallelize=lambda m: wrap(m, ddp),
        **FP32,
    )
    row = report.rows[0]
    assert row.passed, str(report)
    assert row.max_abs_diff <= 1e-5 and row.max_loss_diff <= 1e-5


@DDP
@distributed(4)
def test_bf16_newton_schulz_updates_are_as_near_as_rounding_lets_them(rank, world, ddp):
    report = dmuon.check_step_equivalence(
        lambda: seeded(Net, width=64, hidden=160),
        loss_of,
        batch,
        parallelize=lambda m: wrap(m, ddp),
        ns_dtype=torch.bfloat16,
        lr=0.02,
    )
    assert report.passed, str(report)


@DDP
@pytest.mark.parametrize("reduce", [torch.float32, None], ids=["reduce32", "reduce16"])
@distributed(1, 2, 4)
def test_bf16_parameters(rank, world, ddp, reduce):
    report = dmuon.check_step_equivalence(
        lambda: seeded(Net).to(torch.bfloat16),
        loss_of,
        batch,
        parallelize=lambda m: wrap(m, ddp),
        options=dmuon.ReplicatedOptions(reduce_dtype=reduce),
        ns_dtype=torch.bfloat16,
        lr=0.02,
    )
    row = report.rows[0]
    assert row.dtype == "bfloat16" and row.passed, str(report)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"momentum_mode": "sgd", "dampening": 0.1},
        {"momentum_mode": "sgd", "nesterov": False},
        {"adjust_lr_fn": "original", "ns_coefficients": "quintic"},
        {"adjust_lr_fn": None, "ns_steps": 3, "weight_decay": 0.0},
        {"adamw_lr": 0.003, "adamw_weight_decay": 0.3, "adamw_betas": (0.8, 0.9)},
    ],
    ids=lambda k: "-".join(map(str, k)),
)
@distributed(2)
def test_hyperparameters_mean_the_same(rank, world, kwargs):
    report = dmuon.check_step_equivalence(
        lambda: seeded(Net), loss_of, batch, steps=4, **(FP32 | kwargs)
    )
    assert report.passed, str(report)


@DDP
@distributed(4)
def test_all_ranks_have_bitwise_equal_weights_after_every_step(rank, world, ddp):
    model = seeded(Net, seed=rank)  # different start: rank 0's counts
    wrapped = wrap(model, ddp)
    own = dmuon.dedicate_params(wrapped)
    opt = dmuon.Muon(wrapped, lr=0.02)
    for step in range(4):
        loss_of(wrapped, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        opt.synchronize()
        assert_equal_on_all_ranks(model, own.runtime.transport)
    own.close()


@DDP
@distributed(4)
def test_async_publish_equals_sync_bitwise(rank, world, ddp):
    results = []
    for publish in ("async", "sync"):
        model = seeded(Net)
        wrapped = wrap(model, ddp)
        own = dmuon.dedicate_params(
            wrapped, options=dmuon.ReplicatedOptions(publish_bucket_bytes=4096, bucket_bytes=4096)
        )
        opt = dmuon.Muon(wrapped, lr=0.02, publish=publish)
        for step in range(5):
            loss_of(wrapped, batch(step, rank)).backward()
            opt.step()
            opt.zero_grad()
        own.close()
        results.append(weights(model))
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


@DDP
@distributed(4)
def test_accumulation_with_and_without_no_sync_is_one_big_batch(rank, world, ddp):
    def train(mode):
        model = seeded(Net)
        wrapped = wrap(model, ddp)
        own = dmuon.dedicate_params(wrapped)
        opt = dmuon.Muon(wrapped, **FP32)
        for step in range(3):
            halves = [batch(10 * step + h, rank) for h in range(2)]
            if mode == "big":
                joined = tuple(torch.cat(parts) for parts in zip(*halves))
                loss_of(wrapped, joined).backward()
            else:
                if mode == "no_sync":
                    with dmuon.no_sync(wrapped):
                        (loss_of(wrapped, halves[0]) / 2).backward()
                else:
                    (loss_of(wrapped, halves[0]) / 2).backward()
                (loss_of(wrapped, halves[1]) / 2).backward()
            opt.step()
            opt.zero_grad()
        own.close()
        return weights(model)

    twin = seeded(Net)
    reference = reference_for(twin, lr=0.02)
    for step in range(3):
        for r in range(world):
            for h in range(2):
                (loss_of(twin, batch(10 * step + h, r)) / (2 * world)).backward()
        reference.step()
        reference.zero_grad()
    for mode in ("each", "no_sync", "big"):
        assert largest_difference(train(mode), weights(twin)) <= 1e-6, mode


@distributed(2)
def test_ddp_own_no_sync_and_backward_only_inside_it(rank, world):
    model = seeded(Net)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    own = dmuon.dedicate_params(wrapped)
    opt = dmuon.Muon(wrapped, **FP32)
    twin = copy.deepcopy(model)
    reference = reference_for(twin, lr=0.02)
    for step in range(3):
        with wrapped.no_sync():
            loss_of(wrapped, batch(step, rank)).backward()
        opt.step()  # nothing has been reduced yet: step does it
        opt.zero_grad()
        joint_step(twin, reference, step, world)
    opt.synchronize()
    assert largest_difference(weights(model), weights(twin)) <= 1e-5
    own.close()


@distributed(2)
def test_two_step_momentum_is_exact(rank, world):
    model = seeded(Net)
    own = dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, lr=0.0, weight_decay=0.0, ns_dtype=torch.float32)
    means = []
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        twin = seeded(Net)
        for r in range(world):
            (loss_of(twin, batch(step, r)) / world).backward()
        means.append({n: p.grad for n, p in twin.named_parameters() if p.grad is not None})
    names = {id(p): n for n, p in model.named_parameters()}
    seen = 0
    for p, state in opt.state.items():
        if "momentum_buffer" in state and names[id(p)] in means[0]:
            first, second = (m[names[id(p)]] for m in means)
            expected = 0.95 * (0.05 * first) + 0.05 * second
            assert (state["momentum_buffer"] - expected).abs().max() <= 1e-6
            seen += 1
    assert seen == sum(n in means[0] for n in own.owned_by(rank)), "momentum lives at owners only"
    own.close()


@distributed(4)
def test_three_lines_over_a_mesh(rank, world):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    report = dmuon.check_step_equivalence(
        lambda: seeded(Net), loss_of, batch, mesh, steps=3, **FP32
    )
    assert report.passed and report.rows[0].mesh == "2x2"


@distributed(4)
def test_two_ownerships_on_halves_of_the_world(rank, world):
    """Pipeline stages: each half plans its own model on its own mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))["dp"]
    stage, dp_rank = rank // 2, rank % 2
    model = seeded(Net, seed=stage, layers=1 + stage)
    own = dmuon.dedicate_params(model, mesh)
    opt = dmuon.Muon(model, **FP32)
    twin = copy.deepcopy(model)
    reference = reference_for(twin, lr=0.02)
    assert own.plan.topology.world == 2 and own.rank == dp_rank
    for step in range(3):
        loss_of(model, batch(step, 10 * stage + dp_rank)).backward()
        opt.step()
        opt.zero_grad()
        for r in range(2):
            (loss_of(twin, batch(step, 10 * stage + r)) / 2).backward()
        reference.step()
        reference.zero_grad()
    opt.synchronize()
    assert largest_difference(weights(model), weights(twin)) <= 1e-5
    own.close()
