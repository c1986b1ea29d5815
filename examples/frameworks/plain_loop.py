"""A plain loop with `torch.compile`: one process, DDP under torchrun, or FSDP2 with --fsdp2.

    python examples/frameworks/plain_loop.py
    torchrun --standalone --nproc-per-node=2 examples/frameworks/plain_loop.py
    torchrun --standalone --nproc-per-node=2 examples/frameworks/plain_loop.py --fsdp2

--backend inductor (the default of torch) needs a C++ compiler on a CPU.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from _tiny import Sequences, tiny_llama
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dmuon


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--backend", default="aot_eager")
    options = parser.parse_args()
    launched = "RANK" in os.environ
    if launched:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if launched else 0
    world = dist.get_world_size() if launched else 1

    model = tiny_llama()
    for layer in model.model.layers:
        layer.compile(backend=options.backend)  # block by block; or torch.compile(model)
    if options.fsdp2 and launched:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif launched:
        model = DistributedDataParallel(model)
    optimizer = dmuon.Muon(model, lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    tokens = Sequences().tokens
    for step in range(40):
        rows = (16 * (world * step + rank)) % len(tokens)
        batch = tokens[rows : rows + 16]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 and rank == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    if rank == 0:
        print(optimizer.report())
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
