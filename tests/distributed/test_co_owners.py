"""Matrices that several ranks share, against Muon in one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.config import PlannerOptions
from dmuon.scheduler.plan import OwnershipPlan
from dmuon.tools.parallel_models import ParallelModel, batch, loss_of
from tests.distributed.harness import Pools, distributed
from tests.distributed.sharded import BY_NAME, MUON, pair, reference, train

STEPS = 10


def shared(k: int) -> PlannerOptions:
    return PlannerOptions(co_owners=k)


def split(plan: OwnershipPlan, is_split: bool) -> OwnershipPlan:
    """The same plan, in which co-owners also share the products of short side x short side."""
    batches = tuple(replace(b, split=is_split and bool(b.co_owners)) for b in plan.batches)
    return replace(plan, batches=batches)


def assert_equal_to_reference(
    rank: int, world: int, *, case: str, k: int, is_split: bool, **settings: Any
) -> None:
    both = pair(case)
    own = dmuon.dedicate_params(both.model, planner=shared(k))
    plan = split(own.plan, is_split)
    own.close()
    sizes = {len(batch.ranks) for batch in plan.batches}
    assert k in sizes, sizes
    train(both, STEPS, plan=plan, **settings)
    worst, where = both.difference()
    assert worst <= 1e-5, (worst, where)


assert_equal_to_reference.body = assert_equal_to_reference  # type: ignore[attr-defined]


# On every mesh as many co-owners as there are ranks, and on half of them pairs.
MESHES = [(name, min(8, case.world), n % 2 == 0) for n, (name, case) in enumerate(BY_NAME.items())]
MESHES += [(name, 2, n % 4 == 1) for n, name in enumerate(BY_NAME) if n % 2]


@pytest.mark.parametrize(("case", "k", "is_split"), MESHES)
def test_every_mesh_is_equal_to_the_reference(pools: Pools, case: str, k: int, is_split: bool):
    kwargs = {"case": case, "k": k, "is_split": is_split}
    pools(BY_NAME[case].world).run(__name__, "assert_equal_to_reference", kwargs)


@pytest.mark.parametrize("is_split", [False, True], ids=["", "split"])
@pytest.mark.parametrize("k", [2, 4])
@distributed(4)
def test_distributed_data_parallel(rank, world, k, is_split):
    torch.manual_seed(0)
    model = ParallelModel()
    twin = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    own = dmuon.dedicate_params(ddp, planner=shared(k))
    plan = split(own.plan, is_split)
    own.close()
    own = dmuon.dedicate_params(ddp, plan=plan)
    opt, ref = dmuon.Muon(ddp, **MUON), reference(twin)
    for step in range(STEPS):
        loss_of(ddp, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        torch.stack([loss_of(twin, batch(step, r)) for r in range(world)]).mean().backward()
        ref.step()
        ref.zero_grad()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    own.close()
