"""The products of each backend, which of them run where, and which forms there are to choose."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from dmuon import devices
from dmuon.kernels import choice as choosing
from dmuon.kernels.choice import (
    BACKENDS,
    Speeds,
    backend_version,
    common_choice,
    fixed_choice,
    fixed_speeds,
    measured_speeds,
    offered_backends,
    ops_of,
    why_not,
)
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.kernels.ops import MatmulOps, RoundedOps, StripsOps, TritonOps
from dmuon.tensors import normalize
from dmuon.types import KernelChoice
from tests.products import Products, gaussian, iterated, relative

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")
REAL_SECONDS = choosing._product_seconds


# ---- the iteration over products ---------------------------------------------------------------


class Recording(MatmulOps):
    """Notes each product: its kind, and the dims of its result, which is over no operand."""

    def __init__(self, batch_rows: int | None = None) -> None:
        self.batch_rows = batch_rows
        self.calls: list[tuple[str, int]] = []

    def general(self, a, b, c=None, *, kind="general", out, **factors):
        self.calls.append((kind, out.ndim))
        assert all(x is None or x.data_ptr() != out.data_ptr() for x in (a, b, c))
        return super().general(a, b, c, out=out, **factors)

    def symmetric(self, *operands, **how):
        return self.general(*operands, kind="symmetric", **how)


class Mirrored:
    """Stands for `triton_syrk.symm_mm`; notes the sizes of operands, and which lie by rows."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.by_rows: list[bool] = []

    def __call__(self, a, bt, c=None, *, out, alpha=1.0, beta=0.0, diag=0.0, plain=None):
        assert all(x is None or x.data_ptr() != out.data_ptr() for x in (a, bt, c))
        self.calls.append(tuple(a.shape[-2:]))
        self.by_rows += [a.stride(-1) == 1, bt.stride(-1) == 1]
        value = alpha * a @ bt.mT + (0.0 if c is None else beta * c)
        value = value.tril() + value.tril(-1).mT
        if plain is not None:
            plain.copy_(value)
        out.copy_(value + diag * torch.eye(len(value[0]), dtype=value.dtype))


@pytest.mark.parametrize(("shape", "sizes", "by_rows"), [
    ((2, 32, 64), {(32, 64), (32, 32)}, {True}),
    ((2, 64, 32), {(32, 64), (32, 32)}, {True, False}),  # a tall X as it is stored
    ((2, 32, 50), {(32, 32)}, {True}),  # X X^T by torch
    ((2, 17, 64), set(), set()),
])  # fmt: skip
@pytest.mark.parametrize("restarts", [(1, 2, 3, 4), (2,)])
def test_symmetric_kernels_get_even_sizes_and_factors_by_rows(shape, sizes, by_rows, restarts):
    """All of them are symmetric, so no factor need be read column by column."""
    kernel, x = Mirrored(), normalize(gaussian(*shape), F64)
    expected = newton_schulz(x, method="standard", dtype=F64)
    found = iterated(x.clone(), restarts, TritonOps(kernel))
    assert relative(found, expected) < 1e-9
    assert {*kernel.calls} == sizes and {*kernel.by_rows} == by_rows
    assert offered_backends("meta", F16, 17) == ("torch",)
    assert offered_backends("meta", F16, 32) == ("torch", "triton")


@pytest.mark.parametrize(
    ("restarts", "symmetric", "general"), [((1, 2, 3, 4), 10, 5), ((2,), 16, 2), ((1, 3), 14, 3)]
)
@pytest.mark.parametrize(
    ("shape", "batch_rows", "as_one"),
    [((1, 9, 6), None, 0), ((3, 6, 9), None, 1), ((3, 6, 9), 6, 1), ((2, 6, 9), 5, 0)],
)
def test_number_of_products_and_when_a_batch_runs_as_one(
    restarts, symmetric, general, shape, batch_rows, as_one
):
    x = normalize(gaussian(*shape), F64)
    recording = Recording(batch_rows)
    found = iterated(x.clone(), restarts, recording)
    times, ndim = (1, 3) if as_one else (len(x), 2)
    expected = {("symmetric", ndim): times * symmetric, ("general", ndim): times * general}
    assert Counter(recording.calls) == expected
    torch.testing.assert_close(found, newton_schulz(x, dtype=F64), rtol=0, atol=1e-9)
    assert StripsOps(128).batch_rows == 255 and MatmulOps.batch_rows is None
    assert StripsOps().batch_rows == RoundedOps(BF16).batch_rows == 511


