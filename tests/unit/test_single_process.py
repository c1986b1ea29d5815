"""The three lines on one process, without any process group, against `ReferenceMuon`."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import warnings
import weakref
from collections.abc import Callable, Mapping
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR
from torch.utils.checkpoint import checkpoint

import dmuon
from dmuon.__main__ import main
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.reference import ReferenceMuon
from dmuon.types import OwnershipError, PlanError, SelectionError
from tests.unit.models import (
    WIDTH,
    AllDifferent,
    Block,
    Mixed,
    TinyGPT,
    assert_bitwise,
    assert_within,
    clone,
    inputs,
    mean_square,
    tokens,
    train,
    tree,
    weights,
)

LAYOUTS = pytest.mark.parametrize("layout", ["replicated", "dedicated"])
FP32 = {"ns_dtype": torch.float32}
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, **FP32}


def dedicated(model: nn.Module, **settings: object) -> tuple[dmuon.Ownership, dmuon.Muon]:
    options = {k: settings.pop(k) for k in ("splits", "heads", "options") if k in settings}
    own = dmuon.dedicate_params(model, **options)  # type: ignore[arg-type]
    return own, dmuon.Muon(model, **(SETTINGS | settings))  # type: ignore[arg-type]


def selection(model: nn.Module) -> dict[str, Mapping]:
    return {k: getattr(model, k) for k in ("splits", "heads") if hasattr(model, k)}


def reference(model: nn.Module, **settings: object) -> ReferenceMuon:
    return ReferenceMuon(model, **(selection(model) | SETTINGS | settings))  # type: ignore


def test_no_process_group_is_made():
    dedicated(TinyGPT())
    assert not dist.is_initialized()


# ---- equal to the reference --------------------------------------------------------------

HYPERPARAMETERS = [
    {},
    {"nesterov": False, "adjust_lr_fn": "original"},
    {"momentum_mode": "sgd", "dampening": 0.1, "momentum": 0.8},
    {"adjust_lr_fn": None, "weight_decay": 0.5, "adamw_weight_decay": 0.0, "adamw_lr": 0.003},
    {"ns_coefficients": "quintic", "ns_steps": 3, "eps": 1e-3, "adamw_betas": (0.8, 0.99)},
    {"ns_coefficients": (2.0, -1.5, 0.5), "momentum": 0.0, "adamw_eps": 1e-3},
]


@pytest.mark.parametrize("settings", HYPERPARAMETERS)
def test_without_batching_ten_steps_are_those_of_the_reference_bitwise(settings):
    model = AllDifferent()
    twin = clone(model)
    own, opt = dedicated(model, **selection(model), **settings)
    assert all(len(batch.matrices) == 1 for batch in own.plan.batches)
    batches = inputs((4, 2, 6))
    ours = train(model, opt, batches, range(10))
    theirs = train(twin, reference(twin, **settings), batches, range(10))
    assert ours == theirs
    assert len(set(ours)) == 10
    assert_bitwise(weights(model), weights(twin))


def test_without_batching_bf16_parameters_are_those_of_the_reference_bitwise():
    model = AllDifferent().bfloat16()
    twin = clone(model)
    _, opt = dedicated(model, **selection(model))
    batches = inputs((4, 2, 6), torch.bfloat16)
    train(model, opt, batches, range(10))
    train(twin, reference(twin), batches, range(10))
    assert_bitwise(weights(model), weights(twin))


@pytest.mark.parametrize("settings", HYPERPARAMETERS[:3])
def test_experts_splits_heads_and_convolutions_follow_the_reference(settings):
    model = Mixed()
    twin = clone(model)
    own, opt = dedicated(model, **selection(model), **settings)
    assert max(len(batch.matrices) for batch in own.plan.batches) > 1
    batches = inputs((4, WIDTH))
    ours = train(model, opt, batches, range(10))
    theirs = train(twin, reference(twin, **settings), batches, range(10))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert_within(weights(model), weights(twin), 1e-5)


def test_float64_training_follows_the_reference_in_float64():
    model = Mixed().double()
    twin = clone(model)
    settings = {"ns_dtype": torch.float64}
    _, opt = dedicated(model, **selection(model), **settings)
    batches = inputs((4, WIDTH), torch.float64)

    def loss_fn(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    train(model, opt, batches, range(5), loss_fn)
    train(twin, reference(twin, **settings), batches, range(5), loss_fn)
    assert_within(weights(model), weights(twin), 1e-12)


def test_the_comparison_with_the_reference_notices_a_lost_split():
    model = Mixed()
    twin = clone(model)
    _, opt = dedicated(model)
    train(model, opt, inputs((4, WIDTH)), range(2))
    train(twin, reference(twin), inputs((4, WIDTH)), range(2))
    for name in ("qkv.weight", "o_proj.weight"):
        assert not torch.allclose(weights(model)[name], weights(twin)[name], atol=1e-5)


def test_channels_last_convolutions_follow_the_reference():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.ConvTranspose2d(6, 4, 3))
    model = model.to(memory_format=torch.channels_last)
    twin = clone(model)
    _, opt = dedicated(model)
    batches = inputs((2, 3, 5, 5))
    train(model, opt, batches, range(5))
    train(twin, reference(twin), batches, range(5))
    assert_within(weights(model), weights(twin), 1e-6)


@pytest.mark.parametrize("options", [
    {"bucket_bytes": 1, "publish_bucket_bytes": 1},
    {"bucket_bytes": 700, "publish_bucket_bytes": 700},
])  # fmt: skip
def test_bucket_sizes_change_nothing(options):
    model = Mixed()
    twin = clone(model)
    _, opt = dedicated(model, **selection(model))
    _, other = dedicated(twin, **selection(twin), options=dmuon.ReplicatedOptions(**options))
    train(model, opt, inputs((4, WIDTH)), range(4))
    train(twin, other, inputs((4, WIDTH)), range(4))
    assert_bitwise(weights(model), weights(twin))


@pytest.mark.parametrize("solver", ["auto", "greedy", "round_robin"])
def test_every_solver_gives_the_same_training_on_one_rank(solver):
    model = TinyGPT()
    twin = clone(model)
    dmuon.dedicate_params(model, solver=solver)
    train(model, dmuon.Muon(model, **SETTINGS), tokens(), range(3))
    train(twin, reference(twin), tokens(), range(3))
    assert_within(weights(model), weights(twin), 1e-5)


def test_bf16_newton_schulz_is_as_near_to_the_reference_as_rounding_lets_it():
    report = dmuon.check_step_equivalence(
        TinyGPT,
        mean_square,
        lambda step, data_rank: tokens()(step),
        steps=1,
        ns_dtype=torch.bfloat16,
        lr=0.02,
    )
    assert report.passed and report.rows[0].criterion.startswith("of an update"), str(report)


def test_async_and_sync_publish_are_bitwise_the_same():
    model = Mixed()
    twin = clone(model)
    _, opt = dedicated(model, publish="async")
    _, other = dedicated(twin, publish="sync")
    ours = train(model, opt, inputs((4, WIDTH)), range(5))
    assert ours == train(twin, other, inputs((4, WIDTH)), range(5))
    assert_bitwise(weights(model), weights(twin))


# ---- models with habits ------------------------------------------------------------------


def assert_follows_reference(
    model: nn.Module,
    batches: Callable[[int], Tensor],
    steps: int = 4,
    loss_fn: Callable[[nn.Module, Tensor], Tensor] = mean_square,
    wrap: Callable[[nn.Module], nn.Module] = lambda m: m,
    tolerance: float = 1e-5,
) -> None:
    twin = clone(model)
    wrapped = wrap(model)
    _, opt = dedicated(wrapped)
    ours = train(wrapped, opt, batches, range(steps), loss_fn)
    theirs = train(twin, reference(twin), batches, range(steps), loss_fn)
    assert ours == pytest.approx(theirs, abs=tolerance)
    assert_within(weights(model), weights(twin), tolerance)


class NanoGPT(nn.Module):
    """Blocks in a ModuleList in a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(11, WIDTH), "h": nn.ModuleList(Block() for _ in range(2))}
        )
        self.lm_head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transformer.wte(x)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(x)


