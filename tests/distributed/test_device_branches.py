"""Every layout as on an accelerator, whose host cannot read: equal to the reference, nothing read.

Each run goes through the same steps (see `What`): two micro-batches, gradients missing on some
ranks and on all, clipping, a non-finite gradient. `step` runs under `nothing_read`. Some runs are
repeated where the host can read. Both must agree bitwise, so AdamW's rate is zero there: its fused
form, which an accelerator takes, rounds differently, and so would the gradients of the matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import dmuon
from dmuon.comm.transport import host_can_read
from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.tools.parallel_models import ParallelCase, replicated_case
from tests.accelerator import host_cannot_read, nothing_read
from tests.distributed import owners as of_owners
from tests.distributed.harness import distributed
from tests.distributed.models import batch, loss_of, reference_for, seeded, weights, wrap
from tests.distributed.sharded import BY_NAME, MUON, Pair, dedicated, pair, reference
from tests.distributed.test_drop_in import average
from tests.distributed.test_muonbp import check_against_oracle

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
    it out of its batch, a mask does not, and batches of other sizes are rounded otherwise; and
    co-owners divide by a shared norm, whose parts are summed in another dtype where no host reads.
    """
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if isinstance(name, tuple) and "exp_avg" in name[1]:
            rtol, atol = 8 * torch.finfo(value.dtype).eps, 1e-7 if rounded else 1e-9
        else:
            rtol, atol = (8 * torch.finfo(value.dtype).eps, 1e-6) if rounded else (0.0, 0.0)
        torch.testing.assert_close(
            value, expected[name], rtol=rtol, atol=atol, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


# ---- replicated and dedicated --------------------------------------------------------------


@contextmanager
def owners(kind: str, rank: int, world: int, **muon: Any) -> Iterator[Any]:
    """(model as it is called, the bare model, ownership, optimizer, whole weights)."""
    bare = seeded(of_owners.Ordered, layers=4)
    model = wrap(bare, kind == "ddp")
    if kind in ("plain", "ddp"):
        own = dmuon.dedicate_params(model, options=dmuon.ReplicatedOptions(reduce_to_owner=True))
    else:
        mesh = of_owners.mesh_of((2, 2) if kind == "dedicated hsdp" else (world,))
        own = dmuon.dedicate_params(bare, mesh, layout="dedicated")
        if kind != "dedicated plain":
            of_owners.shard_rest(bare, own, mesh)
    opt = dmuon.Muon(model, **(MUON | muon))
    yield model, bare, own, opt
    own.close()


def uses(model: nn.Module, what: What, rank: int, world: int) -> None:
    missing = what.missing == "everywhere" or (what.missing != "nowhere" and rank == world - 1)
    model.order = [0, 2, 3] if missing else [0, 1, 2, 3]  # type: ignore[assignment]
    model.use_spare = not missing  # type: ignore[assignment]


def run_owners(
    kind: str, steps: list[What], rank: int, world: int, *, compare: bool, **muon: Any
) -> tuple[Values, Values]:
    """Train; the weights and this rank's state after the last step."""
    twin = seeded(of_owners.Ordered, layers=4)
    ref = reference_for(twin, **(MUON | muon))
    with owners(kind, rank, world, **muon) as (model, bare, own, opt):
        partial = 0
        for step, what in enumerate(steps):
            skipped = [r == 0 and what.absent_rank for r in range(world)]
            for part in range(what.parts):
                uses(bare, what, rank, world)
                last = part == what.parts - 1
                with nullcontext() if last else dmuon.no_sync(model):
                    if not skipped[rank]:
                        loss = loss_of(model, batch(10 * step + part, rank)) / what.parts
                        poisoned = bare.get_parameter(what.bad) if what.bad and rank == 0 else None
                        hook = poisoned.register_hook(spoiled) if poisoned is not None else None
                        loss.backward()
                        if hook is not None:
                            hook.remove()
                for r in range(world if compare else 0):
                    uses(twin, what, r, world)
                    if not skipped[r]:
                        loss = loss_of(twin, batch(10 * step + part, r)) / (what.parts * world)
                        loss.backward()
            if what.clip:
                with watched(what):
                    found = dmuon.clip_grad_norm_(model, 0.3)
                if compare:
                    expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
                    assert abs(float(found) / float(expected) - 1) <= 1e-5
            partial += what.missing != "nowhere" and any(
                len(u.matrices) > 1 for u in own.runtime.units
            )
            with watched(what):
                opt.step()
                opt.zero_grad()
                if step % 2:
                    opt.synchronize()
            ref.step()
            ref.zero_grad()
        assert partial, "no unit has several matrices, of which one would be missing"
        opt.synchronize()
        found_weights = of_owners.whole(bare, own)
        if compare:
            for name, value in weights(twin).items():
                difference = float((found_weights[name] - value).abs().max())
                assert difference <= 1e-5, f"{name} is {difference} off"
            stats = opt.stats()
            assert stats["ns_ms"] >= 0 and all(v >= 0 for v in stats["update_rms"].values())
        return found_weights, state_of(opt)


def spoiled(grad: Tensor) -> Tensor:
    return grad * math.inf


@pytest.mark.parametrize(
    ("kind", "world", "bitwise"),
    [
        ("plain", 2, True),
        ("ddp", 2, False),
        ("dedicated plain", 1, False),
        ("dedicated plain", 2, True),
        ("dedicated fsdp", 2, False),
        ("dedicated hsdp", 4, False),
    ],
)
@distributed()
def test_owners_need_no_host(rank, world, kind, bitwise):
    steps = list(STEPS)
    if kind in ("dedicated fsdp", "dedicated hsdp"):
        # FSDP2 wants every rank to run the same modules.
        steps = [step for step in steps if step.missing != "on the last"]
    alone = [What(absent_rank=True), What()] if bitwise else []
    with host_cannot_read():
        run_owners(kind, [*steps, *alone], rank, world, compare=True)
    if not bitwise:
        return
    steps += [What(bad="blocks.2.up.weight")]
    expected = run_owners(kind, steps, rank, world, compare=False, **WITHOUT_ADAMW)
    with host_cannot_read():
        found = run_owners(kind, steps, rank, world, compare=False, **WITHOUT_ADAMW)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)


