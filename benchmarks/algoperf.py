"""Are the forms of AlgoPerf's Muon submission and dmuon's equal, and how long does a step take?

``python -m benchmarks.algoperf --json out.json`` (examples/algoperf/README.md). The submissions
train the small workloads of examples/algoperf through AlgoPerf's functions, on the same batches:

| name | gradients | each matrix is orthogonalized |
|---|---|---|
| vanilla | all-reduced by DDP | on every rank |
| KJ | all-reduced by DDP | on one rank, round robin |
| KJ_RS | reduced to its owner after backward, under DDP's ``no_sync`` | on one rank, round robin |
| dmuon, all-reduce | all-reduced by DDP | by its owner |
| dmuon, reduce to owner | reduced to its owner in backward, by DDP's hook | by its owner |

``equivalence``: how far weights and losses are from vanilla's; Newton-Schulz in float32.
``time``: of an update, and of its parts: until the model returns, until the optimizer's step, rest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW

from benchmarks import baselines
from benchmarks.results import Row, command, read_rows, table, write
from benchmarks.timing import Laps, first_laps, on_ranks, over_ranks, ratio, take_turns, timed_row
from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.specs import dtype_name

# The examples are scripts: their folder is on the path when they run, and so it must be here.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "algoperf"))

import submission
from run import FOLDER as FOLDER
from run import Training, first_trial
from run import split_text as split_text
from workloads import WORKLOADS

TOLERANCE = 1e-5  # of weights, of which some move by 0.1
WARM_UP = 2


def average_together(gradients: Sequence[Tensor]) -> None:
    """Replace many small gradients by their means over the ranks, in one all-reduce."""
    joint = torch.cat([grad.flatten() for grad in gradients])
    baselines.average([(joint, None)])
    parts = joint.split([grad.numel() for grad in gradients])
    for grad, part in zip(gradients, parts):
        grad.copy_(part.view_as(grad))


@dataclass(frozen=True)
class Form:
    """A submission in which a baseline trains what dmuon takes for matrices, and AdamW the rest."""

    kind: Callable[..., baselines.Baseline]
    reduces: bool = False  # gradients to owners

    get_batch_size = staticmethod(submission.get_batch_size)
    data_selection = staticmethod(submission.data_selection)
    prepare_for_eval = staticmethod(submission.prepare_for_eval)

    def init_optimizer_state(
        self,
        workload: Any,
        model_params: nn.Module,
        model_state: Any,
        hyperparameters: Any,
        rng: Any,
    ) -> dict[str, Any]:
        given, beta1 = hyperparameters, 1.0 - hyperparameters.one_minus_beta1
        others = {*collect(model_params).adamw_parameters()}
        split: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i, (_, p) in enumerate(trainable_parameters(model_params)):
            split[i in others].append(p)
        how: dict[str, Any] = {"reduce_to_owner": True} if self.reduces else {}
        muon = self.kind(
            split[0],
            given.learning_rate,
            given.weight_decay,
            beta1,
            ns_dtype=given.ns_dtype,
            **how,
        )
        adamw = AdamW(
            split[1],
            given.adamw_learning_rate,
            (beta1, given.beta2),
            weight_decay=given.weight_decay,
            foreach=True,
        )
        both = {"optimizer": muon, "adamw": adamw}
        return both | {
            f"schedule of {name}": submission.schedule(one, workload, given)
            for name, one in both.items()
        }

    def update_params(
        self,
        workload: Any,
        current_param_container: nn.Module,
        current_params_types: Any,
        model_state: Any,
        hyperparameters: Any,
        batch: Any,
        loss_type: Any,
        optimizer_state: dict[str, Any],
        eval_results: list[tuple[int, float]],
        global_step: int,
        rng: Any,
        train_state: dict[str, Any] | None = None,
    ) -> tuple[dict[str, Any], nn.Module, Any]:
        model: Any = current_param_container
        muon = optimizer_state["optimizer"]
        others = optimizer_state["adamw"].param_groups[0]["params"]
        muon.zero_grad()
        optimizer_state["adamw"].zero_grad()
        with model.no_sync() if self.reduces else nullcontext():
            loss, mean, model_state = submission.mean_loss(
                workload, model, model_state, hyperparameters, batch, rng
            )
            loss.backward()
        if self.reduces:
            muon.sync_gradients()
            average_together([p.grad for p in others])
        norm = self.norm(muon.matrices, others)
        clip_grads_with_norm_(model.parameters(), hyperparameters.grad_clip, norm)
        for one in optimizer_state.values():
            one.step()
        submission.log(workload, global_step, mean, norm)
        return optimizer_state, model, model_state

    def norm(self, matrices: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """The joint norm of all gradients; those of matrices may be right on their owners only."""
        if not self.reduces:
            return get_total_norm([p.grad for p in (*matrices, *others) if p.grad is not None])
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = [p.grad for p in matrices[rank::world] if p.grad is not None]
        square = get_total_norm(mine).square()
        dist.all_reduce(square)
        rest = get_total_norm([p.grad for p in others if p.grad is not None])
        return (square + rest.square()).sqrt()


CONTENDERS: dict[str, tuple[Form | ModuleType, bool]] = {
    "vanilla": (Form(baselines.Redundant), False),
    "KJ": (Form(baselines.RoundRobin), False),
    "KJ_RS": (Form(baselines.RoundRobin, reduces=True), True),
    "dmuon, all-reduce": (submission, False),
    "dmuon, reduce to owner": (submission, True),
}


def trial(dtype: torch.dtype) -> dict[str, Any]:
    """Hyperparameters; all contenders use the quintic coefficients."""
    return first_trial() | {"ns_dtype": dtype, "ns_coefficients": "quintic"}


def training_of(name: str, workload: str, dtype: torch.dtype) -> Training:
    """A training by a contender."""
    by, frugal = CONTENDERS[name]
    return Training(WORKLOADS[workload](), by, trial(dtype) | {"reduce_to_owner": frugal})


# ---- equivalence ---------------------------------------------------------------------------


def weights(training: Training) -> Tensor:
    """A copy of all parameters, flat."""
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


def ask_equivalence(workload: str, args: argparse.Namespace) -> Iterator[Row]:
    """Train by each, and compare what all ranks have with what this rank had from vanilla."""
    expected: tuple[Tensor, Tensor] | None = None
    for name in CONTENDERS:
        training = training_of(name, workload, torch.float32)
        start = weights(training)
        for _ in range(args.steps):
            training.step()
        found, losses = weights(training), torch.tensor(training.logger.losses)
        expected = expected or (found, losses)
        apart = torch.stack([(a - b).abs().max() for a, b in zip((found, losses), expected)])
        dist.all_reduce(apart, dist.ReduceOp.MAX)
        row: Row = {"set": workload, "optimizer": name, "layout": "replicated"}
        yield row | {
            "world": dist.get_world_size(),
            "ns_dtype": "float32",
            "steps": args.steps,
            "max_abs_diff": apart[0].item(),
            "tolerance": TOLERANCE,
            "passed": apart[0].item() <= TOLERANCE,
            "loss_diff": apart[1].item(),
            "losses": [losses[0].item(), losses[-1].item()],
            "moved": (found - start).abs().max().item(),
        }


# ---- time ----------------------------------------------------------------------------------


class Timed:
    """A training whose updates are timed in parts, by hooks of the model and of the optimizer."""

    def __init__(self, training: Training) -> None:
        self.training, self._marks = training, list[float]()
        training.model.register_forward_hook(self._mark)
        training.state["optimizer"].register_step_pre_hook(self._mark)

    def _mark(self, *_: Any) -> None:
        self._marks.append(time.perf_counter())

    def turn(self) -> Laps:
        """Milliseconds of an update, and of each of its parts on the slowest rank."""
        batch = self.training.next_batch()
        self._marks.clear()

        def update() -> None:
            self._mark()
            self.training.update(batch)
            self._mark()

        whole, _ = over_ranks(update)
        parts = torch.tensor([1e3 * (end - begin) for begin, end in pairwise(self._marks)])
        dist.all_reduce(parts, dist.ReduceOp.MAX)
        return (whole, *parts.tolist())


def ask_time(workload: str, args: argparse.Namespace) -> Iterator[Row]:
    dtype = baselines.ns_dtype()
    field = {name: Timed(training_of(name, workload, dtype)) for name in CONTENDERS}
    turns = {name: timed.turn for name, timed in field.items()}
    times = take_turns(turns, args.rounds, warm_up=WARM_UP)
    ms = first_laps(times)
    for name, mine in ms.items():
        parts = [statistics.median(laps[part] for laps in times[name]) for part in (1, 2, 3)]
        row = timed_row(workload, name, "replicated", dist.get_world_size(), mine)
        row |= dict(zip(("forward_ms", "backward_ms", "step_ms"), parts))
        row |= {
            "ratio_to_vanilla": ratio(mine, ms["vanilla"]),
            "ratio_to_kj": ratio(mine, ms["KJ"]),
        }
        yield row | {"ns_dtype": dtype_name(dtype)}


# ---- the command ---------------------------------------------------------------------------

QUESTIONS = {"equivalence": ask_equivalence, "time": ask_time}


def work(rank: int, args: argparse.Namespace, question: str) -> list[Row]:
    return [
        {"question": question} | row
        for workload in args.workloads
        for row in QUESTIONS[question](workload, args)
    ]


def cells(question: str, row: Row) -> list[str]:
    """What a table shows of a row."""
    if question == "equivalence":
        return [f"{row['max_abs_diff']:.0e}", f"{row['loss_diff']:.0e}"]
    parts = ", ".join(f"{row[f'{part}_ms']:.0f}" for part in ("forward", "backward", "step"))
    spread = "{median_ms:.0f} ({p10_ms:.0f}-{p90_ms:.0f})".format(**row)
    return [spread, parts, f"{row['ratio_to_vanilla']:.2f}", f"{row['ratio_to_kj']:.2f}"]


HEADINGS = {
    "equivalence": ("weights apart", "losses apart"),
    "time": ("ms (p10-p90)", "forward, backward, step", "x vanilla", "x KJ"),
}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """A Markdown table for each question, a line for each submission and workload."""
    found = {}
    for question, headings in HEADINGS.items():
        mine = [row for row in rows if row["question"] == question]
        at = {(row["set"], row["optimizer"], row["world"]): row for row in mine}
        worlds = sorted({row["world"] for row in mine})
        lines = list(dict.fromkeys((row["set"], row["optimizer"]) for row in mine))
        body = [
            [*line, *(cell for world in worlds for cell in cells(question, at[line + (world,)]))]
            for line in lines
        ]
        top = [f"{world} processes: {text}" for world in worlds for text in headings]
        if mine:
            found[question] = table(("workload", "submission", *top), body, left=2)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = command(__doc__)
    parser.add_argument("--ask", nargs="+", choices=QUESTIONS, default=[*QUESTIONS])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], help="processes")
    parser.add_argument("--steps", type=int, default=20, help="after which weights are compared")
    parser.add_argument("--rounds", type=int, default=20, help=f"timed, after {WARM_UP} to warm up")
    parser.add_argument("--read", nargs="+", metavar="PATH", help="earlier rows; measure nothing")
    args = parser.parse_args(argv)
    if args.read:
        rows = [row for path in args.read for row in read_rows(path)]
    else:
        asked = product(args.worlds, args.ask)
        rows = [row for world, question in asked for row in on_ranks(world, work, args, question)]
    print(*tables(rows).values(), sep="\n\n")
    write(args.json, rows)
    return int(not all(row.get("passed", True) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