# ---- products ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "batch"), [(511, ()), (512, (2,)), (1100, ())])
def test_strips_equal_the_plain_products(m, batch):
    x = gaussian(*batch, m, 37)
    c = x @ x.mT
    a, b = c @ c / m, c / 2
    before = [t.clone() for t in (a, b, c)]
    product, how = a @ b, {"alpha": -2.0, "beta": 0.5}
    wanted, near = 0.5 * c - 2.0 * product, {"rtol": 1e-11, "atol": 1e-9}
    for ops in (StripsOps(), MatmulOps()):
        out, plain = torch.full((2, *c.shape), math.nan, dtype=F64)
        ops.symmetric(a, b, out=out)
        torch.testing.assert_close(out, product, **near)
        ops.symmetric(a, b, c, out=out, **how)
        torch.testing.assert_close(out, wanted, **near)
        ops.shifted(a, b, c, out=out, plain=plain, diag=3.0, **how)
        torch.testing.assert_close(plain, wanted, **near)
        torch.testing.assert_close(out - plain, (3.0 * torch.eye(m, dtype=F64)).expand_as(out))
    assert all(torch.equal(x, y) for x, y in zip((a, b, c), before, strict=True))
    # From 512 rows up the blocks above the diagonal are mirrored, whatever the operands.
    one = torch.empty(m, m, dtype=F64)
    StripsOps().symmetric(gaussian(m, 5), gaussian(5, m, seed=1), out=one)
    assert torch.equal(one[:99, -99:], one[-99:, :99].mT) == (m >= 512)


@pytest.mark.parametrize(("shape", "method", "backend"), [
    *(((2, 40, 12), method, backend) for method in ("gram", "standard")
      for backend in ("torch", "torch_strips", "torch_rounded")),
    ((1, 40, 12), "gram", "torch"), ((530, 520), "gram", "torch_strips"),
])  # fmt: skip
def test_products_get_memory_that_they_are_fast_on(shape, method, backend):
    """Whatever the strides of what a user has; a batch of tall matrices was 900 times slower."""
    x = gaussian(*shape).float()
    forms = [x, x.mT, x.mT.contiguous().mT, x.repeat_interleave(2, -1)[..., ::2]]
    if x.ndim == 3:
        forms.append(x.permute(1, 2, 0).contiguous().permute(2, 0, 1))  # the batch lies innermost
    how = {"method": method, "backend": backend, "dtype": BF16, "steps": 3}
    expected = newton_schulz(x, **how)
    for form in forms:
        with Products() as seen:
            found = newton_schulz(form, **how)
        assert seen.count >= 6 and not seen.slow, seen.slow
        assert relative(found if found.shape == expected.shape else found.mT, expected) < 0.05


# ---- choices and backends ----------------------------------------------------------------------


@pytest.mark.parametrize(("method", "dtype", "message"), [
    ("gram[3]", BF16, r"'gram\[3\]' diverges in torch.bfloat16 .* use 'gram\[1,3\]'"),
    ("gram[1]", F16, r"diverges in torch.float16 .*at most 3 steps.* use 'gram\[2\]'"),
    ("gram[5]", F32, "increase from 1 to at most 4"),
    ("gram[2,2]", F32, "restarts must increase"),
    ("gram[]", F32, "method must be one of"),
    ("fast", F32, "method must be one of"),
])  # fmt: skip
def test_unsafe_or_unknown_methods_are_refused(method, dtype, message):
    with pytest.raises(ValueError, match=message):
        fixed_choice(64, 256, dtype, CPU, 5, method)
    with pytest.raises(ValueError, match=message):
        newton_schulz(torch.ones(4, 6), method=method, dtype=dtype)


def test_a_backend_that_cannot_run_is_an_error():
    for backend, dtype, message in (
        ("triton", F32, "cannot run on cpu"),
        ("torch_rounded", F32, "rounds to half precision, found torch.float32"),
        ("cutlass", F32, "there is no backend 'cutlass'; choose one of torch,"),
    ):
        with pytest.raises(ValueError, match=message):
            newton_schulz(torch.ones(4, 6), backend=backend, dtype=dtype)
        with pytest.raises(ValueError, match=message):
            ops_of(KernelChoice("standard", (), backend, str(dtype)[6:]), CPU)