# ---- sharded -------------------------------------------------------------------------------

SHARED = {"planner": dmuon.PlannerOptions(co_owners=2)}
REPLICATED = replicated_case(2)  # plain, so that the test averages
FSDP1 = replace(BY_NAME["fsdp2"], name="fsdp1", mesh_shape=(1,))
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


def lose(both: Pair, what: What, *, compare: bool) -> None:
    """Drop gradients of the model, and what they are to the whole ones, of the twin."""
    ours, twins = dict(both.model.named_parameters()), dict(both.twin.named_parameters())
    for name in LOST:
        p, q = ours[name], twins[name]
        held = torch.ones_like(p.detach())
        if what.missing == "everywhere" or is_last(p):
            p.grad = None
            local_tensor(held).zero_()
        if compare:
            whole = whole_tensor(held)
            q.grad = q.grad * whole if whole.any() else None


def is_last(p: Tensor) -> bool:
    """Whether this rank holds the last part of ``p``; a tensor that is whole is nobody's part."""
    mesh = getattr(p, "device_mesh", None)
    if mesh is None:
        return False
    cut = [axis for axis, placement in enumerate(p.placements) if isinstance(placement, Shard)]
    return bool(cut) and mesh.get_coordinate()[cut[0]] == mesh.size(cut[0]) - 1


def run_sharded(
    case: ParallelCase,
    steps: list[What],
    rank: int,
    *,
    compare: bool,
    dtype: torch.dtype = torch.float32,
    **muon: Any,
) -> tuple[Values, Values]:
    both = pair(case, change=lambda model: model.to(dtype))
    with dedicated(both.model, **muon) as (_, opt):
        ref = reference(both.twin) if compare else None
        skipped = 0
        for step, what in enumerate(steps):
            for part in range(what.parts):
                both.backward(10 * step + part)
                if compare:
                    both.joint_backward(10 * step + part)
            if case is REPLICATED:
                average(*both.model.parameters())
            if what.missing != "nowhere":
                lose(both, what, compare=compare)
            if what.clip == "torch":
                nn.utils.clip_grad_norm_(both.model.parameters(), 0.3)
            elif what.clip:
                with watched(what):
                    dmuon.clip_grad_norm_(both.model, 0.3)
            if what.clip and compare:
                nn.utils.clip_grad_norm_(both.twin.parameters(), 0.3)
            if what.bad and rank == 0:
                local_tensor(both.model.get_parameter(what.bad).grad).view(-1)[0] = math.nan
            if what.found_inf is not None:
                for p in both.model.parameters():
                    p.grad *= SCALE
                opt.grad_scale, opt.found_inf = torch.tensor(SCALE), torch.tensor(what.found_inf)
            if what.bad or what.found_inf:
                skipped += 1
                both.twin.zero_grad()  # nothing changes anywhere
            with watched(what, steps[step - 1] if step else None):
                opt.step()
                opt.zero_grad()
                if step % 2:
                    opt.synchronize()
            opt.grad_scale = opt.found_inf = None
            if ref is not None:
                ref.step()
            both.twin.zero_grad()
        opt.synchronize()
        if compare:
            assert both.difference()[0] <= 1e-5, both.difference()
            assert opt.stats()["skipped"] == skipped and opt.stats()["finite"]
        return both.whole(), state_of(opt)


@pytest.mark.parametrize(
    ("case", "world", "period", "settings"),
    [
        ("fsdp2", 2, 1, {}),
        ("fsdp2", 2, 3, {}),
        ("fsdp2", 2, 2, {"master_weights": True, "dtype": torch.bfloat16}),
        # Operands lie in the narrower dtype, where no host reads.
        ("fsdp2", 2, 1, {"ns_dtype": torch.bfloat16}),
        ("tp", 2, 3, {}),
        ("hsdp", 4, 2, {}),
        ("fsdp2", 2, 1, SHARED),
        ("hsdp", 4, 2, SHARED),
    ],
)
@distributed()
def test_sharded_steps_need_no_host(rank, world, case, period, settings):
    """The same with and without a host that reads."""
    # torch's clipping takes no mixture of meshes.
    steps = [s for s in SHARDED_STEPS if s.clip != "torch" or case != "tp"]
    settings = settings | WITHOUT_ADAMW | {"period": period}
    expected = run_sharded(BY_NAME[case], steps, rank, compare=False, **settings)
    with host_cannot_read():
        found = run_sharded(BY_NAME[case], steps, rank, compare=False, **settings)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs, rounded=period != 1 or "planner" in settings)


@pytest.mark.parametrize(
    ("case", "world", "settings"),
    [
        *((FSDP1, 1, {}), (BY_NAME["fsdp2"], 2, {}), (BY_NAME["fsdp2"], 2, SHARED)),
        *(("replicated", 2, {}), ("replicated", 2, SHARED)),
    ],
)
@distributed()
def test_sharded_steps_equal_the_reference(rank, world, case, settings):
    case = REPLICATED if case == "replicated" else case  # found again in this process
    with host_cannot_read():
        run_sharded(case, SHARDED_STEPS, rank, compare=True, **settings)


@distributed(2)
def test_block_steps_need_no_host_and_equal_the_oracle(rank, world):
    with host_cannot_read():
        check_against_oracle("fsdp2", 3, 0.7, 5)
