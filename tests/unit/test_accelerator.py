"""What `nothing_read` sees, by planted examples, and what it lets pass."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.accelerator import nothing_read

CPU = torch.device("cpu")
T = torch.tensor(2.0)
X = torch.arange(6.0).view(2, 3)
MASK = X > 1

PLANTED = (
    "float(T)", "int(T)", "bool(T)", "1 if T else 0", "T.item()", "f'{T}'", "X.tolist()",
    "T.tolist()", "X.cpu()", "X.to('cpu')", "X.to(device='cpu', dtype=torch.float64)",
    "torch.Tensor.to(X, 'cpu:0', non_blocking=True)", "X.numpy()", "numpy.asarray(X)",
    "X.nonzero()", "torch.where(MASK)", "X[MASK]", "X.clone().__setitem__(MASK, 0.0)",
    "X.clone().index_put_((MASK,), T)", "X.masked_select(MASK)", "X[T.long() - 1]", "X[[0]]",
    "X.clone().__setitem__(0, 1.0)", "X.clone().__setitem__((0, slice(1)), 2)",
    "X.clone().__setitem__(MASK, T)", "torch.equal(X, X)", "torch.allclose(X, X)",
    "torch.unique(X)", "torch.is_nonzero(T)", "torch.add(X, X, alpha=T)", "torch.tensor([1, 2])",
    "torch.tensor(1.0)", "torch.tensor([1, 2], device=X.device)", "torch.as_tensor([1, 2])",
    "torch.asarray([1, 2])", "torch.Tensor([1.0, 2.0])", "X.new_tensor([1.0, 2.0])",
    "torch.from_numpy(numpy.ones(2))",
)  # fmt: skip
ALLOWED = (
    "X * 2.0", "X[0, 1:]", "X * T", "torch.where(MASK, X, 1.0)", "X.masked_fill(MASK, 0.0)",
    "torch.zeros(3)", "torch.empty(3).fill_(2.0)", "torch._foreach_mul([X, X], 2.0)",
    "torch._foreach_copy_([X.clone()[0]], [X[1]])", "torch.stack([X[0], X[1]])",
    "X.to(torch.float64)", "X.to(T.device)", "X.to(T)", "X.to(device=T.device)",
    "X.clone().index_copy_(0, torch.zeros(1, dtype=torch.int64), X[:1])",
    "X.clone().__setitem__(0, X[1])", "X.clone().__setitem__(0, T)",
)  # fmt: skip
NAMES = {"numpy": numpy, "torch": torch, "T": T, "X": X, "MASK": MASK}


def test_planted_reads_and_copies_are_seen_and_what_stays_on_the_device_passes():
    for planted in PLANTED:
        eval(planted, NAMES)  # it is right but for what it costs
        with pytest.raises(AssertionError, match="device|host"), nothing_read():
            eval(planted, NAMES)
            pytest.fail(f"{planted} passes")
    for allowed in ALLOWED:
        with nothing_read():
            eval(allowed, NAMES)


def test_the_local_operators_of_a_dtensor_are_seen(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        whole = distribute_tensor(X.clone(), init_device_mesh("cpu", (1,)), [Replicate()])
        with nothing_read():
            whole.mul_(2.0)
        with pytest.raises(AssertionError, match="reads"), nothing_read():
            float(whole.sum())
    finally:
        dist.destroy_process_group()
