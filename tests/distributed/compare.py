"""What ranks have, and whether it is what they should have."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon
from dmuon.dtensors import local_tensor, whole_tensor
from dmuon.scheduler.select import trainable_parameters

TOLERANCE = 1e-5


def whole(model: nn.Module, own: dmuon.Ownership | None = None) -> dict[str, Tensor]:
    """Copies of the full weights; a collective call."""
    with nullcontext() if own is None else own.materialized(model):
        return {n: whole_tensor(p).clone() for n, p in trainable_parameters(model)}


def snapshot(model: nn.Module, opt: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of what this rank stores of weights and optimizer state."""
    found = [local_tensor(p).clone() for p in model.parameters()]
    for p in model.parameters():
        for value in opt.state[p].values() if p in opt.state else ():
            found.append(local_tensor(torch.as_tensor(value)).clone())
    return found


def gathered(value: Any) -> list[Any]:
    """``value`` of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        difference = (weight.double() - expected[name].double()).abs()
        assert bool((difference <= tolerance).all()), f"{name} is {difference.max()} off"


def assert_bitwise(found: Any, expected: Any, what: str = "") -> None:
    """Mappings, sequences and tensors, wherever these lie."""
    if isinstance(expected, Tensor):
        assert torch.equal(local_tensor(found), local_tensor(expected)), what
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), what
        for key, value in expected.items():
            assert_bitwise(found[key], value, f"{what} {key}")
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected), what
        for one, other in zip(found, expected, strict=True):
            assert_bitwise(one, other, what)
    else:
        assert found == expected, what


def assert_equal_on_all_ranks(model: nn.Module) -> None:
    """Bitwise, for every parameter."""
    for name, p in trainable_parameters(model):
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(p.detach(), first), f"{name} differs from rank 0's"


def our_hooks(model: nn.Module, optimizer: Any = None) -> list[str]:
    """Where dmuon has put something of its own."""
    holders = [*model.named_modules(), *model.named_parameters(), ("optimizer", optimizer)]
    found = []
    for name, holder in holders:
        attributes = vars(holder) if hasattr(holder, "__dict__") else {}
        found += [f"{name}.unshard" for _ in range("unshard" in attributes)]
        for attribute in {*attributes, "_backward_hooks", "_post_accumulate_grad_hooks"}:
            hooks = getattr(holder, attribute, None) if "hooks" in attribute else None
            for hook in dict(hooks or {}).values():
                origin = getattr(hook, "__module__", "") or ""
                if origin.startswith("dmuon") or type(hook).__module__.startswith("dmuon"):
                    found.append(f"{name}.{attribute}")
    return found


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace gradients by their means over all ranks, in one all-reduce; None where no rank has
    one."""
    params = list(model.parameters())
    held = [p.grad is not None for p in params]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([torch.tensor(held), *(part.double().flatten() for part in parts)])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    anywhere, *means = flat.split([len(params), *(p.numel() for p in params)])
    for p, mean, found in zip(params, means, anywhere.tolist(), strict=True):
        p.grad = mean.view_as(p).to(p.dtype) if found else None
