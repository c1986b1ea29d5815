"""Weights to where they are used: before a group of modules runs, and again before its backward.

Each forward pass broadcasts every group once, in the order of registration, each backward pass in
the reverse order; the *sweep* is how far it has come. A rank that skips a module, or calls two in
another order, still issues the same broadcasts in the same order as the others::

    forward    b0 b1 | run 0 | b2 | run 1 | b3 | run 2 ...      prefetch = 1
    backward   b3 b2 | run 3 | b1 | run 2 | ...

Backward passes by group g right before the broadcast of its place g + prefetch + 1, on every rank:
there the gradients of g leave if it is known that none will come, and on a rank that has them all
they have left by then.

What a rank has not asked for when the pass ends, it receives then, and drops. A group that is asked
for again after it has been dropped is sent once more, on all ranks that run the same program; from
the next pass on it is kept until its last call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from dmuon.comm.dedicated.homes import Group
from dmuon.comm.transport import Meter, Transport

__all__ = ["Materializer", "Passed"]

Passed = Callable[[Group], None]  # told of a group that backward has passed by


class _Sweep:
    """How many groups of ``order`` have been launched in a pass; None between passes."""

    def __init__(self, order: Sequence[int], phase: str) -> None:
        self.order = order
        self.phase = phase
        self.place = {g: i for i, g in enumerate(order)}
        self.cursor = 0
        self.open = False


class Materializer:
    """``first`` groups (those of the root) are needed first in both passes.

    ``before_launch`` is called with a group whose weights are about to leave.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        transport: Transport,
        meter: Meter,
        *,
        prefetch: int,
        free_after_forward: bool,
        first: Iterable[int] = (),
        before_launch: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self.groups = groups
        self._transport = transport
        self._meter = meter
        self._prefetch = prefetch
        self._free = free_after_forward
        self._before_launch = before_launch
        ahead = list(first)
        others = [g for g in range(len(groups)) if g not in ahead]
        self._first = len(ahead)
        self._forward = _Sweep([*ahead, *others], "forward")
        self._backward = _Sweep([*ahead, *reversed(others)], "backward")
        self._prelaunched = 0
        self._needed: set[int] = set()  # asked for in this backward pass, and not freed
        self._passed = 0  # how many groups of it are passed
        self._recorded = False  # by autograd, in the forward pass that is open
        self._recordings = 0  # forward passes that were, since the last step

    # ---- sweeps --------------------------------------------------------------------------

    def _launch(self, g: int, phase: str) -> None:
        self._before_launch(self.groups[g])
        self._meter.add_bytes("weights", self.groups[g].launch(self._transport, phase))

    def _next(self, sweep: _Sweep) -> int:
        g = sweep.order[sweep.cursor]
        sweep.cursor += 1
        if self._free or not self.groups[g].valid:
            self._launch(g, sweep.phase)
        return g

    def _ask(self, sweep: _Sweep, g: int, before: Callable[[], None] = lambda: None) -> None:
        """Launch ``g``, what comes before it, and what is prefetched behind it.

        ``before`` is called before each launch.
        """
        last = min(sweep.place[g] + self._prefetch, len(sweep.order) - 1)
        while sweep.cursor <= last:
            before()
            self._next(sweep)
        if not self.groups[g].valid:
            self._launch(g, sweep.phase)  # again: it was dropped in this pass

    def _complete(self, sweep: _Sweep, before: Callable[[], None] = lambda: None) -> None:
        """Take part in the broadcasts of what was not asked for."""
        while sweep.cursor < len(sweep.order):
            before()
            group = self.groups[self._next(sweep)]
            if self._free and not group.in_use:
                group.free()
        sweep.open = False

    # ---- forward -------------------------------------------------------------------------

    @property
    def forward_open(self) -> bool:
        """Whether a forward pass has begun and not ended."""
        return self._forward.open

    def begin_forward(self) -> None:
        """A pass over the whole model begins; one that was broken off ends first."""
        if self._forward.open:
            self.end_forward()
        self._open_forward()

    def _open_forward(self) -> None:
        sweep = self._forward
        sweep.open = True
        self._recorded = False
        sweep.cursor, self._prelaunched = self._prelaunched, 0
        for group in self.groups:
            group.running = group.calls = 0

    def enter(self, g: int) -> None:
        """A module of the group is about to run."""
        if not self._forward.open:
            self._open_forward()
        self._ask(self._forward, g)
        group = self.groups[g]
        group.use()
        group.ran = True
        group.running += 1

    def leave(self, g: int, *, recorded: bool, keep: bool, free: bool = True) -> None:
        """It has run. ``recorded``: by autograd; ``keep``: its backward may come unannounced; not
        ``free``: it is only about to run, and nothing will tell when it has."""
        group = self.groups[g]
        if recorded:
            group.record()
            self._recorded = True
        group.running -= 1
        group.keep = group.keep or keep
        if group.running > 0:
            return
        group.calls += 1
        if free and self._free and group.calls >= group.expected and not group.keep:
            group.free()

    def end_forward(self) -> None:
        """Every rank has issued every broadcast of the pass when this returns."""
        if not self._forward.open:
            return
        for group in self.groups:
            if group.calls:
                group.expected = group.calls
            group.running = 0
            if self._free and group.valid and not group.keep:
                group.free()
        self._recordings += self._recorded
        self._complete(self._forward)

    # ---- backward ------------------------------------------------------------------------

    @property
    def backward_open(self) -> bool:
        return self._backward.open

    def begin_backward(self) -> None:
        self.end_forward()
        self._backward.open = True
        self._backward.cursor = 0
        self._passed = self._first
        self._needed.clear()
        for group in self.groups:
            group.arrived, group.asked = 0, False

    def need(self, g: int, passed: Passed) -> None:
        """The backward of the group is about to run. Tells ``passed`` once of each group."""
        for i in [i for i in self._needed if i != g and self.groups[i].done]:
            self.groups[i].free()
            self._needed.discard(i)
        self._needed.add(g)
        self.groups[g].asked = True
        self._ask(self._backward, g, partial(self._pass, passed))
        self.groups[g].use()
        self._pass(passed)

    def _pass(self, passed: Passed) -> None:
        end = max(self._passed, self._backward.cursor - self._prefetch)
        groups = self._backward.order[self._passed : end]
        self._passed = end
        for g in groups:
            passed(self.groups[g])

    def end_backward(self, passed: Passed) -> None:
        """Every rank has issued every broadcast of the pass; nothing stays materialized.

        Tells ``passed`` of each group again, in its place among the broadcasts that are left.
        """
        if not self._backward.open:
            return
        for group in self.groups:
            if self._free and group.valid:
                group.free()
        self._passed = self._first
        self._complete(self._backward, partial(self._pass, passed))
        self.drop()

    # ---- between passes ------------------------------------------------------------------

    def drop(self) -> None:
        """Free every group: the weights may have changed, or are no longer needed."""
        for group in self.groups:
            if group.valid or group.in_use:
                group.free()
        self._forward.open = self._backward.open = False
        self._prelaunched = 0

    def begin_step(self) -> None:
        """The weights are about to change."""
        self.drop()
        self._recordings = 0
        for group in self.groups:
            group.ran = False
            group.epochs = 0

    def next_ahead(self) -> Group | None:
        """The group that the next forward pass needs next, if it is to be launched ahead."""
        order = self._forward.order
        if self._prelaunched >= min(self._first + self._prefetch + 1, len(order)):
            return None
        return self.groups[order[self._prelaunched]]

    def prelaunch(self) -> None:
        """Launch that group."""
        self._launch(self._forward.order[self._prelaunched], "forward")
        self._prelaunched += 1

    def pass_by(self, passed: Passed) -> None:
        """Take part in the broadcasts of a backward pass, and of the forward pass before it if
        there was none here, that run elsewhere. ``passed`` as in `end_backward`."""
        if not self._forward.open and not self._recordings:
            self._open_forward()
        self.begin_backward()
        self.end_backward(passed)
