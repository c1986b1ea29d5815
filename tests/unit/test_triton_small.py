"""The iteration of small matrices in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is made for Linux")

from dmuon.kernels.newton_schulz import resolve_coefficients
from tests.gpu.kernel_checks import check_small, exact_iteration
from tests.unit.triton_tools import interpreted

SMALL = interpreted("triton_small")
POLAR = resolve_coefficients("polar_express", 5)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}


def matrices(*shape: int) -> torch.Tensor:
    x = torch.randn(*shape)
    return x / torch.linalg.matrix_norm(x, keepdim=True)


@pytest.mark.parametrize(
    ("m", "n", "dtype"),
    [
        (1, 1, torch.float32),
        (5, 31, torch.float32),
        (16, 64, torch.float16),
        (32, 65, torch.float32),
        (50, 129, torch.float16),
        (64, 100, torch.bfloat16),
        (65, 70, torch.bfloat16),
        (128, 192, torch.float16),
    ],
)
@pytest.mark.parametrize("restarts", [(2,), (1, 3)])
def test_shapes_and_dtypes(m, n, dtype, restarts):
    check_small(SMALL, matrices(2, m, n).to(dtype), POLAR, restarts, TOLERANCE[dtype])


@pytest.mark.parametrize("m", [20, 100])
@pytest.mark.parametrize(
    ("steps", "restarts"), [(1, ()), (2, ()), (3, ()), (3, (1, 2)), (4, (3,)), (5, (1, 2, 3, 4))]
)
def test_segments_of_any_length(m, steps, restarts):
    dtype = torch.float32 if m == 20 else torch.float16
    x = matrices(1, m, 110).to(dtype)
    check_small(SMALL, x, POLAR[:steps], restarts, TOLERANCE[dtype])


@pytest.mark.parametrize("m", [20, 70])
def test_matrices_of_a_batch_do_not_meet(m):
    dtype = torch.float32 if m == 20 else torch.float16
    x = matrices(4, m, 90).to(dtype)
    x[1, 3, 4] = float("nan")
    x[2] = 0
    alone = x[3:].clone()
    SMALL.small_iteration(alone, SMALL.tables(alone, POLAR, (2,)))
    SMALL.small_iteration(x, SMALL.tables(x, POLAR, (2,)))
    assert x[0].isfinite().all()
    assert x[1].isnan().all()
    assert (x[2] == 0).all()
    assert torch.equal(x[3], alone[0])


def test_strides_and_nothing_written_beside():
    memory = torch.zeros(3, 80, 44)
    x = memory[:, 3:-3, 5:25].mT
    x.copy_(matrices(3, 20, 74))
    check_small(SMALL, x, POLAR, (2,), 1e-5)
    x.zero_()
    assert not memory.any()


def test_each_step_has_its_own_coefficients():
    x = matrices(1, 20, 30)
    swapped = [*POLAR[1:], POLAR[0]]
    assert not torch.allclose(exact_iteration(x, POLAR), exact_iteration(x, swapped), rtol=0.05)
    check_small(SMALL, x, swapped, (2,), 1e-4)


def test_nothing_to_do():
    x = matrices(1, 4, 5)
    before = x.clone()
    SMALL.small_iteration(x, SMALL.tables(x, (), ()))
    SMALL.small_iteration(x[:0], SMALL.tables(x[:0], POLAR, (2,)))
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("x", "restarts", "message"),
    [
        (torch.zeros(4, 5), (), "x must be"),
        (torch.zeros(1, 5, 4), (), "m <= n"),
        (torch.zeros(1, 4, 5).double(), (), "float64"),
        (torch.zeros(1, 129, 129).half(), (), "129 rows, more than the 128"),
        (torch.zeros(1, 33, 33), (), "33 rows, more than the 32"),
        (torch.zeros(1, 4, 5), (0,), "restarts must increase"),
        (torch.zeros(1, 4, 5), (5,), "restarts must increase"),
        (torch.zeros(1, 4, 5), (3, 2), "restarts must increase"),
    ],
)
def test_wrong_arguments_are_refused(x, restarts, message):
    with pytest.raises(ValueError, match=message):
        SMALL.tables(x, POLAR, restarts)
