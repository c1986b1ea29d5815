"""`ReferenceMuon` against torch's own optimizers: the oracle must be right itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.reference import ReferenceMuon
from tests.unit.models import (
    AllDifferent,
    TinyGPT,
    assert_bitwise,
    clone,
    inputs,
    mean_square,
    tokens,
    train,
)

QUINTIC = (3.4445, -4.7750, 2.0315)
SHAPES = [(8, 20), (20, 8), (12, 12), (3, 65)]


def torch_newton_schulz(x: Tensor) -> Tensor:
    return _zeropower_via_newtonschulz(x, QUINTIC, 5, 1e-7)


def parameters(
    dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, int]] = SHAPES
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(*s, generator=generator).to(dtype)) for s in shapes]


def descend(
    params: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], steps: int
) -> None:
    """Steps on made-up gradients, the same for equal shapes and dtypes."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(*p.shape, generator=generator).to(p.dtype)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_torchs_newton_schulz_it_is_torch_muon_bitwise(adjust, nesterov, dtype):
    shared = {
        "lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov,
        "adjust_lr_fn": adjust,
    }  # fmt: skip
    ours, theirs = parameters(dtype), parameters(dtype)
    descend(ours, [ReferenceMuon(ours, orthogonalize=torch_newton_schulz, **shared)], 10)
    descend(theirs, [torch.optim.Muon(theirs, ns_coefficients=QUINTIC, **shared)], 10)
    for p, q, start in zip(ours, theirs, parameters(dtype)):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
        assert not torch.equal(p, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_our_newton_schulz_it_is_torch_muon_within_its_bf16_rounding(dtype):
    shared = {"lr": 1.0, "weight_decay": 0.0, "adjust_lr_fn": "original"}
    # Not so small that all singular values lie together: their errors would add up coherently.
    shapes = [(32, 48), (48, 32), (40, 40), (16, 65)]
    ours, theirs = parameters(dtype, shapes), parameters(dtype, shapes)
    mine = ReferenceMuon(ours, ns_coefficients="quintic", ns_dtype=torch.bfloat16, **shared)
    torchs = torch.optim.Muon(theirs, ns_coefficients=QUINTIC, **shared)
    seen = []
    for _ in range(5):
        # Weights of zero, so that what comes out is the update and not its rounding in a sum.
        for p in (*ours, *theirs):
            p.data.zero_()
        descend(ours, [mine], 1)
        descend(theirs, [torchs], 1)
        for p, q in zip(ours, theirs):
            seen.append(((p - q).float().norm() / q.float().norm()).item())
    # 0.2% a rounding, amplified by the first steps' slope: one NS in bf16 is off by 1 to 3%.
    assert 0 < max(seen) < 0.05


def test_the_orthogonalizer_gets_the_hyperparameters_of_newton_schulz():
    settings = {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "eps": 1e-3}
    (p,) = parameters(shapes=[(6, 9)])
    start = p.detach().clone()
    optimizer = ReferenceMuon(
        [p], 1.0, 0.0, nesterov=False, momentum=0.0, adjust_lr_fn="original",
        ns_dtype=torch.float32, **settings,
    )  # fmt: skip
    p.grad = 1e-3 * torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    expected = newton_schulz(
        p.grad, coefficients=(2.0, -1.5, 0.5), steps=3, eps=1e-3, dtype=torch.float32
    )
    optimizer.step()
    torch.testing.assert_close(p.detach(), start - expected, rtol=0, atol=0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("mode", ["ema", "sgd"])
def test_two_steps_without_orthogonalization_by_hand(mode, nesterov):
    (p,) = parameters(shapes=[(4, 3)])
    w = p.detach().double()
    dampening = 0.25 if mode == "sgd" else 0.0
    optimizer = ReferenceMuon(
        [p], lr=0.1, weight_decay=0.5, momentum=0.9, nesterov=nesterov, adjust_lr_fn="original",
        momentum_mode=mode, dampening=dampening, orthogonalize=lambda x: x,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    buffer = torch.zeros(4, 3, dtype=torch.float64)
    fresh = 0.1 if mode == "ema" else 0.75
    for _ in range(2):
        p.grad = torch.randn(4, 3, generator=generator)
        optimizer.step()
        g = p.grad.double()
        buffer = 0.9 * buffer + fresh * g
        update = buffer
        if nesterov:
            update = 0.9 * buffer + (0.1 * g if mode == "ema" else g)
        w = w * (1 - 0.1 * 0.5) - 0.1 * (4 / 3) ** 0.5 * update
        torch.testing.assert_close(p.detach().double(), w, rtol=0, atol=1e-6)


def test_the_rest_is_torch_adamw_bitwise():
    model = TinyGPT()
    twin = clone(model)
    matrices = [p for n, p in twin.named_parameters() if "up.weight" in n or "down.weight" in n]
    rest = [p for p in twin.parameters() if all(p is not m for m in matrices)]
    ours = ReferenceMuon(
        model, lr=0.02, weight_decay=0.3, adamw_lr=0.01, adamw_betas=(0.8, 0.9), adamw_eps=1e-6,
        adamw_weight_decay=0.2, ns_dtype=torch.float32,
    )  # fmt: skip
    theirs = [
        torch.optim.AdamW(rest, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
        ReferenceMuon(matrices, lr=0.02, weight_decay=0.3, ns_dtype=torch.float32),
    ]
    assert len(rest) > len(matrices) > 0
    train(model, ours, tokens(), range(6))
    train(twin, theirs, tokens(), range(6))
    assert_bitwise(dict(model.named_parameters()), dict(twin.named_parameters()))
    group = ReferenceMuon(TinyGPT(), lr=0.02, weight_decay=0.3).adamw.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.02, 0.3), "by default they are Muon's"


def test_parameters_without_gradient_are_skipped():
    used, unused = parameters(shapes=[(4, 3), (4, 3)])
    start = unused.detach().clone()
    optimizer = ReferenceMuon([used, unused], weight_decay=0.5)
    used.grad = torch.ones(4, 3)
    optimizer.step()
    assert torch.equal(unused, start)
    assert unused not in optimizer.state


class Separate(nn.Module):
    """`Fused` with its pieces held as parameters of their own."""

    def __init__(self, fused: nn.Module, rows: tuple[int, ...]) -> None:
        super().__init__()
        pieces = fused.qkv.weight.detach().split(rows)
        self.pieces = nn.ParameterList(piece.clone() for piece in pieces)
        self.experts = nn.ParameterList(fused.w1.detach().clone().unbind())
        self.kernel = nn.Parameter(fused.conv.weight.detach().flatten(1).clone())

    def forward(self, x: Tensor) -> Tensor:
        qkv, experts = torch.cat(list(self.pieces)), torch.stack(list(self.experts))
        return forward(x, qkv, experts, self.kernel.view(4, 2, 3))


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 12, bias=False)
        self.w1 = nn.Parameter(torch.randn(2, 12, 5) / 3)
        self.conv = nn.Conv1d(2, 4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return forward(x, self.qkv.weight, self.w1, self.conv.weight)


def forward(x: Tensor, qkv: Tensor, w1: Tensor, kernel: Tensor) -> Tensor:
    x = torch.tanh(x @ qkv.t())
    image = nn.functional.conv1d(x.view(-1, 2, 6), kernel).flatten(1)
    return torch.cat([torch.tanh(x @ w1[0]), x @ w1[1], image], dim=1)


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ({"splits": {"qkv.weight": (6, 3, 3)}}, (6, 3, 3)),
        ({"heads": {"qkv.weight": 4}}, (3, 3, 3, 3)),
    ],
)
def test_pieces_are_updated_as_parameters_of_their_own(split, rows):
    fused = Fused()
    separate = Separate(fused, rows)
    shared = {"lr": 0.02, "adjust_lr_fn": "original", "ns_dtype": torch.float32}
    train(fused, ReferenceMuon(fused, **shared, **split), inputs((6, 12)), range(5))
    train(separate, ReferenceMuon(list(separate.parameters()), **shared), inputs((6, 12)), range(5))
    found = fused.qkv.weight, fused.w1, fused.conv.weight.flatten(1)
    pieces, experts = torch.cat(list(separate.pieces)), torch.stack(list(separate.experts))
    assert_bitwise(dict(enumerate(found)), dict(enumerate((pieces, experts, separate.kernel))))


def test_a_transposed_convolution_is_updated_as_its_matrix_of_out_by_rest():
    model = AllDifferent()
    weight = model.deconv.weight
    start = weight.detach().clone()
    optimizer = ReferenceMuon(
        model, 1.0, 0.0, 0.0, nesterov=False, adjust_lr_fn="original", ns_dtype=torch.float32
    )
    mean_square(model, inputs((3, 2, 6))(0)).backward()
    matrix = weight.grad.transpose(0, 1).reshape(4, -1)
    update = newton_schulz(matrix, dtype=torch.float32).view(4, 7, 3).transpose(0, 1)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), start - update, rtol=0, atol=1e-7)
