"""What `Muon` drives: one engine an ownership, one implementation a layout; and its times."""

from __future__ import annotations

import math
import statistics
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dmuon.comm.layout import LayoutRuntime
from dmuon.comm.transport import HostCopy, Meter, Stopwatch, Transport, Work
from dmuon.config import KernelOptions
from dmuon.dtensors import copy_state, distributed_as, local_tensor
from dmuon.groups import Accepted
from dmuon.kernels.newton_schulz import resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.period import Schedule
from dmuon.scheduler.plan import Unit
from dmuon.scheduler.specs import Box
from dmuon.step.verdict import VerdictMessage, is_exchange_step
from dmuon.step.verify import Sample, Stored, Verifier
from dmuon.types import NonFiniteError, first_of
from dmuon.update import Rates, merged_master, rounds_to

WARM_UP = 2  # steps that allocate, compile and fill caches
WINDOW = 8  # steps whose median counts
_FACTOR = 10  # between executed and planned times, from which on the plan is wrong and says so
SUSPECTS = 4  # names that a rank tells of a step that was skipped
_FULL = 1 / 8  # of a dtype's range: momentum of so much overflows
_FLOOR_MS = 5.0  # below, the call's own overhead and the machine's noise decide


@dataclass(frozen=True)
class Settings:
    """What holds for all groups of an optimizer."""

    ns_dtype: torch.dtype
    master_weights: bool
    schedule: Schedule
    accepted: Accepted
    block_lr_ratio: float | None
    publish: str
    nonfinite: str
    backend: str  # for products, where neither the plan nor the options name one


@dataclass(frozen=True, slots=True)
class Amp:
    """What `torch.amp.GradScaler` tells an optimizer: 0-d tensors.

    ``scale``: what gradients are still to be divided by; ``found_inf``: not zero where this rank
    found a non-finite gradient.
    """

    scale: Tensor | None = None
    found_inf: Tensor | None = None


