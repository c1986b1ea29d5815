"""Tensor parallelism in the `dedicated` layout: slices at the owner's tensor-parallel ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dmuon
from dmuon.config import DedicatedOptions
from dmuon.reference import ReferenceMuon
from dmuon.types import OwnershipError
from tests.distributed.dedicated import MUON, mesh_of, recorded, shard_rest, whole
from tests.distributed.harness import distributed
from tests.distributed.models import batch, largest_difference, loss_of, seeded, weights

STEPS = 4


def parallelize(model, mesh, *, even=True):
    """Columns and rows; torch's styles take rows that do not divide only if columns are joined."""
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if not even:
        styles = {"up": ColwiseParallel(output_layouts=Replicate())}
    for block in model.blocks:
        parallelize_module(block, mesh, styles)
    return model


def train(model, own, data_rank, data_ranks, twin=None, clip=None):
    """A few steps of the model, and of its twin on everybody's data; the norms of both."""
    opt = dmuon.Muon(model, **MUON)
    ref = None if twin is None else ReferenceMuon(twin, **MUON)
    norms = []
    for step in range(STEPS):
        loss_of(model, batch(step, data_rank)).backward()
        if clip is not None:
            norms.append(float(dmuon.clip_grad_norm_(model, clip)))
        opt.step()
        opt.zero_grad()
        if twin is None:
            continue
        (sum(loss_of(twin, batch(step, r)) for r in range(data_ranks)) / data_ranks).backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(twin.parameters(), clip)))
        ref.step()
        ref.zero_grad()
    return norms


@pytest.mark.parametrize("kind", ["plain", "fsdp", "kept"])
@distributed(4)
def test_tp_with_data_parallelism_equals_the_reference(rank, world, kind):
    mesh = mesh_of((2, 2), ("dp", "tp"))
    for hidden in (56, 57):
        model, twin = seeded(hidden=hidden), seeded(hidden=hidden)
        parallelize(model, mesh["tp"], even=hidden % 2 == 0)
        options = DedicatedOptions(free_after_forward=kind != "kept")
        own = dmuon.dedicate_params(model, mesh, layout="dedicated", options=options)
        if kind == "fsdp":
            shard_rest(model, own, mesh["dp"])
        norms = train(model, own, rank // 2, 2, twin, clip=0.5)
        assert norms[::2] == pytest.approx(norms[1::2], rel=1e-5)
        assert largest_difference(whole(model, own), weights(twin)) <= 1e-5
        own.close()


@distributed(4)
def test_the_result_does_not_depend_on_the_tp_degree(rank, world):
    """Data ranks have the same data in all three, so that only the degree differs."""
    found = []
    for degree in (1, 2, 4):
        model = seeded()
        mesh = mesh_of((world // degree, degree), ("dp", "tp"))
        if degree > 1:
            parallelize(model, mesh["tp"])
        own = dmuon.dedicate_params(model, mesh, layout="dedicated")
        train(model, own, 0, 1)
        found.append(whole(model, own))
        own.close()
    assert largest_difference(found[0], found[1]) <= 1e-5
    assert largest_difference(found[0], found[2]) <= 1e-5


@distributed(8)
def test_hsdp_with_tp(rank, world):
    mesh = mesh_of((2, 2, 2), ("replicate", "shard", "tp"))
    model, twin = seeded(), seeded()
    parallelize(model, mesh["tp"])
    own = dmuon.dedicate_params(model, mesh, layout="dedicated")
    train(model, own, rank // 2, 4, twin)
    assert largest_difference(whole(model, own), weights(twin)) <= 1e-5
    own.close()


@distributed(4)
def test_slices_travel_once_to_the_owner_and_back(rank, world):
    """The bytes of a step, for 8 matrices of which 6 are cut in two."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = parallelize(seeded(), mesh["tp"])
    own, events = recorded(model, mesh)
    opt = dmuon.Muon(model, **MUON)
    for step in range(2):
        events.clear()
        loss_of(model, batch(step, rank // 2)).backward()
        opt.step()
    sent = {"gather": 0, "scatter": 0, "replicate": 0}
    for event in events:
        if event.op == "all_to_all":
            sent[event.tag] += event.nbytes
    total = torch.tensor(list(sent.values()))
    dist.all_reduce(total)
    cut = 6 * 24 * 56 * 4
    whole_ones = (18 + 24) * 24 * 4  # `mid`, and `spare` even without a gradient
    assert total.tolist() == [cut // 2, cut // 2, whole_ones]
    everywhere = [e.tag for e in events if "publish" in e.tag or "across" in e.tag]
    assert everywhere == []  # one replica only
    own.close()


@distributed(4)
def test_what_is_refused_under_tp(rank, world):
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = parallelize(seeded(), mesh["tp"])
    with pytest.raises(OwnershipError, match="pass the whole mesh"):
        dmuon.dedicate_params(model, layout="dedicated")
    with pytest.raises(OwnershipError, match="param_dtype"):
        options = DedicatedOptions(param_dtype=torch.bfloat16)
        dmuon.dedicate_params(model, mesh, layout="dedicated", options=options)
    own = dmuon.dedicate_params(model, mesh, layout="dedicated")
    with pytest.raises(OwnershipError, match="a slice of a weight only"):
        dmuon.Muon(model, **MUON, master_weights=True)
    own.close()