class Pairs(nn.Module):
    """Layers that are bare ModuleLists of their two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.layers:
            x = second(first(x))
        return x


class Autoencoder(nn.Module):
    """Trained through a method, never through forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 5)
        self.decoder = nn.Linear(5, WIDTH)

    def reconstruct(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


class Recurrent(nn.Module):
    """One block used several times, each use checkpointed."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = Block()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


def test_blocks_inside_a_module_dict_are_trained_right():
    assert_follows_reference(NanoGPT(), tokens())


def test_layers_that_are_module_lists_are_trained_right():
    assert_follows_reference(Pairs(), inputs((4, WIDTH)))


def test_a_model_used_through_a_method_is_trained_right():
    assert_follows_reference(
        Autoencoder(),
        inputs((4, WIDTH)),
        loss_fn=lambda m, x: (m.reconstruct(x) - x).square().mean(),
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_block_checkpointed_several_times_is_trained_right(use_reentrant):
    assert_follows_reference(Recurrent(use_reentrant), inputs((4, WIDTH)))


class IntoBlocks(nn.Module):
    """Calls its blocks, or reaches into them and calls their parts."""

    def __init__(self, reach: Callable[[int], bool]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.reach, self.calls = reach, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            if self.reach(self.calls):
                x = x + block.down(torch.relu(block.up(block.norm(x))))
            else:
                x = block(x)
        return x


@pytest.mark.parametrize(
    "reach", [lambda call: True, lambda call: call % 2 == 0, lambda call: call > 2]
)
def test_a_model_that_reaches_into_its_blocks_is_trained_right(reach):
    assert_follows_reference(IntoBlocks(reach), inputs((4, WIDTH)), steps=6)


def test_a_compiled_model_is_trained_right():
    torch.compiler.reset()
    assert_follows_reference(TinyGPT(), tokens(), wrap=lambda m: torch.compile(m, backend="eager"))


def test_a_tied_head_is_trained_right():
    model = TinyGPT()
    model.lm_head.weight = model.embed.weight
    assert_follows_reference(model, tokens())


# ---- groups and schedules ----------------------------------------------------------------


def two_groups(model: TinyGPT) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    first = [*model.embed.parameters(), *model.blocks[0].parameters()]
    return first, [p for p in model.parameters() if all(p is not q for q in first)]


def separate_optimizers(model: TinyGPT, lrs: tuple[float, float]) -> list[torch.optim.Optimizer]:
    """What two groups must amount to: an optimizer for each group's matrices and for its rest."""
    made: list[torch.optim.Optimizer] = []
    named = dict(model.named_parameters())
    matrices = [p for n, p in named.items() if ".up.weight" in n or ".down.weight" in n]
    for lr, group in zip(lrs, two_groups(model)):
        muon = [p for p in group if any(p is m for m in matrices)]
        rest = [p for p in group if all(p is not m for m in matrices)]
        made.append(ReferenceMuon(muon, **(SETTINGS | {"lr": lr})))
        made.append(torch.optim.AdamW(rest, lr=lr, weight_decay=0.1, betas=(0.9, 0.95)))
    return made


def test_two_groups_with_a_schedule_keep_their_ratio_and_follow_the_reference():
    model = TinyGPT()
    twin = clone(model)
    dmuon.dedicate_params(model)
    first, second = two_groups(model)
    opt = dmuon.Muon([{"params": first, "lr": 0.04}, {"params": second}], lr=0.01, **{
        k: v for k, v in SETTINGS.items() if k != "lr"
    })  # fmt: skip
    others = separate_optimizers(twin, (0.04, 0.01))
    schedule = CosineAnnealingLR(opt, T_max=10)
    schedules = [CosineAnnealingLR(other, T_max=10) for other in others]
    for step in range(10):
        train(model, opt, tokens(), [step])
        train(twin, others, tokens(), [step])
        schedule.step()
        for other in schedules:
            other.step()
        rates = {g["lr"] for g in opt.param_groups}
        assert max(rates) == pytest.approx(4 * min(rates))
    assert_within(weights(model), weights(twin), 1e-5)
    assert opt.param_groups[0]["lr"] != 0.04


def test_a_rate_changed_after_step_does_not_touch_the_update_on_its_way():
    model = TinyGPT()
    twin = clone(model)
    _, opt = dedicated(model)
    train(model, opt, tokens(), [0])
    for group in opt.param_groups:
        group["lr"] = 100.0
    train(twin, reference(twin), tokens(), [0])
    assert_within(weights(model), weights(twin), 1e-6)


def test_a_group_holds_one_algorithm_and_user_groups_stay_apart():
    model = TinyGPT()
    dmuon.dedicate_params(model)
    first, second = two_groups(model)
    opt = dmuon.Muon([
        {"params": first, "lr": 0.04, "weight_decay": 0.3},
        {"params": second, "momentum": 0.5, "adamw_lr": 0.5, "betas": (0.1, 0.2)},
    ])  # fmt: skip
    found = [(g["algorithm"], g["lr"], g["weight_decay"]) for g in opt.param_groups]
    assert found == [
        ("muon", 0.04, 0.3), ("adamw", 0.04, 0.3), ("muon", 1e-3, 0.1), ("adamw", 0.5, 0.1),
    ]  # fmt: skip
    assert [g["momentum"] for g in opt.param_groups if g["algorithm"] == "muon"] == [0.95, 0.5]
    assert opt.param_groups[3]["betas"] == (0.1, 0.2)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda opt: LambdaLR(opt, lambda step: 1 / (1 + step)),
        lambda opt: OneCycleLR(opt, max_lr=0.1, total_steps=10),
    ],
)
def test_schedulers_of_torch_drive_it(schedule):
    model = TinyGPT()
    _, opt = dedicated(model)
    scheduler = schedule(opt)
    before = [g["lr"] for g in opt.param_groups]
    train(model, opt, tokens(), range(1))
    scheduler.step()
    assert all(g["lr"] != lr for g, lr in zip(opt.param_groups, before))


@pytest.mark.parametrize(
    "form",
    [
        lambda m: m,
        lambda m: m.parameters(),
        lambda m: list(m.named_parameters()),
        lambda m: [{"params": m.parameters()}],
        lambda m: [{"params": list(m.named_parameters())}],
    ],
)
def test_every_form_of_parameters_is_taken(form):
    model = TinyGPT()
    twin = clone(model)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(form(model), **SETTINGS)
    train(model, opt, tokens(), range(2))
    train(twin, reference(twin), tokens(), range(2))
    assert_within(weights(model), weights(twin), 1e-5)


def test_keys_that_other_tools_put_into_groups_are_kept():
    # torch.optim takes any key: schedulers resumed with last_epoch need initial_lr.
    model = TinyGPT()
    dmuon.dedicate_params(model)
    opt = dmuon.Muon([{"params": model.parameters(), "initial_lr": 0.5, "name": "all"}])
    assert all(g["initial_lr"] == 0.5 and g["name"] == "all" for g in opt.param_groups)


# ---- gradients: missing, accumulated, cleared, clipped -----------------------------------


