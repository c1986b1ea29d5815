"""The update is never changed: every layout against Muon in one process on everybody's data.

The first half is a table: a row is a layout (or several), a model, a mesh, and settings of any
kind. What needs more than "the same weights" has a test of its own below.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from dmuon.dtensors import whole_tensor
from tests.distributed.compare import assert_bitwise, assert_close, average_gradients
from tests.distributed.harness import distributed
from tests.distributed.layouts import IN_TWO, Layout, mesh_of, shard_units, sharded
from tests.distributed.models import Casting, Net, Used, batch, loss_of, net_of, tied, weights
from tests.distributed.twins import Rows, both, follow

BF16 = torch.bfloat16
ROWS = Rows()


def in_another_order() -> DeviceMesh:
    names = ("replicate", "shard")
    device = torch.get_default_device().type
    return DeviceMesh(device, [[0, 2], [1, 3]], mesh_dim_names=names)


ROWS.add("another order of ranks", "dedicated fsdp", world=4, mesh=in_another_order)
ROWS.add("another order, replicas", "hsdp", mesh=in_another_order)


CUBE = {"mesh": (2, 1, 2), "axes": ("replicate", "shard", "tp")}
ROWS.add("replicas and columns", replace(IN_TWO, **CUBE))


class TwoMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(61, 6)
        self.a = nn.Linear(6, 9, bias=False)
        self.b = nn.Linear(9, 61, bias=False)
        self.w_empty = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        return self.b(self.a(self.tok(tokens))) * self.scale


# More ranks than matrices.
ROWS.add("two matrices", "reduced", world=4, build=TwoMatrices)
for way in (
    {"static_graph": True},
    {"bucket_cap_mb": 0.005, "gradient_as_bucket_view": True, "find_unused_parameters": True},
):
    ROWS.add(f"DDP {way}", "reduced", build=Used, wrap=partial(DistributedDataParallel, **way))


def over_a_mesh(model):
    return DistributedDataParallel(model, device_mesh=mesh_of((2,)))


ROWS.add("DDP over a mesh", "reduced", build=Used, wrap=over_a_mesh)


def together(model, mesh):
    """Both blocks are one unit: running the first gathers the second."""
    fully_shard(list(model.blocks), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def evaluating(pair, step):
    """Right after a step: a state dict once, and the loss."""
    if step == 2:
        saved = {n: whole_tensor(v).clone() for n, v in pair.model.state_dict().items()}
        assert_close(saved, weights(pair.twin))
    pair.model.eval()
    pair.assert_same_loss(9)
    pair.model.train()
    pair.both_backward(step)


class Attention(nn.Module):
    """Causal attention of one head. With a mesh, its ranks hold parts of each sequence."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mesh: DeviceMesh | None = None

    def forward(self, x):
        (q, k, v), first = self.qkv(x).chunk(3, -1), 0
        if self.mesh is not None:
            whole = (DTensor.from_local(t, self.mesh, [Shard(1)], run_check=False) for t in (k, v))
            k, v = (
                t.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
                for t in whole
            )
            first = x.shape[1] * self.mesh.get_local_rank()
        mask = torch.ones(x.shape[1], k.shape[1], dtype=torch.bool).tril(first)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def context_parallel(model, mesh):
    """FSDP2 over both axes as one, as torchtitan does."""
    for block in model.blocks:
        block.mesh = mesh["cp"]
    return shard_units(model, mesh["dp", "cp"]._flatten("fsdp"))


def at_a_part(model, step, rank):
    model.at = step, rank


