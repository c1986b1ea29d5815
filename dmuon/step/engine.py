"""The work of every step, wherever momentum lies, with one engine per ownership; and its timing."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from dmuon.comm.layout import LayoutRuntime
from dmuon.comm.process_groups import Stages
from dmuon.comm.reducer import rows_of, set_rows
from dmuon.comm.routes import Keepers
from dmuon.comm.transport import Meter, Transport, Work
from dmuon.config import Schedule, is_exchange_step
from dmuon.devices import HostCopy, Stopwatch, host_can_read
from dmuon.dtensors import (
    copy_state,
    distributed_as,
    local_tensor,
    placed,
    stored_tensor,
    whole_tensor,
)
from dmuon.kernels.newton_schulz import resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer
from dmuon.rule import (
    MASTER,
    Hyper,
    Rule,
    follow_weights,
    list_kernels,
    merged_master,
    momentum_dtypes,
    rounds_to,
    rule_of,
)
from dmuon.scheduler.plan import Unit
from dmuon.scheduler.specs import Box, MatrixSpec, dtype_name
from dmuon.step.verdict import BLOCKS, Checked, Verdict, VerdictMessage, suspects
from dmuon.step.verify import Sample, Stored, Verifier
from dmuon.tensors import finite_norms
from dmuon.types import DmuonError, HyperDigest, NonFiniteError, first_of, grouped, runs_of, warn

WARM_UP = 2  # steps that allocate, compile and fill caches
WINDOW = 8  # steps in the median
_FACTOR = 10  # ratio of executed and planned times from which the plan is reported as wrong
_FLOOR_MS = 5.0  # smaller differences come from call overhead and noise
SUSPECTS = 4  # names that a rank reports for a skipped step
_ADAMW_CACHED = 1 << 15  # elements that stay in a CPU's caches over a dozen passes
_FULL = 1 / 8  # share of a dtype's range from which momentum may overflow


@dataclass(frozen=True)
class Settings:
    """Settings for all groups of an optimizer."""

    schedule: Schedule
    digest: HyperDigest
    ns_dtype: torch.dtype
    master_weights: bool
    block_lr_ratio: float | None
    nonfinite: str


@dataclass(frozen=True, slots=True)
class Amp:
    """Values from `torch.amp.GradScaler`, 0-d tensors: the factor that gradients must still be
    divided by, and whether this rank found a non-finite gradient (not zero)."""

    scale: Tensor | None = None
    found_inf: Tensor | None = None


@dataclass(slots=True)
class Skips:
    """Skipped work. ``finite``: the last step skipped nothing. ``count`` steps were skipped that
    all ranks know of, ``reported`` of them in warnings. ``late`` [BLOCKS]: not zero where this rank
    skipped parts of a block step since the last full one, with ``flags`` of what was not finite."""

    late: Tensor
    finite: bool | Tensor = True
    count: int | Tensor = 0
    reported: int = 0
    flags: deque[Checked] = field(default_factory=partial(deque, maxlen=BLOCKS))
    reported_eps: bool = False

    def seen(self) -> Tensor:
        """Return how many skipped steps this rank knows of, 0-d."""
        return (self.late > 0).sum() + self.count


@dataclass(frozen=True, slots=True)
class Record:
    """Numbers of the ``steps``-th step, which was a ``full`` one or not. ``bytes`` were sent since
    the step before; ``square`` and ``below_eps`` are `Findings` of the last full step; ``numbers``,
    which may still be on their way to the host, are the RMS of the updates of ``matrices`` over the
    learning rate, then the number of skipped steps."""

    steps: int
    full: bool
    bytes: int
    watch: Stopwatch
    waits: Mapping[str, Stopwatch]
    square: float | None
    below_eps: int
    matrices: Sequence[int]
    numbers: HostCopy

    def times(self) -> dict[str, float]:
        """Return milliseconds under the names of `Muon.metrics`."""
        waits = {purpose: watch.milliseconds() for purpose, watch in self.waits.items()}
        found = {f"{n}_ms": waits[n] for n in ("gather", "scatter") if n in waits}
        exposed = math.fsum(waits.values())
        return {"ns_ms": self.watch.milliseconds(), **found, "exposed_ms": exposed}


@dataclass(eq=False)
class LastStep:
    """The step count after the last step, whether that was a full one, and the bytes sent since the
    step before; ``records`` of a few steps, once somebody has asked for them."""

    steps: int = 0
    full: bool = True
    bytes: Counter[str] = field(default_factory=Counter)
    records: deque[Record] | None = None


@dataclass(eq=False, repr=False)
class Engine(ABC):
    """The work of one ownership in `Muon.step`, in calling order. The constructor makes the state
    in the optimizer."""

    _runtime: LayoutRuntime
    _telemetry: StepTelemetry
    _kernels: Orthogonalizer
    _optimizer: Optimizer
    _settings: Settings
    _message: VerdictMessage = field(init=False)
    _are_raw = False  # whether operands are unscaled, see `tensors.are_raw`

    def __post_init__(self) -> None:
        runtime, optimizer, settings = self._runtime, self._optimizer, self._settings
        runtime.one_by_one = self._kernels.options.is_fixed
        self._amp = Amp()
        self._grads: dict[int, Tensor] = {}
        self.skips = Skips(torch.zeros(BLOCKS, dtype=torch.float64, device=runtime.device))
        # Probe now: a first probe inside `step` would wait for the device.
        for p in runtime.parameters[:1]:
            list_kernels(p.device)
        self.verifier = Verifier()
        self._last = LastStep()
        groups, specs = optimizer.param_groups, runtime.plan.specs
        group_of = {p: g for g, group in enumerate(groups) for p in group["params"]}
        # The number of the param group of each matrix.
        self._group_of = [group_of[runtime.parameters[m.parameter]] for m in specs.matrices]
        # AdamW's parameters by the number of their param group: (index, parameter).
        self._adamw: dict[int, list[tuple[int, nn.Parameter]]] = defaultdict(list)
        for i in specs.adamw_parameters():
            p = runtime.parameters[i]
            if p in group_of:
                self._adamw[group_of[p]].append((i, p))
                # Made now, so that every rank saves the same keys.
                make_adamw_state(p, optimizer.state, settings.master_weights)
        self._hypers: list[Hyper] = []
        self._rules = [rule_of(group) for group in groups]
        self._bind()
        self._kept = KeptByRules(self._rules, self._group_of, runtime, settings.ns_dtype)
        self._kept.show(optimizer)

    @abstractmethod
    def _bind(self) -> None:
        """Make the state and everything else that is made once."""

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _momentum_dtypes(self, matrix: int) -> tuple[torch.dtype, torch.dtype]:
        """See `rule.momentum_dtypes`."""
        asked = self._groups[self._group_of[matrix]]["momentum_dtype"]
        weight: torch.dtype = getattr(torch, self._runtime.plan.specs.matrices[matrix].dtype)
        return momentum_dtypes(asked, weight, self._settings.master_weights)

    def _call(self, unit: Unit, count: int | None = None) -> Call:
        """Return the Newton-Schulz call for a unit, or for ``count`` of its matrices."""
        group = self._groups[unit.group]
        triples = resolve_coefficients(group["ns_coefficients"], group["ns_steps"])
        shape = count or len(unit.matrices), unit.rows, unit.cols
        return Call(shape, triples, unit.kernel, group["eps"] if self._are_raw else None)

    # ---- a step --------------------------------------------------------------------------

    def _begin_update(self) -> None:
        # Snapshots, because a scheduler may change the groups before an update is applied.
        self._hypers = [Hyper.of(group) for group in self._groups]
        last, schedule = self._last, self._settings.schedule
        if last.records is not None and last.steps:
            last.records.append(self._record())  # all of that step's work is done
        last.steps, last.full = schedule.t + 1, schedule.is_full(schedule.t)
        self._telemetry.begin_step()

    def _note(self, finite: bool | Tensor, *, is_late: bool = False) -> None:
        """Record whether the step found only finite gradients; ``is_late``: the other ranks learn
        it in the next full step."""
        skipped = finite.logical_not() if isinstance(finite, Tensor) else int(not finite)
        self.skips.finite = finite
        if is_late:
            n = self._settings.schedule.t - self._settings.schedule.last_full - 1
            self.skips.late[min(n, BLOCKS - 1)].add_(skipped)
        else:
            self.skips.count = self.skips.count + skipped

    def _checked(self, grads: Mapping[int, Tensor]) -> tuple[Checked, list[Tensor]]:
        """Return (numbers that are finite where AdamW's gradients are, separately for each set of
        replicas; sums of squares of the gradients counted here)."""
        found: dict[Hashable, dict[int, Tensor]] = defaultdict(dict)
        for i, p in chain.from_iterable(self._adamw.values()):
            if i in grads and grads[i].numel():
                found[placed(p)][i] = grads[i]
        checked = [([*some], finite_norms([*some.values()])) for some in found.values()]
        counted = [norms for numbers, norms in checked if self._runtime.counts(numbers[0])]
        return checked, [norms.dot(norms) for norms in counted]

    @property
    def _fuses_adamw(self) -> bool:
        """Whether to use fused AdamW; on a CPU it rounds an element depending on its place."""
        return not (self._runtime.one_by_one and host_can_read(self._runtime.device))

    def _update_adamw(self, grads: Mapping[int, Tensor], verdict: Verdict) -> None:
        """Update AdamW's parameters that have a gradient here."""
        for g, params in self._adamw.items():
            # The fused form takes one flag for all parameters of a call.
            calls: dict[int, tuple[Tensor | None, list[tuple[Tensor, Tensor]]]] = {}
            for i, p in params:
                stays = verdict.stays.get(i, False)
                if i in grads and stays is not True:
                    flag = stays if isinstance(stays, Tensor) else verdict.others
                    calls.setdefault(id(flag), (flag, []))[1].append((p, grads[i]))
            for flag, pairs in calls.values():
                self._adamw_step(self._groups[g], pairs, flag)

    @torch.no_grad()
    def _adamw_step(
        self, group: dict[str, Any], pairs: Sequence[tuple[Tensor, Tensor]], stays: Tensor | None
    ) -> None:
        """Update parameters of a param group from local gradients. torch's fused form is one call
        that reads nothing back and changes nothing where ``stays`` (0-d, float32) is not zero; on a
        CPU the same bits are computed in pieces that stay in its caches."""
        own = "adamw_" if "adamw_betas" in group else ""  # in a group that also has matrices
        (beta1, beta2), decay = group[f"{own}betas"], group[f"{own}weight_decay"]
        decay = group["weight_decay"] if decay is None else decay
        lr = float(group["lr"]) * group.get("adamw_lr_ratio", 1.0)
        rows = []
        for p, grad in pairs:
            entry = self._optimizer.state[p]
            tensors = entry.get(MASTER, p), p, entry["exp_avg"], entry["exp_avg_sq"]
            target, weight, *kept = map(stored_tensor, tensors)
            rows.append((target, weight, grad.to(target.dtype), *kept, entry["step"]))
        fused, stays = self._fuses_adamw, None if stays is None else stays.to(pairs[0][0].device)
        for some in [rows] if fused else _adamw_pieces(rows):
            targets, weights, grads, averages, squares, steps = map(list, zip(*some, strict=True))
            if self._settings.master_weights:
                follow_weights(targets, weights)
            # In half precision the foreach form would round the decay first.
            foreach = not fused and all(t.dtype.itemsize >= 4 for t in targets)
            adamw(
                targets, grads, averages, squares, [], steps, lr=lr, beta1=beta1, beta2=beta2,
                weight_decay=decay, eps=group[f"{own}eps"], amsgrad=False, maximize=False,
                foreach=foreach, fused=fused, found_inf=stays,
            )  # fmt: skip
            both = zip(weights, targets, strict=True)
            if rounded := [(w, t) for w, t in both if w.dtype is not t.dtype]:
                torch._foreach_copy_([w for w, _ in rounded], [t for _, t in rounded])

    def begin(self, amp: Amp, refusal: Exception | None) -> Exception | None:
        """Move gradients to where they are needed, and wait for published weights. Return
        ``refusal``, the reason why this rank cannot take the step, or an error found here; `launch`
        raises it once the other ranks can know."""
        self._message.raise_noted()
        self._report_skips()
        self._amp = amp
        try:
            self._runtime.reduce_gradients()
            self._take_gradients()
        except DmuonError as error:  # may concern this rank alone
            refusal = refusal or error
        return refusal

    @abstractmethod
    def _take_gradients(self) -> None:
        """Collect the local gradients by parameter, at least AdamW's."""

    @abstractmethod
    def send(self, refusal: Exception | None) -> None:
        """Look at the gradients and, in a full step, send this rank's message about them."""

    def received(self) -> Tensor:
        """Wait for the sum of all ranks' messages, and return it."""
        self._runtime.meter.wait("verdict", [self._message.sent.work])
        return self._message.sent.vector

    @abstractmethod
    def launch(self, refusal: Exception | None) -> None:
        """Update the matrices, except for work that may wait until the end. ``refusal`` may be of
        any engine, so that no other engine has stepped when one refuses."""

    def update_others(self) -> None:  # noqa: B027
        """Update the other parameters, unless `launch` has done so."""

    def finish(self) -> None:
        """Do the last part of a step, on every rank."""
        self._telemetry.finish_step()

    def count_bytes(self) -> None:
        """Record the bytes that this rank has passed to collectives since the step before."""
        meter = self._runtime.meter
        self._last.bytes = Counter(meter if self._runtime.transport.world > 1 else ())
        meter.clear()

    # ---- reports of skipped steps ------------------------------------------------------------

    def _report_skips(self) -> None:
        """Warn on one rank that steps were skipped, and why, or that eps damps updates. Stay silent
        about skips if a scaler looks for them."""
        found = self._message.found
        if found.is_bad or any(found.late):
            if self._amp.found_inf is None:
                self._report_skipped()
        elif found.below_eps and not self.skips.reported_eps:
            self._report_eps()

    def _report_skipped(self) -> None:
        skips, transport, message = self.skips, self._runtime.transport, self._message.found
        blocks = [n for n, ranks in enumerate(message.late) if ranks]
        before, skips.reported = skips.reported, skips.reported + message.is_bad + len(blocks)
        is_error, alone = self._settings.nonfinite == "raise", self._settings.schedule.never_full
        if before.bit_length() == skips.reported.bit_length() and not is_error:
            return
        # Gather the names that ranks know, so that all use the same list.
        mine = self._suspects()
        reported = mine if alone else chain.from_iterable(transport.gather_objects(mine))
        found = dict(sorted(reported, key=lambda pair: bool(pair[1])))
        names = [name for name, reason in found.items() if reason] or [*found]
        why = found.get(names[0]) if names else ""
        cause = f"momentum is {why}" if why else "gradients are not finite"
        other = "those of another pipeline stage" if message.elsewhere else "their sum of squares"
        cause = f"because {cause}: {first_of(names) or other}"
        skipped, kept = [], "They are"
        if blocks:
            first, s = message.since + blocks[0], "s" * (len(blocks) > 1)
            skipped = [f"parts of {len(blocks)} block step{s} since step {first} were skipped"]
        if alone:
            skipped = [f"parts of a block step were skipped on rank {transport.rank}"]
        elif message.is_bad:
            skipped.append("a step was skipped on all ranks")
            kept = "Weights and optimizer state are"
        text = f"dmuon: {' and '.join(skipped)}, {cause}. {kept} as before it"
        text += f" (skipped so far: {skips.reported})"
        if is_error:
            raise NonFiniteError(f"{text}. This is an error because of nonfinite='raise'")
        if transport.rank == 0 or alone:
            warn(text, of_rank=True)

    def _report_eps(self) -> None:
        message, transport = self._message, self._runtime.transport
        self.skips.reported_eps = True
        mine = [*islice(message.names_below_eps(), SUSPECTS)]
        names = [*dict.fromkeys(chain.from_iterable(transport.gather_objects(mine)))]
        if transport.rank == 0:
            eps = min(self._settings.digest.eps.values())
            warn(
                f"dmuon: Newton-Schulz got {message.found.below_eps} of the matrices with a norm "
                f"below eps={eps:g} ({first_of(names)}): their updates are smaller than Muon's. "
                "Is the loss scaled down, or are gradients clipped to a tiny norm? Leave that out, "
                'or pass a smaller eps=, such as 1e-20 (opt.stats()["below_eps"] counts them)',
                of_rank=True,
            )

    def _suspects(self) -> list[tuple[str, str]]:
        """Return (name, flaw of its momentum or "") for a few matrices not finite on this rank."""
        kept, specs, found = self._momentum(), self._runtime.plan.specs, []
        flags = [self._message.found.not_finite, *self.skips.flags]
        self.skips.flags.clear()
        named = dict.fromkeys(chain.from_iterable(suspects(specs, some) for some in flags))
        for name in islice(named, SUSPECTS):
            momentum = next((kept[i] for i in kept if specs.matrices[i].name == name), None)
            reason = ""
            if momentum is not None:
                norm = torch.linalg.vector_norm(momentum, math.inf).double()
                share = HostCopy(norm.div_(torch.finfo(momentum.dtype).max).view(1)).read()[0]
                if not math.isfinite(share):
                    reason = "not finite, which no gradient can mend (load an older checkpoint)"
                elif share > _FULL:
                    reason = (
                        f"at the end of the range of {dtype_name(momentum.dtype)} "
                        "(clip gradients, scale the loss down, or use momentum_mode='ema')"
                    )
            found.append((name, reason))
        return found

    @abstractmethod
    def _momentum(self) -> Mapping[int, Tensor]:
        """Return the momentum that this rank keeps, by matrix."""

    # ---- verify_every --------------------------------------------------------------------

    @abstractmethod
    def whole(self, parameter: int) -> tuple[Tensor, Tensor]:
        """Return whole momentum and gradient of a matrix parameter, after `begin`; a collective."""

    @abstractmethod
    def stored(self, box: Box, parameter: int) -> Stored:
        """Return this rank's weights of the matrix at this box of a parameter."""

    def take_sample(self, count: int) -> None:
        """Sample some matrices before a step for `check_sample`; a collective call."""
        specs = self._runtime.plan.specs
        self.verifier.samples = []
        for parameter, box in self.verifier.sample(self._runtime.plan, count):
            shape = specs.parameters[parameter].shape
            members = ((i, m) for i, m in enumerate(specs.matrices) if m.parameter == parameter)
            i, matrix = next((i, m) for i, m in members if m.box(shape) == box)
            stored = partial(self.stored, box, parameter)
            before = [part.clone() for _, _, part in stored()]
            whole, kept = self.whole(parameter), self._kept_of(i, matrix)
            working = self._momentum_dtypes(i)[1]
            self.verifier.samples.append(Sample(matrix, *whole, kept, before, stored, working))

    def _kept_of(self, i: int, matrix: MatrixSpec) -> dict[str, Tensor]:
        """Return a variant's state of matrix ``i``, ``[1, ...]``, on every rank; a collective."""
        kept, found = [*self._kept.rows(matrix.parameter)], {}
        shapes = {s.name: s.shape(*matrix.shape) for s in self._rules[self._group_of[i]].state}
        rows = self._spread(kept)[matrix.parameter]
        for k in kept:
            box = next(box for j, _, box in k.places if j == i)
            own = whole_tensor(rows[k.key])[box.slices()]
            found[k.key] = own.reshape(1, *shapes[k.key]).clone()
        return found

    def check_sample(self) -> None:
        """Raise CorruptionError, on every rank, if a step's results differ from the sample's (or do
        whatever else the verifier does then)."""
        samples, self.verifier.samples = self.verifier.samples, []
        plan, found = self._runtime.plan, []
        for s in samples if self.skips.finite else ():
            group = self._group_of[plan.specs.matrices.index(s.matrix)]
            how = self._rules[group], self._groups[group], self._hypers[group]
            found += s.deviations(*how, self._settings.ns_dtype, self._kernels.options)
        if samples:
            self.verifier.judge(found, plan, self._runtime.transport)

    # ---- reading and state ---------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return numbers of the last step, without a collective; see `Muon.stats`."""
        self._runtime.synchronize()
        (matrices, rms), specs = self._update_rms(), self._runtime.plan.specs.matrices
        lists = "torch" if list_kernels(self._runtime.device) is None else "triton"
        return {
            "ns_dtype": dtype_name(self._settings.ns_dtype),
            "update_rms": {specs[i].name: value for i, value in zip(matrices, rms.tolist())},
            "finite": bool(self.skips.finite),
            "skipped": int(self.skips.seen()),
            "below_eps": self._message.found.below_eps,
            "bytes": dict(self._last.bytes),
            "step_bytes": self.step_bytes(),
            "kernels": self._kernels.report() | {"lists": lists},
        }

    def step_bytes(self) -> dict[str, int]:
        """Return the bytes that a full step takes on this rank besides weights, gradients and
        optimizer state, by purpose; the table in docs/sharded.md explains them."""
        kernels = self._kernels
        own = {"newton_schulz": kernels.nbytes, "products": kernels.temporary_bytes}
        return self._runtime.nbytes | own

    def describe(self) -> str:
        """Describe this rank's share of the work."""
        owners = [unit.owner for unit in self._runtime.units]
        return f"batches that this rank owns: {owners.count(self._runtime.transport.rank)}"

    @abstractmethod
    def _update_rms(self) -> tuple[Sequence[int], Tensor]:
        """Return matrices whose updates this rank knows, and their RMS over the learning rate."""

    def records(self) -> dict[int, Record]:
        """Return records by step count, of recent steps that can be read without waiting for the
        device. Where the last step may not be ready, steps keep records from the first call on."""
        if host_can_read(self._runtime.device):
            return {self._last.steps: self._record()} if self._last.steps else {}
        if self._last.records is None:
            self._last.records = deque(maxlen=3)
        return {record.steps: record for record in self._last.records if record.numbers.ready()}

    def _record(self) -> Record:
        (matrices, rms), found = self._update_rms(), self._message.found
        numbers = HostCopy(torch.cat([rms, rms.new_zeros(1).add(self.skips.seen())]))
        last, watch, waits = self._last, self._telemetry.watch, self._runtime.meter.waits
        step = last.steps, last.full, last.bytes.total(), watch, waits
        return Record(*step, found.square, found.below_eps, matrices, numbers)

    def in_groups(self, record: Record) -> Iterator[tuple[int, float]]:
        """Yield (number of the param group, RMS) of the matrices that a step has updated."""
        for i, rms in zip(record.matrices, record.numbers.read()):
            if rms:
                yield self._group_of[i], rms

    @abstractmethod
    def saved_state(self) -> dict[Tensor, dict[str, Any]]:
        """Return entries to save in place of those in the optimizer's state; may be a collective
        call."""

    @abstractmethod
    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        """Load saved entries, bit for bit where they have the same precision."""

    def _spread(self, kept: Iterable[AtOwners]) -> dict[int, dict[str, Tensor]]:
        """Return owners' state in the form in which it is saved, distributed by rows, by parameter
        and key. A collective call if there is any."""
        rows = self._runtime.rows
        found: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for k in kept:
            once = {box: (i, owner, box) for i, owner, box in reversed(k.places)}
            found[k.parameter][k.key] = rows.spread(k.shape, k.dtype, [*once.values()], k.here)
        return found

    def _collect(self, kept: Iterable[AtOwners], saved: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Load the result of `_spread`; a collective call. Where nothing was saved, masters stay
        and other state becomes zero."""
        for k in kept:
            value = saved.get(self._runtime.parameters[k.parameter], {}).get(k.key)
            if value is not None:
                self._runtime.rows.collect(value, k.places, k.here)
            elif k.key != MASTER:
                for i in {i for i, _, _ in k.places} & k.here.keys():
                    k.here[i].zero_()

    def _entries_as_weights_are(self, parameters: Iterable[Tensor]) -> dict[Tensor, dict[str, Any]]:
        """Return entries with updated masters where somebody has written to the weights. The state
        itself stays until the next step, because the write may be undone before."""
        found = {}
        for p in parameters:
            entry = self._optimizer.state[p]
            if MASTER in entry:
                master, weight = local_tensor(entry[MASTER]), local_tensor(p)
                if not rounds_to(master, weight):
                    found[p] = {**entry, MASTER: distributed_as(p, merged_master(master, weight))}
        return found


def join(stages: Stages, engines: Sequence[Engine]) -> Exception | None:
    """Let all pipeline stages know, in one all-reduce, whether one of them skips or refuses a step.

    Return an error of this rank's stages, to be raised. The joint square of gradients goes to the
    first engine, because metrics add up. Waits on the host only where that can read anyway."""
    vectors = [engine.received() for engine in engines]
    found = [e._message.outcome(vector) for e, vector in zip(engines, vectors, strict=True)]
    mine = torch.stack([outcome for outcome, _ in found])
    step = engines[0]._settings.schedule.t
    total = torch.cat([mine.sum(0), mine.new_full((1,), step), mine.new_full((1,), step**2)])
    stages.all_reduce(total)
    # Stages at different step counts refuse the step.
    total[1] += len(stages.ranks) * total[4] != total[3].square()
    squares = [total[2], *total.new_zeros(len(engines) - 1)]
    for engine, vector, own, square in zip(engines, vectors, mine, squares, strict=True):
        engine._message.hear(vector, total[:2] - own[:2], square)
    return next((error for _, error in found if error is not None), None)


def load_entry(
    p: Tensor, state: dict[str, Tensor], saved: Mapping[str, Any], but: Collection[str] = ()
) -> None:
    """Copy a parameter's saved state into ``state``, except keys in ``but``. Missing values become
    zero (the parameter had no gradient before), and a missing master takes the weight."""
    for key, value in state.items():
        if key in but:
            continue
        if key in saved:
            copy_state(value, torch.as_tensor(saved[key]))
        elif key == MASTER:
            local_tensor(value).copy_(local_tensor(p))
        else:
            local_tensor(value).zero_()


# ---- state at the owners -----------------------------------------------------------------


class AtOwners(NamedTuple):
    """State of a parameter kept by the owners of its matrices: key, shape and dtype in its saved
    form; which rank keeps which part; this rank's tensors by matrix."""

    parameter: int
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    places: Keepers
    here: Mapping[int, Tensor]


def orientations(unit: Unit, where: Sequence[int]) -> list[tuple[bool, list[int]]]:
    """Group the positions in ``where``, of matrices of a unit, by whether the unit holds their
    transposes."""
    if not unit.transposed:
        return [(False, [*range(len(where))])]
    return sorted(grouped((unit.holds_transpose(k), n) for n, k in enumerate(where)).items())


class KeptByRules:
    """State that variants keep of each matrix, on all ranks that compute it; empty if all groups
    are plain. If groups of ranks hold copies of a parameter, each copy has its own owners."""

    def __init__(
        self,
        rules: Sequence[Rule],
        group_of: Sequence[int],
        runtime: LayoutRuntime,
        ns_dtype: torch.dtype,
    ) -> None:
        self._rules, self._group_of, self._runtime = rules, group_of, runtime
        first = {group_of[i]: m for i, m in reversed([*enumerate(runtime.plan.specs.matrices)])}
        for g, matrix in sorted(first.items()):
            if not rules[g].is_plain:
                rules[g].rehearse(*matrix.shape, ns_dtype, runtime.device)
        plan, rank = runtime.plan, runtime.transport.rank
        self._copies = plan.copies
        self._tensors: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self._members: dict[int, list[int]] = defaultdict(list)
        for i, matrix in enumerate(plan.specs.matrices):
            specs = rules[group_of[i]].state
            if specs:
                self._members[matrix.parameter].append(i)
            for spec in specs if rank in self._copies[i] else ():
                self._tensors[spec.name][i] = torch.zeros(
                    spec.shape(*matrix.shape), dtype=spec.dtype, device=runtime.device
                )

    def __bool__(self) -> bool:
        """Whether any matrix, on any rank, has such state."""
        return bool(self._members)

    @property
    def names(self) -> set[str]:
        """The names of all such state in the optimizer's state."""
        return {spec.name for rule in self._rules for spec in rule.state}

    def show(self, optimizer: Optimizer) -> None:
        """Give the optimizer's state the same keys on every rank, as torch requires: this rank's
        state for a parameter of one matrix, otherwise an empty tensor."""
        for p, members in self._members.items():
            for spec in self._rules[self._group_of[members[0]]].state:
                mine = self._tensors[spec.name].get(members[0]) if len(members) == 1 else None
                shown = torch.empty(0, dtype=spec.dtype) if mine is None else mine
                optimizer.state[self._runtime.parameters[p]][spec.name] = shown

    def accept(self, unit: Unit, update: Tensor, where: Sequence[int] | None = None) -> None:
        """Run `Rule.accepted` on the matrices at these positions of a unit (None: all)."""
        rule = self._rules[unit.group]
        if rule.is_plain:
            return
        where = range(len(unit.matrices)) if where is None else where
        for is_turned, at in orientations(unit, where):
            matrices = [unit.matrices[where[n]] for n in at]
            part = rows_of(update, at)
            kept = {s.name: [self._tensors[s.name][i] for i in matrices] for s in rule.state}
            stacks = {name: torch.stack(each) for name, each in kept.items()}
            rule.accepted(part.mT if is_turned else part, stacks)
            if part is not update:
                set_rows(update, at, part)
            for name, stack in stacks.items():
                torch._foreach_copy_(kept[name], list(stack.unbind()))

    def rows(self, parameter: int | None = None) -> Iterator[AtOwners]:
        """Yield a parameter's state (None: each one's) as one row over its matrices in order."""
        specs = self._runtime.plan.specs
        for p, members in self._members.items():
            if parameter not in (None, p):
                continue
            shape = specs.parameters[p].shape
            copies = grouped((specs.matrices[i].box(shape), i) for i in members)
            for spec in self._rules[self._group_of[members[0]]].state:
                places, end = [], 0
                for copy in copies.values():
                    start, end = end, end + math.prod(spec.shape(*specs.matrices[copy[0]].shape))
                    box = Box((start,), (end - start,))
                    places += [(i, owner, box) for i in copy for owner in self._copies[i]]
                here = {i: tensor.view(-1) for i, tensor in self._tensors[spec.name].items()}
                yield AtOwners(p, spec.name, (end,), spec.dtype, places, here)


# ---- AdamW -------------------------------------------------------------------------------
# torch's own functional form of AdamW, applied elementwise to the local shards.


def _adamw_pieces(rows: Iterable[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Yield lists of (tensors of one shape, step number) with about `_ADAMW_CACHED` elements; cut
    larger tensors along their first dim."""
    found: list[tuple[Tensor, ...]] = []
    for *tensors, step in rows:
        first, pieces = tensors[0], [tuple(tensors)]
        if first.numel() > _ADAMW_CACHED and first.ndim:
            count = max(1, _ADAMW_CACHED * len(first) // first.numel())
            pieces = list(zip(*(t.split(count) for t in tensors), strict=True))
        # Each piece advances its step number, so only the last piece gets the original.
        steps = [*(step.clone() for _ in pieces[1:]), step]
        found += [(*piece, number) for piece, number in zip(pieces, steps, strict=True)]
    return runs_of(found, lambda row: row[0].numel(), _ADAMW_CACHED)


@torch.no_grad()
def make_adamw_state(p: Tensor, state: dict[Any, Any], master_weights: bool) -> None:
    """Make the state of ``p`` unless it exists: `torch.optim.AdamW`'s and, with ``master_weights``,
    a float32 "master_weight" for parameters of lower precision."""
    entry = state[p]
    if "step" in entry:
        return
    if master_weights and p.dtype.itemsize < 4:
        entry[MASTER] = p.detach().float()
    target = entry.get(MASTER, p)
    # float32 as in torch.optim.AdamW (bfloat16 cannot count past 256), on the device for fused use.
    entry["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
    entry["exp_avg"] = torch.zeros_like(target.detach())
    entry["exp_avg_sq"] = torch.zeros_like(target.detach())


# ---- times -------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class StepTelemetry:
    """Newton-Schulz milliseconds of every rank of an ownership, at no cost to the step.

    Each rank times its own work, and at fixed step counts all ranks exchange the median of their
    recent steps, so that any rank may ask for a `report` on its own::

        step       1  2 | 3  4              ...        16        ...
                   warm-up   `-> exchange: [0 .. mine .. 0], summed over the ranks
                                    `-> waited for in the next step, when it has long arrived

    ``watch`` times the current step, from `begin_step` to `finish_step`. If a rank's times are far
    from ``_planned_ms`` (None: not comparable), it warns once.
    """

    _transport: Transport
    _meter: Meter
    _device: torch.device
    _planned_ms: float | None = None

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self._device)
        self.planned_ms = self._planned_ms
        self._steps = 0
        self._recent: deque[Stopwatch] = deque(maxlen=WINDOW)
        self._exchange: tuple[Work, Tensor] | None = None
        self._known: Tensor | None = None  # [world]; NaN for ranks that have sent no number yet

    def begin_step(self) -> None:
        """Start new watches for this step; the last ones stay readable."""
        self.watch = Stopwatch(self._device)
        self._meter.waits = {}

    def finish_step(self) -> None:
        """Record this step's time and, at the fixed step counts, launch the exchange: every rank
        calls this at the same place among its collectives."""
        self._steps += 1
        self.wait()
        if self._steps > WARM_UP:
            self._recent.append(self.watch)
        if not is_exchange_step(self._steps):
            return
        # Times that can be read without waiting for the device; none if the host runs ahead.
        seen = [watch.milliseconds() for watch in self._recent if watch.ready()]
        self._compare(seen)
        vector = torch.zeros(self._transport.world, dtype=torch.float32, device=self._device)
        # Filling one element is a kernel launch; copying a Python list would wait for the device.
        vector[self._transport.rank].fill_(statistics.median(seen) if seen else math.nan)
        self._meter["telemetry"] += vector.nbytes
        self._exchange = self._transport.all_reduce(vector, tag="telemetry"), vector

    def _compare(self, seen: list[float]) -> None:
        """Warn once if every recent step took many times the planned time, or a small part."""
        planned = self._planned_ms
        if planned is None or not any(seen):  # for instance without gradients
            return
        slowest, fastest = max(seen), min(seen)
        if fastest > max(_FACTOR * planned, planned + _FLOOR_MS):
            executed, times = fastest, f"{fastest / max(planned, 1e-3):.0f} times as much"
        elif planned > max(_FACTOR * slowest, slowest + _FLOOR_MS):
            executed, times = slowest, f"1/{planned / max(slowest, 1e-3):.0f} of it"
        else:
            return
        self._planned_ms = None
        warn(
            f"dmuon: rank {self._transport.rank} spends {executed:.3g} ms per step on the matrices "
            f"that it owns; the plan expected {planned:.3g} ms, and this is {times}. Owners are "
            "balanced by prices that are wrong here: from another machine, or for another ns_dtype "
            "or ns_steps; or gradients are missing, or the machine is busy. "
            'opt.stats()["kernels"] lists the kernels that ran; '
            'dmuon.dedicate_params(model, costs="measured") plans by the times of this machine',
            UserWarning,
            of_rank=True,
        )

    def wait(self) -> None:
        """Wait for a pending exchange, if any. Does not block the host on CUDA."""
        if self._exchange is None:
            return
        work, vector = self._exchange
        self._exchange = None
        work.wait()
        known = self._known
        self._known = vector if known is None else torch.where(vector.isnan(), known, vector)

    def measured_ms(self) -> tuple[float, ...] | None:
        """Return each rank's milliseconds per step as of the last exchange; None until every rank
        has sent a number, or if no rank had any work. Waits for a pending exchange."""
        self.wait()
        if self._known is None:
            return None
        times = tuple(self._known.tolist())
        return times if any(times) and not any(map(math.isnan, times)) else None
