"""What `nothing_read` sees, by planted examples, and what it lets pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

from dmuon.comm.reducer import rows_of, set_rows
from dmuon.comm.streams import Stopwatch, host_can_read
from tests.accelerator import host_cannot_read, nothing_read

T = torch.tensor(2.0)
X = torch.arange(6.0).view(2, 3)
MASK = X > 1

PLANTED: dict[str, Callable[[], object]] = {
    "float(t)": lambda: float(T),
    "int(t)": lambda: int(T),
    "bool(t)": lambda: bool(T),
    "if t": lambda: 1 if T else 0,
    "t.item()": lambda: T.item(),
    "f'{t}'": lambda: f"{T}",
    "t.tolist()": lambda: X.tolist(),
    "t.tolist() of one": lambda: T.tolist(),
    "t.cpu()": lambda: X.cpu(),
    "t.to('cpu')": lambda: X.to("cpu"),
    "t.to(device='cpu')": lambda: X.to(device="cpu", dtype=torch.float64),
    "torch.Tensor.to(t, 'cpu')": lambda: torch.Tensor.to(X, "cpu:0", non_blocking=True),
    "t.numpy()": lambda: X.numpy(),
    "numpy.asarray(t)": lambda: numpy.asarray(X),
    "t.nonzero()": lambda: X.nonzero(),
    "torch.where(mask)": lambda: torch.where(MASK),
    "x[mask]": lambda: X[MASK],
    "x[mask] = 0": lambda: X.clone().__setitem__(MASK, 0.0),
    "x[mask] = t": lambda: X.clone().index_put_((MASK,), T),
    "x.masked_select": lambda: X.masked_select(MASK),
    "x[t]": lambda: X[T.long() - 1],
    "x[[0]]": lambda: X[[0]],
    "x[0] = 1.0": lambda: X.clone().__setitem__(0, 1.0),
    "torch.equal": lambda: torch.equal(X, X),
    "torch.allclose": lambda: torch.allclose(X, X),
    "torch.unique": lambda: torch.unique(X),
    "torch.is_nonzero": lambda: torch.is_nonzero(T),
    "add(alpha=t)": lambda: torch.add(X, X, alpha=T),
    "torch.tensor([..])": lambda: torch.tensor([1, 2]),
    "torch.tensor(1.0)": lambda: torch.tensor(1.0),
    "torch.tensor([..], device=)": lambda: torch.tensor([1, 2], device=X.device),
    "torch.as_tensor(list)": lambda: torch.as_tensor([1, 2]),
    "torch.asarray(list)": lambda: torch.asarray([1, 2]),
    "torch.Tensor([..])": lambda: torch.Tensor([1.0, 2.0]),
    "t.new_tensor([..])": lambda: X.new_tensor([1.0, 2.0]),
    "torch.from_numpy": lambda: torch.from_numpy(numpy.ones(2)),
}

ALLOWED: list[Callable[[], object]] = [
    lambda: X * 2.0,
    lambda: X[0, 1:],
    lambda: X * T,
    lambda: torch.where(MASK, X, 1.0),
    lambda: X.masked_fill(MASK, 0.0),
    lambda: torch.zeros(3),
    lambda: torch.empty(3).fill_(2.0),
    lambda: torch._foreach_mul([X, X], 2.0),
    lambda: torch._foreach_copy_([X.clone()[0]], [X[1]]),
    lambda: torch.stack([X[0], X[1]]),
    lambda: X.to(torch.float64),
    lambda: (X.to(T.device), X.to(T), X.to(device=T.device)),
    lambda: X.clone().index_copy_(0, torch.zeros(1, dtype=torch.int64), X[:1]),
]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_read_or_copy_is_seen(name):
    PLANTED[name]()  # it is right but for what it costs
    with pytest.raises(AssertionError, match="device|host"), nothing_read():
        PLANTED[name]()


def test_what_stays_on_the_device_passes():
    for allowed in ALLOWED:
        with nothing_read():
            allowed()


def test_the_local_operators_of_a_dtensor_are_seen(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

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
    from dmuon.comm import streams

    device = torch.device("cpu")
    assert host_can_read(device) and not host_can_read(torch.device("cuda"))
    with host_cannot_read():
        assert not streams.host_can_read(device)
    assert streams.host_can_read(device)


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
    watch = Stopwatch(torch.device("cpu"))
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
    from dmuon.update import scale_all

    tensors: list[Tensor] = [torch.ones(3), torch.ones(2, 2)]
    with nothing_read():
        scale_all(tensors, T)
        scale_all(tensors, 0.25)
    assert all(torch.equal(t, torch.full_like(t, 0.5)) for t in tensors)
