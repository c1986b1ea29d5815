"""What `dmuon.scheduler.traffic` says of a plan, beside what a step hands to collectives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmuon.scheduler.traffic import traffic
from tests.distributed.harness import distributed
from tests.distributed.layouts import sharded, shared
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


def told(pair: Both) -> list[dict[str, float]]:
    """Bytes handed over, by purpose, of each rank."""
    found: list[dict[str, float]] = [{} for _ in range(pair.own.plan.topology.world)]
    for flow in traffic(pair.own.plan).flows:
        for mine, nbytes in zip(found, flow.handed.tolist(), strict=True):
            mine[flow.purpose] = mine.get(flow.purpose, 0) + nbytes
    return found


def loss_of(model: nn.Module, batch: object) -> torch.Tensor:
    return model(torch.linspace(0, 1, 8))


CASES = {
    "sharded": {"layout": sharded(4)},
    "sharded, shared matrices": {"layout": sharded(4), "request": shared(2)},
    "hsdp": {"layout": sharded(2, 2)},
    "replicated": {"layout": "plain"},
    "reduce_to_owner": {"layout": "reduced"},
    "dedicated": {"layout": "dedicated"},
    "dedicated, replicas": {"layout": "dedicated", "mesh": (2, 2)},
}
# Beside these a few bytes travel (verdicts, flags, telemetry), and what co-owners exchange.


@pytest.mark.parametrize("case", CASES)
@distributed(4)
def test_a_plan_tells_the_bytes_that_a_step_hands_over(rank, world, case):
    with both(Uneven, loss_of=loss_of, **HALF, **CASES[case]) as pair:
        pair.train_alone(range(2))
        found = dict(pair.opt.stats()["bytes"])
        expected, layout = told(pair)[rank], CASES[case]["layout"]
        if layout == "dedicated":  # where FSDP2 was not asked to, dmuon reduces what AdamW gets
            expected["gradients"] += 4 * 16
        assert found.keys() >= expected.keys()
        for purpose, nbytes in expected.items():
            # Behind updates lie their RMS; they begin at multiples of 64 bytes.
            room = 64 * 16 if purpose == "updates" and case == "reduce_to_owner" else 0
            assert nbytes <= found[purpose] <= nbytes + room, purpose
