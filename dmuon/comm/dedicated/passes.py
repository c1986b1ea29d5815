"""What the hooks of the `dedicated` layout tell: passes over the model begin, come by, and end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dmuon.comm.dedicated.homes import Group
from dmuon.comm.dedicated.materialize import Materializer
from dmuon.comm.dedicated.vault import Vault
from dmuon.comm.dedicated.weights import DedicatedWeights
from dmuon.comm.reduction import GradientReducer

__all__ = ["WeightPasses"]


class WeightPasses:
    """Has weights materialized as passes need them, and gradients reduced as they come.

    ``steps`` counts how often weights have changed, ``backwards`` the backward passes since then.
    There is a ``reducer`` once an optimizer has bound itself; without ``sync`` it waits.
    """

    def __init__(self, kept: DedicatedWeights) -> None:
        self.steps = 0
        self.backwards = 0
        self.sync = True
        self.reducer: GradientReducer | None = None
        self._kept = kept

    @property
    def _storage(self) -> tuple[Vault, Materializer]:
        return self._kept.storage

    def adopt(self) -> None:
        """Find the parameters as they are now."""
        self._kept.adopt()

    def check_whole(self, module: nn.Module) -> None:
        """Raise OwnershipError if placeholders would be saved, copied or loaded into."""
        self._kept.check_whole(module)

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun and not ended."""
        return self._kept.is_backward_open

    # ---- forward -------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root is about to run."""
        vault, materializer = self._storage
        self.recover()
        vault.check()
        materializer.begin_forward()

    def end_forward(self) -> None:
        """The root has run."""
        self._storage[1].end_forward()

    def enter(self, groups: Sequence[int]) -> None:
        """A module of these groups is about to run."""
        for g in groups:
            self._storage[1].enter(g)

    def touch(self, groups: Sequence[int]) -> None:
        """A part of these groups' modules runs, normally inside them."""
        vault, materializer = self._storage
        recorded = torch.is_grad_enabled()
        for g in groups:
            if not vault.groups[g].running:  # called by itself, so nobody announces its backward
                materializer.enter(g)
                materializer.leave(g, recorded=recorded, keep=recorded, free=False)

    def leave(self, groups: Sequence[int], *, recorded: bool, announced: bool) -> None:
        """A module of these groups has run. ``recorded``: by autograd; ``announced``: a hook will
        tell when its backward begins."""
        for g in groups:
            self._storage[1].leave(g, recorded=recorded, keep=recorded and not announced)

    # ---- backward ------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """The first hook of a backward pass has fired."""
        vault, materializer = self._storage
        materializer.begin_backward()
        for group in vault.groups:
            # Changing the dtype of a parameter's data makes autograd accumulate apart.
            parts = [max(1, group.epochs) if vault.casts(p) else 1 for p in group.parameters]
            group.awaited = sum(parts)
            if self.reducer is not None:
                for p, count in zip(group.parameters, parts, strict=True):
                    self.reducer.expected[p] = count
        if self.reducer is not None and self.sync:
            self.reducer.begin()

    def need(self, groups: Sequence[int]) -> None:
        """The backward of these groups is about to run."""
        for g in groups:
            self._storage[1].need(g, self._send_idle)

    def _send_idle(self, group: Group) -> None:
        """Send zeros of a group that neither ran in forward nor was asked for since.

        At its place among the broadcasts, where the ranks that have its gradients send them.
        """
        if self.reducer is not None and self.reducer.open and not (group.ran or group.asked):
            vault = self._storage[0]
            self.reducer.give_up(p for p in group.parameters if not vault.is_pinned(p))

    def _send(self, group: Group) -> None:
        """Send what there is of a group; nothing is to come."""
        if self.reducer is not None and self.reducer.open:
            self.reducer.give_up(group.parameters)

    def take_gradient(self, parameter: int) -> None:
        """Autograd has accumulated into a parameter's ``grad``."""
        is_matrix = parameter in self._kept.dedicated
        if is_matrix:
            self._storage[0].group_of[parameter].arrived += 1
        reducer = self.reducer
        if reducer is None or not reducer.open:
            return
        reducer.take(parameter, reducer.gradient_of(parameter))
        if is_matrix:
            self._kept.parameters[parameter].grad = None
        reducer.launch_ready()

    def end_backward(self) -> None:
        """Autograd is done, or has raised."""
        vault, materializer = self._storage
        materializer.end_backward(self._send)
        if self.reducer is not None and self.reducer.open:
            self.reducer.finish()
        self.backwards += 1
        for group in vault.groups:
            group.settle()

    def pass_by(self) -> None:
        """Join the other ranks' passes since the step if no backward ran here.

        They count on this rank's part all the same, and in the same order.
        """
        if self.backwards:
            return
        if self.reducer is not None:
            self.reducer.begin_owed()
        self._storage[1].pass_by(self._send)
        self.backwards = 1

    def recover(self) -> None:
        """End a backward that raised: the other ranks count on the rest of it."""
        if self.in_backward:
            self.end_backward()
