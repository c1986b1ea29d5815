"""Every layout as on an accelerator, whose host cannot read: equal to the reference, nothing read.

Each run goes through the same steps (see `What`): two micro-batches, gradients missing on some
ranks and on all, clipping, a non-finite gradient. `step` runs under `nothing_read`. Some runs are
repeated where the host can read. Both must agree bitwise, so AdamW's rate is zero there: its fused
form, which an accelerator takes, rounds differently, and so would the gradients of the matrices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.tools.parallel_models import ParallelModel
from tests.accelerator import host_cannot_read, nothing_read, reading_allowed
from tests.distributed.harness import distributed
from tests.distributed.layouts import LAYOUTS, Layout, on
from tests.distributed.models import Ordered, half
from tests.distributed.twins import Both, both, follow
from tests.internals import host_can_read

pytestmark = pytest.mark.cpu_only("a CPU that pretends to be an accelerator")

Values = dict[Any, Tensor]
WITHOUT_ADAMW = {"adamw_lr": 0.0, "adamw_weight_decay": 0.0}


@dataclass(frozen=True)
class What:
    """One step of a run. ``missing`` on these ranks: none, those that hold or see the last part of
    the data, or all."""

    parts: int = 1
    missing: str = "nowhere"
    clip: str = ""
    bad: str = ""  # the parameter of which one rank has a non-finite gradient
    found_inf: float | None = None  # a `GradScaler` is there, and this is what it tells
    absent_rank: bool = False  # rank 0 runs no backward at all


STEPS = [
    What(parts=2),
    What(missing="on the last"),
    What(missing="everywhere"),
    What(clip="dmuon"),
    What(),
]


def watched(what: What, before: What | None = None) -> AbstractContextManager[None]:
    # Which buckets are published depends on what others have: a rank that ran no backward learns
    # it in `step`, from the flags that the others send at the end of theirs. And ranks exchange
    # names when they tell of a step that was skipped before.
    on_host = host_can_read(torch.device("cpu"))
    tells = before is not None and before.bad and before.found_inf is None
    return nullcontext() if on_host or what.absent_rank or tells else nothing_read()


def state_of(opt: dmuon.Muon) -> Values:
    """What the optimizer stores on this rank, by parameter, kind and matrix."""
    found: Values = {}
    for i, p in enumerate(p for group in opt.param_groups for p in group["params"]):
        for key, value in opt.state[p].items():
            for name, part in (value if isinstance(value, dict) else {"": value}).items():
                found[i, key, name] = local_tensor(part).detach().clone()
    return found


def assert_same(found: Values, expected: Values, *, rounded: bool = False) -> None:
    """Bitwise, NaN included; what AdamW keeps to a few units in the last place.

    ``rounded``: so are all. Where block steps leave out a block that is not finite the host takes
    it out of its batch, a mask does not, and batches of other sizes are rounded otherwise.
    """
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if isinstance(name, tuple) and "exp_avg" in name[1]:
            rtol, atol = 8 * torch.finfo(value.dtype).eps, 1e-7 if rounded else 1e-9
        else:
            rtol, atol = (8 * torch.finfo(value.dtype).eps, 4e-6) if rounded else (0.0, 0.0)
        torch.testing.assert_close(
            value, expected[name], rtol=rtol, atol=atol, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


# ---- momentum at owners --------------------------------------------------------------------


def uses(model: nn.Module, what: What, rank: int, world: int) -> None:
    missing = what.missing == "everywhere" or (what.missing != "nowhere" and rank == world - 1)
    model.order = [0, 2, 3] if missing else [0, 1, 2, 3]  # type: ignore[assignment]
    model.use_spare = not missing  # type: ignore[assignment]


def backward_at_owners(pair: Both, step: int, what: What, compare: bool) -> None:
    pair.prepare = lambda model, _, rank: uses(model, what, rank, pair.data_world)
    for part in range(what.parts):
        with nullcontext() if part == what.parts - 1 else dmuon.no_sync(pair.model):
            if not (what.absent_rank and pair.data_rank == 0):
                handle = None
                if what.bad and pair.data_rank == 0:
                    weight = pair.bare.get_parameter(what.bad)
                    handle = weight.register_hook(lambda grad: grad * math.inf)
                pair.backward(10 * step + part, what.parts)
                if handle is not None:
                    handle.remove()
        if compare:
            pair.joint_backward(10 * step + part, what.parts, 0 if what.absent_rank else None)
    units = pair.own.runtime.units
    assert any(len(u.matrices) > 1 for u in units), "of which one would be missing"


HSDP_REST = on("dedicated fsdp", 2, 2)
OWNERS = {
    "reduced": ("reduced", True),
    "reduced ddp": ("reduced ddp", False),
    "dedicated, one rank": ("dedicated", False),
    "dedicated": ("dedicated", True),
    "dedicated fsdp": ("dedicated fsdp", False),
    "dedicated hsdp": (HSDP_REST, False),
}


# ---- sharded -------------------------------------------------------------------------------

WHOLE = replace(LAYOUTS["plain"], build=ParallelModel)  # on every rank
LOST = ("blocks.1.mlp.up.weight", "blocks.1.norm.weight")  # a matrix and one of AdamW's
SHARDED_STEPS = [
    What(parts=2),
    What(missing="on the last"),
    What(missing="everywhere"),
    What(clip="dmuon"),
    What(clip="torch"),
    What(bad="blocks.0.mlp.up.weight"),
    What(found_inf=0.0),
    What(found_inf=1.0),
    What(bad="tok.weight"),
    What(),
]
SCALE = 8.0


def lose(pair: Both, what: What, *, compare: bool) -> None:
    """Drop gradients of the model, and what they are to the whole ones, of the twin."""
    ours, twins = dict(pair.model.named_parameters()), dict(pair.twin.named_parameters())
    for name in LOST:
        p, q = ours[name], twins[name]
        kept = torch.ones_like(p.detach())
        if what.missing == "everywhere" or is_last(p):
            p.grad = None
            local_tensor(kept).zero_()
        if compare:
            whole = whole_tensor(kept)
            q.grad = q.grad * whole if whole.any() else None


def is_last(p: Tensor) -> bool:
    """Whether this rank holds the last part of ``p``; a tensor that is whole is nobody's part."""
    mesh = getattr(p, "device_mesh", None)
    if mesh is None:
        return False
    cut = [axis for axis, placement in enumerate(p.placements) if isinstance(placement, Shard)]
    return bool(cut) and mesh.get_coordinate()[cut[0]] == mesh.size(cut[0]) - 1


