"""Clipping, schedules, param groups, non-finite gradients and `GradScaler` on sharded models."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.tools.parallel_models import batch, loss_of
from tests.distributed.fsdp import TOLERANCE, advance, assert_close, fsdp, snapshot
from tests.distributed.harness import distributed
from tests.distributed.sharded import MUON, dedicated, pair, reference

# ---- clipping ----------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "world"), [("tp", 2), ("hsdp", 4), ("ep+fsdp, split experts", 4)])
@distributed()
def test_clip_grad_norm_counts_every_element_once(rank, world, case):
    both = pair(case)
    twins = dict(both.twin.named_parameters())
    with dedicated(both.model) as (own, _):
        both.both_backward(0)
        limit = 1e9  # changes nothing
        for order in (math.inf, 2.0):
            found = dmuon.clip_grad_norm_(both.model, limit, order)
            expected = nn.utils.clip_grad_norm_(twins.values(), limit, order)
            assert abs(float(found) / float(expected) - 1) <= TOLERANCE, (order, limit)
            norms = own.runtime.transport.gather_objects(float(found))
            assert len(set(norms)) == 1, f"different on each rank: {norms}"
            limit = float(expected) / 2
        for name, p in both.model.named_parameters():
            assert torch.allclose(whole_tensor(p.grad), twins[name].grad, atol=1e-7), name


@distributed(2)
def test_the_clip_grad_norm_of_torch(rank, world):
    both = fsdp()
    with dedicated(both.model) as (_, opt):
        ref = reference(both.twin)
        for step in range(2):
            both.both_backward(step)
            found = nn.utils.clip_grad_norm_(both.model.parameters(), 0.1)
            expected = nn.utils.clip_grad_norm_(both.twin.parameters(), 0.1)
            assert abs(float(whole_tensor(found)) / float(expected) - 1) <= TOLERANCE
            advance(opt, ref)
    assert_close(both)


@distributed(2)
def test_a_norm_that_is_not_finite(rank, world):
    both = fsdp()
    with dedicated(both.model):
        both.backward(0)
        poison(both.model, WHERE[0], math.inf)
        before = [local_tensor(p.grad).clone() for p in both.model.parameters()]
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            dmuon.clip_grad_norm_(both.model, 1.0, error_if_nonfinite=True)
        after = [local_tensor(p.grad) for p in both.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---- schedules and groups ----------------------------------------------------------------


@distributed(2)
def test_a_schedule_changes_rates_before_updates_are_applied(rank, world):
    both = fsdp()
    with dedicated(both.model) as (own, opt):
        ref = reference(both.twin)
        schedules = [LambdaLR(o, lambda t: 1 / (1 + t)) for o in (opt, ref, ref.adamw)]
        for step in range(3):
            both.both_backward(step)
            advance(opt, ref)
            assert own.runtime.pipeline.pending
            for schedule in schedules:
                schedule.step()
        (group,) = opt.param_groups
        assert group["lr"] == 0.02 / 4 and group["adamw_lr_ratio"] == 1e-3 / 0.02
    assert_close(both)


@distributed(2)
def test_param_groups(rank, world):
    """Each group has a learning rate, a decay and a number of iterations of its own."""
    both = fsdp()
    settings = [
        {"lr": 0.02, "weight_decay": 0.3, "ns_steps": 5, "adamw_lr": 1e-3},
        {"lr": 0.01, "weight_decay": 0.0, "ns_steps": 3, "momentum": 0.8, "nesterov": False},
        {"lr": 0.005, "adamw_lr": 2e-3, "adamw_weight_decay": 0.2},
    ]

    def grouped(model):
        """The first block, the second, and all else."""
        groups = [[], [], []]
        for name, p in model.named_parameters():
            groups[int(name.split(".")[1]) if name.startswith("blocks.") else 2].append(p)
        return groups

    own = dmuon.dedicate_params(both.model)
    groups = [{"params": g, **s} for g, s in zip(grouped(both.model), settings, strict=True)]
    opt = dmuon.Muon(groups, **MUON)
    specs = own.plan.specs
    matrices = {specs.parameters[i].name for i in specs.muon_parameters()}
    twins = {p: n for n, p in both.twin.named_parameters()}
    references = []
    for members, chosen in zip(grouped(both.twin), settings, strict=True):
        keys = {"lr", "weight_decay", "ns_steps", "momentum", "nesterov"} & chosen.keys()
        muon = [p for p in members if twins[p] in matrices]
        if muon:
            same = {k: chosen[k] for k in keys}
            references.append(ReferenceMuon(muon, **same, ns_dtype=torch.float32))
        decay = chosen.get("adamw_weight_decay", chosen.get("weight_decay", 0.1))
        rate = chosen.get("adamw_lr", chosen["lr"])
        others = [p for p in members if twins[p] not in matrices]
        references.append(torch.optim.AdamW(others, rate, betas=(0.9, 0.95), weight_decay=decay))
    for step in range(3):
        both.both_backward(step)
        advance(opt, *references)
    own.close()
    assert_close(both)


# ---- gradients that are not finite -------------------------------------------------------


def poison(model, name, value):
    """Put ``value`` into this rank's part of a gradient, on rank 1 alone."""
    if torch.distributed.get_rank() == 1:
        local_tensor(model.get_parameter(name).grad).view(-1)[-1] = value


