"""`ReferenceMuon`: Muon in one process, without distribution, as the oracle of every test."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dmuon.config import MuonDefaults
from dmuon.kernels.newton_schulz import newton_schulz
from dmuon.rule import Rule, rule_of
from dmuon.scheduler.select import collect, trainable_parameters
from dmuon.scheduler.specs import MatrixSpec
from dmuon.types import Coefficients, DtypeName, Heads, Select, Splits


class ReferenceMuon(Optimizer):
    """Plain Muon, one matrix after the other, with AdamW for all other parameters.

    From a module it takes the same matrices as `dmuon.dedicate_params` (``select``, ``splits`` and
    ``heads`` mean the same). Of 2-D parameters each is a matrix, as in `torch.optim.Muon`.
    ``orthogonalize`` replaces Newton-Schulz: ``[m, n] -> [m, n]``.

    ``adamw`` is a separate optimizer, or None if it would have no parameters. Its groups are not in
    ``param_groups``, so a schedule needs a scheduler for each of the two."""

    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = "polar_express",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | float | None = "match_rms_adamw",
        *,
        momentum_mode: str = "ema",
        dampening: float = 0.0,
        variant: str | Rule | None = None,
        cautious_weight_decay: bool = False,
        momentum_dtype: str | torch.dtype | None = None,
        ns_dtype: DtypeName | torch.dtype = "auto",
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        select: Select | None = None,
        splits: Splits | None = None,
        heads: Heads | None = None,
        orthogonalize: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        group = MuonDefaults(
            lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn,
            momentum_mode, dampening, variant, cautious_weight_decay, momentum_dtype,
        ).group()  # fmt: skip
        rule_of(group)
        if isinstance(variant, str) and variant not in _VARIANTS:
            raise ValueError(f"ReferenceMuon knows {list(_VARIANTS)}, found variant={variant!r}")
        # By parameter: functions that view a tensor like it as matrices, and variants' state.
        self._views: dict[Tensor, list[Callable[[Tensor], Tensor]]] = {}
        self._kept: dict[Tensor, list[dict[str, Tensor]]] = {}
        others: list[Tensor] = []
        if isinstance(model_or_params, nn.Module):
            interleaved, splits, heads = _without_interleaved(splits or {}, heads or {})
            specs = collect(model_or_params, select=select, splits=splits, heads=heads)
            named = [*trainable_parameters(model_or_params)]
            parameters = [p for _, p in named]
            for matrix in specs.matrices:
                name, p = named[matrix.parameter]
                said = [how for key, how in interleaved.items() if fnmatchcase(name, key)]
                views = _alternating(matrix, p.ndim, **said[0]) if said else [matrix.view]
                self._views.setdefault(p, []).extend(views)
            others = [parameters[i] for i in specs.adamw_parameters()]
        else:
            self._views = {p: [lambda t: t] for p in model_or_params}
        super().__init__(list(self._views), group)
        how: dict[str, Any] = {"steps": ns_steps, "coefficients": ns_coefficients, "eps": eps}
        self._orthogonalize = orthogonalize or (lambda x: newton_schulz(x, dtype=ns_dtype, **how))
        lr = lr if adamw_lr is None else adamw_lr
        decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
        self.adamw = AdamW(others, lr, adamw_betas, adamw_eps, decay) if others else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        group = self.param_groups[0]
        for p, views in self._views.items():
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                asked = group["momentum_dtype"]
                dtype = p.grad.dtype if asked is None else getattr(torch, asked)
                state["momentum_buffer"] = torch.zeros_like(p.grad, dtype=dtype)
            for view, kept in zip(views, self._kept.setdefault(p, [{} for _ in views])):
                self._update(view(p), view(p.grad), view(state["momentum_buffer"]), group, kept)
        if self.adamw is not None:
            self.adamw.step()
        return loss

    def _update(
        self, w: Tensor, g: Tensor, buf: Tensor, group: dict[str, Any], kept: dict[str, Tensor]
    ) -> None:
        lr, mu = group["lr"], group["momentum"]
        # `buf` itself, if it is kept in the gradient's dtype.
        momentum = buf.to(torch.promote_types(buf.dtype, g.dtype))
        g = g.to(momentum.dtype)
        if group["momentum_mode"] == "ema":
            momentum.lerp_(g, 1 - mu)
            update = g.lerp(momentum, mu) if group["nesterov"] else momentum
        else:
            momentum.mul_(mu).add_(g, alpha=1 - group["dampening"])
            update = g.add(momentum, alpha=mu) if group["nesterov"] else momentum
        buf.copy_(momentum)
        matrix = self._orthogonalize(update.reshape(w.shape[0], -1))
        if (named := group["variant"]) is not None and matrix.any():
            vary = _VARIANTS[named] if isinstance(named, str) else partial(_varied, named)
            matrix = vary(matrix, kept)
        update = matrix.reshape(w.shape)
        decay = lr * group["weight_decay"]
        if group["cautious_weight_decay"]:
            w.sub_(torch.where(update * w >= 0, decay * w, 0.0))
        else:
            w.mul_(1 - decay)
        w.add_(update, alpha=-lr * _adjustment(group["adjust_lr_fn"], *matrix.shape))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.adamw is not None:
            self.adamw.zero_grad(set_to_none)


Interleaved = dict[str, dict[str, Any]]


def _without_interleaved(splits: Splits, heads: Heads) -> tuple[Interleaved, Splits, Heads]:
    """Split off entries of interleaved parameters, which count as whole in the remaining ones."""
    interleaved: Interleaved = {}
    for pattern, said in splits.items():
        said = dict(said) if isinstance(said, Mapping) else {"sizes": said}
        if isinstance(sizes := said.pop("sizes", None), str):
            interleaved[pattern] = {"count": int(sizes.split(":")[1]), "dim": said.get("dim")}
            heads = {**heads, pattern: {**said, "heads": 1}}
    return interleaved, {k: v for k, v in splits.items() if k not in interleaved}, heads


def _alternating(
    matrix: MatrixSpec, ndim: int, count: int, dim: int | None
) -> list[Callable[[Tensor], Tensor]]:
    """Return views of every ``count``-th row of a matrix, or column if ``dim`` is the columns'."""
    rows, _ = matrix.form.dims(ndim)
    if dim is None or dim % ndim == rows:
        return [lambda t, k=k: matrix.view(t)[k::count] for k in range(count)]  # type: ignore[misc]
    return [lambda t, k=k: matrix.view(t)[:, k::count] for k in range(count)]  # type: ignore[misc]


