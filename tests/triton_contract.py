"""What the Triton kernels have to do, wherever they run: in the interpreter and on a GPU.

``tests/unit/test_triton.py`` and ``tests/gpu/test_triton.py`` collect these tests and give them a
fixture ``kernels``: the three modules, and where they run. Large sizes are for a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dmuon.rule import Rule
from dmuon.tensors import into_range, normalize_
from tests.internals import Hyper, momentum_update

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
EMA: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "mode": "ema", "dampening": 0.0}
TOLERANCE = {F32: 1e-5, F16: 1e-2, BF16: 8e-2}
FLOAT32_EPS = torch.finfo(F32).eps


@dataclass(frozen=True)
class Kernels:
    """The modules under test, and tensors where they run."""

    device: str
    syrk: ModuleType
    lists: ModuleType

    def momentum(
        self, buffer: Tensor, grad: Tensor, out: Tensor, eps: float = 1e-7, **how: Any
    ) -> Tensor:
        """As optimizers have it by default: norms first, then momentum and scaled operands."""
        settings = Hyper(0.0, 1.0, None, **EMA | how).momentum_settings()
        to, *lists = ([*stack.unbind()] for stack in (out, buffer, grad))
        if not to:
            return out
        norms = self.lists.norms(*lists, buffer.dtype, **settings)[0]
        scales = into_range(norms, eps).float()
        self.lists.advance(to, *lists, buffer.dtype, scales=scales, **settings)
        return out

    def update(self, weight: Tensor, update: Tensor, decay: float, lr: float) -> None:
        how = {"stays": None, "cautious": False}
        self.lists.update([weight], [update], None, decay=decay, lr=lr, **how)

    @property
    def is_interpreted(self) -> bool:
        return self.device == "cpu"

    @property
    def low(self) -> torch.dtype:
        """Of weights with masters: the interpreter cuts what bfloat16 cannot hold, and rounds to
        float16."""
        return F16 if self.is_interpreted else BF16

    def random(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        """The same numbers on every device."""
        return torch.randn(shape).to(dtype).to(self.device)

    def empty(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=self.device)

    def unit(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        """Matrices of norm 1."""
        x = torch.randn(shape)
        return (x / torch.linalg.matrix_norm(x, keepdim=True)).to(dtype).to(self.device)

    def tile(self, *sizes: int) -> Any:
        """Small ones, so that the interpreter sees many of them."""
        return self.syrk.Tile(*sizes) if self.is_interpreted else None


def assert_within(found: Tensor, wanted: Tensor, bound: Tensor) -> None:
    """|found - wanted| <= bound, element by element; a nan is never within."""
    error = (found.double() - wanted).abs()
    assert (error <= bound).all(), f"off by {(error - bound).max():.3g} more than {bound.max():.3g}"


# ---- symmetric products --------------------------------------------------------------------


def check_symm(
    kernels: Kernels,
    a: Tensor,
    bt: Tensor,
    c: Tensor | None = None,
    *,
    out: Tensor,
    plain: Tensor | None = None,
    tile: Any = None,
    **factors: float,
) -> None:
    """The lower triangle is that of the product, and the upper one mirrors it to the bit.

    The operands may be such that the product is not symmetric: then mixing up its halves shows.
    """
    before = [x if x is None else x.clone() for x in (a, bt, c)]
    kernels.syrk.symm_mm(a, bt, c, out=out, plain=plain, tile=tile, **factors)
    alpha = factors.get("alpha", 1.0)
    beta, diag = (factors.get(name, 0.0) for name in ("beta", "diag"))
    for x, old in zip((a, bt, c), before, strict=True):
        assert x is None or old is None or torch.equal(x, old), "operands stay as they are"
    wide_a, wide_b = a.double(), bt.double()
    without = alpha * (wide_a @ wide_b.mT)
    size = abs(alpha) * (wide_a.abs() @ wide_b.mT.abs())
    if c is not None:
        without, size = without + beta * c.double(), size + abs(beta) * c.double().abs()
    shift = diag * torch.eye(a.shape[-2], dtype=torch.float64, device=a.device)
    for result, wanted in ((out, without + shift), (plain, without)):
        if result is None:
            continue
        assert torch.equal(result, result.mT), "exactly symmetric"
        sums = (a.shape[-1] + 4) * FLOAT32_EPS * (size + shift.abs())
        bound = torch.finfo(out.dtype).eps * wanted.abs() + sums + 1e-7
        assert_within(result.tril(), wanted.tril(), bound)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("parts", [(), ("c",), ("diag",), ("plain",), ("c", "diag", "plain")])
def test_every_epilogue(kernels, parts, dtype):
    m, k = (70, 50) if kernels.is_interpreted else (330, 200)
    a, bt = (kernels.random(m, k, dtype=dtype) for _ in range(2))
    how: dict[str, Any] = {"alpha": -1.75, "diag": 8.25 * ("diag" in parts)}
    if "c" in parts:
        how |= {"c": kernels.random(m, m, dtype=dtype), "beta": 0.6}
    if "plain" in parts:
        how["plain"] = kernels.empty(m, m, dtype=dtype)
    tile = kernels.tile(32, 16, 4, 2)
    check_symm(kernels, a, bt, out=kernels.empty(m, m, dtype=dtype), tile=tile, **how)


@pytest.mark.parametrize(("m", "k"), [(1, 40), (16, 32), (17, 31), (64, 64), (150, 9)])
def test_sizes(kernels, m, k):
    """One tile, many of them (more than a group), whole tiles and cut ones."""
    a, bt = kernels.random(m, k), kernels.random(m, k)
    out, plain = kernels.empty(2, m, m)
    tile = kernels.tile(16, 32, 4, 2)
    check_symm(kernels, a, bt, out=out, plain=plain, diag=-1.0, tile=tile)


def test_batches_of_strided_matrices(kernels):
    """Operands are transposed views, results lie between other matrices of one workspace."""
    b, m, k = 3, 40, 24
    a = kernels.random(b, k, m, dtype=F16).mT
    bt = kernels.random(b, m, 2 * k, dtype=F16)[:, :, ::2]
    workspace = torch.zeros(b, 4, m + 2, m + 3, dtype=F16, device=kernels.device)
    c = kernels.random(b, m, 2 * m, dtype=F16)[:, :, m:]
    out, plain = workspace[:, 1, 1:-1, 2:-1], workspace[:, 2, 1:-1, 2:-1]
    tile = kernels.tile(16, 32, 4, 2)
    check_symm(kernels, a, bt, c, out=out, plain=plain, beta=0.5, diag=1.0, tile=tile)
    outside = torch.ones_like(workspace, dtype=torch.bool)
    outside[:, 1:3, 1:-1, 2:-1] = False
    assert not workspace[outside].any(), "nothing is written outside of the results"


def test_unusual_operands(kernels):
    tile = kernels.tile(16, 32, 4, 2)
    shared = kernels.random(30, 12).expand(2, 30, 12)  # one matrix for a whole batch
    check_symm(kernels, shared, kernels.random(2, 30, 12), out=kernels.empty(2, 30, 30), tile=tile)
    m, far = 3 if kernels.is_interpreted else 300, 2**22 + 1  # offsets in a tile pass 2^31 bytes
    a = kernels.empty((m - 1) * far + 64, dtype=F16).as_strided((m, 20), (far, 1))
    a.copy_(kernels.random(m, 20))
    check_symm(kernels, a, a, out=kernels.empty(m, m, dtype=F16), tile=tile)
    a, c = kernels.random(40, 24, dtype=F16), kernels.random(40, 40, dtype=BF16)
    check_symm(kernels, a, a, c, out=kernels.empty(40, 40), beta=1.5, tile=tile)
    c, none = kernels.random(20, 20), kernels.empty(20, 0)
    check_symm(kernels, none, none, c + c.mT, out=c.clone(), beta=2.0, diag=1.0, tile=tile)
    kernels.syrk.symm_mm(c, c, kernels.empty(20, 20), out=(out := c.clone()), beta=0.0, tile=tile)
    assert out.isfinite().all(), "c is not read where beta is 0"
    how = {"alpha": 0.0, "beta": 2.0, "diag": 1.0, "tile": tile}
    check_symm(kernels, c, c, c + c.mT, out=kernels.empty(20, 20), **how)
    a = kernels.random(2, 20, 20)
    a[0, 3, 4] = math.nan
    kernels.syrk.symm_mm(a, a, out=(out := kernels.empty(2, 20, 20)), tile=tile)
    assert out[0, 3].isnan().all() and out[1].isfinite().all(), "a nan stays in its matrix"


# ---- momentum, normalization, cast ---------------------------------------------------------


def check_momentum(
    kernels: Kernels, buffer: Tensor, grad: Tensor, out: Tensor, *, eps: float = 1e-7, **how: Any
) -> None:
    """Against the formulas of `dmuon.rule` in float64, with room for one rounding each."""
    how = EMA | how
    advanced, kept = buffer.double(), grad.clone()
    momentum_update(advanced, grad.double(), Hyper(0.0, 1.0, None, **how))
    advanced = advanced.to(buffer.dtype).double()
    operand = advanced
    if how["nesterov"]:
        share = 1 - how["momentum"] if how["mode"] == "ema" else 1.0
        operand = share * grad.double() + how["momentum"] * advanced
    normalize_(kernels.momentum(buffer, grad, out, eps, **how))
    assert torch.equal(grad, kept)
    size = advanced.abs() + grad.double().abs()
    step = 2 * torch.finfo(buffer.dtype).eps
    assert_within(buffer, advanced, step * size)
    norm = torch.linalg.vector_norm(operand, dim=(-2, -1), keepdim=True).clamp_min(eps)
    rounding = torch.finfo(out.dtype).eps * (operand / norm).abs()
    # The buffer may round the other way, and a float16 result may be subnormal.
    bound = rounding + 4 * (step + 4 * FLOAT32_EPS) * size / norm + torch.finfo(out.dtype).tiny
    assert_within(out, operand / norm, bound)


@pytest.mark.parametrize("dtypes", [(F32, BF16, F16), (F32, F32, BF16), (BF16, BF16, F16)])
def test_momentum_of_any_shape_and_dtype(kernels, dtypes):
    large = () if kernels.is_interpreted else ((1, 1024, 4096), (2, 1000, 777))
    for shape in ((1, 1, 1), (3, 3, 5), (2, 70, 130), *large):
        check_momentum(kernels, *(kernels.random(*shape, dtype=d) for d in dtypes))


def test_several_tiles_a_program_and_nothing_written_beside(kernels, monkeypatch):
    monkeypatch.setattr(kernels.lists, "_MAX_PARTS", 3)
    monkeypatch.setattr(kernels.lists, "_TILES", 2)
    shape = (2, 130, 200)
    buffer, grad = kernels.random(*shape), kernels.random(*shape)
    again = buffer.clone()
    memory = torch.zeros(4, *shape[1:], device=kernels.device)
    out, other = memory[1:3], kernels.empty(*shape)
    check_momentum(kernels, buffer, grad, out)
    other = normalize_(kernels.momentum(again, grad, other))
    assert torch.equal(other, out), "the same input gives the same bits"
    assert not memory[0].any() and not memory[3].any()


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e30])
def test_squares_neither_overflow_nor_vanish(kernels, scale):
    buffer, grad = kernels.random(2, 40, 150) * scale, kernels.random(2, 40, 150) * scale
    grad[0, 0, 0] *= 1e4
    check_momentum(kernels, buffer, grad, kernels.empty(2, 40, 150), eps=1e-35)
    grad = torch.full((1, 4, 4), 1e-10, device=kernels.device)
    out = kernels.momentum(grad.clone(), grad, kernels.empty(1, 4, 4))
    torch.testing.assert_close(out, torch.full_like(out, 1e-3), msg="below eps it stays small")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of inf - inf
@pytest.mark.parametrize(
    ("bad", "at"), [(math.nan, (0, 0)), (math.inf, (69, 129)), (-math.inf, (0, 0))]
)
def test_a_bad_entry_makes_its_matrix_nan(kernels, bad, at, monkeypatch):
    monkeypatch.setattr(kernels.lists, "_MAX_PARTS", 2)
    monkeypatch.setattr(kernels.lists, "_TILES", 1)
    grad = kernels.random(3, 70, 130)
    grad[1][at] = bad
    grad[2] = 0.0
    out = kernels.momentum(grad.clone(), grad, kernels.empty(3, 70, 130), nesterov=False)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert (out[2] == 0).all(), "a zero matrix stays zero"


# ---- lists ---------------------------------------------------------------------------------

# Of several sizes: one that is empty, one of several tiles, and two that no vector of 16 bytes is.
SHAPES = ((64, 96), (0, 4), (5,), (3, 7, 5), (40, 200))


def several(kernels: Kernels, *dtypes: torch.dtype) -> list[Tensor]:
    """Tensors of `SHAPES` and dtypes in turn; some begin where no vector does."""
    found = []
    for n, shape in enumerate(SHAPES):
        memory = kernels.random(math.prod(shape) + 1, dtype=dtypes[n % len(dtypes)])
        found.append(memory[n % 2 : n % 2 + math.prod(shape)].view(shape))
    return found


def copied(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


@pytest.mark.parametrize("working", [F32, BF16])
@pytest.mark.parametrize("mode", ["ema", "sgd"])
def test_lists_of_any_shapes_and_dtypes_are_as_torch_has_them(kernels, mode, working):
    """Within what another order of operations, and the interpreter's rounding, may change."""
    h = Hyper(0.0, 1.0, None, momentum=0.9, nesterov=True, mode=mode, dampening=0.25)
    buffers, grads = several(kernels, working, BF16), several(kernels, BF16, F32, F16)
    out = [kernels.empty(*shape, dtype=F16) for shape in SHAPES]
    scales = torch.tensor([1.0, 1.0, 0.5, 2.0, 0.25], device=kernels.device)
    wanted, wide = [kernels.empty(*shape, dtype=F16) for shape in SHAPES], copied(buffers)
    rule, how = Rule(), h.momentum_settings()
    norms = rule._norms_of_some(wide, grads, h, working)
    rule._advance_some(wanted, wide, grads, h, working, None, scales)
    found = kernels.lists.norms(buffers, grads, working, **how)
    kernels.lists.advance(out, buffers, grads, working, scales=scales, **how)
    eps = 1e-6 if working is F32 else 2e-2
    torch.testing.assert_close(found, torch.stack(norms, 1), rtol=eps, atol=0)
    for one, two, narrow in zip((*buffers, *out), (*wide, *wanted), [*buffers, *wanted]):
        ulp = 2 * torch.finfo(narrow.dtype).eps
        torch.testing.assert_close(one, two, rtol=ulp + eps, atol=ulp + 2 * eps)


