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
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dmuon
from dmuon.dtensors import whole_tensor
from dmuon.reference import ReferenceMuon
from dmuon.types import Algorithm, OwnershipError
from tests.distributed.compare import assert_close, gathered, whole
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


def run(
    page: str, without: str = "not run", change: tuple[str, str] = ("", ""), **given: Any
) -> dict[str, Any]:
    """The names of a page after all of its blocks but those that hold this text, and with this
    change; ``given`` are names that it uses."""
    text, names = (DOCS / page).read_text(encoding="utf-8"), prelude() | given
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


@distributed(2, 4)
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
    assert_close(whole(model, opt.ownership), expected, 1e-6)
    torch.manual_seed(0)
    uncut = alone(page["Model"](), losses, 5, **how)
    assert max(float((uncut[n] - w).abs().max()) for n, w in expected.items()) > 1e-3
    opt.ownership.close()


@distributed(4)
def test_pipeline_stages(rank: int, world: int) -> None:
    page = run("frameworks/pipeline.md", without="named = ")
    torch.manual_seed(0)
    given = prelude()
    loss_of, data = given["loss_fn"], given["data"]

    def losses(twin: nn.Module, step: int) -> list[Tensor]:
        return [loss_of(twin(data[step][0]), data[step][1])]

    expected = alone(given["build_model"](), losses, len(data), lr=1e-3)
    found = whole(page["part"], page["opt"].ownership)
    assert set().union(*gathered(set(found))) == expected.keys()
    assert_close(found, {n: expected[n] for n in found}, 1e-6)


@distributed(4)
def test_workers(rank: int, world: int) -> None:
    """DiLoCo of two workers of two ranks, each with its data."""

    def data_of(place: int) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(1 + place)
        found = [torch.randint(11, (4, 6)) for _ in range(4)]
        return [(tokens, tokens.roll(-1, 1)) for tokens in found]

    data, torch_state = [data_of(place) for place in range(world)], torch.manual_seed(0)
    page = run("frameworks/workers.md", data=data[rank])
    torch_state.manual_seed(0)
    given = prelude()
    twins = [copy.deepcopy(given["build_model"]())]
    twins.append(copy.deepcopy(twins[0]))
    refs = [ReferenceMuon(twin, lr=1e-3, **EXACT) for twin in twins]
    start = [p.detach().clone() for p in twins[0].parameters()]
    outer = torch.optim.SGD(start, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(4):
        for worker, (twin, ref) in enumerate(zip(twins, refs, strict=True)):
            for place in (2 * worker, 2 * worker + 1):
                inputs, targets = data[place][step]
                (given["loss_fn"](twin(inputs), targets) / 2).backward()
            ref.step()
            ref.zero_grad()
        if step % 2:
            pairs = zip(start, *(twin.parameters() for twin in twins), strict=True)
            for before, one, other in pairs:
                before.grad = before - (one.detach() + other.detach()) / 2
            outer.step()
            with torch.no_grad():
                for twin in twins:
                    for before, p in zip(start, twin.parameters(), strict=True):
                        p.copy_(before)
    expected = {n: p.detach() for n, p in twins[0].named_parameters()}
    assert_close(whole(page["model"], page["opt"].ownership), expected, 1e-6)
    assert page["opt"].ownership.runtime.transport.world == 2


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
    "fsdp2": ((2, 1), {}),
    "tp": ((1, 2), {}),
    "tp+fsdp": ((2, 2), {}),
    "dedicated": ((2, 1), {"layout": "dedicated"}),
}
STEPS, TAU = 3, 0.9


def recipes() -> dict[str, Any]:
    return run("recipes.md")


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(32, (4, 9), generator=generator)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Pair:
    """The page's model in a layout, and its twin in one process."""

    def __init__(self, page: dict[str, Any], name: str) -> None:
        torch.manual_seed(0)
        self.model = page["Model"](width=24, heads=4, kv_heads=2, head_dim=5)
        self.twin = copy.deepcopy(self.model)
        shape, asked = LAYOUTS[name]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        self.rank, self.ranks = mesh["dp"].get_local_rank(), shape[0]
        styles = {f"{x}_proj": ColwiseParallel() for x in "qkv"} | {"o_proj": RowwiseParallel()}
        for block in self.model.blocks if "tp" in name else ():
            parallelize_module(block, mesh["tp"], styles)
            block.first_head = mesh["tp"].get_local_rank() * block.heads // shape[1]
        for module in (*self.model.blocks, self.model) if "fsdp" in name else ():
            fully_shard(module, mesh=mesh["dp"])
        if asked:
            dmuon.dedicate_params(self.model, **asked)
        self.opt = dmuon.Muon(self.model, lr=2e-2, **EXACT)
        self.ref = ReferenceMuon(self.twin, lr=2e-2, **EXACT)

    def backward(self, step: int) -> None:
        loss_of(self.model, step, self.rank).backward()
        for r in range(self.ranks):
            (loss_of(self.twin, step, r) / self.ranks).backward()

    def step(self) -> None:
        for one in (self.opt, self.ref):
            one.step()
            one.zero_grad()

    def check(self) -> None:
        expected = {n: p.detach() for n, p in self.twin.named_parameters()}
        assert_close(whole(self.model, self.opt.ownership), expected)
        self.opt.ownership.close()


@pytest.mark.parametrize(("name", "world"), [("tp+fsdp", 4), ("dedicated", 2)])
@distributed()
def test_qk_clip(rank: int, world: int, name: str) -> None:
    page = recipes()
    pair = Pair(page, name)
    mine, theirs = (
        [m for m in x.modules() if isinstance(m, page["Attention"])]
        for x in (pair.model, pair.twin)
    )
    clipped: list[bool] = []
    for step in range(STEPS):
        pair.backward(step)
        pair.step()
        with pair.opt.ownership.materialized(pair.model):
            found = page["clip_qk_"](mine, TAU)
        assert torch.allclose(found, page["clip_qk_"](theirs, TAU), rtol=1e-5)
        clipped += (found > TAU).flatten().tolist()
    assert 0 < sum(clipped) < len(clipped)  # some heads, not all
    pair.check()


@pytest.mark.parametrize(("name", "world"), [("fsdp2", 2), ("tp+fsdp", 4)])
@distributed()
def test_only_the_gradients_of_adamw_are_clipped(rank: int, world: int, name: str) -> None:
    """By torch's own function on one mesh, and by the page's on several."""
    page = recipes()
    pair = Pair(page, name)
    expected = pair.ref.adamw.param_groups[0]["params"]
    clip = nn.utils.clip_grad_norm_ if name == "fsdp2" else page["clip_on_meshes_"]
    for step in range(STEPS):
        most = 0.05 * (1 + step)
        pair.backward(step)
        norm = whole_tensor(clip(pair.opt.ownership.adamw_parameters(), most))
        assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(expected, most)))
        assert float(norm) > 2 * most
        pair.step()
    pair.check()


@pytest.mark.parametrize("name", ["tp", "dedicated"])
@distributed(2)
def test_where_the_page_says_that_it_cannot_be_done_an_error_says_so(
    rank: int, world: int, name: str
) -> None:
    pair = Pair(recipes(), name)
    pair.backward(0)
    with pytest.raises(Exception, match="DTensor|clip with dmuon.clip_grad_norm_") as error:
        nn.utils.clip_grad_norm_(pair.opt.ownership.adamw_parameters(), 0.05)
        pair.opt.step()
    assert isinstance(error.value, RuntimeError if name == "tp" else OwnershipError)
    pair.opt.ownership.close()
