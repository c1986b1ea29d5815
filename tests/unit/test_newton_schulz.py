"""Newton-Schulz against exact arithmetic (an SVD), the hand formula, and torch's own iteration."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dmuon import devices
from dmuon.devices import cpu_has_bf16
from dmuon.kernels.choice import choose_method, default_restarts, fixed_speeds
from dmuon.kernels.newton_schulz import (
    COEFFICIENT_SETS,
    newton_schulz,
    resolve_coefficients,
    resolve_ns_dtype,
)
from dmuon.tensors import normalize
from tests.products import POLAR, gaussian, iterated, relative

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
QUINTIC = (3.4445, -4.7750, 2.0315)


def exact(y: Tensor, triples=POLAR) -> Tensor:
    """The scalar polynomials applied to the singular values of one matrix as it is."""
    u, s, vt = np.linalg.svd(y.double().numpy(), full_matrices=False)
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return torch.from_numpy((u * s) @ vt)


# ---- coefficients ------------------------------------------------------------------------------


def test_published_values():
    assert COEFFICIENT_SETS["quintic"] == (QUINTIC,)
    assert COEFFICIENT_SETS["simple"] == ((2, -1.5, 0.5),)
    # The sums of the published a, b and c catch a wrong digit in any triple.
    you, polar = COEFFICIENT_SETS["you_jiacheng"], COEFFICIENT_SETS["polar_express"]
    assert (len(you), len(polar)) == (5, 8)
    assert np.sum(you, axis=0) == pytest.approx((17.4906, -24.9840, 10.2742), abs=1e-9)
    sums = (25.728336549136394, -36.128028033283854, 20.07771006636957)
    scaled_back = np.sum(polar[:-1], axis=0) * (1.05, 1.05**3, 1.05**5)
    assert scaled_back == pytest.approx(sums, rel=1e-12)
    assert polar[0][0] * 1.05 == pytest.approx(8.28721201814563, rel=1e-12)
    assert polar[-1] == (1.875, -1.25, 0.375)  # not scaled: p(1) = 1 has to hold when it repeats


def test_steps_always_count():
    polar = COEFFICIENT_SETS["polar_express"]
    assert resolve_coefficients("polar_express", 3) == polar[:3]
    assert resolve_coefficients("polar_express", 10) == (*polar, polar[-1], polar[-1])
    assert resolve_coefficients(QUINTIC, 4) == (QUINTIC,) * 4
    assert resolve_coefficients([[1, 2, 3], [4, 5, 6]], 2) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    assert resolve_coefficients([QUINTIC] * 3, 3) == (QUINTIC,) * 3  # three triples, not one
    assert resolve_coefficients("simple", 0) == ()


@pytest.mark.parametrize(("coefficients", "steps", "message"), [
    ("polar", 5, "'polar_express', 'quintic'"),
    ([QUINTIC] * 4, 5, r"4 coefficient triples for steps=5.*set steps=4"),
    ((1.0, 2.0, math.nan), 5, "three finite numbers"),
    (3.0, 5, "three finite numbers"),
    ("simple", -1, "steps must be an integer >= 0, found -1"),
])  # fmt: skip
def test_bad_coefficients(coefficients, steps, message):
    with pytest.raises(ValueError, match=message):
        resolve_coefficients(coefficients, steps)


# ---- the polynomial ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 24),
    n=st.integers(1, 24),
    name=st.sampled_from(sorted(COEFFICIENT_SETS)),
    steps=st.integers(0, 8),
    method=st.sampled_from(["standard", "gram"]),
    seed=st.integers(0, 2**16),
)
def test_is_the_polynomial_of_the_singular_values(m, n, name, steps, method, seed):
    x = gaussian(m, n, seed=seed)
    found = newton_schulz(x, steps=steps, coefficients=name, method=method, dtype=F64)
    assert found.shape == x.shape
    # Gram squares the condition number, and a square Gaussian can be close to singular.
    expected = exact(x / x.norm(), resolve_coefficients(name, steps))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


# ---- accuracy on a zoo of spectra --------------------------------------------------------------

SHAPES = [(1, 1), (1, 64), (3, 5), (33, 100), (100, 37), (48, 48), (96, 513)]
EASY = ("Gaussian", "near-orthogonal")
HARD = ("log-spaced to 1e-6", "log-spaced to 1e-12", "spiky", "half the rank", "constant")
# (dtype, method) -> largest error on easy and on hard members: in half precision about twice what
# was measured; in float32 eight times, because there CPUs sum in orders that differ by a factor of
# four, and a product left out or rounded to half precision is off by 1e-2.
BOUNDS = {
    ("float32", "standard"): (4e-5, 1.2e-3),
    ("float32", "gram[2]"): (1.6e-4, 3.2e-3),
    ("float32", "gram[1,3]"): (4e-5, 2e-3),
    ("float16", "standard"): (0.01, 0.07),
    ("float16", "gram[2]"): (0.03, 0.3),
    ("float16", "gram[1,3]"): (0.02, 0.1),
    ("bfloat16", "standard"): (0.15, 0.4),
    ("bfloat16", "gram[1,3]"): (0.18, 0.4),
}


@cache
def member(name: str, shape: tuple[int, int]) -> Tensor:
    m, n = min(shape), max(shape)
    u, v = torch.linalg.qr(gaussian(m, m))[0], torch.linalg.qr(gaussian(n, m, seed=1))[0]
    values = {
        "log-spaced to 1e-6": torch.logspace(0, -6, m, dtype=F64),
        "log-spaced to 1e-12": torch.logspace(0, -12, m, dtype=F64),
        "spiky": torch.full((m,), 1e-3, dtype=F64).index_fill_(0, torch.tensor(0), 1.0),
        "half the rank": (torch.arange(m) < max(1, m // 2)).double(),
        "near-orthogonal": 1 + 1e-3 * gaussian(m).tanh(),
    }
    whole = {"Gaussian": gaussian(m, n), "constant": torch.ones(m, n, dtype=F64)}
    x = whole[name] if name in whole else (u * values[name]) @ v.mT
    return x if shape[0] <= shape[1] else x.mT


@pytest.mark.parametrize(("dtype", "method"), BOUNDS)
def test_errors_on_a_zoo_of_spectra(dtype, method):
    easy, hard = BOUNDS[dtype, method]
    wrong = {}
    for shape, name in itertools.product(SHAPES, (*EASY, *HARD)):
        y = normalize(member(name, shape), getattr(torch, dtype))
        # Half precision as a unit for it computes.
        backend = "torch_rounded" if y.dtype.itemsize == 2 else "torch"
        found = newton_schulz(y, method=method, dtype=y.dtype, backend=backend)
        error = relative(found, exact(y))
        if not error <= (easy if name in EASY else hard):
            wrong[name, shape] = error
    assert not wrong


def test_bfloat16_gram_needs_its_restarts():
    y = normalize(member("log-spaced to 1e-6", (64, 256)), BF16)
    assert not relative(iterated(y[None].clone(), ())[0], exact(y)) < 1
    assert default_restarts(BF16, 5) == (1, 3) and default_restarts(BF16, 8) == (1, 3, 5, 7)
    for dtype in (F16, F32, F64):
        assert default_restarts(dtype, 5) == (2,) and default_restarts(dtype, 8) == (2, 5)
    assert default_restarts(F16, 2) == default_restarts(BF16, 1) == ()


# ---- shapes and batches ------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 0, 5), (5, 0)])
def test_empty(shape):
    for dtype in (BF16, F32):
        found = newton_schulz(torch.nn.Parameter(torch.empty(shape)), dtype=dtype)
        assert found.shape == shape and found.dtype == dtype
        assert type(found) is Tensor and not found.requires_grad


@pytest.mark.parametrize("dtype", [BF16, F64])
def test_any_strides_and_leading_dims(dtype):
    x = gaussian(2, 3, 30, 40)
    for view in (x[..., ::2, 1::3], x.mT[..., 3:, ::2], x[:, :, :1].expand(2, 3, 6, 40)):
        found = newton_schulz(view, dtype=dtype)
        assert torch.equal(found, newton_schulz(view.clone(), dtype=dtype))
        for i, j in np.ndindex(2, 3):
            alone = newton_schulz(view[i, j], dtype=dtype)
            assert torch.equal(newton_schulz(view[i : i + 1, j], dtype=dtype)[0], alone)
            assert relative(found[i, j], alone) < (0.03 if dtype is BF16 else 1e-11)
    assert newton_schulz(x.mT, dtype=dtype).mT.is_contiguous(), "computed as it is stored"


def test_choice_of_method():
    for shape, dtype, steps, expected in (
        ((1024, 1024), BF16, 5, "standard"),
        ((1024, 2048), BF16, 5, "gram"),
        ((2048, 1024), F16, 5, "gram"),
        ((128, 512), BF16, 5, "standard"),  # too small: calls count
        ((128, 512), F32, 5, "gram"),
        ((1024, 4096), BF16, 1, "standard"),
    ):
        assert choose_method(*shape, dtype, steps, fixed_speeds("cpu", dtype)) == expected
    for shape, method in (((128, 128), "standard"), ((128, 512), "gram")):
        x = gaussian(*shape, dtype=F32)
        results = {m: newton_schulz(x, method=m, dtype=F32) for m in ("standard", "gram")}
        assert not torch.equal(results["standard"], results["gram"])
        assert torch.equal(newton_schulz(x, dtype=F32), results[method])


# ---- normalization and extreme inputs ----------------------------------------------------------


@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-12), (F32, 1e-5), (F16, 0.03), (BF16, 0.03)])
def test_any_scale_gives_the_same(dtype, bound):
    x = gaussian(20, 33)
    expected = newton_schulz(x, dtype=dtype)
    for exponent in (-30, -20, -7, 7, 20, 30):
        found = newton_schulz(x * 10.0**exponent, dtype=dtype, eps=1e-60)
        assert relative(found, expected) < bound
    if dtype is not F64:  # as float32 has it, to its largest number
        found = newton_schulz((x.clamp(-1, 1) * 3e38).float(), dtype=dtype)
        assert relative(found, newton_schulz(x.clamp(-1, 1), dtype=dtype)) < bound


def test_norm_below_eps_is_clamped_like_torch_and_that_of_a_large_matrix_is_accurate():
    x = gaussian(6, 8, dtype=F32)
    for scale in (1e-8, 1e-12, 1e-30):
        small = x * scale
        found = newton_schulz(small, steps=0, dtype=F32, eps=1e-3)
        torch.testing.assert_close(found, small / small.norm().clamp(min=1e-3))
    tiny = newton_schulz(x * 1e-30, dtype=F32)
    assert tiny.isfinite().all() and 0 < tiny.abs().max() < 1e-15
    assert newton_schulz(x * 1e-44, dtype=F32).isfinite().all()
    large = gaussian(600, 4000, dtype=F32)
    assert float(normalize(large, F64).norm()) == pytest.approx(1, abs=1e-12)
    assert float(normalize(large, F32).double().norm()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(10, 16), (520, 530)])
def test_zero_inf_nan_stay_where_they_are(method, dtype, shape):
    x = gaussian(6, *shape, dtype=F32)
    x[0], x[1, 2, 3], x[2, 0, 0], x[3, 1, 1] = 0, math.inf, math.nan, -math.inf
    x[4] *= 1e30
    clean = x.clone()
    clean[1:4] = 1.0
    found = newton_schulz(x, method=method, dtype=dtype, steps=3)
    expected = newton_schulz(clean, method=method, dtype=dtype, steps=3)
    assert torch.equal(found[0], torch.zeros_like(found[0]))
    assert not found[1:4].isfinite().any()
    assert torch.equal(found[4:], expected[4:]) and found[4:].isfinite().all()


# ---- what the caller sees ----------------------------------------------------------------------


def test_input_is_left_alone_and_no_derivative_is_recorded():
    x = torch.nn.Parameter(gaussian(8, 24, dtype=F32))
    before = x.detach().clone()
    for steps in (0, 5):
        found = newton_schulz(x, steps=steps, dtype=F32)
        assert type(found) is Tensor and not found.requires_grad
        found.zero_()  # the result is not the input
    assert torch.equal(x, before) and x.grad is None
    with pytest.raises(TypeError, match=r"no derivatives, in forward mode \(torch.func.jvp\)"):
        torch.func.jvp(newton_schulz, (before,), (before,))


def test_autocast_does_not_reach_in_and_meta_tensors_give_shapes():
    x = gaussian(16, 32, dtype=F32)
    expected = newton_schulz(x, dtype=F32)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(newton_schulz(x, dtype=F32), expected)
    found = newton_schulz(torch.empty(2, 300, 100, device="meta"))
    assert found.shape == (2, 300, 100) and found.dtype == F32


@pytest.mark.parametrize(("x", "options", "message"), [
    ([[1.0]], {}, "expects a torch.Tensor, found list"),
    (torch.ones(2, 3, dtype=torch.int64), {}, r"torch.int64: .*x.float\(\)"),
    (torch.ones(2, 3, dtype=torch.complex64), {}, "torch.complex64"),
    (torch.ones(2, 3).to_sparse(), {}, r"sparse_coo.*x.to_dense\(\)"),
    (torch.ones(3), {}, r"found shape \(3,\); leave vectors to AdamW"),
    (torch.ones(2, 3), {"method": "svd"}, "auto, standard, gram, .*found 'svd'"),
    (torch.ones(2, 3), {"dtype": "bf16"}, "found 'bf16'"),
    (torch.ones(2, 3), {"dtype": torch.int8}, "float32, float64, found torch.int8"),
    (torch.ones(2, 3), {"eps": 0.0}, "eps must be a finite number > 0"),
    (torch.ones(0, 3), {"steps": -2}, "found -2"),
])  # fmt: skip
def test_bad_inputs_and_options(x, options, message):
    is_type = not options and "found shape" not in message
    with pytest.raises(TypeError if is_type else ValueError, match=message):
        newton_schulz(x, **options)


@pytest.mark.parametrize("dtype", [F32, "auto"])
def test_newton_schulz_compiles_in_one_graph(dtype):
    x = gaussian(12, 40, dtype=F32)
    expected = newton_schulz(x, dtype=dtype)
    compiled = torch.compile(newton_schulz, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, dtype=dtype), expected, atol=1e-5, rtol=1e-2)


# ---- the dtype "auto" --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("float32_ms", "bfloat16_ms", "expected"), [(4, 2, BF16), (4, 5, BF16), (4, 23, F32)]
)
def test_auto_is_the_dtype_that_is_fast_here(monkeypatch, float32_ms, bfloat16_ms, expected):
    now, multiply = [0.0], torch.mm

    def timed(a, b, *, out):
        # A model may be planned, exported or traced before it is trained.
        assert torch.get_num_threads() == 1 and type(a) is Tensor
        now[0] += bfloat16_ms if a.dtype is BF16 else float32_ms
        return multiply(a, b, out=out)

    torch.set_num_threads(2)
    with monkeypatch.context() as patch, FakeTensorMode():
        patch.setattr(torch, "mm", timed)
        patch.setattr("dmuon.devices.time.perf_counter", lambda: now[0])
        patch.setattr(devices, "_has_bf16", [])
        native = cpu_has_bf16()
        assert type(torch.ones(1)) is FakeTensor and now[0] > 0
    assert torch.get_num_threads() == 2
    assert native == (expected is BF16)
    monkeypatch.setattr(devices, "_has_bf16", [native])
    assert devices.of("cpu").ns_dtype() == resolve_ns_dtype("auto", torch.device("cpu")) == expected
    assert newton_schulz(torch.ones(2, 3)).dtype == expected
