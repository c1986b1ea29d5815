"""The bytes that a simulated step sends, beside what a step hands to collectives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from dmuon.config import ShardedOptions
from dmuon.scheduler.costs import Rates
from dmuon.scheduler.network import Routes
from dmuon.scheduler.plan import Sizes
from dmuon.scheduler.simulate import Machine
from tests.distributed.compare import gathered
from tests.distributed.harness import distributed
from tests.distributed.layouts import sharded
from tests.distributed.twins import Both, both

HALF = {"muon": {"ns_dtype": torch.bfloat16}}


class Uneven(nn.Module):
    """Rows that no number of ranks divides, wide and tall, and one of fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(130, 64), (67, 200), (3, 90), (96, 96), (131, 64), (256, 33)]
        self.mats = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in shapes)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return sum(m(x.new_ones(m.in_features)).sum() for m in self.mats) * self.norm(x).sum()


def told(pair: Both) -> dict[str, float]:
    """Bytes that a rank hands over, by purpose, in the mean of all."""
    plan, shards = pair.own.plan, pair.own.runtime.shards
    machine = Machine(Rates(1e9, 1e9, 1e9, 0.0, 0.0, 0.0), 1e9, 1e9, is_cpu=True)
    found: Counter[str] = Counter()
    for bucket in Routes(plan, shards, Sizes.of(ShardedOptions(), plan), 2, machine).buckets():
        for each in (bucket.gather, *bucket.turns):
            found[each.purpose] += each.sent
    # Of an all-gather by messages the meter counts all that a rank has then.
    world = plan.topology.world
    return {k: n * (world / (world - 1) if k == "updates" else 1) for k, n in found.items() if k}


def loss_of(model: nn.Module, batch: object) -> torch.Tensor:
    return model(torch.linspace(0, 1, 8))


CASES = {
    "sharded": {"layout": sharded(4)},
    "hsdp": {"layout": sharded(2, 2)},
    "replicated": {"layout": "plain"},
}
# Beside these a few bytes travel (verdicts, telemetry).


@pytest.mark.parametrize("case", CASES)
@distributed(4)
def test_what_is_simulated_is_what_a_step_hands_over(rank, world, case):
    with both(Uneven, loss_of=loss_of, **HALF, **CASES[case]) as pair:
        pair.train_alone(range(2))
        every, expected = gathered(dict(pair.opt.stats()["bytes"])), told(pair)
        assert expected.keys() >= ({"updates"} if case == "replicated" else {"gather", "scatter"})
        for purpose, nbytes in expected.items():
            assert nbytes == pytest.approx(sum(one[purpose] for one in every) / world), purpose
