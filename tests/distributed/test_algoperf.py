"""The AlgoPerf submission on dmuon: its API, what it trains, and what goes where.

Newton-Schulz runs in float32.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from benchmarks import algoperf
from benchmarks.algoperf import CONTENDERS, FOLDER, WORKLOADS, Form, split_text, submission
from dmuon.reference import ReferenceMuon
from tests.distributed.harness import distributed

pytestmark = pytest.mark.cpu_only("an example of CPUs")

STEPS = 4
TOLERANCE = 1e-5

# Parameters of AlgoPerf's functions, in their order (algorithms/template/submission.py of
# github.com/mlcommons/algorithmic-efficiency at 2c90454).
BOTH = ["workload", "current_param_container", "current_params_types", "model_state"]
LAST = ["loss_type", "optimizer_state", "eval_results", "global_step", "rng"]
SIGNATURES = {
    "init_optimizer_state": ["workload", "model_params", "model_state", "hyperparameters", "rng"],
    "update_params": [*BOTH, "hyperparameters", "batch", *LAST, "train_state"],
    "prepare_for_eval": [*BOTH, "hyperparameters", *LAST],
    "get_batch_size": ["workload_name"],
    "data_selection": ["workload", "input_queue", "optimizer_state", "current_param_container",
                       "model_state", "hyperparameters", "global_step", "rng"],
}  # fmt: skip


@pytest.mark.parametrize("by", [submission, CONTENDERS["KJ"][0]], ids=["dmuon", "form"])
def test_functions_are_those_of_algoperf(by):
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(by, name)).parameters) == parameters, name


def test_batch_sizes():
    assert submission.get_batch_size("wmt") == 128
    with pytest.raises(ValueError, match="'mnist' has no batch size"):
        submission.get_batch_size("mnist")


def test_rates_rise_and_fall():
    rates = [submission.factor(step, 12, 1 / 6) for step in range(14)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[7] == pytest.approx(0.5)
    assert rates[12:] == [0.0, 0.0] and sorted(rates[2:], reverse=True) == rates[2:]


def reference(workload: str, world: int) -> tuple[Tensor, list[float]]:
    """Weights and losses in one process, where every rank's part of a batch runs by itself."""
    work = WORKLOADS[workload]()
    trial = SimpleNamespace(**algoperf.trial(torch.float32))
    torch.manual_seed(0)
    model = work.build()
    optimizer = ReferenceMuon(
        model,
        weight_decay=trial.weight_decay,
        momentum=1 - trial.one_minus_beta1,
        ns_coefficients="quintic",
        ns_dtype=torch.float32,
        adamw_betas=(1 - trial.one_minus_beta1, trial.beta2),
    )
    generator = torch.Generator().manual_seed(1)  # of seed 0's training examples
    losses = []
    for step in range(STEPS):
        rate = submission.factor(step, work.step_hint, trial.warmup_factor)
        optimizer.param_groups[0]["lr"] = trial.learning_rate * rate
        optimizer.adamw.param_groups[0]["lr"] = trial.adamw_learning_rate * rate
        inputs, targets = work.examples(submission.get_batch_size(workload), generator)
        parts = [
            work.loss_fn(y, model(x))["per_example"].mean() / world
            for x, y in zip(inputs.chunk(world), targets.chunk(world))
        ]
        model.zero_grad()
        sum(parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), trial.grad_clip)
        optimizer.step()
        losses.append(float(sum(parts)))
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


@distributed(2)
def test_all_train_as_the_reference(rank: int, world: int) -> None:
    for workload in WORKLOADS:
        expected, losses = reference(workload, world)
        for name in CONTENDERS:
            training = algoperf.training_of(name, workload, torch.float32)
            for _ in range(STEPS):
                training.step()
            difference = float((algoperf.weights(training) - expected).abs().max())
            assert difference <= TOLERANCE, (workload, name, difference)
            assert training.logger.losses == pytest.approx(losses, abs=TOLERANCE), (workload, name)
            assert training.seconds > 0 and training.evaluate()["validation/loss"] > 0


class Faulty(Form):
    """A form with another learning rate."""

    def init_optimizer_state(self, workload, model_params, model_state, hyperparameters, rng):
        changed = SimpleNamespace(**vars(hyperparameters) | {"learning_rate": 0.011})
        return super().init_optimizer_state(workload, model_params, model_state, changed, rng)


@distributed(2)
def test_a_fault_is_seen(rank: int, world: int) -> None:
    arguments = SimpleNamespace(steps=STEPS)
    good, CONTENDERS["KJ"] = CONTENDERS["KJ"], (Faulty(algoperf.baselines.RoundRobin), False)
    try:
        rows = [*algoperf.ask_equivalence("tiny_transformer", arguments)]
    finally:
        CONTENDERS["KJ"] = good
    assert [row["optimizer"] for row in rows if not row["passed"]] == ["KJ"]


@distributed(2)
def test_time_is_told_by_parts(rank: int, world: int) -> None:
    rows = [*algoperf.ask_time("tiny_cnn", SimpleNamespace(rounds=2))]
    assert [row["optimizer"] for row in rows] == [*CONTENDERS]
    for row in rows:
        assert min(row["forward_ms"], row["backward_ms"], row["step_ms"]) > 0
    rows = [{"question": "time"} | row for row in rows]
    assert algoperf.tables(rows)["time"].count("\n| tiny_cnn |") == len(CONTENDERS)


@distributed(2)
def test_compiled_models_are_looked_through(rank: int, world: int) -> None:
    """AlgoPerf's runner hands over ``torch.compile(DistributedDataParallel(model))``."""
    for frugal in (False, True):
        work = WORKLOADS["tiny_transformer"]()
        ddp, _ = work.init_model_fn([0, 0])
        compiled = torch.compile(ddp, backend="eager")
        trial = SimpleNamespace(**algoperf.trial(torch.float32) | {"reduce_to_owner": frugal})
        state = submission.init_optimizer_state(work, compiled, None, trial, [0, 0])
        assert submission.ddp_in(compiled) is ddp
        assert state["optimizer"].ownership.numel() == 614_464


@distributed(2)
def test_the_split_is_golden(rank: int, world: int) -> None:
    """Anew: ``python examples/algoperf/run.py --workload ... --out examples/algoperf/splits``."""
    for workload in WORKLOADS:
        training = algoperf.training_of("dmuon, all-reduce", workload, torch.float32)
        golden = FOLDER / "splits" / f"{workload}.txt"
        assert split_text(training.state["optimizer"]) == golden.read_text()
