"""What `nothing_read` sees, by planted examples, and what it lets pass."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from dmuon.comm.reducer import rows_of, set_rows
from dmuon.devices import Stopwatch, host_can_read
from dmuon.tensors import scale_all
from tests.accelerator import host_cannot_read, nothing_read

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


def test_the_host_can_read_a_cpu_but_for_the_patch():
    assert host_can_read(CPU) and not host_can_read(torch.device("cuda"))
    with host_cannot_read():
        assert not host_can_read(CPU)
    assert host_can_read(CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [[0], [1, 3], [0, 1, 2, 3]], ids=str)
def test_rows_are_taken_and_set_without_an_index(where, dtype):
    stack = torch.randn(4, 3, 5)
    kept = stack.clone()
    with nothing_read():
        rows = rows_of(stack, where)
        set_rows(stack, where, (rows * 2).to(dtype))
    for k in range(4):
        expected = (kept[k] * 2).to(dtype).float() if k in where else kept[k]
        assert torch.equal(stack[k], expected)
    assert (rows is stack) is (len(where) == 4)


def test_a_stopwatch_sums_what_lies_between_start_and_stop():
    watch = Stopwatch(CPU)
    assert watch.milliseconds() == 0.0 and watch.ready()
    seen: list[float] = []
    with nothing_read():
        for _ in range(3):
            watch.start()
            _ = X @ X.T
            watch.stop()
            seen.append(watch.milliseconds())
    assert watch.ready() and 0.0 < seen[0] < seen[1] < seen[2]


def test_a_scale_on_the_device_is_applied_without_reading_it():
    tensors = [torch.ones(3), torch.ones(2, 2)]
    with nothing_read():
        scale_all(tensors, T)
        scale_all(tensors, 0.25)
    assert all(torch.equal(t, torch.full_like(t, 0.5)) for t in tensors)
