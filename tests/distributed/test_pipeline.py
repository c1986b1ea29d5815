"""Pipeline parallelism: every stage plans on its own mesh, and stages may skip a step together."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.scheduler.select import trainable_parameters
from dmuon.types import ConsensusError, DmuonError, NonFiniteError, OwnershipError
from tests.accelerator import host_cannot_read
from tests.distributed.compare import assert_bitwise, gathered, snapshot
from tests.distributed.harness import distributed
from tests.distributed.models import VOCAB, Block, batch, loss_of, seeded
from tests.distributed.twins import MUON, grouped_references

LAYERS, MICROBATCHES, TOLERANCE = 4, 4, 1e-6
SCHEDULES = {
    "1F1B": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
}
SPLIT = ("zero bubble", "ZBV")  # gradients of weights come after those of inputs
# Between the two, activations are DTensors, which support parts of unequal sizes.
TENSOR_PARALLEL = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}


class Model(nn.Module):
    """All layers, or some of them under the same names: those of part ``number`` of ``count``."""

    def __init__(self, number: int = 0, count: int = 1, alone: bool = False) -> None:
        super().__init__()
        layers = [Block(22, 15) for _ in range(LAYERS)]
        ends = nn.Embedding(VOCAB, 22), nn.Linear(22, VOCAB)
        # ``alone``: the first part has the embedding, and no layer.
        first, parts = (1, count - 1) if alone else (0, count)
        k = number - first
        own = range(LAYERS * k // parts, LAYERS * (k + 1) // parts) if k >= 0 else ()
        self.tok = ends[0] if number == 0 else None
        self.blocks = nn.ModuleDict({str(i): layers[i] for i in own})
        self.lm_head = ends[1] if number == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok is None else self.tok(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.lm_head is None else self.lm_head(x)


build = partial(seeded, Model)


def loss_of_part(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass
class Pipeline:
    """This rank's parts of a model, beside a twin: all of it, in one process or ``beside`` it under
    FSDP2 on the mesh of each stage."""

    mesh: DeviceMesh
    stages: list[PipelineStage]
    schedule: Any
    parts: list[nn.Module]
    opts: list[dmuon.Muon]
    twin: nn.Module
    refs: list[Any]
    is_beside: bool

    @classmethod
    def of(
        cls, pp: int, dp: int, tp: int = 1, *, kind: str = "1F1B", ddp: bool = False,
        each: bool = False, joint: bool = True, alone: bool = False, beside: bool = False,
        **muon: Any,
    ) -> Pipeline:  # fmt: skip
        device = torch.get_default_device().type
        mesh = init_device_mesh(device, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        rank, is_single = mesh.get_local_rank("pp"), kind == "1F1B"
        count = pp if is_single else 2 * pp
        other = 2 * pp - 1 - rank if kind == "ZBV" else rank + pp
        numbers = [rank] if is_single else [rank, other]
        parts: list[Any] = [build(number=n, count=count, alone=alone) for n in numbers]
        for n, part in enumerate(parts):
            for block in part.blocks.values() if tp > 1 else ():
                parallelize_module(block, mesh["tp"], TENSOR_PARALLEL)
            if ddp:
                parts[n] = DistributedDataParallel(part, process_group=mesh.get_group("dp"))
                continue
            # torch's split backward loses gradients of units inside of units.
            for module in (part,) if kind in SPLIT else (*part.blocks.values(), part):
                fully_shard(module, mesh=mesh["dp"])
        at = partial(
            PipelineStage, num_stages=count, device=torch.get_default_device(),
            group=mesh.get_group("pp"),
        )  # fmt: skip
        stages = [at(part, n) for part, n in zip(parts, numbers, strict=True)]
        made: Any = SCHEDULES[kind]
        schedule = made(stages[0] if is_single else stages, MICROBATCHES, loss_fn=loss_of_part)
        settings = MUON | muon | ({"nonfinite_group": mesh["pp"]} if joint else {})
        named = [pair for part in parts for pair in trainable_parameters(part)]
        passed = parts if each or ddp else [named]
        opts = [dmuon.Muon(given, **settings) for given in passed]
        twin = build()
        if beside:
            for module in (*twin.blocks.values(), twin):
                fully_shard(module, mesh=mesh["dp"])
            refs: list[Any] = [dmuon.Muon(twin, **MUON, **muon)]
        else:
            matrices = [n for n, p in twin.named_parameters() if "blocks" in n and p.ndim == 2]
            groups = [{"params": [*twin.named_parameters()]}]
            refs = grouped_references(groups, MUON, matrices)
        return cls(mesh, stages, schedule, parts, opts, twin, refs, beside)

    @property
    def opt(self) -> dmuon.Muon:
        (only,) = self.opts
        return only

    @property
    def own(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the model."""
        return {n: p for part in self.parts for n, p in trainable_parameters(part)}

    def backward(self, step: int) -> None:
        tokens, targets = batch(step, self.mesh.get_local_rank("dp"))
        given = (tokens,) if any(stage.is_first for stage in self.stages) else ()
        is_last = any(stage.is_last for stage in self.stages)
        self.schedule.step(*given, **({"target": targets, "losses": []} if is_last else {}))
        if self.is_beside:
            loss_of(self.twin, (tokens, targets)).backward()
            return
        for rank in range(self.mesh.size(1)):
            (loss_of(self.twin, batch(step, rank)) / self.mesh.size(1)).backward()

    def step(self) -> None:
        for optimizer in (*self.opts, *self.refs):
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for optimizer in (*self.opts, *self.refs):
            optimizer.zero_grad()

    def train(self, steps: Sequence[int]) -> None:
        for step in steps:
            self.backward(step)
            self.step()

    def check(self) -> None:
        """Compare the weights of all parts with the twin's."""
        expected = {n: whole_tensor(p) for n, p in self.twin.named_parameters()}
        found = {n: whole_tensor(p) for n, p in self.own.items()}
        assert set().union(*gathered(set(found))) == expected.keys()
        off = {n: float((w - expected[n]).abs().max()) for n, w in found.items()}
        assert max(off.values()) <= TOLERANCE, off