class Engine(ABC):
    """The work of one ownership in `Muon.step`, in the order in which it is called.

    ``optimizer`` holds the param groups and the state; an engine makes its state at construction.
    """

    _message: VerdictMessage

    def __init__(
        self,
        runtime: LayoutRuntime,
        telemetry: StepTelemetry,
        options: KernelOptions,
        optimizer: Optimizer,
        settings: Settings,
    ) -> None:
        self._runtime = runtime
        self._telemetry = telemetry
        self._optimizer = optimizer
        self._settings = settings
        self._kernels = Orthogonalizer(
            runtime.device, settings.ns_dtype, options, backend=settings.backend
        )
        runtime.apart = options.is_fixed
        self._rates: list[Rates] = []
        self._finite: bool | Tensor = True  # no gradient of the last step was otherwise
        self._skipped: int | Tensor = 0
        self.verifier = Verifier()
        self._samples: list[Sample] = []
        self._told = 0  # steps that were skipped and told of
        # Skipped in block steps, which the other ranks do not know: how many, and names.
        self._late: int | Tensor = 0
        self._late_names: list[str] = []
        self._told_of_eps = False
        groups, specs = optimizer.param_groups, runtime.plan.specs
        group_of = {p: g for g, group in enumerate(groups) for p in group["params"]}
        # The number of the param group of each matrix.
        self._group_of = [group_of[runtime.parameters[m.parameter]] for m in specs.matrices]
        # By the number of their param group: AdamW's parameters, (index, parameter).
        self._adamw: dict[int, list[tuple[int, nn.Parameter]]] = defaultdict(list)
        for i in specs.adamw_parameters():
            p = runtime.parameters[i]
            if p in group_of:
                self._adamw[group_of[p]].append((i, p))
        self._bind()

    def go_on_from(self, before: Engine) -> None:
        """Count on where the engine that this one replaces has stopped."""
        self._skipped, self._told = before._skipped, before._told
        self._late, self._late_names = before._late, before._late_names

    @abstractmethod
    def _bind(self) -> None:
        """Make the state, and whatever is made once."""

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _call(self, unit: Unit, count: int | None = None) -> Call:
        """Newton-Schulz on a unit, or on ``count`` of its matrices."""
        group = self._groups[unit.group]
        triples = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
        return Call((count or len(unit.matrices), unit.rows, unit.cols), triples, unit.kernel)

    def _begin_update(self) -> None:
        # Rates as they are now: a scheduler may change the groups before an update is applied.
        self._rates = [Rates.of(group) for group in self._groups]
        self._telemetry.begin_step()

    def _entries_as_weights_are(self, parameters: Iterable[Tensor]) -> dict[Tensor, dict[str, Any]]:
        """The entries whose masters somebody's writing to weights has outdated. What is kept stays
        as it is until the next step, because what was written may be taken back."""
        found = {}
        for p in parameters:
            entry = self._optimizer.state[p]
            if "master_weight" in entry:
                master = local_tensor(entry["master_weight"])
                weight = local_tensor(p)
                if not rounds_to(master, weight):
                    merged = distributed_as(p, merged_master(master, weight))
                    found[p] = {**entry, "master_weight": merged}
        return found

    def _tell_of_skipped(self, amp: Amp, late: Sequence[str] = ()) -> None:
        """Say on one rank that a step was skipped on all, and why; ``late``: what this rank has
        skipped in block steps before. Where a scaler looks for that, it is no news."""
        if not self._message.is_bad or amp.found_inf is not None:
            return
        self._told += 1
        is_error, transport = self._settings.nonfinite == "raise", self._runtime.transport
        if self._told & (self._told - 1) and not is_error:
            return
        # The names that each rank knows, alike for all of them.
        told = chain.from_iterable(transport.gather_objects(self._suspects(late)))
        found = dict(sorted(told, key=lambda pair: bool(pair[1])))
        names = [name for name, reason in found.items() if reason] or [*found]
        why = found.get(names[0]) if names else ""
        what = f"momentum is {why}" if why else "gradients are not finite"
        text = (
            f"dmuon: a step was skipped on all ranks, because {what}: "
            f"{first_of(names) or 'those of block steps before'}. "
            f"Weights and optimizer state are as before it (skipped so far: {self._told})"
        )
        if is_error:
            raise NonFiniteError(f"{text}. This is an error because of nonfinite='raise'")
        if transport.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _tell_of_eps(self) -> None:
        """Say once, on one rank, that updates are damped by eps."""
        message, transport = self._message, self._runtime.transport
        if self._told_of_eps or not message.below_eps or message.is_bad:
            return
        self._told_of_eps = True
        mine = [*islice(message.names_below_eps(), SUSPECTS)]
        names = [*dict.fromkeys(chain.from_iterable(transport.gather_objects(mine)))]
        if transport.rank == 0:
            eps = min(self._settings.accepted.eps.values())
            warnings.warn(
                f"dmuon: Newton-Schulz got {message.below_eps} of the matrices with a norm below "
                f"eps={eps:g} ({first_of(names)}): their updates are smaller than Muon's, or zero. "
                "Gradients are that small where the loss is scaled down, or clipped to a tiny "
                "norm: leave that out, or pass a smaller eps=, such as 1e-20 "
                '(opt.stats()["below_eps"] counts such matrices)',
                RuntimeWarning,
                stacklevel=5,
            )

    def _suspects(self, late: Sequence[str]) -> list[tuple[str, str]]:
        """(name, what is wrong with its momentum, if that is to blame) of the first few that are
        not finite on this rank."""
        kept, matrices = self._momentum(), self._runtime.plan.specs.matrices
        found = []
        for name in islice(chain(self._message.suspects(), late), SUSPECTS):
            momentum = next((kept[i] for i in kept if matrices[i].name == name), None)
            reason = ""
            if momentum is not None:
                norm = torch.linalg.vector_norm(momentum, math.inf).double()
                share = HostCopy(norm.div_(torch.finfo(momentum.dtype).max).view(1)).read()[0]
                if not math.isfinite(share):
                    reason = "not finite, which no gradient can mend (load an older checkpoint)"
                elif share > _FULL:
                    reason = (
                        f"at the end of the range of {str(momentum.dtype).removeprefix('torch.')} "
                        "(clip gradients, scale the loss down, or use momentum_mode='ema')"
                    )
            found.append((name, reason))
        return found

    @abstractmethod
    def _momentum(self) -> Mapping[int, Tensor]:
        """What this rank keeps of momentum, by matrix."""

    @abstractmethod
    def begin(self, amp: Amp, refusal: Exception | None) -> Exception | None:
        """Have gradients where they belong, and weights as they were published.

        ``refusal``: why this rank cannot take the step. It raises that, here or in `launch`, once
        the other ranks can know; they raise ConsensusError. Returns it, or what it found itself.
        """

    @abstractmethod
    def launch(self, refusal: Exception | None) -> None:
        """Update the matrices, as far as that needs no waiting at the end.

        ``refusal``: that of any engine, so that no other has stepped when one refuses.
        """

    @abstractmethod
    def update_others(self) -> None:
        """Update the parameters that are no matrices."""

    def finish(self) -> None:
        """What every rank does last in a step."""
        self._telemetry.finish_step()

    @abstractmethod
    def whole(self, parameter: int) -> tuple[Tensor, Tensor]:
        """Momentum and gradient of a matrix parameter, whole, after `begin`; a collective call."""

    @abstractmethod
    def stored(self, box: Box, parameter: int) -> Stored:
        """What this rank stores of the weights of the matrix that is this box of a parameter."""

    def take_sample(self, count: int) -> None:
        """Note some matrices before a step, for `check_sample`; a collective call."""
        runtime = self._runtime
        self._samples = []
        for parameter, box in self.verifier.sample(runtime.plan, count):
            shape = runtime.plan.specs.parameters[parameter].shape
            mine = [m for m in runtime.plan.specs.matrices if m.parameter == parameter]
            matrix = next(m for m in mine if m.box(shape) == box)
            stored = partial(self.stored, box, parameter)
            before = [part.clone() for _, _, part in stored()]
            self._samples.append(Sample(matrix, box, *self.whole(parameter), before, stored))

    def check_sample(self) -> None:
        """Raise CorruptionError, on every rank, if a step did something else to what was noted (or
        what else the verifier does then)."""
        samples, self._samples = self._samples, []
        found = []
        for s in samples if self._finite else ():
            group = self._group_of[self._runtime.plan.specs.matrices.index(s.matrix)]
            how = self._settings.ns_dtype, self._kernels.options
            found += s.deviations(self._groups[group], self._rates[group], *how)
        if samples:
            self.verifier.judge(found, self._runtime.plan, self._runtime.transport)

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Numbers of the last step, without a collective; see `Muon.stats`."""

    @abstractmethod
    def saved_state(self) -> Mapping[Tensor, dict[str, Any]]:
        """Entries that are saved in the place of those in the optimizer's state; may be a
        collective call."""

    @abstractmethod
    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Take over saved entries, bit for bit where they have the same precision."""