def _adjustment(name: str | float | None, rows: int, cols: int) -> float:
    """Return the factor on the learning rate of a matrix, as `torch.optim.Muon` computes it."""
    if name == "spectral_unclamped":
        return math.sqrt(rows / cols)
    if name in (None, "original"):
        return math.sqrt(max(1.0, rows / cols))
    return (0.2 if name == "match_rms_adamw" else float(name)) * math.sqrt(max(rows, cols))


def _normuon(matrix: Tensor, kept: dict[str, Tensor]) -> Tensor:
    """Apply NorMuon (arXiv 2510.05491) in float64, keeping the norm of the matrix."""
    x = matrix.double()
    before = kept.setdefault("row_moment", x.new_zeros(len(x)))
    kept["row_moment"] = moment = 0.95 * before + 0.05 * x.square().mean(1)
    scaled = x / (moment.sqrt() + 1e-8).unsqueeze(1)
    return (scaled * (x.norm() / scaled.norm())).to(matrix.dtype)


_VARIANTS = {"normuon": _normuon}


def _varied(rule: Rule, matrix: Tensor, kept: dict[str, Tensor]) -> Tensor:
    for spec in rule.state:
        if spec.name not in kept:
            shape = (1, *spec.shape(*matrix.shape))
            kept[spec.name] = torch.zeros(shape, dtype=spec.dtype, device=matrix.device)
    return rule.accept(matrix.unsqueeze(0).clone(), kept)[0]
