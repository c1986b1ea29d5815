"""`verify_every`: right steps pass; corruption that nobody noticed names its matrix and rank."""

from __future__ import annotations

import pytest
import torch

import dmuon
from dmuon.dtensors import local_tensor
from dmuon.types import CorruptionError
from tests.distributed.harness import distributed
from tests.distributed.layouts import layouts
from tests.distributed.models import Net, batch, loss_of, seeded
from tests.distributed.twins import both


def told(pair, steps):
    """What the first of these steps that finds corruption says."""
    for step in steps:
        pair.backward(step)
        try:
            pair.opt.step()
        except CorruptionError as error:
            return str(error)
        pair.opt.zero_grad()
    return ""


def corrupted(pair, rank, launch):
    """The weights of ``mid`` change in a step on this rank."""

    def broken(refusal):
        launch(refusal)
        pair.opt.synchronize()
        weight = local_tensor(pair.bare.mid.weight)
        if rank == 1 and weight.numel():
            weight.view(-1)[5].add_(1.0)

    return broken


@distributed(3)
def test_a_replica_that_changed_is_named(rank, world):
    with both(Net, "reduced", only={"verify_every": 2}) as pair:
        pair.train(range(18))
        (engine,) = pair.opt._run.engines
        engine.launch = corrupted(pair, rank, engine.launch)
        text = told(pair, range(18, 60))
        # Of two that differ, each may be the one; the second computation tells.
        assert "'mid.weight'" in text and "on rank 1" in text, text
        del engine.launch


@pytest.mark.parametrize(("what", "world"), [("weights", 2), ("momentum", 3)])
@distributed()
def test_a_healthy_rank_is_never_named_alone(rank, world, what):
    """An owner whose momentum has changed is right in its own eyes, and the others are wrong. Of
    two ranks that differ either may be the one."""
    for culprit in range(world):
        model = seeded(Net)
        opt = dmuon.Muon(model, lr=0.02, verify_every=1, ns_dtype=torch.float32)
        text, name = "", ""
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
                text = str(error)
                break
        opt.ownership.close()
        owner = opt.ownership.owner_of(name)
        # Another's momentum is of no use, and nobody looks at it.
        if what == "weights" or culprit == owner or text:
            assert name in text
            either = "on rank 0, 1: " if world == 2 else f"on rank {culprit}: "
            assert f"on rank {culprit}: " in text or either in text, (text, culprit, owner)


def wrong_results(run):
    def broken(call, operand):
        update = run(call, operand)
        update[0, 0, 0] += 3.0
        return update

    return broken


@layouts("dedicated", "fsdp2")
def test_an_owner_that_computes_wrongly_is_named(rank, world, layout):
    with both(Net, layout, only={"verify_every": 1}) as pair:
        (engine,) = pair.opt._run.engines
        if rank == 1:
            engine._kernels.run = wrong_results(engine._kernels.run)
        text = told(pair, range(40))
    assert "rank 1" in text, text
