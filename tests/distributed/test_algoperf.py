"""The AlgoPerf submission on dmuon: its API, what it trains, and what goes where.

Newton-Schulz runs in float32.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmuon.reference import ReferenceMuon
from tests.distributed.harness import distributed

# The examples are scripts: their folder is on the path when they run, and so it must be here.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "algoperf"))

import submission
from run import FOLDER, Training, first_trial, split_text
from workloads import WORKLOADS

pytestmark = pytest.mark.cpu_only("an example of CPUs")

STEPS = 2
TOLERANCE = 1e-5  # of weights, of which some move by 0.1

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


def test_functions_are_those_of_algoperf():
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(submission, name)).parameters) == parameters, name


def test_batch_sizes():
    assert submission.get_batch_size("wmt") == 128
    with pytest.raises(ValueError, match="'mnist' has no batch size"):
        submission.get_batch_size("mnist")


def test_rates_rise_and_fall():
    rates = [submission.factor(step, 12, 1 / 6) for step in range(14)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[7] == pytest.approx(0.5)
    assert rates[12:] == [0.0, 0.0] and sorted(rates[2:], reverse=True) == rates[2:]


def trial(frugal: bool) -> dict[str, Any]:
    own = {"ns_dtype": torch.float32, "ns_coefficients": "quintic", "reduce_to_owner": frugal}
    return first_trial() | own


def reference(workload: str, world: int) -> tuple[Tensor, list[float]]:
    """Weights and losses in one process, where every rank's part of a batch runs by itself."""
    work, given = WORKLOADS[workload](), SimpleNamespace(**trial(False))
    torch.manual_seed(0)
    model = work.build()
    optimizer = ReferenceMuon(
        model,
        weight_decay=given.weight_decay,
        momentum=1 - given.one_minus_beta1,
        ns_coefficients="quintic",
        ns_dtype=torch.float32,
        adamw_betas=(1 - given.one_minus_beta1, given.beta2),
    )
    generator = torch.Generator().manual_seed(1)  # of seed 0's training examples
    losses = []
    for step in range(STEPS):
        rate = submission.factor(step, work.step_hint, given.warmup_factor)
        optimizer.param_groups[0]["lr"] = given.learning_rate * rate
        optimizer.adamw.param_groups[0]["lr"] = given.adamw_learning_rate * rate
        inputs, targets = work.examples(submission.get_batch_size(workload), generator)
        parts = [
            work.loss_fn(y, model(x))["per_example"].mean() / world
            for x, y in zip(inputs.chunk(world), targets.chunk(world))
        ]
        model.zero_grad()
        sum(parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), given.grad_clip)
        optimizer.step()
        losses.append(float(sum(parts)))
    return weights(model), losses


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@distributed(2)
def test_all_train_as_the_reference(rank: int, world: int) -> None:
    """With gradients that are all-reduced or reduced to their owners; and which parameter goes
    where (anew: ``python examples/algoperf/run.py --workload ... --out examples/algoperf/splits``).
    """
    for workload in WORKLOADS:
        expected, losses = reference(workload, world)
        for frugal in (False, True):
            training = Training(WORKLOADS[workload](), submission, trial(frugal))
            for _ in range(STEPS):
                training.step()
            difference = float((weights(training.model) - expected).abs().max())
            assert difference <= TOLERANCE, (workload, frugal, difference)
            assert training.logger.losses == pytest.approx(losses, abs=TOLERANCE), workload
            assert training.seconds > 0 and training.evaluate()["validation/loss"] > 0
            golden = FOLDER / "splits" / f"{workload}.txt"
            assert split_text(training.state["optimizer"]) == golden.read_text()


@distributed(2)
def test_compiled_models_are_looked_through(rank: int, world: int) -> None:
    """AlgoPerf's runner hands over ``torch.compile(DistributedDataParallel(model))``."""
    for frugal in (False, True):
        work = WORKLOADS["tiny_transformer"]()
        ddp, _ = work.init_model_fn([0, 0])
        compiled = torch.compile(ddp, backend="eager")
        given = SimpleNamespace(**trial(frugal))
        state = submission.init_optimizer_state(work, compiled, None, given, [0, 0])
        assert submission.ddp_in(compiled) is ddp
        assert state["optimizer"].ownership.numel() == 614_464