def cases(*rows: tuple[Any, ...], last: str = "") -> Any:
    """Parametrize by (ranks of pp, dp and tp; options of `Pipeline.of`; what ``last`` names)."""
    names = [f"{row[0]} {' '.join(map(str, row[1].values()))} {row[2:]}" for row in rows]
    return pytest.mark.parametrize(("shape", "how", *filter(None, [last])), rows, ids=names)


@distributed(4)
@cases(
    ((2, 2), {"joint": False}),
    ((2, 2), {"kind": "interleaved"}),
    ((2, 2), {"kind": "interleaved", "each": True, "joint": False}),
    ((2, 2), {"kind": "zero bubble"}),
    ((2, 2), {"kind": "ZBV"}),
    ((4, 1), {}),
    ((2, 1, 2), {}),
    ((2, 2), {"ddp": True}),
    ((2, 2), {"alone": True}),
    ((2, 2), {"period": 2, "beside": True}),
)
def test_stages_follow_the_whole_model(rank, world, shape, how):
    pipeline = Pipeline.of(*shape, **how)
    pipeline.train(range(3))
    pipeline.check()


@distributed(8)
def test_three_kinds_of_parallelism(rank, world):
    pipeline = Pipeline.of(2, 2, 2, kind="interleaved")
    pipeline.train(range(3))
    pipeline.check()


def poison(pipeline: Pipeline, here: bool, value: float = math.nan) -> None:
    """Spoil a gradient of the last layer, on one rank of those that have it."""
    grad = getattr(pipeline.own.get(f"blocks.{LAYERS - 1}.up.weight"), "grad", None)
    if grad is not None and here:
        local_tensor(grad).view(-1)[:1] = value


def state_here(pipeline: Pipeline) -> list[Tensor]:
    return [t for part in pipeline.parts for t in snapshot(part, pipeline.opt)]