def load_entry(p: Tensor, state: dict[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Copy what was saved of a parameter into its state; zeros where it had no gradient before, and
    a master that was not saved takes the weight."""
    for key, value in state.items():
        if key in saved:
            copy_state(value, torch.as_tensor(saved[key]))
        elif key == "master_weight":
            local_tensor(value).copy_(local_tensor(p))
        else:
            local_tensor(value).zero_()


# ---- times -------------------------------------------------------------------------------


class StepTelemetry:
    """Newton-Schulz milliseconds of every rank of an ownership, at no cost to the step.

    Each rank times its own work. At step counts fixed in advance all ranks exchange the median of
    their recent steps in one small asynchronous all-reduce, so that `report` is no collective call
    and any rank may ask alone::

        step       1  2 | 3  4              ...        16        ...
                   warm-up   `-> exchange: [0 .. mine .. 0], summed over the ranks
                                    `-> waited for in the next step, when it has long arrived

    ``watch`` times the current step; `begin_step` and `finish_step` enclose a step's work. Where a
    rank's times are far from ``planned_ms`` (None: not comparable), it warns once.
    """

    def __init__(
        self,
        transport: Transport,
        meter: Meter,
        device: torch.device,
        planned_ms: float | None = None,
    ) -> None:
        self.watch = Stopwatch(device)
        self._transport = transport
        self._meter = meter
        self._device = device
        self._planned_ms = planned_ms
        self._steps = 0
        self._recent: deque[Stopwatch] = deque(maxlen=WINDOW)
        self._flight: tuple[Work, Tensor] | None = None
        self._known: Tensor | None = None  # [world]; NaN for a rank that had no number yet

    def begin_step(self) -> None:
        """A new watch for this step; the last ones stay readable."""
        self.watch = Stopwatch(self._device)

    def finish_step(self) -> None:
        """Note this step's time and, at the steps when all do, launch the exchange.

        Every rank calls it once a step, at the same place among its collectives.
        """
        self._steps += 1
        self.wait()
        if self._steps > WARM_UP:
            self._recent.append(self.watch)
        if not is_exchange_step(self._steps):
            return
        # What can be read without waiting for the device; nothing where the host runs ahead.
        seen = [watch.milliseconds() for watch in self._recent if watch.ready()]
        self._compare(seen)
        vector = torch.zeros(self._transport.world, dtype=torch.float32, device=self._device)
        # Filling one element is a kernel launch; copying a Python list would wait for the device.
        vector[self._transport.rank].fill_(statistics.median(seen) if seen else math.nan)
        self._meter.add("telemetry", vector)
        self._flight = self._transport.all_reduce(vector, tag="telemetry"), vector

    def _compare(self, seen: list[float]) -> None:
        """Warn once if every recent step took many times what was planned, or a small part."""
        planned = self._planned_ms
        if planned is None or not any(seen):  # as where no gradient came
            return
        slowest, fastest = max(seen), min(seen)
        if fastest > max(_FACTOR * planned, planned + _FLOOR_MS):
            executed, times = fastest, f"{fastest / max(planned, 1e-3):.0f} times as much"
        elif planned > max(_FACTOR * slowest, slowest + _FLOOR_MS):
            executed, times = slowest, f"1/{planned / max(slowest, 1e-3):.0f} of it"
        else:
            return
        self._planned_ms = None
        warnings.warn(
            f"dmuon: rank {self._transport.rank} spends {executed:.3g} ms a step on the matrices "
            f"that it owns; the plan expected {planned:.3g} ms, and this is {times}. Owners are "
            "balanced by prices that are wrong here. Usual causes: a plan or a cost table from "
            "another machine, an ns_dtype or ns_steps other than what was measured, gradients that "
            'are missing, or a busy machine. opt.stats()["kernels"] says what ran; '
            'dmuon.dedicate_params(model, costs="measured") plans by the times of this machine',
            stacklevel=2,
        )

    def wait(self) -> None:
        """Wait for the exchange in flight, if any. Blocks no host on CUDA."""
        if self._flight is None:
            return
        work, vector = self._flight
        self._flight = None
        work.wait()
        known = self._known
        self._known = vector if known is None else torch.where(vector.isnan(), known, vector)

    def measured_ms(self) -> tuple[float, ...] | None:
        """Milliseconds a step of each rank, as of the last exchange.

        None before there is a number of every rank, or when no rank had anything to do. No
        collective call, but it waits for the exchange in flight.
        """
        self.wait()
        if self._known is None:
            return None
        times = tuple(self._known.tolist())
        return times if any(times) and not any(map(math.isnan, times)) else None
