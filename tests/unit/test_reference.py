"""`ReferenceMuon` against torch's own optimizers: the oracle must be right itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.optim._muon import _zeropower_via_newtonschulz

from dmuon.reference import ReferenceMuon
from tests.unit.models import assert_bitwise, tree

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


def pieces(model: nn.Module) -> list[Tensor]:
    """Of parts of rows, experts, a convolution as it is flattened, and a transposed one."""
    w1, qkv, conv, turned = (p.detach() for p in model.parameters())
    return [*qkv.split((6, 3, 3)), *w1.unbind(), conv.flatten(1), turned.transpose(0, 1).flatten(1)]


def test_pieces_are_updated_as_parameters_of_their_own():
    model = tree({"qkv.weight": (12, 12), "w1": (2, 12, 5)})
    model.conv = nn.Conv1d(2, 4, 3, bias=False)
    model.turned = nn.ConvTranspose1d(3, 5, 2, bias=False)
    separate = [nn.Parameter(piece.clone()) for piece in pieces(model)]
    shared = {"lr": 0.02, "adjust_lr_fn": "original", "ns_dtype": torch.float32}
    together = ReferenceMuon(model, **shared, splits={"qkv.weight": (6, 3, 3)})
    alone = ReferenceMuon(separate, **shared)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        gradients = copy.deepcopy(model)
        for p, q in zip(gradients.parameters(), model.parameters(), strict=True):
            p.data = q.grad.clone()
        for p, grad in zip(separate, pieces(gradients), strict=True):
            p.grad = grad.clone()
        together.step()
        alone.step()
    assert_bitwise(dict(enumerate(pieces(model))), dict(enumerate(p.detach() for p in separate)))
