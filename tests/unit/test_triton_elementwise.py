"""Momentum, normalization and update in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux")

from dmuon.kernels.newton_schulz import normalize
from dmuon.update import momentum_update
from tests.gpu.kernel_checks import FLOAT32_EPS, assert_within, check_momentum, on
from tests.unit.triton_tools import interpreted

ELEMENTWISE = interpreted("triton_elementwise")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
EMA = {"momentum": 0.95, "nesterov": True, "mode": "ema", "dampening": 0.0}
PLAIN = {"momentum": 0.95, "nesterov": False, "mode": "ema", "dampening": 0.0}


@pytest.mark.parametrize("mode", ["ema", "sgd"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.3, 0.95])
def test_every_formula(mode, nesterov, momentum):
    how = {"momentum": momentum, "nesterov": nesterov, "mode": mode, "dampening": 0.25}
    buffer, grad = on("cpu", 2, 9, 70, dtype=F32), on("cpu", 2, 9, 70, dtype=F32)
    out = torch.empty(2, 9, 70)
    wanted = buffer.clone()
    operand = torch.stack([momentum_update(w, g, **how) for w, g in zip(wanted, grad)])
    check_momentum(ELEMENTWISE, buffer, grad, out, **how)
    torch.testing.assert_close(buffer, wanted, rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(out, normalize(operand, F32), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtypes", [(F32, BF16, F16), (F32, F32, BF16), (BF16, BF16, F16)])
def test_dtypes(dtypes):
    buffer, grad = on("cpu", 2, 20, 33, dtype=dtypes[0]), on("cpu", 2, 20, 33, dtype=dtypes[1])
    check_momentum(ELEMENTWISE, buffer, grad, torch.empty(2, 20, 33, dtype=dtypes[2]), **EMA)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 1, 1), (3, 70, 130), (1, 130, 70)])
@pytest.mark.parametrize("transposed", ["", "out", "all"])
def test_shapes_and_strides(shape, transposed):
    turned = (*shape[:-2], shape[-1], shape[-2])
    buffer, grad = on("cpu", *shape, dtype=F32), on("cpu", *shape, dtype=BF16)
    out = torch.empty(shape, dtype=F16)
    if transposed:
        out = torch.empty(turned, dtype=F16).mT
    if transposed == "all":
        buffer, grad = on("cpu", *turned, dtype=F32).mT, on("cpu", *turned, dtype=BF16).mT
    check_momentum(ELEMENTWISE, buffer, grad, out, **EMA)


def test_rows_with_gaps_and_nothing_written_beside():
    memory = torch.zeros(3, 12, 600)
    out = memory[:, 1:-1, 5:595]
    buffer, grad = on("cpu", 3, 10, 590, dtype=F32), on("cpu", 3, 10, 590, dtype=F32)
    check_momentum(ELEMENTWISE, buffer, grad, out, **EMA)
    out.zero_()
    assert not memory.any()


def test_several_tiles_a_program(monkeypatch):
    monkeypatch.setattr(ELEMENTWISE, "_MAX_PARTS", 3)
    buffer, grad = on("cpu", 2, 130, 200, dtype=F32), on("cpu", 2, 130, 200, dtype=F32)
    check_momentum(ELEMENTWISE, buffer, grad, torch.empty(2, 130, 200), **EMA)


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e30])
def test_squares_neither_overflow_nor_vanish(scale):
    buffer, grad = torch.randn(2, 40, 150) * scale, torch.randn(2, 40, 150) * scale
    grad[0, 0, 0] *= 1e4
    check_momentum(ELEMENTWISE, buffer, grad, torch.empty(2, 40, 150), eps=1e-35, **EMA)


def test_below_eps_a_matrix_stays_small():
    grad = torch.full((4, 4), 1e-10)
    out = torch.empty(4, 4)
    ELEMENTWISE.momentum_norm_cast(grad.clone(), grad, **EMA, eps=1e-7, out=out)
    torch.testing.assert_close(out, torch.full((4, 4), 1e-3))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of inf - inf
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(1, 0, 0), (1, 69, 129)])
def test_a_bad_entry_makes_its_matrix_nan(bad, place, monkeypatch):
    monkeypatch.setattr(ELEMENTWISE, "_MAX_PARTS", 2)
    grad = torch.randn(3, 70, 130)
    grad[place] = bad
    grad[2] = 0.0
    out = torch.empty(3, 70, 130)
    ELEMENTWISE.momentum_norm_cast(grad.clone(), grad, **PLAIN, eps=1e-7, out=out)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert (out[2] == 0).all(), "a zero matrix stays zero"


def test_the_same_input_gives_the_same_bits():
    buffer, grad = torch.randn(2, 70, 130), torch.randn(2, 70, 130)
    results = []
    for _ in range(2):
        out = torch.empty(2, 70, 130)
        ELEMENTWISE.momentum_norm_cast(buffer.clone(), grad, **EMA, eps=1e-7, out=out)
        results.append(out)
    assert torch.equal(*results)


# ---- update --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(F32, F16), (BF16, BF16), (F32, F32), (F16, F32)])
@pytest.mark.parametrize(
    ("shape", "transposed"),
    [
        *((shape, "") for shape in ((), (7,), (1, 1), (70, 90), (2, 33, 65), (2, 3, 4, 5))),
        *((shape, "update") for shape in ((1, 1), (70, 90), (2, 33, 65))),
        *((shape, "weight") for shape in ((1, 1), (70, 90), (2, 33, 65))),
    ],
)
def test_update(dtypes, shape, transposed):
    weight, update = on("cpu", *shape, dtype=dtypes[0]), on("cpu", *shape, dtype=dtypes[1])
    if transposed == "update":
        update = update.mT.contiguous().mT
    if transposed == "weight":
        weight = weight.mT.contiguous().mT
    kept, wanted = update.clone(), weight.double() * 0.875 - 0.25 * update.double()
    ELEMENTWISE.apply_update(weight, update, decay=0.875, lr=0.25)
    assert torch.equal(update, kept)
    bound = torch.finfo(dtypes[0]).eps * wanted.abs() + 4 * FLOAT32_EPS
    assert_within(weight, wanted, bound)


def test_many_dimensions_have_to_be_contiguous():
    weight = torch.zeros(2, 3, 4, 5)
    with pytest.raises(ValueError, match="apply_update: weight must be"):
        ELEMENTWISE.apply_update(weight, torch.zeros(2, 3, 5, 4).mT, decay=1.0, lr=1.0)


# ---- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grad": torch.zeros(5, 4)}, "grad must be on the device and of the shape of buffer"),
        ({"out": torch.zeros(2, 4, 5)}, "out must be on the device"),
        ({"buffer": torch.zeros(4, 5).double()}, "buffer must be float16.*float64"),
        ({"mode": "nag"}, "mode must be"),
    ],
)
def test_wrong_arguments_are_refused(changed, message):
    fine = {"buffer": torch.zeros(4, 5), "grad": torch.zeros(4, 5), "out": torch.zeros(4, 5)}
    ELEMENTWISE.momentum_norm_cast(**fine, **EMA, eps=1e-7)
    with pytest.raises(ValueError, match=message):
        ELEMENTWISE.momentum_norm_cast(**{**fine, **EMA, "eps": 1e-7, **changed})


def test_shared_memory_is_refused():
    x = torch.zeros(3, 4, 5)
    for buffer, grad, out in ((x[0], x[0], x[1]), (x[0], x[1], x[0]), (x[0], x[1], x[1])):
        with pytest.raises(ValueError, match="shares memory with"):
            ELEMENTWISE.momentum_norm_cast(buffer, grad, **EMA, eps=1e-7, out=out)
    with pytest.raises(ValueError, match="weight shares memory with update"):
        ELEMENTWISE.apply_update(x, x, decay=1.0, lr=1.0)


def test_nothing_to_do():
    none = torch.empty(0, 4, 5)
    ELEMENTWISE.momentum_norm_cast(none, none.clone(), **EMA, eps=1e-7, out=none.clone())
    ELEMENTWISE.apply_update(none, none.clone(), decay=1.0, lr=1.0)
