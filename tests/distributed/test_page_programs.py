"""Pages that are whole programs: run on several processes, they train as one process does without
any distribution. `unit/test_pages` runs them in one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.dtensors import whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.types import Algorithm, OwnershipError
from tests.distributed.compare import assert_bitwise, assert_close, gathered, whole
from tests.distributed.harness import distributed
from tests.unit.test_pages import blocks, prelude

DOCS = Path(__file__).parents[2] / "docs"
EXACT = {"ns_dtype": torch.float32}


@contextmanager
def as_a_program() -> Iterator[None]:
    """The processes have met, and will go on with other tests; Newton-Schulz in float32."""
    made = patch.object(dmuon, "Muon", partial(dmuon.Muon, **EXACT))
    with patch("torch.distributed.init_process_group"), made:
        yield


def run(page: str, without: str = "not run", change: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """The names of a page after all of its blocks but those that hold this text, and with this
    change."""
    text, names = (DOCS / page).read_text(encoding="utf-8"), prelude()
    with as_a_program():
        for block in blocks(text):
            if block.why_not is None and without not in block.code:
                code = "\n" * (block.line - 1) + block.code.replace(*change)
                exec(compile(code, page, "exec"), names)
    return names


def alone(
    model: nn.Module, losses: Callable[[nn.Module, int], list[Tensor]], steps: int, **how: Any
) -> dict[str, Tensor]:
    """The weights after these steps in one process, on the losses of all ranks, with clipping."""
    opt = ReferenceMuon(model, **EXACT, **how)
    for step in range(steps):
        found = losses(model, step)
        (sum(found) / len(found)).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def chosen(own: dmuon.Ownership) -> Callable[[str, Tensor], bool]:
    """`select` of what this ownership gives to Muon."""
    specs = own.plan.specs.parameters
    names = {p.name for p in specs if p.algorithm is Algorithm.MUON}
    return lambda name, p: name in names


@distributed(2)
def test_mixture_of_experts(rank: int, world: int) -> None:
    page = run("moe.md")
    model, opt = page["model"], page["opt"]
    routed = {p.name: p.algorithm.value for p in opt.ownership.plan.specs.parameters}
    assert routed["blocks.0.router.weight"] == "adamw"
    assert routed["blocks.1.experts.gate_up_proj"] == "muon"
    names = {m.original.name for m in opt.ownership.plan.specs.matrices}
    assert {
        f"blocks.1.experts.gate_up_proj[{e}][:, {k}::2]" for e in range(4) for k in (0, 1)
    } <= names

    def losses(twin: nn.Module, step: int) -> list[Tensor]:
        return [page["loss_of"](twin, *page["batch"](step, r)) for r in range(world)]

    torch.manual_seed(0)
    how = {"lr": 1e-2, "select": chosen(opt.ownership)}
    splits = {"*.gate_up_proj": "interleaved:2"}
    expected = alone(page["Model"](), losses, 5, **how, splits=splits)
    assert_close(whole(model, opt.ownership), expected, 1e-5)
    torch.manual_seed(0)
    uncut = alone(page["Model"](), losses, 5, **how)
    assert max(float((uncut[n] - w).abs().max()) for n, w in expected.items()) > 1e-3
    opt.ownership.close()


# ---- policies --------------------------------------------------------------------------------


@distributed(2)
def test_policies(rank: int, world: int) -> None:
    """Both of the page's optimizers train alike on all ranks, what is unfrozen later included."""
    page = run("vla.md", change=("torch.bfloat16", "torch.float32"))
    own = page["optimizer"].ownership
    specs = own.plan.specs.parameters
    names = {id(p): n for n, p in page["bare"].named_parameters()}
    routed = {
        names[id(p)]: spec.algorithm.value for p, spec in zip(own.parameters, specs, strict=True)
    }
    for vector in ("vision.patch_embedding", "embed_tokens", "time_proj"):
        assert routed.pop(f"{vector}.weight") == "adamw"
    muon = {n for n, algorithm in routed.items() if algorithm == "muon"}
    assert {"action_in_proj.weight", "vision.block.up.weight"} <= muon
    torch.manual_seed(0)
    before = dict(page["Policy"]().named_parameters())
    for model, optimizer in (("bare", "optimizer"), ("sharded", "optimizer2")):
        found = whole(page[model], page[optimizer].ownership)
        for every in zip(*(each.values() for each in gathered(found)), strict=True):
            assert all(torch.equal(every[0], other) for other in every)
        if model == "bare":
            assert not any(torch.equal(found[name], before[name]) for name in muon)
        page[optimizer].ownership.close()