def loss_of_a_part(model, inputs):
    """Of a half of the sequences that two ranks have together."""
    step, rank = model.at
    tokens, targets = batch(step, rank // 2)
    half = slice(8 * (rank % 2), 8 * (rank % 2) + 8)
    is_whole = model.blocks[0].mesh is None
    logits = model(tokens)[:, half] if is_whole else model(tokens[:, half])
    return F.cross_entropy(logits.flatten(0, 1), targets[:, half].flatten())


def cast(pair, step):
    """The twin computes in bfloat16 from its weights, as units do."""
    pair.copy_weights()
    rounded_backward(pair, step, set(weights(pair.twin)))


CONTEXT = Layout((2, 2), ("dp", "cp"), context_parallel, build=partial(net_of, Attention))
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
# docs/frameworks/fsdp2.md lists these.
OF_FSDP2 = {
    "offload_policy=CPUOffloadPolicy()": {"layout": sharded(offload_policy=OFFLOAD)},
    "reshard_after_forward=2": {"layout": sharded(reshard_after_forward=2), "mesh": (4,)},
    "mp_policy=MixedPrecisionPolicy(bfloat16, float32)": {
        "layout": sharded(build=Net, mp_policy=MixedPrecisionPolicy(BF16, torch.float32)),
        "round": cast,
    },
    "context parallel": {
        "layout": replace(CONTEXT, from_first=False),
        "prepare": at_a_part,
        "loss_of": loss_of_a_part,
    },
}


@pytest.mark.parametrize(("world", "name"), [(4, name) for name in OF_FSDP2])
@distributed()
def test_options_of_fsdp2_change_nothing(rank, world, name):
    follow(muon={"adamw_eps": 1e-3}, tolerance=1e-6, **OF_FSDP2[name])


ROWS.add("units stay gathered", sharded(reshard_after_forward=False), round=evaluating, steps=4)
ROWS.add("blocks in one unit", replace(sharded(), wrap=together))


@ROWS.each()
@distributed()
def test_training_follows_the_reference(rank, world, name):
    ROWS.follow(name)


@distributed(4)
def test_two_ownerships_on_halves_of_the_ranks(rank, world):
    mesh = mesh_of((2, 2), ("stage", "dp"))
    stage, data_rank = divmod(rank, 2)
    with both(lambda: Net(layers=1 + stage), "reduced", mesh=mesh["dp"]) as pair:
        assert pair.own.plan.topology.world == 2 and pair.own.rank == pair.data_rank == data_rank
        pair.train(range(2))
        pair.check()


def as_bfloat16(twin, names):
    """A model like ``twin`` whose matrices are rounded, gradients going to the twin's weights."""

    def run(tokens):
        rounded = {n: p.bfloat16() for n, p in twin.named_parameters() if n in names}
        return functional_call(twin, rounded, (tokens,))

    return run


def called_twice(model, step, rank):
    model.order = [0, 1, 2, 0]


def two_forwards(model, inputs):
    return loss_of(model, inputs) + loss_of(model, (inputs[0].flip(1), inputs[1]))


# Several uses are accumulated one by one, because the weight's dtype has changed in between; their
# sum is rounded to bfloat16 in another order than in the twin.
USES = {
    "once": ({}, 1e-5),
    "summed in bfloat16": ({"options": {"reduce_dtype": BF16}}, 5e-3),
    "summed in float32": ({"options": {"reduce_dtype": torch.float32}}, 1e-5),
    "called twice": ({"prepare": called_twice}, 1e-3),
    "tied": ({"change": tied}, 1e-3),
    "two forwards": ({"loss_of": two_forwards}, 1e-3),
}


def rounded_backward(pair, step, names):
    """Of a rank's data, then the mean of all."""
    pair.backward(step)
    pair.prepare(pair.twin, step, pair.data_rank)
    rounded = as_bfloat16(pair.twin, names)
    pair.loss_of(rounded, batch(step, pair.data_rank)).backward()
    average_gradients(pair.twin)


@distributed(2)
def test_weights_used_in_bfloat16(rank, world):
    for kind, (settings, tolerance) in USES.items():
        options = {"param_dtype": BF16} | settings.get("options", {})
        with both(Casting, **(settings | {"options": options})) as pair:
            for step in range(2):
                pair.copy_weights()
                rounded_backward(pair, step, set(pair.matrices))
                pair.advance()
                pair.check(tolerance)
            assert all(block.dtypes == {BF16} for block in pair.model.blocks), kind
            assert {p.dtype for p in pair.own.dedicated_params} == {torch.float32}


@distributed(2)
def test_mixed_precision_of_both(rank, world):
    """FSDP2 casts inputs and the rest, dmuon the matrices: blocks run in bfloat16."""
    options = {"param_dtype": BF16, "reduce_dtype": torch.float32}
    policy = MixedPrecisionPolicy(BF16, torch.float32)
    with both(Net, "dedicated fsdp", options=options, fsdp={"mp_policy": policy}) as pair:
        before = weights(pair.twin)
        for step in range(3):
            rounded_backward(pair, step, set(before))
            pair.advance()
        found, expected = pair.whole(), weights(pair.twin)
        for name, weight in found.items():
            change = expected[name] - before[name]
            if float(change.norm()):
                assert (weight - expected[name]).norm() <= 0.05 * change.norm(), name


@distributed(2)
def test_frozen_parameters_let_gradients_through(rank, world):
    def freeze(model):
        model.blocks[0].up.weight.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        model.mid.weight.requires_grad_(False)

    for layout in ("dedicated fsdp", "reduced ddp", "fsdp2"):
        with both(Net, layout, change=freeze) as pair:
            assert all(p.requires_grad for p in pair.own.dedicated_params)
            before = {n: p.clone() for n, p in pair.twin.named_parameters() if not p.requires_grad}
            pair.train(range(3))
            pair.check()
            frozen = {n: p for n, p in pair.bare.named_parameters() if n in before}
            assert_bitwise({n: whole_tensor(p) for n, p in frozen.items()}, before)
