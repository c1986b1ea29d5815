"""The products of each backend, which of them run where, and which forms there are to choose."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from dmuon import devices
from dmuon.kernels.choice import (
    BACKENDS,
    backend_version,
    candidates,
    default_backend,
    fixed_choice,
    multiplications,
    offered_backends,
    ops_of,
    why_not,
)
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.kernels.ops import MatmulOps, RoundedOps, StripsOps
from dmuon.tensors import normalize
from dmuon.types import KernelChoice
from tests.products import Products, gaussian, iterated, relative

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")


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
    assert StripsOps.batch_rows == RoundedOps.batch_rows == 511 and MatmulOps.batch_rows is None


def test_a_tall_matrix_is_not_copied_and_other_strides_are_refused():
    tall = normalize(gaussian(2, 12, 6), F64)
    found = iterated(tall, (2,), MatmulOps())  # two products Q X: back in place
    assert found.data_ptr() == tall.data_ptr() and found.is_contiguous()
    with pytest.raises(ValueError, match="contiguous batches .* found strides"):
        iterated(tall[..., ::2], (2,), MatmulOps())


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


def test_rounding_is_what_half_precision_units_do():
    """Emulated bfloat16 products of torch, and float32 products rounded."""
    y = gaussian(24, 40)
    for method in ("standard", "gram[1,3]"):
        how = {"method": method, "dtype": BF16}
        emulated = newton_schulz(y, backend="torch", **how)
        rounded = newton_schulz(y, backend="torch_rounded", **how)
        assert rounded.dtype is BF16
        assert relative(rounded, emulated) < 0.05  # other sums, rounded to other neighbours
    (out, plain, c), x = torch.zeros(3, 24, 24), y.bfloat16().float() / 8
    RoundedOps(BF16).shifted(x, x.mT, c, out=out, plain=plain, diag=0.1)
    assert torch.equal(out, out.bfloat16().float())


@pytest.mark.parametrize("backend", ["torch", "torch_strips", "torch_rounded"])
@pytest.mark.parametrize(
    ("shape", "method"),
    [((2, 40, 12), "gram"), ((2, 40, 12), "standard"), ((1, 40, 12), "gram"), ((600, 530), "gram")],
)
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


def test_slow_products_are_seen():
    x, square = torch.zeros(2, 3, 5).mT, torch.zeros(2, 5, 5)
    for out in (torch.zeros(2, 5, 3), torch.zeros_like(x)):
        with Products() as seen:
            torch.baddbmm(x, square, x, out=out)  # x itself is added, by columns
            torch.bmm(square, x, out=torch.zeros(2, 5, 3))
        assert (seen.count, len(seen.slow)) == (2, 1)


# ---- choices and backends ----------------------------------------------------------------------


def test_multiplications_are_those_of_the_published_formulas():
    for r in (1, 2, 8):
        gram = (8 * r + 28, 6 * r + 14)
        formulas = {(1, 2, 3, 4): (20 * r + 10, 15 * r + 5), (2,): gram, (3,): gram}
        for restarts, expected in formulas.items():
            found = (multiplications(1, r, restarts, 5, symmetric) for symmetric in (False, True))
            assert tuple(found) == expected


@pytest.mark.parametrize(
    ("method", "dtype", "message"),
    [
        ("gram[3]", BF16, r"'gram\[3\]' diverges in torch.bfloat16 .* use 'gram\[1,3\]'"),
        ("gram[1]", F16, r"diverges in torch.float16 .*at most 3 steps.* use 'gram\[2\]'"),
        ("gram[5]", F32, "increase from 1 to at most 4"),
        ("gram[2,2]", F32, "restarts must increase"),
        ("gram[]", F32, "method must be one of"),
        ("fast", F32, "method must be one of"),
    ],
)
def test_unsafe_or_unknown_methods_are_refused(method, dtype, message):
    with pytest.raises(ValueError, match=message):
        fixed_choice(64, 256, dtype, CPU, 5, method)
    with pytest.raises(ValueError, match=message):
        newton_schulz(torch.ones(4, 6), method=method, dtype=dtype)


def test_a_backend_that_cannot_run_is_an_error():
    for backend, dtype, message in (
        ("triton", F32, "cannot run on cpu"),
        ("triton_small", F16, "cannot run on cpu"),
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
    assert default_backend("cpu", F16) == "torch_rounded"
    assert default_backend("cpu", F32) == "torch_strips"
    assert default_backend(cuda, F16) == "torch"
    assert backend_version(CPU) == "torch"
    monkeypatch.setattr(devices, "_has_bf16", [False])
    assert default_backend(CPU, BF16) == "torch_rounded"
    # A tiny matrix is multiplied sooner than rounded.
    assert offered_backends(CPU, BF16, 17) == ("torch_rounded", "torch")
    assert offered_backends(CPU, BF16, 64) == ("torch_rounded",)
    monkeypatch.setattr(devices, "_has_bf16", [True])
    assert default_backend(CPU, BF16) == "torch_strips"
    assert offered_backends(CPU, BF16, 1024) == ("torch_strips", "torch")
    assert offered_backends(CPU, BF16, 256) == ("torch_strips",)


def test_candidates_begin_with_the_fixed_rule_and_are_all_safe():
    for dtype in (F32, BF16, F16):
        for m, n in ((16, 16), (64, 300), (1024, 1024), (1024, 4096), (4096, 1024)):
            found = candidates(m, n, dtype, CPU, 5)
            assert found[0] == fixed_choice(m, n, dtype, CPU, 5)
            assert len(set(found)) == len(found)
            for choice in found:
                name = str(choice).split("/")[0]
                assert fixed_choice(m, n, dtype, CPU, 5, name).restarts == choice.restarts
    one = candidates(1024, 4096, F32, CPU, 5, "gram[2]", "torch")
    assert [str(choice) for choice in one] == ["gram[2]/torch/float32"]
    forms = ("standard", "gram[1,3]", "gram[2]")
    square = {str(choice) for choice in candidates(1024, 1024, F32, CPU, 5)}
    assert square == {f"{f}/{b}/float32" for f in forms for b in ("torch_strips", "torch")}
    wide = {c.method for c in candidates(1024, 16384, F32, CPU, 5)}
    assert wide == {"gram"}, "the standard form multiplies more than 1.5 times as much"


def test_a_choice_is_a_text():
    for choice in (
        KernelChoice("standard", (), "torch", "float32"),
        KernelChoice("gram", (1, 3), "triton", "float16", "128x64-w4-s3"),
        KernelChoice("gram", (2,), "triton_small", "float16"),
    ):
        assert KernelChoice.parse(str(choice)) == choice
    for text in (
        *("", "svd/torch/float32", "gram[2]/torch", "gram[a]/torch/float32", "gram[2]torch"),
        *("gram/torch/float32", "gram[]/torch/float32", "gram[0]/torch/float32"),
        *("gram[2,1]/torch/float32", "gram[1,1]/torch/float32", "standard[2]/torch/float32"),
        *("gram[2]/torch/int8", "gram[2]/torch-64x64/float32"),
    ):
        with pytest.raises(ValueError, match="no kernel choice"):
            KernelChoice.parse(text)
