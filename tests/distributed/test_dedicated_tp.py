"""Tensor parallelism in the `dedicated` layout: slices at the owner's tensor-parallel ranks."""

from __future__ import annotations

from functools import partial

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
from dmuon.types import OwnershipError
from tests.distributed.harness import distributed
from tests.distributed.models import Net, seeded
from tests.distributed.owners import FSDP, KEPT, MUON, PLAIN, both, layouts, mesh_of
from tests.transports import RecordingTransport


def parallelize(model, mesh, *, even=True):
    """Columns and rows; torch's styles take rows that do not divide only if columns are joined."""
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if not even:
        styles = {"up": ColwiseParallel(output_layouts=Replicate())}
    for block in model.blocks:
        parallelize_module(block, mesh, styles)
    return model


def with_tp(mesh, hidden=56):
    """Of `both`: the model is parallel along the last axis, the twin is not."""
    tp = mesh["tp"]
    return {
        "build": lambda: Net(hidden=hidden),
        "mesh": mesh,
        "fsdp": {"mesh": mesh[mesh.mesh_dim_names[:-1]]},
        "wrap": partial(parallelize, mesh=tp, even=hidden % 2 == 0),
        "data_rank": dist.get_rank() // tp.size(),
        "data_world": dist.get_world_size() // tp.size(),
    }


@layouts(PLAIN, KEPT, FSDP)
@distributed(4)
def test_tp_with_data_parallelism_equals_the_reference(rank, world, layout):
    for degree, hidden in ((2, 56), (2, 57), (4, 56)):
        mesh = mesh_of((world // degree, degree), ("dp", "tp"))
        with both(layout=layout, **with_tp(mesh, hidden)) as pair:
            for step in range(3):
                pair.both_backward(step)
                found = float(dmuon.clip_grad_norm_(pair.model, 0.5))
                expected = float(nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.5))
                assert found == pytest.approx(expected, rel=1e-5)
                pair.advance()
            pair.check()


@distributed(8)
def test_hsdp_with_tp(rank, world):
    with both(**with_tp(mesh_of((2, 2, 2), ("replicate", "shard", "tp")))) as pair:
        pair.train(range(3))
        pair.check()


@distributed(4)
def test_slices_travel_once_to_the_owner_and_back(rank, world):
    """The bytes of a step, for 8 matrices of which 6 are cut in two."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    with both(transport=RecordingTransport, **with_tp(mesh)) as pair:
        for step in range(2):
            pair.events.clear()
            pair.backward(step)
            pair.opt.step()
        sent = {"gather": 0, "scatter": 0, "updates": 0}
        for event in pair.events:
            if event.tag in sent:
                sent[event.tag] += event.nbytes
        total = torch.tensor(list(sent.values()))
        dist.all_reduce(total)
        cut = 6 * 24 * 56 * 4
        whole_ones = (18 + 24) * 24 * 4  # `mid`, and `spare` even without a gradient
        # A broadcast is an event of both ranks.
        assert total.tolist() == [cut // 2, cut // 2, 2 * whole_ones]
        everywhere = [e.tag for e in pair.events if "publish" in e.tag or "across" in e.tag]
        assert everywhere == []  # one replica only


@distributed(4)
def test_what_is_refused_under_tp(rank, world):
    mesh = mesh_of((2, 2), ("dp", "tp"))
    model = parallelize(seeded(), mesh["tp"])
    with pytest.raises(OwnershipError, match="pass the whole mesh"):
        dmuon.dedicate_params(model, layout="dedicated")
    with pytest.raises(OwnershipError, match="param_dtype"):
        options = dmuon.DedicatedOptions(param_dtype=torch.bfloat16)
        dmuon.dedicate_params(model, mesh, layout="dedicated", options=options)
    own = dmuon.dedicate_params(model, mesh, layout="dedicated")
    with pytest.raises(OwnershipError, match="a slice of a weight only"):
        dmuon.Muon(model, **MUON, master_weights=True)
    own.close()