def backward_of_shards(pair: Both, step: int, what: What, compare: bool) -> None:
    averages = pair.averages
    for part in range(what.parts):
        pair.averages = averages and part == what.parts - 1
        pair.backward(10 * step + part)
        if compare:
            pair.joint_backward(10 * step + part)
    pair.averages = averages
    if what.missing != "nowhere":
        lose(pair, what, compare=compare)
    if what.bad and dist.get_rank() == 0:
        local_tensor(pair.model.get_parameter(what.bad).grad).view(-1)[0] = math.nan
    if what.found_inf is not None:
        for p in pair.model.parameters():
            p.grad *= SCALE
        pair.opt.grad_scale = torch.tensor(SCALE)
        pair.opt.found_inf = torch.tensor(what.found_inf)


def run(
    layout: Layout | str, steps: list[What], *, compare: bool, build: Any = None, **case: Any
) -> tuple[Values, Values]:
    """Train; the weights and this rank's state after the last step."""
    backward = backward_of_shards if build is None else backward_at_owners
    with both(build, layout, **case) as pair:
        opt, skipped = pair.opt, 0
        for step, what in enumerate(steps):
            backward(pair, step, what, compare)
            if what.clip == "torch":
                nn.utils.clip_grad_norm_(pair.model.parameters(), 0.3)
            elif what.clip:
                with watched(what):
                    found = dmuon.clip_grad_norm_(pair.model, 0.3)
            if what.clip and compare:
                expected = nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.3)
                assert what.clip == "torch" or abs(float(found) / float(expected) - 1) <= 1e-5
            if what.bad or what.found_inf:
                skipped += 1
                pair.twin.zero_grad()  # nothing changes anywhere
            with watched(what, steps[step - 1] if step else None):
                pair.step()
                if step % 2:
                    opt.synchronize()
            opt.grad_scale = opt.found_inf = None
            if compare:
                pair.ref.step()
            pair.twin.zero_grad()
        opt.synchronize()
        if compare:
            pair.check()
            stats = opt.stats()
            assert stats["skipped"] == skipped and stats["finite"] and stats["ns_ms"] >= 0
            assert all(v >= 0 for v in stats["update_rms"].values())
        return pair.whole(), state_of(opt)


def agree(found: tuple[Values, Values], expected: tuple[Values, Values], rounded: bool) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs, rounded=rounded)