def test_backends_know_their_devices(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert "serves the CPU, found cuda" in why_not("torch_strips", cuda, F16)
    assert "serves the CPU, found cuda" in why_not("torch_rounded", cuda, F16)
    assert "float64" in why_not("triton", cuda, F64)
    assert all(why_not(backend, "meta", F16) is None for backend in BACKENDS)
    assert fixed_speeds("cpu", F16).backend == "torch_rounded"
    assert fixed_speeds("cpu", F32).backend == "torch_strips"
    assert fixed_speeds(cuda, F16).backend == "torch"
    assert backend_version(CPU) == "torch"
    monkeypatch.setattr(devices, "_has_bf16", [False])
    assert fixed_speeds(CPU, BF16).backend == "torch_rounded"
    # A tiny matrix is multiplied sooner than rounded.
    assert offered_backends(CPU, BF16, 17) == ("torch_rounded", "torch")
    assert offered_backends(CPU, BF16, 64) == ("torch_rounded",)
    monkeypatch.setattr(devices, "_has_bf16", [True])
    assert fixed_speeds(CPU, BF16).backend == "torch_strips"
    assert offered_backends(CPU, BF16, 1024) == ("torch_strips", "torch")
    assert offered_backends(CPU, BF16, 256) == ("torch_strips",)


def test_a_choice_is_a_text():
    for choice in (
        KernelChoice("standard", (), "torch", "float32"),
        KernelChoice("gram", (1, 3), "triton", "float16", "128x64-w4-s3"),
        KernelChoice("standard", (), "torch_strips", "float32", "128"),
    ):
        assert KernelChoice.parse(str(choice)) == choice
    for text in (
        *("", "svd/torch/float32", "gram[2]/torch", "gram[a]/torch/float32", "gram/torch/float32"),
        *("gram[2,1]/torch/float32", "standard[2]/torch/float32", "gram[2]/torch/int8"),
        *("gram[2]/torch-64x64/float32", "standard/torch_strips-0/float32"),
    ):
        with pytest.raises(ValueError, match="no kernel choice"):
            KernelChoice.parse(text)


# ---- what products cost here -------------------------------------------------------------------


class Machine:
    """A CPU with planted costs, in place of the clock and of the products: ``call`` seconds for
    each product, ``rate`` multiplications and additions a second, ``copied`` elements a second
    where a block is mirrored. ``slow``: factors of the products, in order; then 1."""

    def __init__(self, monkeypatch, call: float, rate: float, copied: float, slow=()) -> None:
        self.now, self.products, self.slow = 0.0, 0, iter(slow)
        self._costs = call, rate, copied
        for name in ("_seconds", "_speeds"):
            monkeypatch.setattr(choosing, name, {})
        monkeypatch.setattr(choosing, "_product_seconds", REAL_SECONDS)
        monkeypatch.setattr(choosing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(MatmulOps, "general", self.general)
        monkeypatch.setattr(MatmulOps, "symmetric", self.general)
        monkeypatch.setattr(StripsOps, "mirror", self.mirror)

    def general(self, a, b, c=None, *, out, **factors):
        call, rate, _ = self._costs
        self.products += 1
        work = 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]
        self.now += (call + work / rate) * next(self.slow, 1.0)
        return ()

    def mirror(self, out, strips):
        _, _, copied = self._costs
        self.now += sum((high - low) * (len(out) - high) for low, high in strips) / copied

    def choice(self, m: int, n: int, dtype: torch.dtype = BF16) -> str:
        speeds = measured_speeds(CPU, dtype, min(m, n))
        return str(fixed_choice(m, n, dtype, CPU, 5, speeds=speeds)).rpartition("/")[0]


ZEN = {"call": 2e-5, "rate": 5e11, "copied": 1.5e9}
AMX = {"call": 2e-5, "rate": 15e11, "copied": 1.2e9}


@pytest.fixture
def bf16(monkeypatch):
    monkeypatch.setattr(devices, "_has_bf16", [True])
    return monkeypatch


def test_forms_and_products_follow_what_is_measured(bf16):
    machine = Machine(bf16, **ZEN)
    assert machine.choice(1024, 4096) == "gram[1,3]/torch_strips"  # of 256 rows
    assert machine.choice(1024, 1024) == "standard/torch_strips"
    assert machine.choice(300, 300) == "standard/torch"
    machine = Machine(bf16, **AMX)
    assert machine.choice(512, 2048) == "gram[1,3]/torch"
    assert machine.choice(1024, 4096) == "gram[1,3]/torch_strips-512"
    # Calls and copies that cost nothing: strips win from the first size on.
    assert Machine(bf16, 1e-9, 5e11, 1e15).choice(256, 256) == "standard/torch_strips-128"


@pytest.mark.parametrize("slow", [3.0, 20.0])
def test_noise_does_not_choose(bf16, slow):
    for k in range(4):
        machine = Machine(bf16, **ZEN, slow=[1.0] * k + [slow] * 7)
        assert machine.choice(300, 300) == "standard/torch", "of plain products"
        assert machine.choice(512, 512) == "standard/torch_strips"


def test_ranks_that_measured_differently_agree():
    few, many = Speeds("torch_strips", 1e6, 128), Speeds("torch_strips", 2e6, 256)
    plain, rounded = Speeds("torch", 5e5, 256), Speeds("torch_rounded", 1e7, 256)
    for found, expected in (
        ({(BF16, few)}, few),
        ({(BF16, few), (BF16, many)}, many),
        ({(BF16, few), (BF16, plain)}, Speeds("torch", 1e6, 256)),
        ({(BF16, plain), (BF16, rounded)}, Speeds("torch_rounded", 1e7, 256)),
    ):
        assert common_choice(found, CPU) == (BF16, expected)
    found = {(BF16, few), (F32, few)}
    assert common_choice(found, CPU) == (F32, fixed_speeds(CPU, F32))
