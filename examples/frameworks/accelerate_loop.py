"""accelerate with dmuon: prepare, accumulate, clip, schedule, save and load.

    python examples/frameworks/accelerate_loop.py
    torchrun --standalone --nproc-per-node=2 examples/frameworks/accelerate_loop.py    (DDP)

With FSDP2 only the plugin changes; accelerate accepts it only on machines with GPUs:

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ...)
    accelerator = Accelerator(fsdp_plugin=plugin)
"""

from __future__ import annotations

import tempfile

import torch
from _tiny import Sequences, tiny_llama
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.optim.lr_scheduler import LinearLR

import dmuon


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)  # cpu=True: no GPU here
    model = tiny_llama()
    optimizer = dmuon.Muon(model, lr=1e-2)  # before `prepare`, like any optimizer
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=40 * accelerator.num_processes)
    data = torch.utils.data.DataLoader(Sequences(1280), batch_size=16, shuffle=True)
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)

    for number, batch in enumerate(data):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if number % 10 == 0:
            accelerator.print(f"batch {number:3}  loss {loss.item():.4f}")

    with tempfile.TemporaryDirectory() as folder:
        (shared,) = broadcast_object_list([folder])
        accelerator.save_state(shared)
        accelerator.wait_for_everyone()
        accelerator.load_state(shared)  # on any world size
        accelerator.wait_for_everyone()
    accelerator.print(optimizer.optimizer.report())
    accelerator.end_training()


if __name__ == "__main__":
    main()
