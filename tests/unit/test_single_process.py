"""The three lines on one process, without any process group, against `ReferenceMuon`."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch.optim.lr_scheduler import ExponentialLR

import dmuon
from dmuon.reference import ReferenceMuon
from dmuon.rule import Rule
from dmuon.types import OwnershipError
from tests.accelerator import Pretended, host_cannot_read
from tests.fused import Fused
from tests.unit.models import (
    WIDTH,
    AllDifferent,
    Mixed,
    TinyGPT,
    assert_bitwise,
    assert_within,
    clone,
    inputs,
    mean_square,
    through_a_file,
    tokens,
    train,
    tree,
    weights,
)

FP32 = {"ns_dtype": torch.float32}
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, **FP32}
ROWS = inputs((4, WIDTH))


def dedicated(model: nn.Module, **settings: Any) -> tuple[dmuon.Ownership, dmuon.Muon]:
    names = ("splits", "heads", "options", "layout", "planner")
    planning = {k: settings.pop(k) for k in names & settings.keys()}
    own = dmuon.dedicate_params(model, **planning)
    return own, dmuon.Muon(model, **(SETTINGS | settings))


def selection(model: nn.Module) -> dict[str, Mapping]:
    return {k: getattr(model, k) for k in ("splits", "heads") if hasattr(model, k)}


def reference(model: nn.Module, **settings: Any) -> ReferenceMuon:
    return ReferenceMuon(model, **(selection(model) | SETTINGS | settings))


class Pair:
    """A model that dmuon trains and its copy, which the reference trains."""

    def __init__(
        self,
        model: nn.Module | None = None,
        wrap: Callable[[nn.Module], nn.Module] = lambda m: m,
        **settings: Any,
    ) -> None:
        self.model = TinyGPT() if model is None else model
        self.twin = clone(self.model)
        self.batches = tokens() if hasattr(self.model, "embed") else ROWS
        self.wrapped = wrap(self.model)
        self.own, self.opt = dedicated(self.wrapped, **selection(self.model), **settings)
        its = {k: v for k, v in settings.items() if k not in ("options", "publish", "layout")}
        self.ref = reference(self.twin, **its)

    def backward(self, *steps: int) -> None:
        for model in (self.wrapped, self.twin):
            backward(model, *steps, batches=self.batches)

    def step(self, tolerance: float = 1e-6) -> None:
        for optimizer in (self.opt, self.ref):
            optimizer.step()
            optimizer.zero_grad()
        self.assert_same(tolerance)

    def train(self, steps: Iterable[int], loss_fn: Any = mean_square) -> list[float]:
        """Train both; the losses must agree."""
        steps = list(steps)
        ours = train(self.wrapped, self.opt, self.batches, steps, loss_fn)
        theirs = train(self.twin, self.ref, self.batches, steps, loss_fn)
        assert ours == pytest.approx(theirs, abs=1e-5)
        return ours

    def assert_same(self, tolerance: float = 1e-5) -> None:
        assert_within(weights(self.model), weights(self.twin), tolerance)


def backward(model: nn.Module, *steps: int, batches: Callable[[int], Tensor] | None = None) -> None:
    for step in steps:
        mean_square(model, (batches or tokens())(step)).backward()


def test_no_process_group_is_made_and_one_rank_drops_nothing():
    """Of the `dedicated` layout too: weights are there at any time, and saved as they are."""
    pair = Pair(layout="dedicated")
    assert not dist.is_initialized()
    pair.train(range(2))
    assert {p.shape for p in pair.model.parameters()} == {p.shape for p in pair.twin.parameters()}
    with pair.own.materialized(pair.model):
        saved = {n: v.clone() for n, v in pair.model.state_dict().items()}
    pair.own.close()
    assert_bitwise(weights(pair.model), saved)
    pair.assert_same()


# ---- equal to the reference --------------------------------------------------------------

KEPT = dmuon.DedicatedOptions(free_after_forward=False)
REDUCING = dmuon.ReplicatedOptions(reduce_to_owner=True)
AT_OWNERS = [
    {"options": REDUCING}, {"layout": "dedicated"}, {"layout": "dedicated", "options": KEPT},
]  # fmt: skip
# Of the `replicated` layout: whole gradients and momentum, or those of owners alone.
FORMS = pytest.mark.parametrize("form", [{}, {"options": REDUCING}], ids=["whole", "reduced"])
HYPERPARAMETERS = [
    {},
    {"nesterov": False, "adjust_lr_fn": "original"},
    {"momentum_mode": "sgd", "dampening": 0.1, "momentum": 0.8, "adjust_lr_fn": 0.35},
    {"adjust_lr_fn": None, "weight_decay": 0.5, "adamw_weight_decay": 0.0, "adamw_lr": 0.003},
    {"ns_coefficients": "quintic", "ns_steps": 3, "eps": 1e-3, "adamw_betas": (0.8, 0.99)},
    {"ns_coefficients": (2.0, -1.5, 0.5), "momentum": 0.0, "adamw_eps": 1e-3,
     "adjust_lr_fn": "spectral_unclamped"},
]  # fmt: skip


@pytest.mark.parametrize("layout", AT_OWNERS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [*((torch.float32, settings) for settings in HYPERPARAMETERS), (torch.bfloat16, {})],
)
def test_without_batching_steps_are_those_of_the_reference_bitwise(dtype, settings, layout):
    pair = Pair(AllDifferent().to(dtype), **settings, **layout)
    pair.batches = inputs((4, 2, 6), dtype)
    assert all(len(batch.matrices) == 1 for batch in pair.own.plan.batches)
    assert len(set(pair.train(range(5)))) == 5
    assert_bitwise(weights(pair.model), weights(pair.twin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", HYPERPARAMETERS)
def test_with_its_gradients_whole_momentum_is_that_of_the_reference_bitwise(dtype, settings):
    """AdamW in torch's fused form rounds once where the reference rounds at each operation."""
    pair = Pair(AllDifferent().to(dtype), **settings)
    matrices = {
        pair.own.plan.specs.parameters[m.parameter].name for m in pair.own.plan.specs.matrices
    }
    named, theirs = (dict(m.named_parameters()) for m in (pair.model, pair.twin))
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        for name, p in named.items():
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            theirs[name].grad = p.grad.clone()
        pair.step(math.inf)
    for name in matrices:
        ours, reference = pair.opt.state[named[name]], pair.ref.state[theirs[name]]
        assert_bitwise(dict(ours), {"momentum_buffer": reference["momentum_buffer"]})
        difference = (named[name] - theirs[name]).abs().max().item()
        largest = theirs[name].abs().max().item()
        # A rounding a step.
        assert difference <= 5 * torch.finfo(dtype).eps * largest, name


