"""AdamW on the parameters that are no matrices, by `torch.optim.AdamW`'s own functional form.

AdamW works element by element, so a distributed parameter is updated where its shards lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dmuon.dtensors import stored_tensor
from dmuon.rule import follow_weights

_CACHED = 1 << 15  # elements that a dozen passes over stay in the caches of a CPU


@torch.no_grad()
def adamw_step(
    group: Mapping[str, Any],
    state: MutableMapping[Any, Any],
    pairs: Sequence[tuple[Tensor, Tensor]],
    *,
    master_weights: bool,
    fused: bool,
    found_inf: Tensor | None = None,
) -> None:
    """One AdamW step with the hyperparameters of the param group ``group``.

    ``pairs`` are parameters with the local parts of their gradients, ``state`` is what
    `make_adamw_state` made. ``fused``: in torch's fused form, one call that reads nothing back, and
    leaves all as it is where ``found_inf`` (0-d, float32) is not zero. Otherwise as torch does it
    on a CPU, bit for bit, in pieces that stay in its caches: its fused form rounds an element as
    the element's place in a vector is.
    """
    if not pairs:
        return
    if found_inf is not None:
        found_inf = found_inf.to(pairs[0][0].device)
    own = "adamw_" if "adamw_betas" in group else ""  # in a group that has matrices too
    (beta1, beta2), decay = group[f"{own}betas"], group[f"{own}weight_decay"]
    decay = group["weight_decay"] if decay is None else decay
    lr = float(group["lr"]) * group.get("adamw_lr_ratio", 1.0)
    rows = []
    for p, grad in pairs:
        entry = state[p]
        weight, target, *kept = (
            stored_tensor(t)
            for t in (p, entry.get("master_weight", p), entry["exp_avg"], entry["exp_avg_sq"])
        )
        rows.append((target, weight, grad.to(target.dtype), *kept, entry["step"]))
    for some in [rows] if fused else _pieces(rows):
        targets, weights, gradients, averages, squares, steps = map(list, zip(*some, strict=True))
        if master_weights:
            follow_weights(targets, weights)
        # In half precision that form rounds the decay first.
        foreach = not fused and all(t.dtype.itemsize >= 4 for t in targets)
        adamw(
            targets, gradients, averages, squares, [], steps, lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=decay, eps=group[f"{own}eps"], amsgrad=False, maximize=False,
            foreach=foreach, fused=fused, found_inf=found_inf,
        )  # fmt: skip
        rounded = [(w, t) for w, t in zip(weights, targets, strict=True) if w.dtype is not t.dtype]
        if rounded:
            torch._foreach_copy_([w for w, _ in rounded], [t for _, t in rounded])


def _pieces(rows: Iterable[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """(tensors of one shape, step number), in lists of about `_CACHED` elements: larger tensors are
    cut along their first dim."""
    found: list[tuple[Tensor, ...]] = []
    size = 0
    for *tensors, step in rows:
        first, pieces = tensors[0], [tuple(tensors)]
        if first.numel() > _CACHED and first.ndim:
            count = max(1, _CACHED * len(first) // first.numel())
            pieces = list(zip(*(t.split(count) for t in tensors), strict=True))
        # Each piece is a step further; the number itself advances with the last one.
        steps = [*(step.clone() for _ in pieces[1:]), step]
        for piece, number in zip(pieces, steps, strict=True):
            found.append((*piece, number))
            size += piece[0].numel()
            if size >= _CACHED:
                yield found
                found, size = [], 0
    if found:
        yield found


@torch.no_grad()
def make_adamw_state(p: Tensor, state: MutableMapping[Any, Any], master_weights: bool) -> None:
    """Make the state of ``p`` if there is none.

    The keys are those of `torch.optim.AdamW` and, with ``master_weights``, a float32
    "master_weight" for parameters of lower precision.
    """
    entry = state[p]
    if "step" in entry:
        return
    if master_weights and p.dtype.itemsize < 4:
        entry["master_weight"] = p.detach().float()
    target = entry.get("master_weight", p)
    # As torch.optim.AdamW keeps it, whatever the default dtype: bfloat16 cannot count beyond 256.
    # With the parameter, as the fused form wants it.
    entry["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
    entry["exp_avg"] = torch.zeros_like(target.detach())
    entry["exp_avg_sq"] = torch.zeros_like(target.detach())
