"""`clip_grad_norm_`: one joint norm over all gradients, wherever they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dmuon.comm.layout import Gradients
from dmuon.dtensors import is_distributed, local_tensor, whole_tensor
from dmuon.ownership import Ownership, ownerships_of
from dmuon.tensors import scale_all, wide_norms


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients of ``model`` so that their joint norm is at most ``max_norm``.

    As `torch.nn.utils.clip_grad_norm_` in one process on the whole batch: the norm counts every
    gradient once, matrices at their owners included, and is the same number on every rank. A
    collective call, after backward and before `step`. Where no gradient lies with an owner, torch's
    own function does the same, but for gradients of several meshes (tensor parallelism of a part of
    the model), which torch's refuses.

    Returns:
        The norm before clipping, a 0-d tensor.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``max_norm`` or ``norm_type`` is out of range, or a parameter is not what was
            planned.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; nothing is scaled.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"dmuon.clip_grad_norm_ takes the model itself, found {type(model).__name__}: "
            "dmuon.clip_grad_norm_(model, max_norm)"
        )
    max_norm, norm_type = float(max_norm), float(norm_type)
    if math.isnan(max_norm) or max_norm < 0 or math.isnan(norm_type) or norm_type <= 0:
        raise ValueError(
            f"max_norm must be >= 0 and norm_type > 0, found max_norm={max_norm}, "
            f"norm_type={norm_type}"
        )
    ownerships = ownerships_of(model)
    for ownership in ownerships:
        ownership.runtime.reduce_gradients()
    planned = {id(p) for o in ownerships for p in o.parameters}
    others = (p.grad for p in model.parameters() if id(p) not in planned)
    extra = [grad for grad in others if grad is not None]
    parts = [o.runtime.gradients() for o in ownerships]
    powers = [_power(o, g, norm_type) for o, g in zip(ownerships, parts, strict=True)]
    if extra:
        powers.append(_local_power(extra, norm_type))
    if not powers:
        return torch.zeros(())
    joint = torch.stack(powers)
    total = joint.amax() if math.isinf(norm_type) else joint.sum().pow(1.0 / norm_type)
    total = total.to(torch.float32)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they "
            "cannot be clipped; pass error_if_nonfinite=False to scale them regardless"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for stored in [*(g.stored for g in parts), [local_tensor(grad) for grad in extra]]:
        # With CPU offload the gradients lie elsewhere than the norm.
        scale_all(stored, factor.to(stored[0].device) if stored else factor)
    for ownership in ownerships:
        ownership.runtime.gradients_changed()
    return total


def _local_power(grads: list[Tensor], norm_type: float) -> Tensor:
    """``sum |g|^p``, or ``max |g|`` for the infinity norm; in float64, so no square overflows."""
    # A rank may hold nothing of a matrix, and nothing has no largest element.
    held = [g for g in grads if g.numel()]
    norms = wide_norms([g for g in held if not is_distributed(g)], norm_type)
    norms += [
        whole_tensor(torch.linalg.vector_norm(g, norm_type, dtype=torch.float64))
        for g in filter(is_distributed, held)
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=grads[0].device)
    joint = torch.stack(norms)
    return joint.amax() if math.isinf(norm_type) else joint.pow(norm_type).sum()


def _power(ownership: Ownership, gradients: Gradients, norm_type: float) -> Tensor:
    """The power sum of one ownership's gradients over all its ranks, the same on each."""
    runtime = ownership.runtime
    power = torch.zeros((), dtype=torch.float64, device=runtime.device)
    if gradients.counted:
        power.copy_(_local_power(gradients.counted, norm_type))
    infinite = math.isinf(norm_type)
    runtime.transport.all_reduce(power, tag="norm", maximum=infinite).wait()
    if not gradients.common:
        return power
    common = _local_power(gradients.common, norm_type)
    return torch.maximum(power, common) if infinite else power + common
