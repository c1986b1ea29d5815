"""`verify_every`: right steps pass; corruption that nobody noticed names its matrix and rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon.dtensors import local_tensor
from dmuon.tools.parallel_models import CASES as SHARDED
from dmuon.tools.parallel_models import batch as tokens
from dmuon.tools.parallel_models import loss_of as loss
from dmuon.types import CorruptionError
from tests.distributed.harness import distributed
from tests.distributed.models import Net, Pieces, batch, loss_of, seeded
from tests.distributed.twins import (
    DDP,
    FSDP,
    IN_TURN,
    KEPT,
    PLAIN,
    REDUCED,
    REDUCED_DDP,
    both,
    layouts,
    mesh_of,
)
from tests.internals import Orthogonalizer


@layouts(PLAIN, KEPT, FSDP, REDUCED, REDUCED_DDP, DDP)
@distributed(2)
def test_right_steps_pass(rank, world, layout):
    dtype = torch.bfloat16 if layout in (KEPT, REDUCED_DDP) else torch.float32
    for build, more in ((Net, {}), (Pieces, IN_TURN)):
        muon, checked = {"ns_dtype": dtype}, {"verify_every": 1}
        with both(build, layout, muon=muon, only=checked, **more) as pair:
            pair.train(range(8))
            assert pair.opt._run.verified == 8
            if dtype is torch.float32:
                pair.check()


CASES = [case for case in SHARDED if case.name in ("hsdp", "tp+fsdp", "ep+fsdp")]


@pytest.mark.parametrize("k", ["off", 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(4)
def test_right_steps_pass_in_shards(rank, world, case, k):
    torch.manual_seed(0)
    mesh = case.make_mesh(torch.get_default_device().type)
    model = case.parallelize(case.build(), mesh)
    opt = dmuon.Muon(
        model, lr=0.02, verify_every=3, period=2, ns_dtype=torch.bfloat16,
        dedicate={"planner": dmuon.PlannerOptions(co_owners=k)},
    )  # fmt: skip
    at = mesh.get_coordinate()
    data = [at[case.axes.index(axis)] for axis in case.data_axes]
    number = sum(c * 7**n for n, c in enumerate(data))
    for step in range(10):
        opt.zero_grad()
        loss(model, tokens(step, number)).backward()
        opt.step()
    assert opt._run.verified == 3
    opt.ownership.close()


@distributed(2)
def test_co_owners_one_of_whom_computes_wrongly_are_named(rank, world):
    case = next(case for case in SHARDED if case.name == "fsdp2")
    torch.manual_seed(0)
    model = case.parallelize(case.build(), case.make_mesh(torch.get_default_device().type))
    shared = {"planner": dmuon.PlannerOptions(co_owners=2)}
    opt = dmuon.Muon(model, lr=0.02, verify_every=1, ns_dtype=torch.float32, dedicate=shared)
    honest = Orthogonalizer.run_together

    def broken(self, calls, norms):
        updates = honest(self, calls, norms)
        return [update.mul_(1.5) for update in updates] if rank == 1 else updates

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Orthogonalizer, "run_together", broken)
        loss(model, tokens(0, rank)).backward()
        with pytest.raises(CorruptionError, match="by one of its co-owners, ranks 0, 1"):
            opt.step()


def corrupted(pair, rank, launch):
    """The weights of ``mid`` change in a step on this rank."""

    def broken(refusal):
        launch(refusal)
        pair.opt.synchronize()
        weight = local_tensor(pair.bare.mid.weight)
        if rank == 1 and weight.numel():
            weight.view(-1)[5].add_(1.0)

    return broken


@layouts(REDUCED, DDP)
@distributed(2, 3)
def test_a_replica_that_changed_is_named(rank, world, layout):
    with both(Net, layout, only={"verify_every": 2}) as pair:
        pair.train(range(18))
        (engine,) = pair.opt._run.engines
        engine.launch = corrupted(pair, rank, engine.launch)
        seen = []
        for step in range(18, 60):
            pair.backward(step)
            try:
                pair.opt.step()
            except CorruptionError as error:
                seen.append(str(error))
                break
            pair.opt.zero_grad()
        assert len(seen) == 1
        # Of two that differ, each may be the one; the second computation tells.
        assert "'mid.weight'" in seen[0] and "on rank 1" in seen[0], seen
        del engine.launch


@pytest.mark.parametrize("what", ["weights", "momentum"])
@distributed(2, 3)
def test_a_healthy_rank_is_never_named_alone(rank, world, what):
    """An owner whose momentum has changed is right in its own eyes, and the others are wrong. Of
    two ranks that differ either may be the one."""
    for culprit in range(world):
        model = seeded(Net)
        opt = dmuon.Muon(model, lr=0.02, verify_every=1, ns_dtype=torch.float32)
        told, name = "", ""
        for step in range(40):
            opt.zero_grad()
            loss_of(model, batch(step, 0)).backward()  # as if it had been averaged
            if step == 3:
                plan, (engine,) = opt.ownership.plan, opt._run.engines
                ((sampled, _),) = engine.verifier.sample(plan, opt._run.verified + 1)
                name = plan.specs.parameters[sampled].name
                weight = model.get_parameter(name)
                changed = weight if what == "weights" else opt.state[weight]["momentum_buffer"]
                if rank == culprit:
                    changed.detach().view(-1)[5].add_(10.0)
            try:
                opt.step()
            except CorruptionError as error:
                told = str(error)
                break
        opt.ownership.close()
        owner = opt.ownership.owner_of(name)
        # Another's momentum is of no use, and nobody looks at it.
        if what == "weights" or culprit == owner or told:
            assert name in told
            either = "on rank 0, 1: " if world == 2 else f"on rank {culprit}: "
            assert f"on rank {culprit}: " in told or either in told, (told, culprit, owner)


def wrong_results(run):
    def broken(call, operand):
        update = run(call, operand)
        update[0, 0, 0] += 3.0
        return update

    return broken


@pytest.mark.parametrize("layout", [PLAIN, FSDP, REDUCED, DDP, "fsdp2"])
@distributed(2)
def test_an_owner_that_computes_wrongly_is_named(rank, world, layout):
    def watch(opt, step):
        (engine,) = opt._run.engines
        culprit = 1
        if rank == culprit:
            engine._kernels.run = wrong_results(engine._kernels.run)
        for number in range(40):
            step(number)
            try:
                opt.step()
            except CorruptionError as error:
                return str(error)
            opt.zero_grad()
        return ""

    if layout == "fsdp2":
        model = seeded(Net)
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh_of((world,)))
        opt = dmuon.Muon(model, lr=0.02, verify_every=1, ns_dtype=torch.float32)
        opt.report()
        told = watch(opt, lambda step: loss_of(model, batch(step, rank)).backward())
        opt.ownership.close()
    else:
        with both(Net, layout, only={"verify_every": 1}) as pair:
            told = watch(pair.opt, pair.backward)
    assert "rank 1" in told, told