class Optional(nn.Module):
    """Three matrices of one shape, of which the batch's first element says which are used."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i == 1) for i in range(3))
        self.gain = nn.Parameter(torch.ones(()))
        self.used: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.used:
            x = torch.tanh(self.parts[i](x)) + x
        return x * self.gain


def test_matrices_without_gradient_are_skipped_as_the_reference_skips_them():
    model = Optional()
    twin = clone(model)
    own, opt = dedicated(model)
    assert max(len(batch.matrices) for batch in own.plan.batches) > 1
    other = reference(twin)
    for step, used in enumerate([(0, 1, 2), (0,), (2, 1), (), (1,), (0, 1, 2), (2,)]):
        model.used = twin.used = used
        train(model, opt, inputs((4, WIDTH)), [step])
        train(twin, other, inputs((4, WIDTH)), [step])
        assert_within(weights(model), weights(twin), 1e-6)
    ours, theirs = opt.state[model.parts[0].weight], other.state[twin.parts[0].weight]
    torch.testing.assert_close(ours["momentum_buffer"], theirs["momentum_buffer"])


@pytest.mark.parametrize("publish_bucket_bytes", [1, 1 << 20])
def test_statistics_report_nothing_made_up_for_skipped_matrices(publish_bucket_bytes):
    model = Optional()
    options = dmuon.ReplicatedOptions(publish_bucket_bytes=publish_bucket_bytes)
    _own, opt = dedicated(model, options=options)
    for step, used in enumerate([(1,), (0, 1, 2), (0,), ()]):
        model.used = used
        train(model, opt, inputs((4, WIDTH)), [step])
        rms = opt.stats()["update_rms"]
        for i in range(3):
            assert (rms.get(f"parts.{i}.weight", 0.0) != 0) == (i in used), (step, i)


def test_a_parameter_with_zero_gradient_is_not_a_missing_one():
    model = Optional()
    twin = clone(model)
    _, opt = dedicated(model)
    other = reference(twin)
    train(model, opt, inputs((4, WIDTH)), [0])
    train(twin, other, inputs((4, WIDTH)), [0])

    def zero_loss(m: nn.Module, x: Tensor) -> Tensor:
        return 0.0 * m(x).sum()

    train(model, opt, inputs((4, WIDTH)), [1], zero_loss)
    train(twin, other, inputs((4, WIDTH)), [1], zero_loss)
    assert_within(weights(model), weights(twin), 1e-6)


def backward(model: nn.Module, *steps: int, batches: Callable[[int], Tensor] | None = None) -> None:
    for step in steps:
        mean_square(model, (batches or tokens())(step)).backward()


def accumulated(model: nn.Module, how: str) -> None:
    if how == "plain":
        backward(model, 0, 1, 2)
    elif how == "no_sync first":
        with dmuon.no_sync(model):
            backward(model, 0, 1)
        backward(model, 2)
    elif how == "no_sync last":
        backward(model, 0)
        with dmuon.no_sync(model):
            backward(model, 1, 2)
    elif how == "all in no_sync":
        with dmuon.no_sync(model):
            backward(model, 0, 1, 2)
    else:
        with dmuon.no_sync(model), dmuon.no_sync(model):
            backward(model, 0)
        backward(model, 1)
        with dmuon.no_sync(model):
            backward(model, 2)


@pytest.mark.parametrize(
    "how", ["plain", "no_sync first", "no_sync last", "all in no_sync", "mixed"]
)
def test_gradients_accumulate_however_backward_is_called(how):
    model = TinyGPT()
    twin = clone(model)
    _, opt = dedicated(model)
    other = reference(twin)
    accumulated(model, how)
    backward(twin, 0, 1, 2)
    for optimizer in (opt, other):
        optimizer.step()
        optimizer.zero_grad()
    assert_within(weights(model), weights(twin), 1e-6)
    train(model, opt, tokens(), [7])
    train(twin, other, tokens(), [7])
    assert_within(weights(model), weights(twin), 1e-5)


def test_gradients_of_no_sync_count_once_where_the_next_backward_does_not_reach():
    model = Optional()
    twin = clone(model)
    _, opt = dedicated(model)
    other = reference(twin)
    for step, (first, second) in enumerate([((0, 1), (1,)), ((2,), (0,)), ((0, 1, 2), ())]):
        model.used = twin.used = first
        with dmuon.no_sync(model):
            backward(model, step, batches=inputs((4, WIDTH)))
        backward(twin, step, batches=inputs((4, WIDTH)))
        model.used = twin.used = second
        for m in (model, twin):
            backward(m, step + 10, batches=inputs((4, WIDTH)))
        assert all(part.weight.grad is None for part in model.parts)
        for optimizer in (opt, other):
            optimizer.step()
            optimizer.zero_grad()
        assert_within(weights(model), weights(twin), 1e-5)


def test_a_gradient_set_by_hand_counts():
    model = tree({"a.weight": (4, 6)})
    twin = clone(model)
    _, opt = dedicated(model)
    other = reference(twin)
    for optimizer, m in ((opt, model), (other, twin)):
        m.a.weight.grad = torch.arange(24.0).view(4, 6)
        optimizer.step()
    assert_within(weights(model), weights(twin), 1e-6)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_the_owner_has_accumulated(set_to_none):
    model = TinyGPT()
    twin = clone(model)
    _, opt = dedicated(model)
    other = reference(twin)
    backward(model, 5, 6)
    opt.zero_grad(set_to_none)
    backward(model, 0)
    backward(twin, 0)
    opt.step()
    other.step()
    assert_within(weights(model), weights(twin), 1e-6)


def test_zero_grad_leaves_nothing_for_step():
    model = TinyGPT()
    before = weights(model)
    _, opt = dedicated(model)
    backward(model, 0)
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    opt.step()
    assert_bitwise(weights(model), before)


def test_matrix_gradients_leave_p_grad_after_backward_and_the_rest_stays():
    model = TinyGPT()
    dedicated(model)
    backward(model, 0)
    for name, p in model.named_parameters():
        is_matrix = ".up.weight" in name or ".down.weight" in name
        assert (p.grad is None) == is_matrix, name


def test_a_second_step_without_backward_changes_no_matrix():
    model = TinyGPT()
    _, opt = dedicated(model)
    train(model, opt, tokens(), [0])
    before = weights(model)
    opt.step()
    assert_bitwise(weights(model), before)
    backward(model, 1)
    opt.step()
    matrices = {n: v for n, v in weights(model).items() if ".up.weight" in n}
    opt.step()
    assert_bitwise(matrices, {n: weights(model)[n] for n in matrices})


def test_a_step_before_any_backward_changes_nothing():
    model = TinyGPT()
    before = weights(model)
    _, opt = dedicated(model)
    opt.step()
    assert_bitwise(weights(model), before)


def test_a_closure_is_run_with_gradients_and_its_loss_returned():
    model = TinyGPT()
    twin = clone(model)
    _, opt = dedicated(model)

    def closure() -> Tensor:
        loss = mean_square(model, tokens()(0))
        loss.backward()
        return loss

    loss = opt.step(closure)
    expected = train(twin, reference(twin), tokens(), [0])
    assert loss.item() == expected[0]
    assert_within(weights(model), weights(twin), 1e-6)


def test_a_backward_that_raises_leaves_the_next_one_intact():
    model = TinyGPT()
    twin = clone(model)
    _, opt = dedicated(model)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("broken on purpose")

    x = model.blocks[0](Fails.apply(model.embed(tokens()(0))))
    with pytest.raises(RuntimeError, match="broken on purpose"):
        model.lm_head(model.norm(model.blocks[1](x))).sum().backward()
    opt.zero_grad()
    train(model, opt, tokens(), range(2))
    train(twin, reference(twin), tokens(), range(2))
    assert_within(weights(model), weights(twin), 1e-5)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 1e6])
def test_clipping_is_that_of_torch_in_one_process(norm_type, max_norm):
    model = TinyGPT()
    twin = clone(model)
    # With raw SGD-like updates a missed scale shows: Newton-Schulz would normalize it away.
    _, opt = dedicated(model, momentum=0.5, momentum_mode="sgd")
    other = reference(twin, momentum=0.5, momentum_mode="sgd")
    for step in range(3):
        for m in (model, twin):
            (10.0 ** (-2 * step) * mean_square(m, tokens()(step))).backward()
        ours = dmuon.clip_grad_norm_(model, max_norm, norm_type)
        theirs = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm, norm_type)
        torch.testing.assert_close(ours, theirs)
        for optimizer in (opt, other):
            optimizer.step()
            optimizer.zero_grad()
    assert_within(weights(model), weights(twin), 1e-5)


def test_clipping_reports_what_is_not_finite_and_scales_nothing():
    model = TinyGPT()
    dedicated(model)
    (mean_square(model, tokens()(0)) * float("nan")).backward()
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        dmuon.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert torch.isnan(dmuon.clip_grad_norm_(model, 1.0))


@pytest.mark.parametrize("wrong", [{"max_norm": -1.0}, {"max_norm": 1.0, "norm_type": 0.0}])
def test_clipping_checks_its_arguments(wrong):
    model = TinyGPT()
    dedicated(model)
    with pytest.raises(ValueError, match="max_norm"):
        dmuon.clip_grad_norm_(model, **wrong)


# ---- reading weights ---------------------------------------------------------------------


def after_one_step() -> tuple[nn.Module, dmuon.Muon, dict[str, Tensor]]:
    """A model right after an asynchronous step, and the weights that it must show."""
    model = TinyGPT()
    twin = clone(model)
    _, opt = dedicated(model)
    train(model, opt, tokens(), [0])
    train(twin, reference(twin), tokens(), [0])
    return model, opt, weights(twin)


def test_state_dict_shows_published_values():
    model, _, expected = after_one_step()
    assert_within(dict(model.state_dict()), expected, 1e-6)


def test_synchronize_shows_published_values():
    model, opt, expected = after_one_step()
    opt.synchronize()
    assert_within({n: p.detach() for n, p in model.named_parameters()}, expected, 1e-6)


def test_materialized_shows_published_values():
    model = TinyGPT()
    twin = clone(model)
    own, opt = dedicated(model)
    train(model, opt, tokens(), [0])
    train(twin, reference(twin), tokens(), [0])
    with own.materialized(model):
        found = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert_within(found, weights(twin), 1e-6)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_eval_forward_uses_published_values_and_training_goes_on(context):
    model, opt, expected = after_one_step()
    twin = TinyGPT()
    twin.load_state_dict(expected)
    model.eval()
    with context():
        torch.testing.assert_close(model(tokens()(1)), twin.eval()(tokens()(1)))
    model.train()
    train(model, opt, tokens(), range(1, 3))


def test_a_part_of_a_block_called_by_itself_uses_published_values():
    model, _, expected = after_one_step()
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        found = model.blocks[1].up(x)
    wanted = x @ expected["blocks.1.up.weight"].t() + expected["blocks.1.up.bias"]
    torch.testing.assert_close(found, wanted)


def test_sync_publish_shows_published_values_to_whoever_holds_the_tensors():
    model = TinyGPT()
    held = {name: p.detach() for name, p in model.named_parameters()}
    twin = clone(model)
    _, opt = dedicated(model, publish="sync")
    train(model, opt, tokens(), [0])
    train(twin, reference(twin), tokens(), [0])
    assert_within(held, weights(twin), 1e-6)


def test_weights_loaded_after_a_step_are_not_updated_by_it():
    model, opt, _ = after_one_step()
    other = TinyGPT()
    model.load_state_dict(other.state_dict())
    opt.synchronize()
    assert_bitwise(weights(model), weights(other))


def test_data_assigned_between_steps_is_followed():
    model = TinyGPT()
    twin = clone(model)
    _, opt = dedicated(model)
    other = reference(twin)
    for step in range(4):
        train(model, opt, tokens(), [step])
        train(twin, other, tokens(), [step])
        opt.synchronize()
        for p in model.parameters():
            p.data = p.data.clone()
    assert_within(weights(model), weights(twin), 1e-5)


def test_data_assigned_while_an_update_travels_still_gets_it():
    model, _, expected = after_one_step()
    for p in model.parameters():
        p.data = p.data.clone()
    model(tokens()(1))
    assert_within(weights(model), expected, 1e-6)


def test_a_model_converted_after_planning_is_refused_by_name():
    model = TinyGPT()
    _, opt = dedicated(model)
    model.double()
    backward(model, 0)
    with pytest.raises(ValueError, match=r"weight.*float64"):
        opt.step()


# ---- saving and resuming -----------------------------------------------------------------


def through_a_file(state: object) -> object:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master_weights", [False, True])
def test_resuming_from_a_checkpoint_is_bitwise(dtype, master_weights):
    def build() -> tuple[nn.Module, dmuon.Muon]:
        model = Mixed().to(dtype)
        _, opt = dedicated(model, **selection(model), master_weights=master_weights)
        return model, opt

    batches = inputs((4, WIDTH), dtype)
    model, opt = build()
    train(model, opt, batches, range(3))
    saved = through_a_file({"model": model.state_dict(), "optimizer": opt.state_dict()})
    expected = train(model, opt, batches, range(3, 6))
    resumed, other = build()
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert train(resumed, other, batches, range(3, 6)) == expected
    assert_bitwise(weights(resumed), weights(model))


def test_resuming_restores_hyperparameters_schedules_and_the_step_count():
    model = TinyGPT()
    _, opt = dedicated(model)
    schedule = CosineAnnealingLR(opt, T_max=5)
    for step in range(2):
        train(model, opt, tokens(), [step])
        schedule.step()
    saved = through_a_file((opt.state_dict(), schedule.state_dict()))
    other_model = TinyGPT()
    _, other = dedicated(other_model, lr=9.0)
    other_schedule = CosineAnnealingLR(other, T_max=5)
    other.load_state_dict(saved[0])
    other_schedule.load_state_dict(saved[1])
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in opt.param_groups]
    assert other.stats()["steps"] == 2
    schedule.step()
    other_schedule.step()
    assert [g["lr"] for g in other.param_groups] == [g["lr"] for g in opt.param_groups]


def test_loading_a_state_replaces_a_state_that_has_moved_on():
    model = TinyGPT()
    _, opt = dedicated(model)
    train(model, opt, tokens(), range(2))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    expected = train(model, opt, tokens(), range(2, 5))
    model.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    assert train(model, opt, tokens(), range(2, 5)) == expected


def test_a_loaded_state_is_not_shared_with_what_it_was_loaded_from():
    model = TinyGPT()
    _, opt = dedicated(model)
    train(model, opt, tokens(), range(2))
    saved = copy.deepcopy(opt.state_dict())
    before = copy.deepcopy(saved)
    opt.load_state_dict(saved)
    train(model, opt, tokens(), range(2, 4))
    for key, entry in saved["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(value, before["state"][key][name], rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("dmuon"),
        lambda state: state["dmuon"].update(owners=[("another plan", 0)]),
        lambda state: state["dmuon"].update(owners=[(state["dmuon"]["owners"][0][0], 1)]),
    ],
)
def test_the_state_of_another_plan_or_rank_is_refused_and_nothing_changes(change):
    model = TinyGPT()
    _, opt = dedicated(model)
    train(model, opt, tokens(), range(1))
    before = copy.deepcopy(opt.state_dict())
    wrong = copy.deepcopy(before)
    change(wrong)
    for group in wrong["param_groups"]:
        group["lr"] = 7.0
    with pytest.raises(OwnershipError, match=r"does not belong here"):
        opt.load_state_dict(wrong)
    assert opt.state_dict()["param_groups"] == before["param_groups"]


def test_a_saved_plan_is_used_again():
    model = TinyGPT()
    own = dmuon.dedicate_params(model, solver="round_robin")
    plan = dmuon.OwnershipPlan.from_json(own.plan.to_json())
    again = dmuon.dedicate_params(TinyGPT(), plan=plan)
    assert again.plan == own.plan
    with pytest.raises(PlanError, match=r"does not fit"):
        dmuon.dedicate_params(TinyGPT(blocks=3), plan=plan)


# ---- master weights ----------------------------------------------------------------------


def test_master_weights_are_float32_training_rounded_for_display():
    model = AllDifferent().bfloat16()
    twin = clone(model)
    masters = {n: p.detach().float() for n, p in twin.named_parameters()}
    _, opt = dedicated(model, **selection(model), master_weights=True)
    shadow = AllDifferent()
    shadow.load_state_dict(masters)
    other = reference(shadow)
    for step in range(10):
        train(model, opt, inputs((4, 2, 6), torch.bfloat16), [step])
        # The same gradients, of bf16 weights, applied to float32 ones.
        twin.load_state_dict(shadow.state_dict())
        mean_square(twin, inputs((4, 2, 6), torch.bfloat16)(step)).backward()
        for p, q in zip(shadow.parameters(), twin.parameters()):
            p.grad, q.grad = q.grad.float(), None
        other.step()
    rounded = {n: v.bfloat16() for n, v in weights(shadow).items()}
    assert_bitwise(weights(model), rounded)
    assert any(not torch.equal(v, weights(model)[n].float()) for n, v in weights(shadow).items())


def test_master_weights_keep_updates_that_bf16_would_lose():
    def moved(master_weights: bool) -> float:
        model = tree({"a.weight": (8, 8)}).bfloat16()
        model.a.weight.data.fill_(1.0)
        _, opt = dedicated(model, lr=1e-4, weight_decay=0.0, master_weights=master_weights)
        for _ in range(100):
            model.a.weight.grad = torch.eye(8, dtype=torch.bfloat16)
            opt.step()
        opt.synchronize()
        return (model.a.weight.detach().float() - 1.0).abs().max().item()

    with pytest.warns(RuntimeWarning, match="rounded away"):
        assert moved(master_weights=False) == 0.0
    assert moved(master_weights=True) > 0.0


def test_weights_loaded_into_the_model_replace_the_masters():
    model = AllDifferent().bfloat16()
    _, opt = dedicated(model, lr=1e-3, master_weights=True)
    batches = inputs((4, 2, 6), torch.bfloat16)
    train(model, opt, batches, [0])
    fresh = AllDifferent().bfloat16()
    model.load_state_dict(fresh.state_dict())
    train(model, opt, batches, [1])
    for name, value in weights(model).items():
        moved = (value.float() - weights(fresh)[name].float()).abs().max().item()
        assert moved < 0.05, f"{name} went back to what it was before the load"


# ---- lifetime ----------------------------------------------------------------------------


def test_the_handle_may_be_dropped_between_the_two_calls():
    model = TinyGPT()
    dmuon.dedicate_params(model)
    gc.collect()
    twin = clone(model)
    opt = dmuon.Muon(model, **SETTINGS)
    gc.collect()
    train(model, opt, tokens(), range(2))
    train(twin, reference(twin), tokens(), range(2))
    assert_within(weights(model), weights(twin), 1e-5)
    dmuon.clip_grad_norm_(model, 1.0)


def test_everything_goes_when_the_model_and_the_optimizer_go():
    model = TinyGPT()
    own, opt = dedicated(model)
    train(model, opt, tokens(), range(2))
    left = [weakref.ref(thing) for thing in (model, own, opt, model.embed.weight)]
    del model, own, opt
    gc.collect()
    assert [reference() for reference in left] == [None] * 4


def test_a_deep_copy_is_an_ordinary_model_that_can_follow_as_an_ema():
    model = TinyGPT()
    twin = clone(model)
    _, opt = dedicated(model)
    other = reference(twin)
    train(model, opt, tokens(), [0])
    train(twin, other, tokens(), [0])
    opt.synchronize()
    ema = copy.deepcopy(model)
    assert_bitwise(weights(ema), weights(model))
    for step in range(1, 4):
        train(model, opt, tokens(), [step])
        train(twin, other, tokens(), [step])
        opt.synchronize()
        with torch.no_grad():
            for p, q in zip(ema.parameters(), model.parameters()):
                p.lerp_(q, 0.5)
        ema(tokens()(step))
    assert_within(weights(model), weights(twin), 1e-5)
    mean_square(ema, tokens()(0)).backward()
    assert all(p.grad is not None for p in ema.parameters())
    own, second = dedicated(ema)
    train(ema, second, tokens(), range(2))
    assert_within(weights(model), weights(twin), 1e-5)
    own.close()


def test_a_pickled_model_is_an_ordinary_model():
    model = TinyGPT()
    _, opt = dedicated(model)
    train(model, opt, tokens(), [0])
    opt.synchronize()
    copied = pickle.loads(pickle.dumps(model))
    assert_bitwise(weights(copied), weights(model))
    mean_square(copied, tokens()(0)).backward()
    assert all(p.grad is not None for p in copied.parameters())


def test_close_publishes_what_is_pending_and_leaves_an_ordinary_module():
    model = TinyGPT()
    plain = clone(model)
    own, opt = dedicated(model)
    twin = clone(plain)
    train(model, opt, tokens(), [0])
    train(twin, reference(twin), tokens(), [0])
    own.close()
    own.close()
    assert_within({n: p.detach() for n, p in model.named_parameters()}, weights(twin), 1e-6)
    tables = [name for name in vars(plain) if name.endswith("hooks")]
    assert all(not getattr(m, name) for m in model.modules() for name in tables)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    backward(model, 1)
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(OwnershipError, match=r"dedicate"):
        dmuon.clip_grad_norm_(model, 1.0)


def test_after_close_the_optimizer_says_that_it_was_closed():
    model = TinyGPT()
    own, opt = dedicated(model)
    own.close()
    with pytest.raises(OwnershipError, match=r"close"):
        opt.step()


def test_a_closed_model_can_be_dedicated_again():
    model = TinyGPT()
    own, opt = dedicated(model)
    train(model, opt, tokens(), [0])
    own.close()
    model.zero_grad()
    twin = clone(model)
    _, again = dedicated(model)
    train(model, again, tokens(), range(1, 3))
    train(twin, reference(twin), tokens(), range(1, 3))
    assert_within(weights(model), weights(twin), 1e-5)


# ---- the handle --------------------------------------------------------------------------


def test_the_handle_tells_who_owns_what():
    model = Mixed()
    own = dmuon.dedicate_params(model, splits=Mixed.splits, heads=Mixed.heads)
    assert own.owner_of("conv.weight") == 0
    assert own.owner_of("module._orig_mod.conv.weight") == 0
    assert own.owner_of("qkv.weight") == (0, 0, 0)
    assert own.owner_of("qkv.weight[0:8]") == 0
    assert own.owned_by(0) == tuple(m.name for m in own.plan.specs.matrices)
    assert own.numel() == sum(p.numel() for p in model.parameters())
    assert own.dedicated_params == set()
    with pytest.raises(KeyError, match=r"1-D"):
        own.owner_of("qkv.bias")
    with pytest.raises(KeyError, match=r"unknown"):
        own.owner_of("nothing")


def test_statistics_of_a_step():
    model = TinyGPT()
    own, opt = dedicated(model, adjust_lr_fn="match_rms_adamw")
    train(model, opt, tokens(), range(2))
    stats = opt.stats()
    assert stats["steps"] == 2
    assert stats["ns_dtype"] == "float32"
    assert stats["ns_ms"] > 0
    assert stats["update_rms"].keys() == set(own.owned_by(0))
    # Rows of 8 orthonormal vectors in 16 dims, scaled by 0.2 sqrt(16): as large as AdamW's.
    assert all(0.1 < rms < 0.3 for rms in stats["update_rms"].values())
    assert all(count > 0 for count in stats["bytes"].values())


def test_update_rms_is_that_of_the_update():
    model = tree({"a.weight": (6, 10)})
    _, opt = dedicated(model, lr=0.5, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    before = weights(model)["a.weight"]
    model.a.weight.grad = torch.randn(6, 10)
    opt.step()
    moved = (weights(model)["a.weight"] - before) / 0.5
    assert opt.stats()["update_rms"]["a.weight"] == pytest.approx(
        moved.square().mean().sqrt().item(), rel=1e-4
    )


def test_newton_schulz_is_given_the_groups_settings():
    model = tree({"a.weight": (6, 10)})
    _, opt = dedicated(
        model, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original",
        ns_coefficients=(2.0, -1.5, 0.5), ns_steps=3, eps=1e-2,
    )  # fmt: skip
    before = weights(model)["a.weight"]
    grad = 1e-3 * torch.randn(6, 10)
    model.a.weight.grad = grad.clone()
    opt.step()
    update = newton_schulz(
        grad, coefficients=(2.0, -1.5, 0.5), steps=3, eps=1e-2, dtype=torch.float32
    )
    torch.testing.assert_close(weights(model)["a.weight"], before - update, rtol=0, atol=1e-6)


# ---- misuse ------------------------------------------------------------------------------


def test_muon_before_dedicate_params_is_refused():
    with pytest.raises(OwnershipError, match=r"dmuon\.dedicate_params\(model\)"):
        dmuon.Muon(TinyGPT())
    with pytest.raises(OwnershipError, match=r"dmuon\.dedicate_params\(model\)"):
        dmuon.no_sync(TinyGPT()).__enter__()


def test_an_empty_selection_is_refused():
    with pytest.raises(SelectionError, match=r"nothing for Muon to do"):
        dmuon.dedicate_params(nn.Sequential(nn.LayerNorm(4), nn.Embedding(9, 4)))


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = TinyGPT()
    with pytest.raises(ValueError, match=r"'embed\.weight' is on the meta device"):
        dmuon.dedicate_params(model)


def test_a_vector_forced_onto_muon_is_refused():
    with pytest.raises(SelectionError, match=r"'norm\.bias'|'blocks\.0\.norm\.weight'"):
        dmuon.dedicate_params(TinyGPT(), select=lambda name, p: True)


def test_dedicating_twice_is_refused():
    model = TinyGPT()
    own = dmuon.dedicate_params(model)
    for again in (model, nn.Sequential(model)):
        with pytest.raises(OwnershipError, match=r"close\(\)"):
            dmuon.dedicate_params(again)
    own.close()


def test_a_second_optimizer_is_refused():
    model = TinyGPT()
    dedicated(model)
    with pytest.raises(OwnershipError, match=r"already"):
        dmuon.Muon(model)


@pytest.mark.parametrize(
    "form",
    [
        lambda m: [*m.parameters(), m.embed.weight],
        lambda m: [{"params": m.parameters()}, {"params": [m.embed.weight]}],
        lambda m: [*m.named_parameters(), ("embed.weight", m.embed.weight)],
    ],
)
def test_duplicate_parameters_are_refused_by_name(form):
    model = TinyGPT()
    dmuon.dedicate_params(model)
    with pytest.raises(OwnershipError, match=r"'embed\.weight' appears twice"):
        dmuon.Muon(form(model))


def test_missing_parameters_are_refused_by_name():
    model = TinyGPT()
    dmuon.dedicate_params(model)
    with pytest.raises(OwnershipError, match=r"not passed to dmuon\.Muon: embed\.weight"):
        dmuon.Muon(model.blocks.parameters())


def test_foreign_parameters_are_refused():
    model = TinyGPT()
    dmuon.dedicate_params(model)
    with pytest.raises(OwnershipError, match=r"shape \(3, 5\).*not part of dedicate_params"):
        dmuon.Muon([*model.parameters(), nn.Parameter(torch.zeros(3, 5))])


def test_frozen_parameters_may_be_passed_along():
    model = TinyGPT()
    model.blocks[0].requires_grad_(False)
    before = weights(model)
    _, opt = dedicated(model)
    train(model, opt, tokens(), range(2))
    after = weights(model)
    frozen = {n: v for n, v in after.items() if n.startswith("blocks.0")}
    assert_bitwise(frozen, {n: before[n] for n in frozen})
    assert not torch.equal(after["blocks.1.up.weight"], before["blocks.1.up.weight"])


def test_adding_a_group_after_planning_is_refused():
    model = TinyGPT()
    _, opt = dedicated(model)
    with pytest.raises(OwnershipError, match=r"add_param_group.*again"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(4, 4))]})
    train(model, opt, tokens(), range(1))


@pytest.mark.parametrize("wrong", [3, torch.zeros(2, 2), [3], [("name", 3)], [{"lr": 1.0}]])
def test_what_is_no_parameter_is_a_type_error(wrong):
    with pytest.raises(TypeError):
        dmuon.Muon(wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 2}, r"period=2.*'replicated'"),
        ({"period": float("inf")}, r"period=inf"),
        ({"block_lr_ratio": 0.5}, r"block_lr_ratio"),
        ({"publish": "later"}, r"publish.*'later'"),
        ({"ns_dtype": "half"}, r"dtype.*'half'"),
        ({"ns_dtype": torch.int32}, r"dtype.*int32"),
        ({"ns_steps": -1}, r"steps"),
        ({"ns_steps": 0}, r"ns_steps must be an integer >= 1, found 0"),
        ({"ns_coefficients": "unheard of"}, r"unheard of"),
        ({"ns_coefficients": [(1, 2, 3)] * 4}, r"4 coefficient triples for steps=5"),
        ({"lr": -1.0}, r"lr"),
        ({"eps": 0.0}, r"eps"),
        ({"adjust_lr_fn": "rms"}, r"adjust_lr_fn"),
        ({"adamw_betas": (0.9, 2.0)}, r"betas"),
        ({"adamw_lr": -1.0}, r"lr"),
    ],
)
def test_wrong_settings_are_refused_at_once_and_the_model_stays_usable(settings, message):
    model = TinyGPT()
    dmuon.dedicate_params(model)
    with pytest.raises(ValueError, match=message):
        dmuon.Muon(model, **settings)
    train(model, dmuon.Muon(model), tokens(), range(1))


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": "1e-3"},
        {"lr": None},
        {"weight_decay": "0.1"},
        {"momentum": None},
        {"nesterov": "no"},
        {"ns_coefficients": None},
        {"eps": "1e-7"},
        {"ns_steps": True},
        {"ns_steps": "5"},
        {"adjust_lr_fn": 3},
        {"momentum_mode": None},
        {"dampening": "0"},
        {"period": "5"},
        {"period": True},
        {"block_lr_ratio": "x"},
        {"publish": True},
        {"master_weights": "yes"},
        {"adamw_lr": "1e-3"},
        {"adamw_betas": 0.9},
        {"adamw_eps": None},
        {"adamw_weight_decay": "0.1"},
    ],
    ids=str,
)
def test_settings_of_a_wrong_type_are_refused_by_name(settings):
    model = TinyGPT()
    dmuon.dedicate_params(model)
    ((name, value),) = settings.items()
    with pytest.raises(TypeError, match=rf"^{name} must be .*found {re.escape(repr(value))}"):
        dmuon.Muon(model, **settings)
    train(model, dmuon.Muon(model), tokens(), range(1))


@pytest.mark.parametrize("name", ["lr", "weight_decay", "adamw_lr", "betas"])
def test_settings_of_a_wrong_type_in_a_group_are_refused_by_name(name):
    model = TinyGPT()
    dmuon.dedicate_params(model)
    message = rf"{name.removeprefix('adamw_')} must be .*'1e-3' in opt\.param_groups\[[01]\]: a str"
    with pytest.raises(TypeError, match=message):
        dmuon.Muon([{"params": model.parameters(), name: "1e-3"}])


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("value", ["1e-4", None, -1.0, float("nan")])
def test_settings_that_turn_wrong_later_fail_before_anything_changes(algorithm, value):
    model = TinyGPT()
    _, opt = dedicated(model)
    train(model, opt, tokens(), range(1))
    number = next(i for i, g in enumerate(opt.param_groups) if g["algorithm"] == algorithm)
    good, opt.param_groups[number]["lr"] = opt.param_groups[number]["lr"], value
    opt.synchronize()
    before = weights(model)
    backward(model, 1)
    with pytest.raises((TypeError, ValueError), match=rf"lr must.*opt\.param_groups\[{number}\]"):
        opt.step()
    assert_bitwise(weights(model), before)
    opt.param_groups[number]["lr"] = good
    opt.step()


CHANGES = {
    "key deleted": (lambda groups: groups[0].pop("momentum"), "has lost .*'momentum'"),
    "algorithm deleted": (lambda groups: groups[0].pop("algorithm"), "algorithms .*None"),
    "algorithm renamed": (lambda groups: groups[1].update(algorithm="sgd"), "algorithms .*'sgd'"),
    "group appended": (lambda groups: groups.append(dict(groups[0])), "algorithms"),
    "groups reversed": (lambda groups: groups.reverse(), "algorithms"),
    "parameter removed": (lambda groups: groups[0]["params"].pop(), r"groups\[0\] holds other"),
    "parameters reversed": (lambda groups: groups[1]["params"].reverse(), "in another order"),
    "parameter exchanged": (
        lambda groups: groups[0]["params"].__setitem__(0, groups[0]["params"][0].detach()),
        r"groups\[0\] holds other",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_groups_are_refused_before_anything_changes(change):
    model = TinyGPT()
    _, opt = dedicated(model)
    train(model, opt, tokens(), range(1))
    opt.synchronize()
    before = weights(model)
    backward(model, 1)
    alter, message = CHANGES[change]
    alter(opt.param_groups)
    with pytest.raises(dmuon.types.OwnershipError, match=message):
        opt.step()
    assert_bitwise(weights(model), before)


def test_a_tensor_or_a_number_of_numpy_is_an_lr_like_any_other():
    results = []
    for lr in (0.25, torch.tensor(0.25), torch.tensor([0.25]), np.float32(0.25), np.float64(0.25)):
        torch.manual_seed(0)
        model = TinyGPT()
        _, opt = dedicated(model, lr=lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for step in range(3):
            train(model, opt, tokens(), [step])
            scheduler.step()
        opt.synchronize()
        results.append(weights(model))
    for other in results[1:]:
        assert_bitwise(results[0], other)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16"])
def test_the_newton_schulz_dtype_may_be_text(dtype):
    model = TinyGPT()
    _, opt = dedicated(model, ns_dtype=dtype)
    train(model, opt, tokens(), range(1))
    assert opt.stats()["ns_dtype"] == "bfloat16"


# ---- half precision ----------------------------------------------------------------------


def half_precision(dtype: torch.dtype, layout: str = "replicated", weight: float = 0.02):
    """Two matrices of 32 x 32 whose entries are all ``weight``, rounded."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).to(dtype)
    nn.init.constant_(model[0].weight, weight)
    nn.init.constant_(model[1].weight, weight)
    dmuon.dedicate_params(model, layout=layout)
    return model