@pytest.mark.parametrize("layout", [{}, *AT_OWNERS], ids=str)
@pytest.mark.parametrize("settings", HYPERPARAMETERS)
def test_experts_splits_heads_and_convolutions_follow_the_reference(settings, layout):
    pair = Pair(Mixed(), **settings, **layout)
    assert max(len(batch.matrices) for batch in pair.own.plan.batches) > 1
    pair.train(range(5))
    pair.assert_same()


def coder() -> nn.Module:
    model = nn.Module()
    model.encoder, model.decoder = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
    return model


def through_methods(model: nn.Module, x: Tensor) -> Tensor:
    return (model.decoder(torch.tanh(model.encoder(x))) - x).square().mean()


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Tanh(), nn.ConvTranspose2d(6, 4, 3))
    return model.to(memory_format=torch.channels_last)


MODELS: dict[str, tuple[Any, dict[str, Any], Any, Any, float]] = {
    "float64": (
        lambda: Mixed().double(), {"ns_dtype": torch.float64}, inputs((4, WIDTH), torch.float64),
        lambda m, x: m(x).square().mean(), 1e-12,
    ),
    "stored (in, out)": (
        lambda: Fused(WIDTH), {"adjust_lr_fn": "original"}, ROWS, mean_square, 1e-6,
    ),
    "channels last": (channels_last, {}, inputs((2, 4, 5, 5)), mean_square, 1e-6),
    "used through methods": (coder, {}, ROWS, through_methods, 1e-5),
}  # fmt: skip