@pytest.mark.parametrize("each", [False, True])
def test_what_stays_is_neither_read_nor_written(kernels, each):
    flags = [False, False, True, False, True] if each else [True] * 5
    stays = torch.tensor(flags if each else True, device=kernels.device)
    buffers, grads = several(kernels, F32), several(kernels, F32)
    out = [kernels.empty(*shape, dtype=F16) for shape in SHAPES]
    for n, flag in enumerate(flags):
        if flag:
            grads[n].fill_(math.nan)
    before = copied(buffers)
    how = Hyper(0.0, 1.0, None, momentum=0.9).momentum_settings()
    ones = torch.ones(5, device=kernels.device)
    kernels.lists.advance(out, buffers, grads, F32, scales=ones, stays=stays, **how)
    after = copied(buffers)
    kernels.lists.advance(None, buffers, grads, F32, stays=stays, **how)
    weights, updates = copied(before), grads
    options = {"decay": 0.5, "lr": 1.0, "stays": stays, "cautious": False}
    kernels.lists.update(weights, updates, None, **options)
    for n, flag in enumerate(flags):
        same = [torch.equal(found[n], before[n]) for found in (after, buffers, weights)]
        assert same == [flag or not before[n].numel()] * 3
        assert bool(out[n].any()) != flag or not before[n].numel()
        assert out[n].isfinite().all() and weights[n].isfinite().all()


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("masters", [False, True])
def test_weights_and_masters(kernels, masters, cautious):
    low = kernels.low
    targets, updates, weights = several(kernels, F32), several(kernels, F16, F32), None
    if masters:
        weights = [t if n % 2 else t.to(low) for n, t in enumerate(targets)]
    if weights is not None:
        weights[0][0, :9].fill_(3.0)  # somebody wrote to it
    h = Hyper(0.0, 0.75, None, cautious=cautious)
    wanted, followed = copied(targets), None
    if weights is not None:
        followed = [w.clone() if w.dtype is low else t for w, t in zip(weights, wanted)]
    Rule()._apply_some(wanted, updates, h, 0.25, h.decay, followed)
    kernels.lists.update(
        targets, updates, weights, decay=0.75, lr=0.25, stays=None, cautious=cautious
    )
    for one, two in zip(targets, wanted):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    for one, two in zip(weights or (), followed or ()):
        torch.testing.assert_close(one, two, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("turned", [False, True])
def test_parts_of_matrices_are_copied(kernels, turned):
    memory = torch.zeros(3, 80, 150, device=kernels.device)
    targets = [memory[0, 3:70, 5:140], memory[1, :, :64], memory[2, 5:6, 7:8]]
    sources = [kernels.random(*(t.mT if turned else t).shape) for t in targets]
    sources = [source.mT if turned else source for source in sources]
    kernels.lists.copier(targets, sources, turned=turned)()
    for to, source in zip(targets, sources):
        assert torch.equal(to, source)
        to.zero_()
    assert not memory.any(), "nothing is written beside"


def test_nothing_to_do_and_other_tensors(kernels):
    x = kernels.unit(1, 4, 5)
    before, none = x.clone(), x[:0]
    kernels.momentum(none, none.clone(), none.clone())
    kernels.update(none, none.clone(), 1.0, 1.0)
    assert torch.equal(x, before)
    wide, other = x.double(), kernels.random(1, 5, 5)
    for call in (
        lambda: kernels.update(x, other, 1.0, 1.0),
        lambda: kernels.momentum(x, wide, before),
        lambda: kernels.syrk.symm_mm(x, x, out=other),
    ):
        with pytest.raises(ValueError, match="a Triton kernel needs"):
            call()