# ---- recipes ---------------------------------------------------------------------------------

# Mesh, and what `dedicate_params` is asked for. Rows of 20 and 10, in heads of 5, are cut anywhere.
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "ddp": ((2,), {}),
    "fsdp2": ((2,), {}),
    "tp": ((1, 2), {}),
    "tp+fsdp": ((2, 2), {}),
    "reduce_to_owner": ((2,), {"options": dmuon.ReplicatedOptions(reduce_to_owner=True)}),
    "dedicated": ((2,), {"layout": "dedicated"}),
}
STEPS, TAU = 3, 0.9


def recipes() -> dict[str, Any]:
    return run("recipes.md", without="peft")


def laid_out(model: nn.Module, name: str) -> tuple[nn.Module, int, int]:
    """(the model in this layout, data rank, data ranks)"""
    shape, _ = LAYOUTS[name]
    if len(shape) == 1:
        mesh, data = init_device_mesh("cpu", shape), (dist.get_rank(), shape[0])
        if name.startswith("fsdp"):
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        return DistributedDataParallel(model) if name == "ddp" else model, *data
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    styles = {f"{x}_proj": ColwiseParallel() for x in "qkv"} | {"o_proj": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], styles)
        block.first_head = mesh["tp"].get_local_rank() * block.heads // mesh["tp"].size()
        if shape[0] > 1:
            fully_shard(block, mesh=mesh["dp"])
    if shape[0] > 1:
        fully_shard(model, mesh=mesh["dp"])
    return model, mesh["dp"].get_local_rank(), shape[0]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(32, (4, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens, targets = batch(step, rank)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def made(page: dict[str, Any], name: str, **muon: Any) -> tuple[Any, ...]:
    """(model, optimizer, float32 twin, data rank, data ranks)"""
    torch.manual_seed(0)
    model = page["Model"](width=24, heads=4, kv_heads=2, head_dim=5)
    twin = copy.deepcopy(model)
    model, *data = laid_out(model.bfloat16() if muon.get("master_weights") else model, name)
    if asked := LAYOUTS[name][1]:
        dmuon.dedicate_params(model, **asked)
    return model, dmuon.Muon(model, lr=2e-2, **EXACT, **muon), twin, *data


@pytest.mark.parametrize(
    ("name", "world", "masters"),
    [("ddp", 2, True), ("tp+fsdp", 4, False), ("dedicated", 2, False)],
)
@distributed()
def test_qk_clip(rank: int, world: int, name: str, masters: bool) -> None:
    page = recipes()
    model, opt, twin, data_rank, data_ranks = made(page, name, master_weights=masters)
    ref = ReferenceMuon(twin, lr=2e-2, **EXACT)
    mine, theirs = (
        [m for m in x.modules() if isinstance(m, page["Attention"])] for x in (model, twin)
    )
    own, bare = opt.ownership, getattr(model, "module", model)

    def clip(attentions: list[Any], threshold: float) -> Tensor:
        with own.materialized(bare):
            return page["clip_qk_"](attentions, threshold)

    clipped: Any = []
    for step in range(STEPS):
        loss_of(model, step, data_rank).backward()
        opt.step()
        opt.zero_grad()
        found = clip(mine, TAU)
        for r in range(data_ranks):
            (loss_of(twin, step, r) / data_ranks).backward()
        ref.step()
        ref.zero_grad()
        expected = page["clip_qk_"](theirs, TAU)
        assert torch.allclose(found, expected, rtol=5e-2 if masters else 1e-5), (found, expected)
        clipped += (found > TAU).flatten().tolist()
    assert 0 < sum(clipped) < len(clipped)  # some heads, not all
    # In bfloat16 AdamW takes whole steps by the sign of what is nearly zero.
    names = [n for n, p in twin.named_parameters() if not masters or "q_proj.weight" in n]
    found, expected = whole(bare, own), dict(twin.named_parameters())
    tolerance = 2e-2 if masters else 1e-5
    assert_close({n: found[n] for n in names}, {n: expected[n].detach() for n in names}, tolerance)

    def measured(threshold: float) -> Tensor:
        """The largest logits on the same data again; clips after."""
        loss_of(model, STEPS, data_rank)
        return clip(mine, threshold)

    first = measured(torch.inf)[0]  # of the first layer, whose input no clipping changes
    threshold = float(first.sort().values[1])
    assert torch.equal(measured(threshold)[0], first)  # a factor of 1 changes nothing
    highest = first.view(2, 2).amax(1).repeat_interleave(2)  # of two heads that share keys
    expected = first * (threshold / highest).clamp(max=1.0)
    clipped = measured(torch.inf)[0]
    assert torch.allclose(clipped, expected, rtol=1e-2 if masters else 1e-5), (clipped, expected)
    assert float(clipped.max()) == pytest.approx(threshold, rel=1e-2 if masters else 1e-5)
    weights = whole(bare, own)
    for group in opt.param_groups:
        group |= {key: 0.0 for key in ("lr", "adamw_lr") if group.get(key) is not None}
    loss_of(model, STEPS, data_rank).backward()
    opt.step()  # masters, if there are any, have followed
    assert_bitwise(whole(bare, own), weights)
    own.close()


@distributed(2)
def test_qk_clip_takes_finite_logits_of_training_alone(rank: int, world: int) -> None:
    page = recipes()
    model = page["Model"](width=24, heads=4, kv_heads=4, head_dim=6)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    ran, idle = (m for m in model.modules() if isinstance(m, page["Attention"]))
    loss_of(model.eval(), 0, rank)
    assert ran.max_logits is None  # of an evaluation
    loss_of(model.train(), 0, rank)
    assert ran.max_logits is not None
    planted = torch.tensor([2.0, torch.inf, torch.nan, 0.5])
    ran.max_logits, idle.max_logits = planted if rank == world - 1 else None, None
    found = page["clip_qk_"]([ran, idle], threshold=1.0)
    assert found[0, :2].tolist() == [2.0, torch.inf] and found[1].tolist() == [-torch.inf] * 4
    for name, p in model.named_parameters():
        expected = before[name].clone()
        if name.startswith("blocks.0.") and ("q_proj" in name or "k_proj" in name):
            expected[:6] *= 0.5**0.5  # the first head
        torch.testing.assert_close(p.detach(), expected)


def clipping(page: dict[str, Any], name: str) -> Callable[..., Tensor]:
    """torch's own on one mesh, and the page's on several."""
    return page["clip_on_meshes_"] if "tp" in name else nn.utils.clip_grad_norm_


@pytest.mark.parametrize(("name", "world"), [("fsdp2", 2), ("tp+fsdp", 4)])
@distributed()
def test_only_the_gradients_of_adamw_are_clipped(rank: int, world: int, name: str) -> None:
    page = recipes()
    model, opt, twin, data_rank, data_ranks = made(page, name)
    ref = ReferenceMuon(twin, lr=2e-2, **EXACT)
    own, bare, others = opt.ownership, getattr(model, "module", model), ref.adamw.param_groups[0]
    names = {id(p): n for x in (bare, twin) for n, p in x.named_parameters()}
    found, expected = own.adamw_parameters(), others["params"]
    assert [names[id(p)] for p in found] == [names[id(p)] for p in expected]
    for step in range(STEPS):
        most = 0.05 * (1 + step)
        loss_of(model, step, data_rank).backward()
        for r in range(data_ranks):
            (loss_of(twin, step, r) / data_ranks).backward()
        norms = [
            clip(parameters, most)
            for clip in (clipping(page, name), page["clip_on_meshes_"])
            for parameters in (own.adamw_parameters(), expected)
        ]
        values = [float(whole_tensor(norm)) for norm in norms]
        assert values[0] == pytest.approx(values[1], rel=1e-5) and values[1] > 2 * most
        assert values[2:] == pytest.approx([most] * 2, rel=1e-4)  # of what is clipped already
        opt.step()
        opt.zero_grad()
        ref.step()
        ref.zero_grad()
    assert_close(whole(bare, own), {n: p.detach() for n, p in twin.named_parameters()})
    own.close()


@pytest.mark.parametrize("name", ["tp", "reduce_to_owner", "dedicated"])
@distributed(2)
def test_where_the_page_says_that_it_cannot_be_done_an_error_says_so(
    rank: int, world: int, name: str
) -> None:
    model, opt, _, data_rank, _ = made(recipes(), name)
    loss_of(model, 0, data_rank).backward()
    with pytest.raises(Exception, match="DTensor|clip with dmuon.clip_grad_norm_") as error:
        nn.utils.clip_grad_norm_(opt.ownership.adamw_parameters(), 0.05)
        opt.step()
    assert isinstance(error.value, RuntimeError if name == "tp" else OwnershipError)
    opt.ownership.close()
