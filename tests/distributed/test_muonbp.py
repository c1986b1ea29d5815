"""MuonBP: block steps without traffic, full steps in between, against an oracle in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor.debug import CommDebugMode

import dmuon
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.period import Schedule
from dmuon.rule import adjusted_lr
from dmuon.scheduler.select import trainable_parameters
from dmuon.scheduler.specs import Form
from dmuon.tools.parallel_models import ParallelCase
from tests.distributed.fsdp import snapshot
from tests.distributed.harness import distributed
from tests.distributed.sharded import BY_NAME, MUON, Pair, dedicated, pair, recorded, vocabulary
from tests.fused import FusedModel
from tests.transports import RecordingTransport


class Oracle:
    """MuonBP in one process: Algorithm 1 of the paper, block by block on whole tensors.

    A full step sees each matrix as one block.
    """

    adjust = "match_rms_adamw"

    def __init__(self, both: Pair, own: dmuon.Ownership, period: Any, ratio: float = 1.0) -> None:
        self.schedule = Schedule(period)
        self.ratio = ratio
        self.parameters = [p for _, p in trainable_parameters(both.twin)]
        specs, shards = own.plan.specs, own.runtime.shards
        rest = [self.parameters[i] for i in specs.adamw_parameters()]
        self.adamw = torch.optim.AdamW(
            rest, lr=MUON["adamw_lr"], betas=(0.9, 0.95), weight_decay=0.1
        )
        self.momentum = {i: torch.zeros_like(self.parameters[i]) for i in specs.muon_parameters()}
        # (parameter, form, index of the matrix, indices of its blocks)
        self.matrices = []
        for i, matrix in enumerate(specs.matrices):
            if shards.copies[matrix.parameter][0] != shards.holders[i]:
                continue  # a copy of one that is there already
            box = shards.boxes[i]
            first = min(p.replica for p in shards.pieces(i))
            blocks = [
                tuple(
                    slice(a + b, a + b + n)
                    for a, b, n in zip(box.box.offset, p.box.offset, p.box.shape, strict=True)
                )
                for p in shards.pieces(i)
                if p.replica == first
            ]
            self.matrices.append((matrix.parameter, box.form, box.box.slices(), blocks))

    @torch.no_grad()
    def step(self) -> None:
        full = self.schedule.is_full(self.schedule.t)
        self.schedule.advance()
        operands = {}
        for i, buffer in self.momentum.items():
            grad = self.parameters[i].grad
            assert grad is not None
            buffer.lerp_(grad, 0.05)
            operands[i] = grad.lerp(buffer, 0.95)
        for i, form, whole, blocks in self.matrices:
            for index in [whole] if full or len(blocks) == 1 else blocks:
                ratio = 1.0 if full or len(blocks) == 1 else self.ratio
                self._update(self.parameters[i][index], operands[i][index], form, ratio)
        self.adamw.step()
        for p in self.parameters:
            p.grad = None

    def _update(self, weight: Tensor, operand: Tensor, form: Form, ratio: float) -> None:
        operand, weight = form.rows_first(operand), form.rows_first(weight)
        flat = operand.reshape(len(operand), -1)
        update = newton_schulz(flat, dtype=torch.float32).reshape(weight.shape)
        lr = adjusted_lr(MUON["lr"], self.adjust, *flat.shape) * ratio
        weight.mul_(1 - MUON["lr"] * 0.1).sub_(update, alpha=lr)


def check_against_oracle(
    case: str | ParallelCase, period: Any, ratio: float | None, steps: int
) -> None:
    both = pair(case)
    with dedicated(both.model, period=period, block_lr_ratio=ratio) as (own, opt):
        oracle = Oracle(both, own, period, ratio or 1.0)
        kinds = []
        for step in range(steps):
            both.backward(step)
            opt.step()
            opt.zero_grad()
            kinds.append(opt.stats()["full_step"])
            both.joint_backward(step)
            oracle.step()
        expected = Schedule(period)
        for kind in kinds:
            assert kind == expected.is_full(expected.t)
            expected.advance()
        assert both.difference()[0] <= 1e-5, both.difference()


@pytest.mark.parametrize(
    ("case", "world", "period", "ratio", "steps"),
    [
        ("fsdp2", 2, math.inf, None, 4),
        ("tp", 2, 3, 0.7, 5),
        ("hsdp", 4, 2, 0.7, 3),
        ("tp+fsdp", 4, dmuon.LinearPeriod(1, 4, 6), 0.7, 6),
        ("ep+fsdp, split experts", 4, math.inf, 0.7, 2),
    ],
)
@distributed()
def test_blocks_are_orthogonalized_alone(rank, world, case, period, ratio, steps):
    check_against_oracle(case, period, ratio, steps)


@distributed(8)
def test_uneven_blocks_of_uneven_parts(rank, world):
    check_against_oracle(vocabulary((4, 2)), 2, 0.7, 3)


@distributed(4)
def test_blocks_of_weights_stored_in_out_and_cut_side_by_side(rank, world):
    both = pair(replace(BY_NAME["fsdp4"], build=FusedModel))
    cut = {"splits": FusedModel.splits, "heads": FusedModel.heads, "costs": "analytic"}
    with dedicated(both.model, period=2, adjust_lr_fn="original", **cut) as (own, opt):
        oracle = Oracle(both, own, 2)
        oracle.adjust = "original"
        for step in range(4):
            both.both_backward(step)
            opt.step()
            opt.zero_grad()
            oracle.step()
        assert both.difference()[0] <= 1e-5, both.difference()


def weights_after(case: str, steps: int, **kwargs: Any) -> list[Tensor]:
    both = pair(case)
    with dedicated(both.model, **kwargs) as (_, opt):
        for step in range(steps):
            both.backward(step)
            opt.step()
            opt.zero_grad()
    return [w for _, w in sorted(both.whole().items())]


@distributed(2)
def test_period_one_is_muon_bitwise(rank, world):
    plain, one = weights_after("fsdp2", 2), weights_after("fsdp2", 2, period=1)
    assert all(torch.equal(a, b) for a, b in zip(plain, one, strict=True))
    blocks = weights_after("fsdp2", 2, period=2)
    assert not all(torch.equal(a, b) for a, b in zip(plain, blocks, strict=True))


@pytest.mark.parametrize(
    ("period", "through_torch"), [(3, True), (dmuon.LinearPeriod(1, 4, 6), False)]
)
@distributed(2)
def test_a_checkpoint_in_mid_period_resumes_there(rank, world, period, through_torch):
    straight = weights_after("fsdp2", 6, period=period)
    both, again = pair("fsdp2"), pair("fsdp2", seed=1)
    with dedicated(both.model, period=period) as (_, opt):
        for step in range(4):
            both.backward(step)
            opt.step()
            opt.zero_grad()
        saved = get_optimizer_state_dict(both.model, opt) if through_torch else opt.state_dict()
        weights = both.model.state_dict()
        with dedicated(again.model, period=period) as (_, other):
            again.model.load_state_dict(weights)
            if through_torch:
                set_optimizer_state_dict(again.model, other, saved)
            else:
                other.load_state_dict(saved)
            assert other.stats()["steps"] == 4
            for step in range(4, 6):
                again.backward(step)
                other.step()
                other.zero_grad()
    resumed = [w for _, w in sorted(again.whole().items())]
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


@distributed(4)
def test_block_steps_issue_no_collective_and_full_steps_the_planned_ones(rank, world):
    both = pair("hsdp")
    with dedicated(both.model, RecordingTransport, period=3) as (own, opt):
        transport = recorded(own)
        sequences = []
        for step in range(7):
            both.backward(step)
            transport.events.clear()
            with CommDebugMode() as comm:
                opt.step()
                opt.synchronize()
            events = [(e.op, e.tag) for e in transport.events]
            sequences.append(events)
            assert comm.get_total_counts() == len(events), (step, comm.get_comm_counts(), events)
            assert opt.stats()["full_step"] is (step % 3 == 0)
            if step % 3:
                assert events == []
            opt.zero_grad()
        buckets = len(own.runtime.pipeline.buckets)
        planned = ["norms", *["gather", "scatter", "replicate"] * buckets, "rms"]
        # The second full step is not among those that exchange times.
        assert sorted(tag for _, tag in sequences[3]) == sorted(planned)
        assert sequences[0] == sequences[3] == sequences[6]
        everyone = own.runtime.transport.gather_objects(sequences)
        assert everyone == [sequences] * world


@distributed(2)
def test_blocks_without_a_gradient_or_with_a_bad_one_are_left_alone(rank, world):
    """On this rank: rank 0 finds an inf in a block, rank 1 lacks the gradient of another one."""
    both = pair("fsdp2")
    lost, bad = "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"
    named = dict(both.model.named_parameters())
    with dedicated(both.model, period=math.inf) as (_, opt):
        for step in range(2):
            both.backward(step)
            if rank == 1:
                named[lost].grad = None
            elif step:
                named[bad].grad.to_local().view(-1)[0] = math.inf
            weights = {n: p.to_local().clone() for n, p in named.items()}
            opt.step()
            same = {n for n, p in named.items() if torch.equal(p.to_local(), weights[n])}
            assert (lost in same) is (rank == 1)
            assert (bad in same) is (rank == 0 and step == 1)
            assert "blocks.1.mlp.up.weight" not in same
            assert all(t.isfinite().all() for t in snapshot(both.model, opt))
            opt.zero_grad()
        assert opt.stats()["finite"] is (rank == 1)
        assert opt.stats()["skipped"] == int(rank == 0)
