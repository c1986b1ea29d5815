"""docs/migration.md in formulas: steps of each peer in plain torch are steps of `dmuon.Muon`.

The peers' formulas are written out here from their sources; the arguments are those of the page's
tables, which are read from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import dmuon
from dmuon.rule import adjusted_lr

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
JORDAN = [(3.4445, -4.7750, 2.0315)] * 5
YOU = [
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
]  # fmt: skip


class Peer(NamedTuple):
    lr: float
    weight_decay: float
    is_ema: bool  # or buffer = momentum * buffer + gradient
    nesterov: bool
    coefficients: list[tuple[float, float, float]]
    scale: str  # of `SCALES`


# As the page names them; with the peers' defaults, but for Megatron's usual extra_scale_factor.
# Of an update of m x n.
SCALES: dict[str, Callable[[int, int], float]] = {
    "clamped": lambda m, n: max(1, m / n) ** 0.5,
    "unclamped": lambda m, n: (m / n) ** 0.5,
    "longest": lambda m, n: 0.2 * max(m, n) ** 0.5,
}
# As the page names them; with the peers' defaults, but for Megatron's usual extra_scale_factor.
PEERS = {
    "torch.optim.Muon": Peer(1e-3, 0.1, True, True, JORDAN, "clamped"),
    "Keller Jordan": Peer(0.02, 0.0, True, True, JORDAN, "clamped"),
    "Moonlight": Peer(1e-3, 0.1, False, True, JORDAN, "longest"),
    "Megatron": Peer(3e-4, 0.01, True, False, YOU, "longest"),
    "dion": Peer(0.01, 0.01, False, False, YOU, "unclamped"),
    "DeepSpeed": Peer(0.02, 0.0, True, True, JORDAN, "clamped"),
    "torchtitan": Peer(8e-4, 0.1, True, True, JORDAN, "longest"),
}
MOMENTUM = 0.95


def newton_schulz(update: Tensor, peer: Peer) -> Tensor:
    x = update.mT if update.size(0) > update.size(1) else update
    x = x / x.norm()
    for a, b, c in peer.coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if update.size(0) > update.size(1) else x


def step(peer: Peer, w: Tensor, g: Tensor, buffer: Tensor) -> None:
    if peer.is_ema:
        buffer.lerp_(g, 1 - MOMENTUM)
        update = g.lerp(buffer, MOMENTUM) if peer.nesterov else buffer
    else:
        buffer.mul_(MOMENTUM).add_(g)
        update = g.add(buffer, alpha=MOMENTUM) if peer.nesterov else buffer
    w.mul_(1 - peer.lr * peer.weight_decay)
    w.add_(newton_schulz(update, peer), alpha=-peer.lr * SCALES[peer.scale](*w.shape))


def arguments(name: str) -> dict[str, Any]:
    """Those of the call that the page has right below the peer's heading."""
    text = PAGE.read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    [mine] = [s for s in section if s.startswith(name)]
    call = re.search(r"^opt = dmuon\.Muon\((.*?)^\)", mine, re.MULTILINE | re.DOTALL)
    assert call is not None, mine
    found: dict[str, Any] = eval(f"dict({call[1].partition(',')[2]})")
    return found


class Layers(nn.Module):
    """A square, a wide and a tall matrix, and what goes to AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 12)
        shapes = (12, 12), (12, 20), (20, 12)
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in shapes)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("fault", [0.0, 0.01])
def test_steps_of_a_peer_are_steps_of_dmuon(name, fault):
    model, peer, given = Layers().double(), PEERS[name], arguments(name)
    weights = [layer.weight for layer in model.layers]
    before = [w.detach().clone() for w in weights]
    expected = [w.clone() for w in before]
    buffers = [torch.zeros_like(w) for w in expected]
    own = dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, ns_dtype=torch.float64, **given | {"lr": given["lr"] * (1 + fault)})
    for _ in range(3):
        for w, e, buffer in zip(weights, expected, buffers):
            w.grad = torch.randn_like(e)
            step(peer, e, w.grad.clone(), buffer)
        opt.step()
    opt.synchronize()
    for w, e, b in zip(weights, expected, before):
        difference = torch.linalg.norm(w - e) / torch.linalg.norm(e - b)
        assert (difference > 0.005) if fault else (difference < 1e-9)
    own.close()


def test_the_table_of_rates_is_right():
    page = (PAGE.parent / "learning-rate.md").read_text(encoding="utf-8")
    heading, _, *rows = page.split("<!-- rates -->\n")[1].split("<!-- end -->")[0].splitlines()
    shapes = [tuple(map(int, cell.split(" x "))) for cell in heading.strip("| ").split(" | ")[3:]]
    assert len(shapes) == 3 and len(rows) > 5
    for row in rows:
        _, lr, adjust, *translated = row.strip("| ").split(" | ")
        how = adjust if adjust.isidentifier() else float(adjust)
        for (m, n), found in zip(shapes, translated, strict=True):
            there = adjusted_lr(float(lr), how, m, n)
            assert f"{there / adjusted_lr(1.0, 'match_rms_adamw', m, n):.2g}" == found