@distributed(4)
@cases(
    ((2, 2), {}, True),
    ((2, 2), {}, False),
    ((2, 2), {"ddp": True}, False),
    ((2, 2), {"kind": "ZBV"}, True),
    ((2, 2), {"nonfinite": "raise"}, True),
    ((2, 2), {"nonfinite": "raise"}, False),
    last="reads",
)
def test_stages_skip_a_step_together(rank, world, shape, how, reads):
    """A gradient is not finite at one rank of one stage; hosts read from devices, or do not."""
    with nullcontext() if reads else host_cannot_read():
        pipeline = Pipeline.of(*shape, **how)
        pipeline.train(range(2))
        pipeline.backward(2)
        poison(pipeline, "ddp" in how or rank % 2 == 1)
        before, raises = state_here(pipeline), "nonfinite" in how
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            error = pytest.raises(NonFiniteError, match="another pipeline stage|up.weight")
            with error if raises and reads else nullcontext():
                pipeline.opt.step()
            assert_bitwise(state_here(pipeline), before)
            pipeline.zero_grad()
            pipeline.backward(3)
            if raises and not reads:  # told of at the next step, on all ranks
                with error:
                    pipeline.opt.step()
            else:
                pipeline.step()
                pipeline.check()
        if raises:
            return
        stats, text = pipeline.opt.stats(), " ".join(str(w.message) for w in told)
        assert (stats["skipped"], stats["finite"]) == (1, True)
        assert not reads or pipeline.opt.metrics()["skipped"] == 1
        if rank in (0, 2):
            has = f"blocks.{LAYERS - 1}.up.weight" in pipeline.own
            assert ("up.weight" if has else "those of another pipeline stage") in text


