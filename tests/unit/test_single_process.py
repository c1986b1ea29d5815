"""The three lines on one process, without any process group, against `ReferenceMuon`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch.optim.lr_scheduler import ExponentialLR

import dmuon
from dmuon.reference import ReferenceMuon
from dmuon.rule import Rule
from dmuon.types import OwnershipError
from tests.accelerator import Pretended, host_cannot_read
from tests.unit.models import (
    WIDTH,
    Fused,
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


REDUCING = dmuon.ReplicatedOptions(reduce_to_owner=True)
# Of the `replicated` layout: whole gradients and momentum, or those of owners alone.
FORMS = pytest.mark.parametrize("form", [{}, {"options": REDUCING}], ids=["whole", "reduced"])


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


@pytest.mark.parametrize("layout", [{}, {"layout": "dedicated"}], ids=["whole", "dedicated"])
@pytest.mark.parametrize("name", MODELS)
def test_models_with_habits_follow_the_reference(name, layout):
    model, settings, batches, loss, tolerance = MODELS[name]
    pair = Pair(model(), **settings, **layout)
    pair.batches = batches
    pair.train(range(5), loss)
    with pair.own.materialized(pair.model):
        pair.assert_same(tolerance)


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


@FORMS
def test_close_leaves_an_ordinary_module_and_an_optimizer_that_says_so(form):
    pair = Pair(**form)
    pair.train([0])
    pair.own.close()
    pair.own.close()
    tables = [name for name in vars(TinyGPT()) if name.endswith("hooks")]
    assert all(not getattr(m, name) for m in pair.model.modules() for name in tables)
    assert all(not p._post_accumulate_grad_hooks for p in pair.model.parameters())
    pair.backward(1)
    norm = nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.1)
    torch.testing.assert_close(dmuon.clip_grad_norm_(pair.model, 0.1), norm)
    for wrong in ({"max_norm": -1.0}, {"max_norm": 1.0, "norm_type": 0.0}):
        with pytest.raises(ValueError, match="max_norm"):
            dmuon.clip_grad_norm_(pair.model, **wrong)
    for p, q in zip(pair.model.parameters(), pair.twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    with pytest.raises(OwnershipError, match=r"close"):
        pair.opt.step()
    pair.model.zero_grad()
    Pair(pair.model).train(range(1, 3))


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
