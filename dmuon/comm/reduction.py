"""Gradients to their owners, in backward.

One *round* reduces every parameter once. Its windows are launched in a fixed order, each as soon
as all of its gradients are there; what is missing at the end of backward counts as zero. So the
collectives of a round, and their order, never depend on which gradients a rank happens to have::

    backward   grad ... grad -> window 0 leaves    grad ... grad -> window 1 leaves   ...
    end        windows that wait for missing gradients leave, then the participation flags;
               the averaged rest is written to p.grad
    step       owners add up what arrived (`collect`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmuon.comm.arena import Arena
from dmuon.comm.routes import EVERYONE, Pack, Window
from dmuon.comm.streams import host_can_read
from dmuon.comm.transport import Meter, Work
from dmuon.comm.windows import LivePack, LiveWindow, Wire
from dmuon.scheduler.dtensors import gradient_like, local_tensor
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import Algorithm, DmuonError

__all__ = ["GradientReducer"]

# Added to a parameter's participation flag by a rank that found a gradient it cannot use, so that
# every rank learns which parameter it was. More than any number of ranks.
_UNUSABLE = 1 << 20


@dataclass(slots=True)
class _Flight:
    """A pack on its way, and the window whose memory it uses."""

    work: Work
    pack: LivePack
    window: LiveWindow | None = None


class GradientReducer:
    """Carries out rounds; see the module's docstring.

    ``deliver(owned)`` is called with the packs that arrived here as owner, and whether they are of
    the first round since `clear`. Rest gradients are written to ``p.grad``. Without an ``arena``
    each window has memory of its own while it is under way, and only the parameters of ``windows``
    take part.
    """

    def __init__(
        self,
        specs: ModelSpecs,
        parameters: Sequence[nn.Parameter],
        wire: Wire,
        arena: Arena | None,
        meter: Meter,
        windows: Sequence[Window],
        deliver: Callable[[list[LivePack], bool], None],
    ) -> None:
        self.specs = specs
        self.parameters = parameters
        self.sync = True
        self.rounds = 0  # completed since `clear`
        self.owed = False  # whether gradients may lie in p.grad that no round has seen
        self.present = [False] * len(parameters)  # on any rank, since `clear`
        self._wire = wire
        self._arena = arena
        self._meter = meter
        self._deliver = deliver
        self._windows = list(windows)
        self.is_matrix = [p.algorithm is Algorithm.MUON for p in specs.parameters]
        # How many gradients one backward accumulates into each parameter: more than one where its
        # storage changed its dtype between two uses.
        self.expected = [1] * len(parameters)
        self._tracked = sorted({p for window in windows for p in window.parameters})
        if arena is not None:
            self._tracked = list(range(len(parameters)))  # of windows that others cut, too
        self._device = parameters[0].device
        self._scale = wire.scale
        self._flags = torch.zeros(len(parameters), dtype=torch.int32, device=self._device)
        self._local: list[int] = []
        self._arrived: list[int] = []
        self._live: list[LiveWindow] = []
        self._live_of: dict[int, LiveWindow] = {}
        # Windows return at the same place round after round: their views are made once.
        self._known: dict[tuple[int, tuple[int, ...]], LiveWindow] = {}
        self._launched = 0
        self._flights: list[_Flight] = []
        self._open = False
        self._first = True
        self._unusable: str | None = None

    # ---- a round -------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Names of the parameters that no window of this round holds and that have no gradient."""
        return [
            spec.name
            for p, spec in enumerate(self.specs.parameters)
            if p not in self._live_of and self.parameters[p].grad is None
        ]

    def local_matrix(self) -> str | None:
        """The name of a matrix with a gradient in ``p.grad``, which none has after a round."""
        for p in self._tracked:
            if self.is_matrix[p] and self.parameters[p].grad is not None:
                return self.specs.parameters[p].name
        return None

    @property
    def open(self) -> bool:
        """Whether a round has begun and not ended (its backward runs, or has raised)."""
        return self._open

    def begin(self, windows: Sequence[Window] | None = None) -> None:
        """Start a round over ``windows`` (None: the planned ones).

        A round that a failed backward left open is dropped.
        """
        if self._open:
            for flight in self._flights:
                flight.work.wait()
            self._flights = []
        self.collect()
        self.owed = False
        self._open = True
        self._first = self.rounds == 0
        self._launched = 0
        self._local = [0] * len(self.parameters)
        self._arrived = [0] * len(self.parameters)
        self._unusable = None
        self._live, self._live_of = [], {}
        for window in self._windows if windows is None else windows:
            self.add_window(window)

    def add_window(self, window: Window) -> None:
        """Give the next window of this round its buffers, right behind the last one's."""
        offset = self._live[-1].end if self._live else 0
        offset = offset if self._arena is not None else 0
        live = self._known.get((offset, window.parameters))
        if live is None:
            if self._arena is None:
                live = LiveWindow.apart(window, self._device)
            else:
                live = LiveWindow(window, self._arena.carve(offset))
            self._known[offset, window.parameters] = live
        live.reset()
        self._live.append(live)
        self._live_of.update(dict.fromkeys(window.parameters, live))

    def take(self, parameter: int, grad: Tensor | None) -> None:
        """Copy one local gradient into its window; None counts as zero."""
        if grad is not None and grad.layout is not torch.strided:
            self._unusable = (
                f"parameter {self.specs.parameters[parameter].name!r} has a gradient of layout "
                f"{grad.layout}; dmuon needs dense gradients (for an embedding: sparse=False)"
            )
            self._local[parameter] += _UNUSABLE
            grad = None
        if grad is not None:
            self._local[parameter] = 1
        live = self._live_of[parameter]
        if parameter in live.empty:
            live.fill(parameter, grad, self._scale)
        elif grad is not None:
            self._take_again(live, parameter, grad)
        self._arrived[parameter] += 1
        if self._arrived[parameter] >= self.expected[parameter]:
            live.waiting.discard(parameter)

    def gradient_of(self, parameter: int) -> Tensor | None:
        """The local part of what lies in the parameter's ``grad``."""
        p = self.parameters[parameter]
        return None if p.grad is None else local_tensor(gradient_like(p.grad, p))

    def _take_again(self, live: LiveWindow, parameter: int, grad: Tensor) -> None:
        """A second gradient in one round: nested backward calls, of a module run several times."""
        if live.launched:
            raise DmuonError(
                f"parameter {self.specs.parameters[parameter].name!r} got a second gradient in "
                "one backward, after its first had been sent: a module that runs several times "
                "under re-entrant checkpointing. Use checkpoint(..., use_reentrant=False)"
            )
        if self.is_matrix[parameter]:
            live.add(parameter, grad, self._scale)
        else:
            live.fill(parameter, grad, self._scale)  # p.grad holds both

    def launch_ready(self) -> None:
        """Send every window that is full and whose predecessors have left."""
        while self._launched < len(self._live) and not self._live[self._launched].waiting:
            live = self._live[self._launched]
            live.launched = True
            self._wire.begin_window()
            for pack in live.packs:
                self._meter.add("gradients", pack.buffer)
                self._flights.append(_Flight(self._wire.send(pack), pack, live))
            self._launched += 1
            if self._arena is None:
                self._collect_arrived()

    def flush(self) -> None:
        """Send every window, what is missing as zeros."""
        self.give_up([p for live in self._live for p in sorted(live.waiting)])

    def give_up(self, parameters: Iterable[int]) -> None:
        """No gradients of these are to come in this round: send what there is."""
        for p in parameters:
            live = self._live_of[p]
            if p in live.empty:
                self.take(p, self.gradient_of(p))
            live.waiting.discard(p)
        self.launch_ready()

    def finish(self) -> None:
        """End the round: send what is missing as zeros, agree on who took part.

        Raises:
            DmuonError: a rank found a gradient that cannot be reduced. Raised on every rank that
                reads the flags: on CPU all, on CUDA those that miss a gradient themselves.
        """
        self.flush()
        self._open = False
        self.rounds += 1
        anywhere = self._participation()
        self._write_rest(anywhere)
        for p in self._tracked:
            self.present[p] = self.present[p] or anywhere[p]
            if self.is_matrix[p]:
                # The owner has it now. Left here, a second backward would add to it and
                # reduce the sum again.
                self.parameters[p].grad = None

    def _participation(self) -> list[bool]:
        """Which parameters have a gradient on any rank."""
        complete = all(self._local[p] for p in self._tracked) and self._unusable is None
        if complete:
            self._flags.fill_(1)
        else:
            self._flags.copy_(torch.tensor(self._local, dtype=torch.int32))
        self._meter.add("flags", self._flags)
        work = self._wire.all_reduce_flags(self._flags)
        if complete and not host_can_read(self._device):
            # All are present here, hence anywhere: no need to wait for the others, or to read
            # back from the device.
            self._flights.append(_Flight(work, LivePack(Pack(EVERYONE, "int32", ()), self._flags)))
            return [True] * len(self._local)
        work.wait()
        flags = self._flags.tolist()
        bad = [self.specs.parameters[p].name for p, f in enumerate(flags) if f >= _UNUSABLE]
        if bad:
            raise DmuonError(
                self._unusable
                or f"another rank has a gradient of parameter {bad[0]!r} that is not dense; dmuon "
                "needs dense gradients (for an embedding: sparse=False)"
            )
        return [flag > 0 for flag in flags]

    def _write_rest(self, anywhere: list[bool]) -> None:
        """Wait for the averaged gradients of the rest and put them in ``p.grad``."""
        grads, means = [], []
        matrices = []
        for flight in self._flights:
            if flight.pack.pack.owner != EVERYONE:
                matrices.append(flight)
                continue
            flight.work.wait()
            for span, view in zip(flight.pack.pack.spans, flight.pack.views, strict=True):
                if not anywhere[span.parameter]:
                    continue
                parameter = self.parameters[span.parameter]
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                grad = local_tensor(parameter.grad)
                grads.append(grad)
                means.append(view.view(grad.shape))
        self._flights = matrices
        if grads:
            torch._foreach_copy_(grads, means)
        for live in self._live:
            if not any(flight.window is live for flight in matrices):
                live.release()

    # ---- between rounds ------------------------------------------------------------------

    def ensure(self) -> None:
        """Have at least one round since `clear`, and none open: what `step` and clipping need.

        A rank whose backward reached no parameter still joins the others' round here.
        """
        if self._open:
            self.finish()
        elif self.rounds == 0 or self.owed:
            self.begin()
            self.finish()
        self.collect()

    def collect(self) -> None:
        """Wait for the matrices' gradients and hand over those that arrived here."""
        self._collect(len(self._flights))

    def _collect_arrived(self) -> None:
        """Collect what has arrived, up to the first window that has not.

        Never waits: another rank may launch that window at the end of its backward only, and need
        something of this rank before.
        """
        arrived = 0
        for flight in self._flights:
            if flight.pack.pack.owner != EVERYONE and not flight.work.is_completed():
                break
            arrived += 1
        self._collect(arrived)

    def _collect(self, count: int) -> None:
        """Wait for the first ``count`` flights and hand over what arrived here.

        While the round is open the rest stays: it is written when the flags are known.
        """
        mine: list[LivePack] = []
        left: list[_Flight] = []
        for i, flight in enumerate(self._flights):
            if i >= count or (self._open and flight.pack.pack.owner == EVERYONE):
                left.append(flight)
                continue
            flight.work.wait()
            if self._wire.is_mine(flight.pack.pack):
                mine.append(flight.pack)
        done = [flight.window for flight in self._flights if flight.window is not None]
        self._flights = left
        if mine:
            self._deliver(mine, self._first)
        for live in done:
            if not any(flight.window is live for flight in left):
                live.release()

    def clear(self) -> None:
        """Forget the gradients reduced so far, as `zero_grad` does."""
        if self._open:
            self.finish()
        self.collect()
        self.owed = False
        self.rounds = 0
        self.present = [False] * len(self.parameters)
