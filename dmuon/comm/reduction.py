"""Gradients to their owners, in backward.

One *round* reduces every parameter once. Its windows are launched in a fixed order, each as soon
as all of its gradients are there; what is missing at the end of backward counts as zero. So the
collectives of a round, and their order, never depend on which gradients a rank happens to have::

    backward   grad ... grad -> window 0 leaves    grad ... grad -> window 1 leaves   ...
    end        windows that wait for missing gradients leave, then what needs the results of all
               (the second level of HSDP), then the participation flags;
               the averaged rest is written to p.grad
    step       owners add up what arrived (`collect`)

A gradient that is not dense cannot be reduced. Where the host can read, every rank raises at the
end of that backward. Elsewhere it would have to wait for the device: the gradient counts as
missing, the flags travel to the host meanwhile, and every rank raises at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmuon.comm import streams
from dmuon.comm.arena import Arena
from dmuon.comm.routes import EVERYONE, Window
from dmuon.comm.streams import HostCopy
from dmuon.comm.transport import Meter, Work
from dmuon.comm.windows import LivePack, LiveWindow, Wire
from dmuon.dtensors import gradient_like, local_tensor
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import Algorithm, DmuonError

__all__ = ["GradientReducer", "decode_flags", "encode_flags"]


@dataclass(slots=True)
class _Flight:
    """A pack on its way."""

    work: Work
    pack: LivePack


def encode_flags(present: Sequence[bool], unusable: Sequence[bool]) -> list[int]:
    """One rank's participation flags: of each parameter whether it has a gradient here, then of
    each whether that cannot be used.

    Ranks combine them by their maximum. A sum would overflow with enough of them.

    >>> encode_flags([True, False], [False, True])
    [1, 0, 0, 1]
    """
    return [int(flag) for flag in (*present, *unusable)]


def decode_flags(flags: Sequence[int]) -> tuple[list[bool], list[bool]]:
    """Of each parameter: whether any rank has a gradient, and whether any has one of no use.

    >>> decode_flags([1, 0, 0, 1])
    ([True, False], [False, True])
    """
    half = len(flags) // 2
    return [bool(f) for f in flags[:half]], [bool(f) for f in flags[half:]]


class GradientReducer:
    """Carries out rounds; see the module's docstring.

    ``deliver(owned)`` is called with the packs that arrived here as owner, and whether they are of
    the first round since `clear`. Rest gradients are written to ``p.grad``. Without an ``arena``
    each pack has memory of its own while it is under way, and only the parameters of ``windows``
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
        self._flags = torch.zeros(2 * len(parameters), dtype=torch.uint8, device=self._device)
        # Flags on their way to a host that does not wait: of rounds since `clear`, and before.
        self._recent_flags: list[HostCopy] = []
        self._earlier_flags: list[HostCopy] = []
        self._local: list[bool] = []
        self._unusable: list[bool] = []
        self._arrived: list[int] = []
        self._live: list[LiveWindow] = []
        self._live_of: dict[int, LiveWindow] = {}
        # Windows return at the same place round after round: their views are made once.
        self._known: dict[tuple[int, tuple[int, ...]], LiveWindow] = {}
        self._launched = 0
        self._flights: list[_Flight] = []
        self._open = False
        self._first = True

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
            self._wire.end_round()
            for flight in self._flights:
                flight.work.wait()
            self._flights = []
        self.collect()
        self.owed = False
        self._open = True
        self._first = self.rounds == 0
        self._launched = 0
        self._local = [False] * len(self.parameters)
        self._unusable = [False] * len(self.parameters)
        self._arrived = [0] * len(self.parameters)
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
                live = LiveWindow.within(window, self._arena.carve(offset))
            self._known[offset, window.parameters] = live
        live.reset()
        self._live.append(live)
        self._live_of.update(dict.fromkeys(window.parameters, live))

    def take(self, parameter: int, grad: Tensor | None) -> None:
        """Copy one local gradient into its window; None counts as zero."""
        if grad is not None and grad.layout is not torch.strided:
            self._unusable[parameter] = True
            self.parameters[parameter].grad = grad = None
        if grad is not None:
            self._local[parameter] = True
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
            for pack in live.packs:
                self._meter.add("gradients", pack.buffer)
                self._flights.append(_Flight(self._wire.send(pack), pack))
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
            DmuonError: a rank found a gradient that cannot be reduced. Raised on every rank: here
                where the host can read the flags, else by the next `ensure` after `clear`.
        """
        self.flush()
        self._wire.end_round()
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
        number = len(self.parameters)
        complete = all(self._local[p] for p in self._tracked) and not any(self._unusable)
        if complete:
            self._flags[:number].fill_(1)
            self._flags[number:].zero_()
        else:
            flags = encode_flags(self._local, self._unusable)
            self._flags.copy_(torch.tensor(flags, dtype=torch.uint8))
        self._meter.add("flags", self._flags)
        self._wire.all_reduce_flags(self._flags).wait()
        if streams.host_can_read(self._device):
            present, unusable = decode_flags(self._flags.tolist())
            self._check_usable(unusable)
            return present
        # Whether this rank reads them depends on its gradients, so nobody raises by that.
        self._recent_flags.append(HostCopy(self._flags))
        if complete:  # all are present here, hence anywhere
            return [True] * number
        return decode_flags(self._flags.tolist())[0]

    def _check_usable(self, unusable: Sequence[bool], when: str = "") -> None:
        """Raise DmuonError, the same on every rank, if any rank had a gradient of no use."""
        for spec, is_unusable in zip(self.specs.parameters, unusable, strict=True):
            if is_unusable:
                raise DmuonError(
                    f"parameter {spec.name!r} got a gradient that is not dense (a sparse layout) "
                    f"on some rank{when}; dmuon needs dense gradients (for an embedding: "
                    "sparse=False)"
                )

    def _check_earlier(self) -> None:
        """Look at flags that no host has read when their round ended."""
        earlier, self._earlier_flags = self._earlier_flags, []
        for flags in earlier:
            _, unusable = decode_flags(flags.read())
            self._check_usable(
                unusable, " in the backward before the last step, which counted it as missing"
            )

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
        written = [f for f in self._flights if f.pack.pack.owner == EVERYONE]
        self._flights = matrices
        if grads:
            torch._foreach_copy_(grads, means)
        for flight in written:
            flight.pack.release()

    # ---- between rounds ------------------------------------------------------------------

    def begin_owed(self) -> None:
        """Start the round that the other ranks count on, if there was none here."""
        if not self._open and (self.rounds == 0 or self.owed):
            self.begin()

    def ensure(self) -> None:
        """Have at least one round since `clear`, and none open: what `step` and clipping need.

        A rank whose backward reached no parameter still joins the others' round here.

        Raises:
            DmuonError: a rank found a gradient that cannot be reduced; see `finish`.
        """
        self.begin_owed()
        if self._open:
            self.finish()
        self.collect()
        self._check_earlier()

    def collect(self) -> None:
        """Wait for the matrices' gradients and hand over those that arrived here."""
        self._collect(self._flights)

    def _collect_arrived(self) -> None:
        """Collect what has arrived, so that its memory is free.

        What has is a matter of time, so no collective may depend on it. And nothing is waited for:
        another rank may launch its part at the end of its backward only, and need something of
        this rank before.
        """
        # The rest stays: it is written when the flags are known.
        matrices = (f for f in self._flights if f.pack.pack.owner != EVERYONE)
        self._collect([f for f in matrices if f.work.is_completed()])

    def _collect(self, flights: Sequence[_Flight]) -> None:
        """Wait for some of the flights, hand over what arrived here, and release their memory."""
        if not flights:
            return
        for flight in flights:
            flight.work.wait()
        done = set(map(id, flights))
        self._flights = [f for f in self._flights if id(f) not in done]
        mine = [f.pack for f in flights if self._wire.is_mine(f.pack.pack)]
        if mine:
            self._deliver(mine, self._first)
        for flight in flights:
            flight.pack.release()

    def clear(self) -> None:
        """Forget the gradients reduced so far, as `zero_grad` does."""
        if self._open:
            self.finish()
        self.collect()
        self._earlier_flags += self._recent_flags
        self._recent_flags = []
        self.owed = False
        self.rounds = 0
        self.present = [False] * len(self.parameters)
