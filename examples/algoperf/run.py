"""Train a small workload by an AlgoPerf submission, as AlgoPerf's runner does.

    python examples/algoperf/run.py --workload tiny_cnn
    torchrun --standalone --nproc-per-node=4 examples/algoperf/run.py --reduce-to-owner

Rank 0 prints losses, the accumulated submission time, and writes which parameters go to Muon, which
to AdamW, and why, to `<out>/<workload>.txt`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import submission as on_dmuon
import torch
import torch.distributed as dist
from workloads import WORKLOADS, Workload, ranks

import dmuon

FOLDER = Path(__file__).parent


def first_trial(path: Path = FOLDER / "tuning_search_space.json") -> dict[str, Any]:
    """The first point of each hyperparameter of a search space."""
    space = json.loads(path.read_text())
    return {name: given["feasible_points"][0] for name, given in space.items()}


class Logger:
    """Keeps what a submission logs: AlgoPerf's logger writes it to files."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def append_scalar_metrics(self, metrics: dict[str, float], global_step: int) -> None:
        self.losses.append(metrics["loss"])


class Training:
    """A workload and a submission: a module or an object with AlgoPerf's functions.

    ``seconds`` is the accumulated submission time: of selecting data and updating parameters, with
    preparations for an evaluation and without the evaluation.
    """

    def __init__(
        self, workload: Workload, submission: Any, hyperparameters: dict[str, Any], seed: int = 0
    ) -> None:
        self.workload, self.submission = workload, submission
        self.hyperparameters = SimpleNamespace(**hyperparameters)
        self.rng = [seed, 0]
        self.logger = Logger()
        self.workload.attach_metrics_logger(self.logger)
        self.batch_size = submission.get_batch_size(workload.name)
        self.queue = workload._build_input_queue(self.rng, "train", "", self.batch_size)
        self.model, self.model_state = workload.init_model_fn(self.rng)
        self.state = submission.init_optimizer_state(
            workload, self.model, self.model_state, self.hyperparameters, self.rng
        )
        self.steps, self.seconds = 0, 0.0

    @property
    def _known(self) -> dict[str, Any]:
        """The arguments that `update_params` and `prepare_for_eval` share."""
        return {
            "workload": self.workload,
            "current_param_container": self.model,
            "current_params_types": None,  # the workloads have none
            "model_state": self.model_state,
            "hyperparameters": self.hyperparameters,
            "loss_type": self.workload.loss_type,
            "optimizer_state": self.state,
            "eval_results": [],
            "global_step": self.steps,
            "rng": self.rng,
        }

    def next_batch(self) -> Any:
        return self.submission.data_selection(
            self.workload,
            self.queue,
            self.state,
            self.model,
            self.model_state,
            self.hyperparameters,
            self.steps,
            self.rng,
        )

    def update(self, batch: Any) -> None:
        found = self.submission.update_params(batch=batch, train_state=None, **self._known)
        self.state, self.model, self.model_state = found
        self.steps += 1

    def step(self) -> None:
        """One step, timed on this rank."""
        began = time.perf_counter()
        self.update(self.next_batch())
        self.seconds += time.perf_counter() - began

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on validation examples."""
        began = time.perf_counter()
        found = self.submission.prepare_for_eval(**self._known)
        self.seconds += time.perf_counter() - began
        self.state, self.model, self.model_state = found
        return self.workload.eval_model(self.batch_size, self.model, self.model_state, self.rng)


def split_text(optimizer: dmuon.Muon) -> str:
    """Which parameters go to Muon, which to AdamW, and why, a line each."""
    lines = []
    for algorithm, title in (("muon", "Muon"), ("adamw", "AdamW")):
        mine = [
            p for p in optimizer.report().to_dict()["parameters"] if p["algorithm"] == algorithm
        ]
        elements = sum(p["numel"] for p in mine)
        lines.append(f"{title}: {len(mine)} parameters, {elements:,} elements")
        for p in mine:
            rows, *rest = p["shape"]
            shape = " x ".join(map(str, p["shape"]))
            if algorithm == "muon" and len(rest) > 1:
                shape += f" as {rows} x {math.prod(rest)}"
            lines.append(f"  {p['name']:26}{shape:32}{p['reason']}")
    return "\n".join(lines) + "\n"


def train(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Train, and say how it goes."""
    trial = first_trial() | {"reduce_to_owner": arguments.reduce_to_owner}
    training = Training(WORKLOADS[arguments.workload](), on_dmuon, trial, arguments.seed)
    steps = arguments.steps or training.workload.step_hint
    for step in range(steps):
        training.step()
        if step % max(1, steps // 6) == 0 or step == steps - 1:
            say(f"step {step + 1:4}: loss {training.logger.losses[-1]:.4f}")
    found = ", ".join(f"{name} {value:.4f}" for name, value in training.evaluate().items())
    say(found)
    say(f"accumulated submission time {training.seconds:.2f} s")
    path = arguments.out / f"{arguments.workload}.txt"
    text = split_text(training.state["optimizer"])
    if ranks()[0] == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    say(f"parameter split: {path}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="tiny_transformer")
    parser.add_argument("--steps", type=int, help="by default the workload's own step hint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/algoperf"))
    parser.add_argument(
        "--reduce-to-owner", action="store_true", help="gradients go to owners, not to every rank"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        train(arguments, print if ranks()[0] == 0 else lambda text: None)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