@pytest.mark.parametrize("layout", [{}, *AT_OWNERS[:2]], ids=["whole", "reduced", "dedicated"])
@pytest.mark.parametrize("name", MODELS)
def test_models_with_habits_follow_the_reference(name, layout):
    model, settings, batches, loss, tolerance = MODELS[name]
    pair = Pair(model(), **settings, **layout)
    pair.batches = batches
    pair.train(range(5), loss)
    with pair.own.materialized(pair.model):
        pair.assert_same(tolerance)


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("changed", [
    {"bucket_bytes": 1, "publish_bucket_bytes": 1},
    {"bucket_bytes": 700, "publish_bucket_bytes": 700},
])  # fmt: skip
def test_bucket_sizes_change_no_bit(changed, reduced):
    model = Mixed()
    twin = clone(model)
    first = dmuon.ReplicatedOptions(reduce_to_owner=reduced)
    second = dataclasses.replace(first, **changed)
    # A batch may be two buckets, and batches of other sizes round otherwise.
    settings = selection(model) | {"planner": dmuon.PlannerOptions(max_batch=1)}
    opt = dedicated(model, **settings, options=first)[1]
    other = dedicated(twin, **settings, options=second)[1]
    train(model, opt, ROWS, range(5))
    train(twin, other, ROWS, range(5))
    assert_bitwise(weights(model), weights(twin))


# ---- models with habits ------------------------------------------------------------------


def tied() -> TinyGPT:
    model = TinyGPT()
    model.lm_head.weight = model.embed.weight
    return model


def files_compiled() -> set[str]:
    """Of the package, whose functions the compiler has looked at since it was reset."""
    codes = [reference() for reference in convert_frame.input_codes.seen]
    files = {Path(code.co_filename) for code in codes if code is not None}
    package = Path(dmuon.__file__).parent
    return {str(f.relative_to(package)) for f in files if f.is_relative_to(package)}


@pytest.mark.parametrize("closure", [False, True])
@FORMS
def test_a_compiled_step_is_the_step_itself(form, closure):
    """Of a compiled model; with a closure it runs what is compiled, and compiles nothing of
    ours."""
    torch.compiler.reset()
    convert_frame.input_codes.clear()
    ran = []

    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend=lambda graph, _: ran.append(graph) or graph.forward)

    pair = Pair(wrap=compiled, **form)
    x = pair.batches(0)

    def loss(model: nn.Module) -> Tensor:
        value = mean_square(model, x)
        value.backward()
        return value

    step = torch.compile(pair.opt.step, backend="eager")
    for _ in range(3):
        found = step(lambda: loss(pair.wrapped)) if closure else loss(pair.wrapped)
        if not closure:
            step()
        assert float(loss(pair.twin)) == pytest.approx(float(found), abs=1e-6)
        pair.opt.zero_grad(), pair.ref.step(), pair.ref.zero_grad()
    pair.assert_same()
    assert ran and files_compiled() <= {"comm/hooks.py"}  # of a compiled model's forward


def test_a_compiled_training_step_takes_the_steps_of_a_plain_one():
    """And plans inside, as at any first step."""
    torch.compiler.reset()
    convert_frame.input_codes.clear()
    model, trained = TinyGPT(), []
    for m, wrap in ((clone(model), lambda body: torch.compile(body, backend="eager")),
                    (model, lambda body: body)):  # fmt: skip
        opt = dmuon.Muon(m, **SETTINGS)

        def body(x: Tensor, m=m, opt=opt) -> None:
            opt.zero_grad()
            mean_square(m, x).backward()
            opt.step()

        run = wrap(body)
        for number in range(3):
            run(tokens()(number))
        trained.append(weights(m))
    assert_bitwise(*trained)
    assert files_compiled() == set()


def test_planning_in_compiled_code_times_what_runs():
    torch.compiler.reset()
    convert_frame.input_codes.clear()
    model = TinyGPT()
    own = torch.compile(lambda: dmuon.dedicate_params(model), backend="eager")()
    assert files_compiled() <= {"api.py", "comm/hooks.py", "comm/process_groups.py"}
    own.close()