# Half a unit in the last place of 0.02 is 2**-14 = 6.1e-5 in bfloat16 and 2**-17 = 7.6e-6 in
# float16; an update is 0.2 lr with "match_rms_adamw" and lr / sqrt(32) with "original".
LOST = [
    (torch.bfloat16, {"lr": 1e-4}, "2e-05", "6.1e-05"),
    (torch.bfloat16, {"lr": 3e-4, "adjust_lr_fn": "original"}, "5.3e-05", "6.1e-05"),
    (torch.bfloat16, {"lr": torch.tensor(1e-4)}, "2e-05", "6.1e-05"),
    (torch.float16, {"lr": 1e-5}, "2e-06", "7.6e-06"),
]
KEPT = [
    (torch.bfloat16, {"lr": 1e-3}),
    (torch.bfloat16, {"lr": 4e-4, "adjust_lr_fn": "original"}),
    (torch.bfloat16, {"lr": 1e-4, "master_weights": True}),
    (torch.bfloat16, {"lr": 0.0}),
    (torch.float16, {"lr": 1e-4}),
    (torch.float32, {"lr": 1e-9}),
]


@LAYOUTS
@pytest.mark.parametrize(("dtype", "settings", "update", "ulp"), LOST)
def test_updates_that_are_rounded_away_are_told_once_with_the_numbers(
    dtype, settings, update, ulp, layout
):
    model = half_precision(dtype, layout)
    with pytest.warns(RuntimeWarning) as caught:
        opt = dmuon.Muon(model, **settings)
    text = (
        rf"lr={float(settings['lr']):g} a typical update of a {str(dtype)[6:]} matrix is {update}, "
        rf"and half a unit in the last place of its typical weight, 0\.02, is {ulp}.*"
        r"master_weights=True"
    )
    (warning,) = caught
    assert re.search(text, str(warning.message)) and warning.filename == __file__
    if settings.get("adjust_lr_fn") is None:
        before = weights(model)
        model(torch.randn(8, 32, dtype=dtype)).square().sum().backward()
        opt.step()
        opt.synchronize()
        same = [(w == before[n]).double().mean() for n, w in weights(model).items()]
        assert min(same) > 0.95  # what the warning says


