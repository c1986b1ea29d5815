"""Replicas that leave and come back, with torchft: two replicas of two ranks, on CPUs.

    pip install torchft
    python examples/frameworks/torchft_replicas.py

Replica 1 leaves before step 3 and comes back in new processes, whose weights differ until they have
taken those of replica 0, and the optimizer's state with them. At the end both replicas are compared
with one process that trains on the same data.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon
from dmuon.reference import ReferenceMuon

STEPS, LEAVES, WAITS, RANKS = 10, 3, 5, 2  # replica 0 waits before step 5
SETTINGS: dict[str, Any] = {"lr": 0.02, "adamw_lr": 1e-3, "ns_dtype": torch.float32}


def model() -> nn.Sequential:
    widths = 12, 12, 12, 7, 5
    layers = [nn.Linear(m, n) for m, n in pairwise(widths)]
    return nn.Sequential(*(nn.Sequential(layer, nn.GELU()) for layer in layers))


def loss_of(net: nn.Module, step: int, replica: int, rank: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * step + 10 * replica + rank)
    inputs, targets = (torch.randn(4, n, generator=random) for n in (12, 5))
    return F.mse_loss(net(inputs), targets)


def local(value: Any) -> Any:
    """Copy this rank's part of all tensors in a state."""
    if isinstance(value, dict):
        return {key: local(one) for key, one in value.items()}
    if isinstance(value, list):
        return [local(one) for one in value]
    tensor = value.to_local() if isinstance(value, DTensor) else value
    return tensor.detach().clone() if isinstance(tensor, Tensor) else tensor


@torch.no_grad()
def put(into: Any, saved: Any) -> None:
    """Write the result of `local` back."""
    for key in into if isinstance(into, dict) else range(len(into)):
        if isinstance(into[key], Tensor):
            tensor = into[key]
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(saved[key])
        elif isinstance(into[key], dict | list):
            put(into[key], saved[key])
        else:
            into[key] = saved[key]


def train(replica: int, life: int, lighthouse: str, folder: Path) -> None:
    """Be a rank of a replica, which torchrun's variables connect with its others."""
    from torchft import Manager, ProcessGroupGloo

    dist.init_process_group("gloo")
    torch.manual_seed(life)  # a newcomer's weights differ until they are healed
    net = model()
    shards = init_device_mesh("cpu", (RANKS,))
    for module in (*net, net):
        fully_shard(module, mesh=shards)
        module.set_all_reduce_hook(lambda gradient: manager.allreduce(gradient).wait())
    opt = dmuon.Muon(net, **SETTINGS)
    opt.report()  # plans now, so that there is state to heal

    def state() -> Any:
        return {"model": local(dict(net.named_parameters())), "opt": local(opt.state_dict())}

    def load(saved: Any) -> None:
        put(dict(net.named_parameters()), saved["model"])
        mine = opt.state_dict()
        put(mine, saved["opt"])
        opt.load_state_dict(mine)

    # Not init_sync: it may heal some ranks of a replica alone, and loading is a collective call.
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)), state_dict=state, load_state_dict=load,
        min_replica_size=1, replica_id=f"replica{replica}", lighthouse_addr=lighthouse,
        use_async_quorum=False, init_sync=False,
    )  # fmt: skip
    (folder / f"{replica}.{life}.{dist.get_rank()}").touch()
    together = []
    while (step := manager.current_step()) < STEPS:
        if (replica, life, step) == (1, 0, LEAVES):
            os._exit(0)
        waits_for = {0: 0, WAITS: 1}.get(step) if replica == 0 else None
        while waits_for is not None and len([*folder.glob(f"1.{waits_for}.*")]) < RANKS:
            time.sleep(0.1)
        time.sleep(1.0)  # until its heartbeats are heard
        manager.start_quorum()
        step = manager.current_step()
        opt.zero_grad()
        loss_of(net, step, replica, dist.get_rank()).backward()
        if manager.should_commit():
            opt.step()
            together += [step] * (manager.num_participants() > 1)
    weights = [p.full_tensor().detach() for p in net.parameters()]
    if dist.get_rank() == 0:
        torch.save((together, weights), folder / f"replica{replica}")
    manager.shutdown(wait=False)
    os._exit(0)


def main() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
    address = lighthouse.address().replace(os.uname().nodename, "127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:

        def start(replica: int, life: int) -> list[subprocess.Popen[bytes]]:
            port = 20_000 + os.getpid() % 5_000 + 50 * replica + 10 * life
            known = {"WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, __file__, str(replica), str(life), address, folder]
            each = [{**known, "RANK": rank, "LOCAL_RANK": rank} for rank in range(RANKS)]
            return [
                subprocess.Popen(command, env=os.environ | {k: str(v) for k, v in one.items()})
                for one in each
            ]

        first, second = start(0, 0), start(1, 0)
        assert not any(process.wait(120) for process in second)
        assert not any(process.wait(120) for process in first + start(1, 1))
        found = [torch.load(Path(folder) / f"replica{replica}") for replica in (0, 1)]
    together = {*range(LEAVES), *found[0][0]}
    torch.manual_seed(0)
    net = model()
    reference = ReferenceMuon(net, **SETTINGS)
    for step in range(STEPS):
        places = [(q, r) for q in range(1 + (step in together)) for r in range(RANKS)]
        for place in places:
            (loss_of(net, step, *place) / len(places)).backward()
        reference.step()
        reference.zero_grad()
    print(f"both replicas took the steps {sorted(together)}")
    for replica, (_, weights) in enumerate(found):
        pairs = zip(weights, net.parameters(), strict=True)
        off = max(float((w - p.detach()).abs().max()) for w, p in pairs)
        print(f"replica {replica} is within {off:.0e} of one process")
    lighthouse.shutdown()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