@pytest.mark.parametrize("limit", [1 << 28, 1])
def test_a_step_that_the_host_cannot_call_off_takes_momentum_in_parts(monkeypatch, limit):
    """Of an owner; a step that is not taken leaves it to the bit."""
    monkeypatch.setattr(Pretended, "chunk_bytes", limit)
    advance, sizes = Rule._advance_some, []

    def noted(rule, out, buffers, *args):
        sizes.append(len(buffers))
        advance(rule, out, buffers, *args)

    monkeypatch.setattr(Rule, "_advance_some", noted)
    with host_cannot_read():
        pair = Pair(tree({f"blocks.{i}.weight": (8, 12) for i in range(4)}), options=REDUCING)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for p, q in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
                q.grad = torch.randn(8, 12, generator=generator)
                (p * q.grad).sum().backward()
            before = [e["momentum_buffer"].clone() for e in pair.opt.state.values()]
            if step == 2:
                (pair.model.blocks.get_submodule("1").weight * math.nan).sum().backward()
            pair.opt.step()
            pair.opt.zero_grad()
            if step == 2:
                for old, entry in zip(before, pair.opt.state.values(), strict=True):
                    assert torch.equal(old, entry["momentum_buffer"])
            else:
                pair.ref.step()
        assert sizes == ([1] * 16 if limit == 1 else [4] * 4)
        pair.assert_same()


# ---- groups and schedules ----------------------------------------------------------------


def test_a_tensor_or_a_number_of_numpy_is_an_lr_like_any_other():
    results = []
    for lr in (0.25, torch.tensor(0.25), torch.tensor([0.25]), np.float32(0.25), np.float64(0.25)):
        torch.manual_seed(0)
        model = TinyGPT()
        _, opt = dedicated(model, lr=lr)
        scheduler = ExponentialLR(opt, 0.5)
        for step in range(3):
            train(model, opt, tokens(), [step])
            scheduler.step()
        results.append(weights(model))
    for other in results[1:]:
        assert_bitwise(results[0], other)


# ---- gradients: missing, accumulated, cleared, clipped -----------------------------------