@LAYOUTS
@pytest.mark.parametrize(("dtype", "settings"), KEPT)
def test_nothing_is_said_where_updates_count(dtype, settings, layout):
    model = half_precision(dtype, layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dmuon.Muon(model, **settings)


@pytest.mark.parametrize("weight", [0.0, float("inf"), float("nan")])
def test_nothing_is_said_of_weights_that_are_not_there_yet(weight):
    model = half_precision(torch.bfloat16, weight=weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dmuon.Muon(model, lr=1e-4)


def test_the_worst_of_several_groups_is_told():
    model = half_precision(torch.bfloat16)
    groups = [{"params": [model[0].weight], "lr": 1e-4}, {"params": [model[1].weight], "lr": 1e-6}]
    with pytest.warns(RuntimeWarning, match="lr=1e-06") as caught:
        dmuon.Muon(groups)
    assert len(caught) == 1


# ---- several processes that do not know each other ---------------------------------------


def check_equivalence() -> None:
    dmuon.check_step_equivalence(TinyGPT, lambda m, x: m(x).sum(), lambda step, rank: tokens()(0))


STARTS = {
    "dedicate_params": lambda: dmuon.dedicate_params(TinyGPT()),
    "Muon": lambda: dmuon.Muon(TinyGPT()),
    "check_step_equivalence": check_equivalence,
}


@pytest.mark.parametrize("start", STARTS)
def test_processes_of_a_launcher_without_a_process_group_are_refused(monkeypatch, start):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = rf"dmuon\.{start}: .*WORLD_SIZE=2.*torch\.distributed\.init_process_group\(\)"
    with pytest.raises(OwnershipError, match=message):
        STARTS[start]()


def test_a_model_dedicated_before_there_was_a_process_group_is_refused(monkeypatch):
    model = TinyGPT()
    dmuon.dedicate_params(model, costs="analytic")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(
        OwnershipError, match=r"init_process_group\(\) before dmuon.dedicate_params"
    ):
        dmuon.Muon(model)


@pytest.mark.parametrize("text", ["two", "2.0", "nan"])
def test_a_world_size_that_is_no_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(OwnershipError, match=rf"WORLD_SIZE='{text}' must be"):
        dmuon.dedicate_params(TinyGPT())


@pytest.mark.parametrize("text", ["1", "", None])
def test_a_world_of_one_needs_no_process_group(monkeypatch, text):
    if text is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", text)
    model = TinyGPT()
    train(model, dedicated(model)[1], tokens(), range(1))


@pytest.mark.parametrize("text", ["8", "two"])
def test_a_process_group_of_one_counts_whatever_the_environment_says(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", text)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = TinyGPT()
        own, opt = dedicated(model)
        train(model, opt, tokens(), range(1))
        own.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--model", "qwen2.5-0.5b", "--mesh", "4", "--costs", "analytic:h100"],
        ["profile", "--shapes", "8x8", "--max-batch", "1", "--out", "-"],
    ],
    ids=lambda command: command[0],
)
def test_commands_of_one_process_run_under_a_launcher(monkeypatch, capsys, command):
    """They plan and measure for processes that they are no part of."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command) == 0
    assert capsys.readouterr().out


# ---- parameters that were replaced -------------------------------------------------------


def replace_weight(model: nn.Module) -> None:
    up = model.blocks[0].up
    up.weight = nn.Parameter(up.weight.detach().clone())


def replace_gain(model: nn.Module) -> None:
    model.norm.weight = nn.Parameter(torch.ones(WIDTH))


def replace_module(model: nn.Module) -> None:
    model.blocks[0] = Block()


def assign_state(model: nn.Module) -> None:
    model.load_state_dict(clone(model).state_dict(), assign=True)
    for p in model.parameters():
        p.requires_grad_(True)


def untie(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.embed.weight.detach().clone())


def normalize_weights(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model.lm_head)


def add_adapter(model: nn.Module) -> None:
    model.blocks[0].up.adapter = nn.Linear(2, 2)


def add_gain(model: nn.Module) -> None:
    model.norm.scale = nn.Parameter(torch.ones(WIDTH))


REPLACEMENTS = {
    add_adapter: r"blocks\.0\.up\.adapter\.weight",
    add_gain: r"norm\.scale",
    replace_weight: r"blocks\.0\.up\.weight",
    replace_gain: r"norm\.weight",
    replace_module: r"blocks\.0\.norm\.weight",
    assign_state: r"embed\.weight",
    untie: r"lm_head\.weight",
    normalize_weights: r"lm_head\.parametrizations\.weight\.original\d",
}


def tied() -> TinyGPT:
    model = TinyGPT()
    model.lm_head.weight = model.embed.weight
    return model


@LAYOUTS
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("replace", REPLACEMENTS)
def test_a_parameter_that_was_replaced_is_refused_by_name(replace, compiled, layout):
    model = tied() if replace is untie else TinyGPT()
    wrapped = torch.compile(model, backend="eager") if compiled else model
    own = dmuon.dedicate_params(wrapped, layout=layout)
    opt = dmuon.Muon(wrapped, **SETTINGS)
    train(model, opt, tokens(), range(1))
    replace(model)
    backward(model, 1)
    added = (normalize_weights, add_adapter, add_gain)
    what = "was no parameter" if replace in added else "is another parameter object"
    message = rf"'{REPLACEMENTS[replace]}' {what}.*in place.*own\.close\(\)"
    with pytest.raises(OwnershipError, match=message):
        dmuon.clip_grad_norm_(wrapped, 1.0)
    with pytest.raises(OwnershipError, match=message):
        opt.step()
    own.close()
    again = dmuon.dedicate_params(wrapped, layout=layout)  # what the message says
    train(model, dmuon.Muon(wrapped, **SETTINGS), tokens(), range(2))
    again.close()


def freeze_gain(model: nn.Module) -> None:
    model.norm.weight = nn.Parameter(torch.ones(WIDTH), requires_grad=False)


def drop_module(model: nn.Module) -> None:
    model.blocks = model.blocks[:1]


def parametrize(model: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(model.norm, "bias", nn.Identity())


def tie(model: nn.Module) -> None:
    model.lm_head.weight = model.embed.weight


def load_in_place(model: nn.Module) -> None:
    model.load_state_dict(clone(model).state_dict())


@LAYOUTS
@pytest.mark.parametrize("change", [freeze_gain, drop_module, parametrize, tie, load_in_place])
def test_what_replaces_no_trained_parameter_is_followed(change, layout):
    model = TinyGPT()
    own = dmuon.dedicate_params(model, layout=layout)
    opt = dmuon.Muon(model, **SETTINGS)
    train(model, opt, tokens(), range(1))
    change(model)
    train(model, opt, tokens(), range(1, 3))
    backward(model, 3)
    with mock.patch.object(nn.Module, "named_parameters") as searched:
        opt.step()
    assert not searched.called  # the change has been looked at once
    replace_gain(model)
    backward(model, 4)
    with pytest.raises(OwnershipError, match=r"'norm\.weight'"):
        opt.step()
    own.close()


@LAYOUTS
def test_a_schedule_may_miss_zero_by_a_rounding(layout):
    model = TinyGPT()
    own = dmuon.dedicate_params(model, layout=layout)
    opt = dmuon.Muon(model, **SETTINGS)
    schedule = LinearLR(opt, end_factor=0.0, total_iters=10)
    for step in range(12):
        backward(model, step)
        opt.step()
        opt.zero_grad()
        schedule.step()
    assert [group["lr"] for group in opt.param_groups] == [0.0] * len(opt.param_groups)
    opt.param_groups[0]["lr"] = -1e-6
    backward(model, 0)
    with pytest.raises(ValueError, match=r"lr must be a finite number >= 0, found -1e-06"):
        opt.step()
    own.close()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layout": "scattered"}, ValueError, r"layout.*'scattered'"),
        ({"layout": "sharded"}, ValueError, r"layout='sharded'"),
        ({"solver": "simplex"}, ValueError, r"solver='simplex'"),
        ({"costs": "guessed"}, ValueError, r"costs='guessed'"),
        ({"costs": 3}, ValueError, r"costs"),
        ({"options": {"bucket_bytes": 1}}, TypeError, r"ReplicatedOptions"),
        ({"planner": {"max_batch": 1}}, TypeError, r"PlannerOptions"),
        ({"mesh": "cpu"}, ValueError, r"mesh"),
        ({"splits": {"no.such": [1]}}, ValueError, r"no\.such"),
        ({"plan": "plan.json"}, TypeError, r"plan"),
    ],
)
def test_wrong_arguments_are_refused_and_the_model_stays_usable(arguments, error, message):
    model = TinyGPT()
    with pytest.raises(error, match=message):
        dmuon.dedicate_params(model, **arguments)
    dedicated(model)


def test_only_modules_can_be_dedicated():
    with pytest.raises(TypeError, match=r"nn\.Module"):
        dmuon.dedicate_params(list(TinyGPT().parameters()))


def test_the_replicated_layout_has_nothing_to_hide_from_fully_shard():
    own = dmuon.dedicate_params(TinyGPT())
    with pytest.raises(OwnershipError, match=r"'dedicated'"), own.ignored_by_fully_shard():
        pass


class SparseLookup(nn.Module):
    """Makes sparse gradients without an Embedding module that would tell."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, WIDTH))
        self.body = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(nn.functional.embedding(x, self.table, sparse=True))


def test_a_sparse_gradient_is_refused_by_name():
    model = SparseLookup()
    dedicated(model)
    with pytest.raises(ValueError, match=r"'table'.*sparse"):
        backward(model, 0)


def test_a_sparse_gradient_of_a_matrix_is_refused_by_name():
    model = tree({"a.weight": (11, 4)})
    dedicated(model)
    with pytest.raises(ValueError, match=r"'a\.weight'.*sparse"):
        nn.functional.embedding(tokens()(0), model.a.weight, sparse=True).sum().backward()


def test_complex_parameters_are_refused_by_name():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4, dtype=torch.complex64)})
    with pytest.raises(ValueError, match=r"'b\.weight' is complex"):
        dmuon.dedicate_params(model)


def test_adamws_step_counter_is_float32_whatever_the_default_dtype():
    model = TinyGPT()
    _, opt = dedicated(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        train(model, opt, tokens(), [0])
    finally:
        torch.set_default_dtype(torch.float32)
    counters = [s["step"] for s in opt.state.values() if "step" in s]
    assert counters and all(c.dtype == torch.float32 and c.device.type == "cpu" for c in counters)
