"""Hugging Face Trainer with dmuon: train, save half-way, resume.

python examples/frameworks/trainer.py
torchrun --standalone --nproc-per-node=2 examples/frameworks/trainer.py    (DDP)
"""

from __future__ import annotations

import tempfile

import torch.distributed as dist
from _tiny import Sequences, tiny_llama
from transformers import Trainer, TrainingArguments

import dmuon


def make_trainer(folder: str) -> Trainer:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=40,
        per_device_train_batch_size=16,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        logging_steps=10,
        save_steps=20,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,  # leave it out if there is a GPU
    )
    # Trainer calls the factory before it wraps the model; dmuon plans at the first step, after it.
    optimizer = (dmuon.hf_factory, {"lr": 1e-2, "weight_decay": 0.1})
    return Trainer(
        tiny_llama(), arguments, train_dataset=Sequences(), optimizer_cls_and_kwargs=optimizer
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(folder)  # makes the process group under torchrun
        shared = [trainer.args.output_dir]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)  # one folder for all ranks
            trainer.args.output_dir = shared[0]
        trainer.train()
        resumed = make_trainer(shared[0])
        resumed.train(resume_from_checkpoint=f"{shared[0]}/checkpoint-20")
        if trainer.is_world_process_zero():
            losses = [
                [entry["loss"] for entry in run.state.log_history if "loss" in entry]
                for run in (trainer, resumed)
            ]
            print("losses:            ", [f"{loss:.4f}" for loss in losses[0]])
            print("resumed at step 20:", [f"{loss:.4f}" for loss in losses[1]])
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()  # gloo's threads may abort a process that leaves them


if __name__ == "__main__":
    main()