def unchanged(before, model, opt):
    after = snapshot(model, opt)
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


WHERE = ["blocks.0.attention.q_proj.weight", "blocks.1.narrow.down.weight", "lm_head.weight",
         "blocks.1.norm.bias"]  # fmt: skip


@distributed(2)
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(rank, world):
    both = fsdp()
    with dedicated(both.model) as (_, opt):
        ref = reference(both.twin)
        skipped = 0
        for step in range(3):
            for name in WHERE if step == 1 else []:
                both.backward(step)
                poison(both.model, name, math.nan if skipped % 2 else math.inf)
                opt.synchronize()
                before = snapshot(both.model, opt)
                advance(opt)
                skipped += 1
                stats = opt.stats()
                assert stats["finite"] is False and stats["skipped"] == skipped, name
                assert unchanged(before, both.model, opt), name
            both.both_backward(step)
            advance(opt, ref)
            assert opt.stats()["finite"] is True and opt.stats()["skipped"] == skipped
    assert_close(both)


@distributed(4)
def test_replicas_and_copies_skip_alike(rank, world):
    """Rank 1 holds one replica of an HSDP mesh's shards; it counts for all."""
    both = pair("hsdp")
    with dedicated(both.model) as (_, opt):
        both.backward(0)
        poison(both.model, "blocks.0.mix.weight", math.inf)
        before = snapshot(both.model, opt)
        opt.step()
        assert unchanged(before, both.model, opt) and opt.stats()["skipped"] == 1


# ---- GradScaler --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unscale", "period"),
    [(True, 1), (False, 1), (True, 3)],
    ids=["unscale_ and clip", "step alone", "block steps"],
)
@distributed(2)
def test_grad_scaler(rank, world, unscale, period):
    """Weights equal those of training without it, and each rank takes the same decisions: torch
    shares its verdict, so block steps obey it too."""
    both = fsdp()
    scaler = torch.amp.GradScaler(
        torch.get_default_device().type, init_scale=2.0**10, growth_interval=2
    )
    scales = []
    with dedicated(both.model, period=period) as (own, opt):
        ref = reference(both.twin)
        for step in range(5):
            bad = step == 2
            scaler.scale(loss_of(both.model, batch(step, rank))).backward()
            if bad:
                poison(both.model, WHERE[0], math.inf)
                opt.synchronize()
                before = snapshot(both.model, opt)
            else:
                both.joint_backward(step)
            if unscale:
                scaler.unscale_(opt)
                dmuon.clip_grad_norm_(both.model, 0.1)
                nn.utils.clip_grad_norm_(both.twin.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            if bad:
                assert unchanged(before, both.model, opt)
                assert opt.stats()["finite"] is False and opt.stats()["skipped"] == 1
            else:
                advance(ref)
                assert opt.stats()["finite"] is True
            scales.append(scaler.get_scale())
        assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11], scales
        assert len({tuple(s) for s in own.runtime.transport.gather_objects(scales)}) == 1
    if period == 1:
        assert_close(both)
