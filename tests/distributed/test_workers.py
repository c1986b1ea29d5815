"""Replicas that average their gradients themselves, and leave and come back between steps."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from tests.distributed.compare import assert_close
from tests.distributed.harness import distributed
from tests.distributed.layouts import shard_units
from tests.distributed.models import Net, batch, loss_of, seeded, weights
from tests.distributed.twins import MUON, grouped_references

GONE = (2, 3)  # steps that the second replica misses


@distributed(4)
def test_a_replica_leaves_and_comes_back(rank, world):
    """`step` of one replica does not wait for the other; that heals from it, bit for bit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    across, replica = mesh.get_group("replicate"), mesh.get_local_rank("replicate")
    model, twin = seeded(Net), seeded(Net)
    shard_units(model, mesh["shard"])
    opt = dmuon.Muon(model, **MUON)
    opt.report()
    own = opt.ownership.plan.specs.matrices
    groups = [{"params": [*twin.named_parameters()]}]
    refs = grouped_references(groups, MUON, {m.name for m in own})

    def tensors():
        entries = (value for entry in opt.state.values() for value in entry.values())
        return [local_tensor(t.detach()) for t in (*model.parameters(), *entries)]

    for step in range(6):
        alive = [0] if step in GONE else [0, 1]
        if step == GONE[-1] + 1:
            for tensor in tensors():
                dist.broadcast(tensor, group_src=0, group=across)
            progress = [opt.state_dict()["param_groups"]]
            dist.broadcast_object_list(progress, group_src=0, group=across)
            opt.load_state_dict({"state": opt.state_dict()["state"], "param_groups": progress[0]})
        if replica in alive:
            loss_of(model, batch(step, rank)).backward()
            for p in model.parameters() if len(alive) > 1 else ():
                if p.grad is not None:
                    dist.all_reduce(local_tensor(p.grad), group=across)
                    p.grad.div_(2)
            opt.step()
            opt.zero_grad()
        for place in (0, 1, 2, 3)[: 2 * len(alive)]:
            (loss_of(twin, batch(step, place)) / (2 * len(alive))).backward()
        for optimizer in refs:
            optimizer.step()
            optimizer.zero_grad()
    assert_close({n: whole_tensor(p) for n, p in model.named_parameters()}, weights(twin), 1e-6)
    assert opt.stats()["steps"] == 6