class Optional(nn.Module):
    """Three matrices of one shape, of which ``used`` says which take part."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i == 1) for i in range(3))
        self.gain = nn.Parameter(torch.ones(()))
        self.used: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.used:
            x = torch.tanh(self.parts[i](x)) + x
        return x * self.gain


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("bucket", [1, 1 << 20])
def test_matrices_without_gradient_are_skipped_as_the_reference_skips_them(bucket, reduced):
    options = dmuon.ReplicatedOptions(publish_bucket_bytes=bucket, reduce_to_owner=reduced)
    pair = Pair(Optional(), options=options)
    most = max(len(batch.matrices) for batch in pair.own.plan.batches)
    assert (most > 1) is (bucket > 1)  # a batch is two buckets, or one matrix
    for step, used in enumerate([(0, 1, 2), (0,), (2, 1), (), (1,), (0, 1, 2), (2,)]):
        pair.model.used = pair.twin.used = used
        pair.train([step])
        pair.assert_same(1e-6)
        rms = pair.opt.stats()["update_rms"]
        for i in range(3):  # nothing is made up
            assert (rms.get(f"parts.{i}.weight", 0.0) != 0) == (i in used), (step, i)
    ours, theirs = (o.state[m.parts[0].weight] for o, m in
                    ((pair.opt, pair.model), (pair.ref, pair.twin)))  # fmt: skip
    torch.testing.assert_close(ours["momentum_buffer"], theirs["momentum_buffer"])


@FORMS
def test_a_parameter_with_zero_gradient_is_not_a_missing_one(form):
    pair = Pair(Optional(), **form)
    pair.train([0])
    pair.train([1], lambda m, x: 0.0 * m(x).sum())
    pair.assert_same(1e-6)


@FORMS
@pytest.mark.parametrize(
    "synced",
    [(1, 1, 1), (0, 0, 1), (1, 0, 0), (0, 0, 0), (0, 1, 0)],
    ids=lambda synced: "".join("s" if each else "-" for each in synced),
)
def test_gradients_accumulate_however_backward_is_called(synced, form):
    pair = Pair(**form)
    for step, sync in enumerate(synced):
        first, second = (nullcontext() if sync else dmuon.no_sync(pair.model) for _ in range(2))
        with first, second:
            backward(pair.model, step)
        backward(pair.twin, step)
    pair.step()
    pair.train([7])
    pair.assert_same()


def test_gradients_of_no_sync_count_once_where_the_next_backward_does_not_reach():
    pair = Pair(Optional(), options=REDUCING)
    for step, (first, second) in enumerate([((0, 1), (1,)), ((2,), (0,)), ((0, 1, 2), ())]):
        pair.model.used = pair.twin.used = first
        with dmuon.no_sync(pair.model):
            pair.backward(step)
        pair.model.used = pair.twin.used = second
        pair.backward(step + 10)
        assert all(part.weight.grad is None for part in pair.model.parts)
        pair.step(1e-5)


@FORMS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_the_owner_has_accumulated(set_to_none, form):
    pair = Pair(**form)
    backward(pair.model, 5, 6)
    pair.opt.zero_grad(set_to_none)
    pair.backward(0)
    pair.step()


@FORMS
def test_a_step_without_a_backward_before_it_changes_nothing(form):
    model = TinyGPT()
    _, opt = dedicated(model, **form)
    for between in (
        lambda: None,
        lambda: (backward(model, 0), opt.zero_grad()),
        lambda: train(model, opt, tokens(), [0]),
    ):
        between()
        assert all(p.grad is None for p in model.parameters())
        before = weights(model)
        opt.step()
        assert_bitwise(weights(model), before)


def test_matrix_gradients_leave_p_grad_after_backward_and_count_once():
    model = TinyGPT()
    _, opt = dedicated(model, options=REDUCING)
    backward(model, 0)
    for name, p in model.named_parameters():
        is_matrix = ".up.weight" in name or ".down.weight" in name
        assert (p.grad is None) == is_matrix, name
    opt.step()
    matrices = {n: v for n, v in weights(model).items() if ".up.weight" in n}
    opt.step()  # without zero_grad: the others' gradients are still there
    assert_bitwise(matrices, {n: weights(model)[n] for n in matrices})


@FORMS
def test_a_closure_is_run_with_gradients_and_its_loss_returned(form):
    pair = Pair(**form)

    def closure() -> Tensor:
        loss = mean_square(pair.model, tokens()(0))
        loss.backward()
        return loss

    loss = pair.opt.step(closure)
    assert [loss.item()] == train(pair.twin, pair.ref, tokens(), [0])
    pair.assert_same(1e-6)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("broken on purpose")


@FORMS
def test_a_backward_that_raises_leaves_the_next_one_intact(form):
    pair = Pair(**form)
    model = pair.model
    x = model.blocks[1](model.blocks[0](Fails.apply(model.embed(tokens()(0)))))
    with pytest.raises(RuntimeError, match="broken on purpose"):
        model.lm_head(model.norm(x)).sum().backward()
    pair.opt.zero_grad()
    pair.train(range(2))
    pair.assert_same()


# ---- reading weights ---------------------------------------------------------------------


def after_one_step(model: nn.Module | None = None, **form: Any) -> Pair:
    """Right after a step, with what the model must show in the twin."""
    pair = Pair(model, **form)
    pair.train([0])
    return pair


@FORMS
def test_published_values_are_in_parts_and_views_and_never_over_loaded_ones(form):
    """A part of a block called by itself; tensors that somebody holds; weights loaded later."""
    pair, x = after_one_step(**form), torch.randn(3, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(pair.model.blocks[1].up(x), pair.twin.blocks[1].up(x))
    model = TinyGPT()
    views = {name: p.detach() for name, p in model.named_parameters()}
    pair = after_one_step(model, **form)
    assert_within(views, weights(pair.twin), 1e-6)
    pair, other = after_one_step(**form), TinyGPT()
    pair.model.load_state_dict(other.state_dict())
    pair.opt.synchronize()
    assert_bitwise(weights(pair.model), weights(other))


@FORMS
def test_data_assigned_between_steps_is_followed(form):
    pair = Pair(**form)
    for step in range(4):
        pair.train([step])
        if step % 2:
            pair.opt.synchronize()
        for p in pair.model.parameters():
            p.data = p.data.clone()
    pair.model(tokens()(1))
    pair.assert_same()


@pytest.mark.parametrize("replaced", [False, True])
def test_state_that_was_moved_away_and_back_is_followed(replaced):
    """As frameworks do that offload an optimizer between steps."""
    pair = Pair()
    for step in range(4):
        pair.train([step])
        for entry in pair.opt.state.values():
            for name, value in [*entry.items()]:
                moved = value.detach().clone()
                value.fill_(math.nan)
                if replaced:
                    entry[name] = moved
                else:
                    value.data = moved
    pair.assert_same()


# ---- saving and resuming -----------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("master_weights", [False, True])
def test_resuming_from_a_checkpoint_is_bitwise(dtype, master_weights, form):
    def build() -> tuple[nn.Module, dmuon.Muon]:
        model = Mixed().to(dtype)
        _, opt = dedicated(model, **selection(model), master_weights=master_weights, **form)
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


@pytest.mark.parametrize("settings", [
    {"options": REDUCING}, {"adjust_lr_fn": 0.35}, {"adjust_lr_fn": "spectral_unclamped"},
    {"adjust_lr_fn": None},
], ids=str)  # fmt: skip
def test_loading_replaces_a_state_that_has_moved_on_and_shares_nothing_with_it(settings):
    """Nor does one that has not planned. How the rate is adjusted is loaded too."""
    model, other, third = TinyGPT(), TinyGPT(), TinyGPT()
    _, opt = dedicated(model, **settings)
    train(model, opt, tokens(), range(2))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    before = copy.deepcopy(saved[1]["state"])
    expected = train(model, opt, tokens(), range(2, 5))
    optimizers = opt, dedicated(other)[1], dmuon.Muon(third, **SETTINGS)
    for each, its in zip((model, other, third), optimizers):
        each.load_state_dict(saved[0])
        its.load_state_dict(saved[1])
        assert train(each, its, tokens(), range(2, 5)) == expected
        torch.testing.assert_close(saved[1]["state"], before, rtol=0, atol=0)


def test_what_is_put_into_a_saved_state_is_loaded_and_changes_nothing_before():
    """torchtune replaces tensors in the entries of ``state_dict()``, and loads the result."""
    model, other = TinyGPT(), TinyGPT()
    (_, opt), (_, resumed) = dedicated(model), dedicated(other)
    train(model, opt, tokens(), range(2))
    train(other, resumed, tokens(), range(1))
    theirs, ours = resumed.state_dict(), opt.state_dict()
    for number, entry in theirs["state"].items():
        entry.update((key, value.clone()) for key, value in ours["state"][number].items())
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(theirs)
    assert train(other, resumed, tokens(), range(2, 5)) == train(model, opt, tokens(), range(2, 5))


# ---- master weights ----------------------------------------------------------------------


@FORMS
def test_master_weights_are_float32_training_rounded_for_display(form):
    model = AllDifferent().bfloat16()
    twin = clone(model)
    masters = {n: p.detach().float() for n, p in twin.named_parameters()}
    _, opt = dedicated(model, **selection(model), master_weights=True, **form)
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
    assert_bitwise(weights(model), {n: v.bfloat16() for n, v in weights(shadow).items()})
    assert any(not torch.equal(v, weights(model)[n].float()) for n, v in weights(shadow).items())


def loaded_in_place(model: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": AllDifferent().bfloat16().state_dict()}, checkpoint_id=folder)
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)


def swapped(model: nn.Module) -> None:
    """For an average of weights, and back."""
    kept = clone(model)
    for p in model.parameters():
        p.data.fill_(0.5)
    for p, q in zip(model.parameters(), kept.parameters()):
        p.data = q.data


def masters_of(opt: dmuon.Muon) -> dict[int, Tensor]:
    """What a checkpoint holds of them."""
    entries = opt.state_dict()["state"].items()
    return {i: entry["master_weight"].clone() for i, entry in entries}


EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "halved": lambda m: [p.mul_(0.5) for p in m.parameters()],
    # No version of a parameter tells.
    "clamped": lambda m: [p.data.clamp_(-0.03, 0.03) for p in m.parameters()],
    "pruned": lambda m: [p.view(torch.int16).numpy()[::2].fill(0) for p in m.parameters()],
    "loaded": lambda m: m.load_state_dict(AllDifferent().bfloat16().state_dict()),
    "loaded in place": loaded_in_place,
    "swapped": swapped,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("first", [0, 2], ids=["before the first step", "later"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@FORMS
def test_whatever_is_written_to_weights_counts(form, edit, first):
    """As with float32 weights that get what is written, where it differs from what they round
    to."""
    model = AllDifferent().bfloat16()
    shadow = AllDifferent()
    shadow.load_state_dict({n: p.float() for n, p in model.named_parameters()})
    _, opt = dedicated(model, **selection(model), master_weights=True, verify_every=1, **form)
    other = reference(shadow)
    batches = inputs((4, 2, 6), torch.bfloat16)
    for step in range(4):
        if step == first:
            before = masters_of(opt)
            with torch.no_grad():
                edit(model)
                for p, q in zip(model.parameters(), shadow.parameters(), strict=True):
                    q.copy_(torch.where(q.bfloat16() == p, q, p))
            saved = masters_of(opt)
            for i, p in enumerate(model.parameters()):
                kept = before[i].bfloat16() == p
                assert torch.equal(saved[i][kept], before[i][kept]), i
                assert torch.equal(saved[i][~kept], p[~kept].float()), i
        train(model, opt, batches, [step])
        twin = clone(shadow).bfloat16()
        mean_square(twin, batches(step)).backward()
        for p, q in zip(shadow.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad.float()
        other.step()
        assert_bitwise(weights(model), {n: v.bfloat16() for n, v in weights(shadow).items()})


def test_a_deep_copy_is_an_ordinary_model_that_can_follow_as_an_ema():
    pair = Pair()
    pair.train([0])
    pair.opt.synchronize()
    ema = copy.deepcopy(pair.model)
    for step in range(1, 4):
        pair.train([step])
        pair.opt.synchronize()
        with torch.no_grad():
            for p, q in zip(ema.parameters(), pair.model.parameters()):
                p.lerp_(q, 0.5)
        ema(tokens()(step))
    backward(ema, 0)
    assert all(p.grad is not None for p in ema.parameters())
    own, second = dedicated(ema)
    train(ema, second, tokens(), range(2))
    pair.assert_same()
    own.close()


@FORMS
def test_close_leaves_an_ordinary_module_and_an_optimizer_that_says_so(form):
    plain = TinyGPT()
    pair = after_one_step(**form)
    pair.own.close()
    pair.own.close()
    tables = [name for name in vars(plain) if name.endswith("hooks")]
    assert all(not getattr(m, name) for m in pair.model.modules() for name in tables)
    assert all(not p._post_accumulate_grad_hooks for p in pair.model.parameters())
    backward(pair.model, 1)
    assert all(p.grad is not None for p in pair.model.parameters())
    twin = clone(pair.model)
    for p, q in zip(pair.model.parameters(), twin.parameters()):
        q.grad = p.grad.clone()
    norm = dmuon.clip_grad_norm_(pair.model, 0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
    for wrong in ({"max_norm": -1.0}, {"max_norm": 1.0, "norm_type": 0.0}):
        with pytest.raises(ValueError, match="max_norm"):
            dmuon.clip_grad_norm_(pair.model, **wrong)
    for p, q in zip(pair.model.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    with pytest.raises(OwnershipError, match=r"close"):
        pair.opt.step()
    pair.model.zero_grad()
    again = Pair(pair.model)
    again.train(range(1, 3))
    again.assert_same()


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
    with pytest.raises(OwnershipError, match=r"'dedicated'"), own.ignored_by_fully_shard():
        pass


def test_statistics_of_a_step():
    model = TinyGPT()
    own, opt = dedicated(model, ns_dtype="torch.bfloat16")
    train(model, opt, tokens(), range(2))
    stats = opt.stats()
    assert stats["steps"] == 2 and stats["ns_ms"] > 0
    assert stats["ns_dtype"] == "bfloat16"
    assert stats["update_rms"].keys() == set(own.owned_by(0))
    # Rows of 8 orthonormal vectors in 16 dims, scaled by 0.2 sqrt(16): as large as AdamW's.
    assert all(0.1 < rms < 0.3 for rms in stats["update_rms"].values())
    assert all(count > 0 for count in stats["bytes"].values())


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


@FORMS
def test_master_weights_keep_updates_that_bf16_would_lose(form):
    for master_weights in (False, True):
        model = tree({"a.weight": (8, 8)}).bfloat16()
        model.a.weight.data.fill_(1.0)
        how = {"lr": 1e-4, "weight_decay": 0.0, "master_weights": master_weights, **form}
        told = nullcontext() if master_weights else pytest.warns(RuntimeWarning, match="rounded aw")
        with told:
            _, opt = dedicated(model, **how)
        for _ in range(100):
            model.a.weight.grad = torch.eye(8, dtype=torch.bfloat16)
            opt.step()
        opt.synchronize()
        moved = (model.a.weight.detach().float() - 1.0).abs().max().item()
        assert (moved > 0.0) is master_weights