@distributed(4)
def test_without_the_group_each_stage_decides_alone(rank, world):
    pipeline = Pipeline.of(2, 2, joint=False)
    pipeline.backward(0)
    poison(pipeline, rank % 2 == 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline.opt.step()
    assert pipeline.opt.stats()["skipped"] == int(rank >= 2)


@distributed(4)
@cases(
    ((2, 2), {"kind": "ZBV"}, 2.0),
    ((2, 1, 2), {}, math.inf),
    ((4, 1), {}, 1.0),
    ((2, 2), {"ddp": True}, 2.0),
    last="norm",
)
def test_one_norm_over_all_stages(rank, world, shape, how, norm):
    pipeline = Pipeline.of(*shape, **how)
    for step in range(2):  # before and after planning
        pipeline.backward(step)
        twin = pipeline.twin.parameters()
        expected = torch.nn.utils.clip_grad_norm_(twin, 0.01, norm)
        whole = nn.ModuleList(pipeline.parts)
        torch.testing.assert_close(dmuon.clip_grad_norm_(whole, 0.01, norm), expected)
        after = math.sqrt(sum(float(p.grad.square().sum()) for p in pipeline.twin.parameters()))
        pipeline.step()
        assert pipeline.opt.metrics()["grad_norm"] == pytest.approx(after, rel=1e-5)
    pipeline.check()


@distributed(4)
@pytest.mark.parametrize("reads", [True, False], ids=["host reads", "host does not read"])
def test_an_error_of_one_stage_is_one_of_all(rank, world, reads):
    with nullcontext() if reads else host_cannot_read():
        pipeline = Pipeline.of(2, 2)
        pipeline.train(range(2))
        pipeline.backward(2)
        before = state_here(pipeline)
        if rank == 3:
            pipeline.opt.param_groups[0]["momentum"] = 2.0
        stage = pytest.raises(ValueError if rank == 3 else ConsensusError)
        other = pytest.raises(ConsensusError, match="another pipeline stage")
        expected = stage if rank >= 2 else other
        for turn in range(2):  # an accelerator tells the others at the next step
            with expected if reads or turn or rank == 3 else nullcontext():
                pipeline.opt.step()
            assert_bitwise(state_here(pipeline), before)
            if reads:
                break


@distributed(4)
@pytest.mark.parametrize("flaw", [{"heads": {"*.up.weight": 1000}}, {"costs": "gone.json"}])
def test_what_fails_in_one_stage_before_the_first_step_fails_in_all(rank, world, flaw):
    pipeline = Pipeline.of(2, 2)
    named, group = [*pipeline.own.items()], pipeline.mesh["pp"]
    make = partial(dmuon.Muon, named, **MUON, nonfinite_group=group)
    error, told = (DmuonError, "") if rank >= 2 else (ConsensusError, "failed on rank 1")
    with pytest.raises(error, match=told):
        make(dedicate=flaw if rank >= 2 else {}).report()
    pipeline.opts = [make()]
    pipeline.train(range(2))
    pipeline.check()


@distributed(4)
def test_stages_at_different_steps_refuse_the_next_one(rank, world):
    pipeline = Pipeline.of(2, 2)
    pipeline.train([0])
    kept = copy.deepcopy(pipeline.opt.state_dict())
    pipeline.train([1])
    if rank >= 2:
        pipeline.opt.load_state_dict(kept)
    pipeline.backward(2)
    before = state_here(pipeline)
    with pytest.raises(ConsensusError, match="stages are at different steps"):
        pipeline.opt.step()
    assert_bitwise(state_here(pipeline), before)


@distributed(4)
def test_pipelines_of_other_shapes_one_after_the_other(rank, world):
    for pp in (2, 4, 1, 2):
        pipeline = Pipeline.of(pp, 4 // pp)
        pipeline.train([0])
        pipeline.check()


@distributed(4)
def test_the_latest_optimizer_says_whether_stages_clip_together(rank, world):
    pipeline = Pipeline.of(2, 2)
    latest = dmuon.Muon([*pipeline.own.items()], **MUON)
    pipeline.backward(0)
    twin = [p for n, p in pipeline.twin.named_parameters() if n in pipeline.own]
    expected = torch.nn.utils.get_total_norm([p.grad for p in twin])
    torch.testing.assert_close(dmuon.clip_grad_norm_(pipeline.parts[0], 1.0), expected)
    assert latest.param_groups


@distributed(4)
def test_a_stage_plans_again_while_the_others_wait(rank, world):
    pipeline = Pipeline.of(2, 2)
    named = [pair for m in (*pipeline.parts, pipeline.twin) for pair in m.named_parameters()]
    late = [p for name, p in named if name == "blocks.3.up.weight"]
    for p in late:
        p.requires_grad_(False)
    pipeline.train(range(2))
    for p in late:
        p.requires_grad_(True)
    pipeline.train(range(2, 4))
    pipeline.check()


@distributed(4)
def test_wrong_groups_are_refused(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    part = build(number=mesh.get_local_rank("pp"), count=2)
    fully_shard(part, mesh=mesh["dp"])
    for group in (mesh, "pp", dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(TypeError, match="nonfinite_group must be a process group"):
            dmuon.Muon(part, nonfinite_group=group)
    with pytest.raises(ValueError, match="period=math.inf"):
        dmuon.Muon(part, nonfinite_group=mesh["pp"], period=math.inf)
    opt = dmuon.Muon(part, nonfinite_group=dist.group.WORLD)
    with pytest.raises(OwnershipError, match="one rank of each pipeline stage"):
        opt.step()
    opt = dmuon.Muon(part, nonfinite_group=mesh["pp"], nonfinite=("skip", "raise")[rank // 2])
    with pytest.raises(ConsensusError, match="nonfinite=raise"):
        opt.step()


@distributed(4)
@cases(((2, 2), {"kind": "ZBV"}), ((4, 1), {"kind": "1F1B"}), ((1, 4), {"kind": "1F1B"}))
def test_a_checkpoint_moves_to_other_stages(rank, world, shape, how, tmp_path):
    """Saved by two parts a rank under flat, unique names; loaded into other parts, or one."""
    folder = gathered(str(tmp_path))[0]
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    first = Pipeline.of(2, 2, kind="interleaved", each=True, joint=False)
    first.train(range(2))
    states = [get_state_dict(*pair, options=flat) for pair in zip(first.parts, first.opts)]
    dcp.save(
        {k: v for pair in states for some in pair for k, v in some.items()}, checkpoint_id=folder
    )

    second = Pipeline.of(*shape, **how, each=True, joint=False)
    for part, opt in zip(second.parts, second.opts, strict=True):
        weights, entries = get_state_dict(part, opt, options=flat)
        into = {**weights, **entries}
        dcp.load(into, checkpoint_id=folder)
        weights, entries = ({k: into[k] for k in some} for some in (weights, entries))
        set_state_dict(part, opt, model_state_dict=weights, optim_state_dict=entries, options=flat)
    second.twin, second.refs = first.twin, first.refs
    second.train([2])
    second.check()
