"""An AlgoPerf submission on dmuon (external tuning, PyTorch): Muon for matrices, else AdamW.

The functions are those of AlgoPerf's template, https://github.com/mlcommons/algorithmic-efficiency.
Hyperparameters are those of `tuning_search_space.json` and `OPTIONAL`. `DistributedDataParallel`,
in which AlgoPerf wraps the model, averages gradients on every rank; with ``reduce_to_owner`` each
travels through DDP's communication hook to the owner of its matrix alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import dmuon

try:
    from algoperf.spec import ForwardPassMode
except ImportError:  # without AlgoPerf, the workloads beside this file have the same names
    from workloads import ForwardPassMode

OptimizerState = dict[str, Any]
Updated = tuple[OptimizerState, nn.Module, Any]

# What a search space may leave out. ``ns_dtype``: "auto", or a torch dtype.
OPTIONAL: dict[str, Any] = {
    "grad_clip": None,
    "label_smoothing": 0.0,
    "reduce_to_owner": False,
    "ns_coefficients": "polar_express",
    "ns_dtype": "auto",
}

BATCH_SIZES = {  # global
    "criteo1tb": 262_144,
    "fastmri": 32,
    "imagenet_resnet": 1024,
    "imagenet_resnet_gelu": 512,
    "imagenet_resnet_silu": 512,
    "imagenet_vit": 1024,
    "imagenet_vit_glu": 512,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "ogbg": 512,
    "wmt": 128,
    "tiny_cnn": 32,
    "tiny_transformer": 32,
}


def optional(hyperparameters: Any, name: str) -> Any:
    """A hyperparameter, or its value in `OPTIONAL` where the search space has none."""
    return getattr(hyperparameters, name, OPTIONAL[name])


def factor(step: int, step_hint: int, warmup: float) -> float:
    """What multiplies all learning rates: a linear warm-up over this part of the steps, then a half
    cosine to 0."""
    rising = max(1, round(warmup * step_hint))
    if step < rising:
        return (step + 1) / rising
    done = min(1.0, (step - rising) / max(1, step_hint - rising))
    return 0.5 * (1 + math.cos(math.pi * done))


def schedule(optimizer: torch.optim.Optimizer, workload: Any, hyperparameters: Any) -> LambdaLR:
    how = {"step_hint": workload.step_hint, "warmup": hyperparameters.warmup_factor}
    return LambdaLR(optimizer, partial(factor, **how))


def ddp_in(model: nn.Module) -> nn.Module:
    """The `DistributedDataParallel` in a model, which AlgoPerf may have compiled, or the model."""
    return next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), model)


def mean_loss(
    workload: Any, model: nn.Module, model_state: Any, hyperparameters: Any, batch: Any, rng: Any
) -> tuple[Tensor, Tensor, Any]:
    """Two losses, and the new state of the model.

    The mean over ranks of the first one's gradients is the gradient of the second one: the mean
    over all valid examples of all ranks, which may have unequally many. Collective.
    """
    rate = getattr(hyperparameters, "dropout_rate", None)
    logits, model_state = workload.model_fn(
        params=model,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=ForwardPassMode.TRAIN,
        rng=rng,
        update_batch_norm=True,
        **({} if rate is None else {"dropout_rate": rate}),
    )
    found = workload.loss_fn(
        label_batch=batch["targets"],
        logits_batch=logits,
        mask_batch=batch.get("weights"),
        label_smoothing=optional(hyperparameters, "label_smoothing"),
    )
    summed, world = found["summed"], 1
    totals = torch.stack([summed.detach().double(), found["n_valid_examples"].double()])
    if dist.is_initialized():
        world = dist.get_world_size()
        dist.all_reduce(totals)
    scale = (world / totals[1]).to(summed.dtype)
    return summed * scale, totals[0] / totals[1], model_state


def log(workload: Any, global_step: int, loss: Tensor, norm: Tensor | None = None) -> None:
    """Tell AlgoPerf's logger, which only one rank has; as rarely as the template does."""
    if workload.metrics_logger is not None and (global_step <= 100 or global_step % 500 == 0):
        metrics = {"loss": loss.item()} | ({} if norm is None else {"grad_norm": norm.item()})
        workload.metrics_logger.append_scalar_metrics(metrics, global_step)


# ---- AlgoPerf's functions ------------------------------------------------------------------


def init_optimizer_state(
    workload: Any, model_params: nn.Module, model_state: Any, hyperparameters: Any, rng: Any
) -> OptimizerState:
    """dmuon and a schedule; both have the state_dict that AlgoPerf's checkpoints ask for."""
    model, beta1 = ddp_in(model_params), 1.0 - hyperparameters.one_minus_beta1
    if optional(hyperparameters, "reduce_to_owner"):  # from the first backward on
        dmuon.dedicate_params(model, options=dmuon.ReplicatedOptions(reduce_to_owner=True))
    optimizer = dmuon.Muon(
        model,
        lr=hyperparameters.learning_rate,
        weight_decay=hyperparameters.weight_decay,
        momentum=beta1,
        ns_coefficients=optional(hyperparameters, "ns_coefficients"),
        ns_dtype=optional(hyperparameters, "ns_dtype"),
        adamw_lr=hyperparameters.adamw_learning_rate,
        adamw_betas=(beta1, hyperparameters.beta2),
    )
    optimizer.report()  # so it plans now, while AlgoPerf's clock stands still
    return {"optimizer": optimizer, "scheduler": schedule(optimizer, workload, hyperparameters)}


def update_params(
    workload: Any,
    current_param_container: nn.Module,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    batch: Any,
    loss_type: Any,
    optimizer_state: OptimizerState,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: Any,
    train_state: dict[str, Any] | None = None,
) -> Updated:
    """One step."""
    model, optimizer = current_param_container, optimizer_state["optimizer"]
    optimizer.zero_grad()
    loss, mean, model_state = mean_loss(workload, model, model_state, hyperparameters, batch, rng)
    loss.backward()
    norm, limit = None, optional(hyperparameters, "grad_clip")
    if limit is not None:  # gradients at owners count too
        norm = dmuon.clip_grad_norm_(ddp_in(model), limit)
    optimizer.step()
    optimizer_state["scheduler"].step()
    log(workload, global_step, mean, norm)
    return optimizer_state, model, model_state


def prepare_for_eval(
    workload: Any,
    current_param_container: nn.Module,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    loss_type: Any,
    optimizer_state: OptimizerState,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: Any,
) -> Updated:
    """Nothing to do: a step of dmuon ends with all weights in place."""
    return optimizer_state, current_param_container, model_state


def get_batch_size(workload_name: str) -> int:
    """The global batch of a workload.

    Raises:
        ValueError: it is not in `BATCH_SIZES`.
    """
    if workload_name not in BATCH_SIZES:
        raise ValueError(f"{workload_name!r} has no batch size; these have: {[*BATCH_SIZES]}")
    return BATCH_SIZES[workload_name]


def data_selection(
    workload: Any,
    input_queue: Iterator[Any],
    optimizer_state: OptimizerState,
    current_param_container: nn.Module,
    model_state: Any,
    hyperparameters: Any,
    global_step: int,
    rng: Any,
) -> Any:
    """The next batch."""
    return next(input_queue)