@pytest.mark.parametrize(
    ("name", "world"),
    [(name, 1 if "one" in name else 4 if "hsdp" in name else 2) for name in OWNERS],
)
@distributed()
def test_owners_need_no_host(rank, world, name):
    layout, bitwise = OWNERS[name]
    case = {"build": partial(Ordered, layers=4), "only": {"publish": "sync"}}
    steps = list(STEPS)
    if name in ("dedicated fsdp", "dedicated hsdp"):
        # FSDP2 wants every rank to run the same modules.
        steps = [step for step in steps if step.missing != "on the last"]
    alone = [What(absent_rank=True), What()] if bitwise else []
    with host_cannot_read():
        run(layout, [*steps, *alone], compare=True, **case)
    if bitwise:
        steps += [What(bad="blocks.2.up.weight")]
        case["muon"] = WITHOUT_ADAMW
        expected = run(layout, steps, compare=False, **case)
        with host_cannot_read():
            agree(run(layout, steps, compare=False, **case), expected, rounded=False)


@pytest.mark.parametrize(
    ("layout", "world", "period", "case"),
    [
        ("fsdp2", 2, 1, {}),
        ("fsdp2", 2, 3, {}),
        ("fsdp2", 2, 2, {"only": {"master_weights": True}, "change": half}),
        # Operands lie in the narrower dtype, where no host reads.
        ("fsdp2", 2, 1, {"muon": {"ns_dtype": torch.bfloat16}}),
        ("tp", 2, 3, {}),
        ("hsdp", 4, 2, {}),
    ],
)
@distributed()
def test_sharded_steps_need_no_host(rank, world, layout, period, case):
    """The same with and without a host that reads."""
    # torch's clipping takes no mixture of meshes.
    steps = [s for s in SHARDED_STEPS if s.clip != "torch" or layout != "tp"]
    rounded = period != 1 or "request" in case
    case = case | {
        "muon": WITHOUT_ADAMW | case.get("muon", {}),
        "only": {"period": period, **case.get("only", {})},
    }
    expected = run(layout, steps, compare=False, **case)
    with host_cannot_read():
        agree(run(layout, steps, compare=False, **case), expected, rounded)


@pytest.mark.parametrize(("layout", "world"), [("fsdp2", 1), ("fsdp2", 2), ("plain", 2)])
@distributed()
def test_sharded_steps_equal_the_reference(rank, world, layout):
    laid = WHOLE if layout == "plain" else layout
    with host_cannot_read():
        run(laid, SHARDED_STEPS, compare=True, averages=layout == "plain")


@contextmanager
def list_kernels() -> Iterator[Counter[str]]:
    """The kernels of an accelerator, interpreted; yields how often each was called."""
    from tests.unit.test_triton import interpreted

    module, counts = interpreted("triton_lists"), Counter[str]()

    def counted(name: str) -> Any:
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            with reading_allowed():  # the interpreter does
                found = real(*args, **kwargs)
            return reading(found) if callable(found) else found

        return call

    def reading(run: Any) -> Any:
        def call() -> None:
            with reading_allowed():
                run()

        return call

    kernels = SimpleNamespace(**{n: counted(n) for n in ("norms", "advance", "update")})
    kernels.copier = counted("copier")
    with (
        patch("dmuon.rule.list_kernels", lambda device: kernels),
        patch("dmuon.step.operands.list_kernels", lambda device: kernels),
    ):
        yield counts


@pytest.mark.parametrize(
    ("layout", "world", "period", "case"),
    [
        ("fsdp2", 2, 1, {}),
        ("fsdp2", 2, 3, {}),
        ("tp", 2, 1, {}),
        ("hsdp", 4, 1, {}),
        ("dedicated", 2, 1, {"build": partial(Ordered, layers=4)}),
    ],
)
@distributed()
def test_list_kernels_take_the_same_steps(rank, world, layout, period, case):
    """Whole steps of an accelerator, kernels included, beside the reference or the same run by
    torch's operations."""
    pytest.importorskip("triton", reason="Triton is made for Linux")
    steps = SHARDED_STEPS
    if "build" in case:
        layout, steps = OWNERS[layout][0], STEPS
        case = case | {"only": {"publish": "sync"}}
    elif layout == "tp":
        steps = [s for s in steps if s.clip != "torch"]
    muon = {"adamw_lr": 0.0} if period != 1 else {}
    case = {"only": {"period": period}, **case} if period != 1 else case
    with host_cannot_read(), list_kernels() as counts:
        found = run(layout, steps, compare=period == 1, **case, muon=muon)
    assert min(counts[name] for name in ("norms", "advance", "update")) > 0
    # In full steps too, of parameters whose gradient is missing on this rank.
    if period != 1:
        with host_cannot_read():
            wanted = run(layout, steps, compare=False, **case, muon=muon)
        for one, two in zip(found[0].values(), wanted[0].values(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@distributed(2)
def test_block_steps_need_no_host_and_equal_the_oracle(rank, world):
    with host_cannot_read():
        follow(layout="fsdp2", only={"period": 3, "block_lr_ratio": 0.7}, steps=5)
