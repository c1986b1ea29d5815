"""The verdict on a step: all ranks agree in one all-reduce on its changes, or a rank decides alone.

::

    message   | squared norm of each matrix that travels | who has a gradient | non-finite found |
                sum over the ranks that hold it            > 0: some rank        > 0: skip
              | ranks that refuse | sum of their numbers | number of the step | its square |
                > 0: nothing may change                    not equal: ranks take different steps
              | ranks with new parameters | matrices below eps whose norms do not travel
                all: they plan again
              | squares of gradients, for `Muon.metrics`
              | what other pipeline stages found: not finite, refusals (0 when sent, see `join`)
              | for each block step since the last full one: how many ranks skipped parts of it
              | in the first steps and then rarely, for each parameter that replicas hold: sums of
                samples of its gradient, of their squares, of ranks    different: an error

The number of a step stands for its count and for all hyperparameters. If the sum shows that numbers
differ, ranks exchange the values behind them. If the host cannot read from the device without
waiting, every answer is a mask, and an error on all ranks is read when the next step begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmuon.comm.layout import LayoutRuntime
from dmuon.comm.process_groups import different
from dmuon.comm.transport import Work
from dmuon.config import Schedule, is_exchange_step
from dmuon.devices import HostCopy, host_can_read
from dmuon.dtensors import sample
from dmuon.scheduler.shards import ShardMap
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import ConsensusError, DmuonError, HyperDigest, Layout, OwnershipError

# Numbers are compared modulo this: sums of their squares are exact in float64 up to 32,768 ranks.
_NUMBERS = 1 << 19
_SAMPLED = 16  # gradient elements to compare, because norms of large gradients hardly differ
_MOST_SPREAD = 1e-4  # over ranks, relative to their mean square: 1%, which no rounding causes
# The last fields of a message, from `Fields.end` on.
_BAD, _REFUSE, _RANK, _NUMBER, _SQUARE, _BAD_ELSEWHERE, _REFUSED_ELSEWHERE = range(7)
_NEW, _BELOW, _GRADS, _LAST = range(7, 11)
_TO_AVERAGE = {  # how to average gradients, by layout
    Layout.SHARDED: "over the mesh axis that replicates. FSDP2 on a mesh with that axis (HSDP) "
    "does it in a backward that has model.set_requires_all_reduce(True); else average by hand",
    Layout.REPLICATED: "over all ranks. Wrap the model: torch.nn.parallel.DistributedDataParallel("
    "model) (wrap it again after unfreezing; the last backward outside of no_sync), or, where it "
    "is wrapped, call the wrapper, not the module inside; or let dmuon average: dmuon."
    "dedicate_params(model, options=dmuon.ReplicatedOptions(reduce_to_owner=True)) before "
    "dmuon.Muon(model)",
}
BLOCKS = 64  # block steps between two full steps with fields of their own; later ones share one

Checked = Sequence[tuple[Sequence[int], Tensor]]
"""Numbers of parameters (or matrices), and for each a value that is finite if they are."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Masks of parts that stay unchanged, as plain values where the host knows without waiting.

    ``finite``: all gradients are finite. ``bad``: which blocks stay (by position, or one 0-d mask
    for all of them; None: no block). ``stays``: masks of AdamW's parameters that have their own,
    ``others``: the mask of all others (None: none stays), 0-d, float32 and not zero where they
    stay. ``not_finite``: in a block step, flags as in `Findings` without their numbers."""

    finite: bool | Tensor
    bad: Tensor | None = None
    stays: Mapping[int, bool | Tensor] = field(default_factory=dict)
    others: Tensor | None = None
    not_finite: Sequence[Tensor] = ()


class Fields:
    """The positions of a message's numbers.

    A rank's vector has a norm for each of ``travelling``, the matrices that several ranks hold; a
    flag for each parameter copy that several ranks hold; from ``end`` the last fields; from
    ``late`` the fields of ``blocks`` block steps; from ``alike``, in some steps, samples of the
    gradients that replicas hold, with this rank's part by parameter in ``samples``; from ``sent``,
    not sent, flags of copies held alone. ``flags`` are the positions of this rank's flags, by
    parameter. ``travels`` has the positions in ``matrices`` of matrices whose norms travel, and
    positions of these norms; ``counted`` the same for the replica that counts; ``not_sent`` the
    matrices whose norms do not travel, and their positions.
    """

    def __init__(
        self,
        runtime: LayoutRuntime,
        shards: ShardMap | None,
        matrices: Sequence[int],
        counts: Sequence[bool],
        blocks: int,
    ) -> None:
        specs, rank, device = runtime.plan.specs, runtime.transport.rank, runtime.device
        every = range(len(specs.matrices))
        self.travelling = [i for i in every if shards is None or not shards.is_local(i)]
        norm_of = {i: n for n, i in enumerate(self.travelling)}
        copies_of = [] if shards is None else shards.copies
        copies = [(p, ranks) for p, copies in enumerate(copies_of) for ranks in copies]
        shared = [copy for copy in copies if len(copy[1]) > 1]
        alone = [p for p, ranks in copies if ranks == (rank,)]
        self.norms = len(norm_of)
        self.end = self.norms + len(shared)
        self.late = self.end + _LAST
        self.alike = self.late + blocks
        self.samples = []
        if shards is not None and any(map(shards.is_replicated, every)):
            # One set of twins samples each parameter, because sums must not mix different shards.
            twins, world = shards.twins(rank), shards.world
            for p in range(len(copies_of)):
                sizes = (shards.shard((p + n) % world, p).box.numel for n in range(world))
                first = next((n for n, size in enumerate(sizes) if size), 0)
                self.samples.append((p + first) % world in twins)
        self.sent = self.alike + len(self.samples) * (_SAMPLED + 2)
        self.size = self.sent + len(alone)
        flag_of = {p: self.norms + n for n, (p, ranks) in enumerate(shared) if rank in ranks}
        flag_of |= {p: self.sent + n for n, p in enumerate(alone)}
        self.flags = [flag_of[p] for p in range(len(copies_of))]
        self.matrices = matrices
        of_blocks = () if shards is None else matrices
        self.block_flags = [self.flags[specs.matrices[i].parameter] for i in of_blocks]

        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def with_norms(positions: Sequence[int]) -> tuple[Tensor, Tensor]:
            return index(positions), index([norm_of[matrices[n]] for n in positions])

        travels = [n for n, i in enumerate(matrices) if i in norm_of]
        here = [n for n, i in enumerate(matrices) if i not in norm_of]
        self.travels = with_norms(travels)
        self.counted = with_norms([n for n in travels if counts[n]])
        self.not_sent = [matrices[n] for n in here], index(here)
        self.block_flag_index = index(self.block_flags)


@dataclass(slots=True)
class Findings:
    """Findings of the last message: whether something was not finite, perhaps ``elsewhere``, in
    another pipeline stage; the ``square`` of the joint norm of all gradients; how many matrices
    were below eps, which of them all ranks know, and this rank's knowledge of others (numbers,
    flags). ``not_finite`` has flags of this rank's matrices, then of AdamW's parameters. ``late``:
    how many ranks skipped parts of each block step before it, the first of which was step
    ``since``."""

    is_bad: bool = False
    elsewhere: bool = False
    late: Sequence[float] = ()
    since: int = 0
    square: float | None = None
    below_eps: int = 0
    below: Sequence[int] = ()
    below_here: tuple[Sequence[int], Tensor] = (), torch.zeros(0)
    not_finite: Checked = (((), torch.zeros(0)),)


class Sent(NamedTuple):
    """A rank's message, which ranks sum up in place; norms of operands, by their positions, the
    gradients behind them, and which parameters have a gradient here."""

    vector: Tensor
    work: Work
    norms: Tensor
    gradients: Sequence[Tensor] = ()
    here: Sequence[bool] = ()


class VerdictMessage:
    """Fills and reads one rank's message about blocks of ``matrices``, by position; ``counts`` says
    which belong to the replica that counts. Without ``shards``, where owners have the gradients,
    norms only tell which are not finite, and who has a gradient is known."""

    def __init__(
        self,
        runtime: LayoutRuntime,
        shards: ShardMap | None,
        schedule: Schedule,
        digest: HyperDigest,
        group_of: Sequence[int],
        matrices: Sequence[int],
        counts: Sequence[bool],
    ) -> None:
        self._specs, self._transport = runtime.plan.specs, runtime.transport
        self._schedule, self._digest, self._group_of = schedule, digest, group_of
        blocks = 0 if schedule.always_full else BLOCKS
        self._fields = Fields(runtime, shards, matrices, counts, blocks)
        self._layout = runtime.plan.layout
        self._count, self._compares = 0, False  # messages so far; whether the last has samples
        self.found = Findings()
        self.sent = Sent(torch.zeros(0), Work(), torch.zeros(0))
        self._pending: HostCopy | None = None  # of values that may be an error on all ranks
        self._last_values: Any = ()  # the values behind the number of the last message
        self._limits: tuple[Any, Tensor] = (), torch.zeros(0)
        empty = torch.zeros(self._fields.size, dtype=torch.float64)
        empty[self._fields.flags] = 1.0
        ones = empty[self._fields.alike : self._fields.sent].view(-1, _SAMPLED + 2)[:, -1]
        ones.copy_(torch.tensor(self._fields.samples))
        self._empty = empty.to(runtime.device)
        self._expected = self._empty  # the sum of the last fields if nothing is wrong

    @property
    def _on_host(self) -> bool:
        return host_can_read(self._empty.device)

    # ---- sending -----------------------------------------------------------------------------

    def fill(
        self,
        norms: Tensor,
        checked: Checked,
        here: Sequence[bool],
        found_inf: Tensor | None,
        squares: Sequence[Tensor],
        others: tuple[Sequence[int], Tensor] | None = None,
        late: Tensor | None = None,
        grads: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's vector, float64, and the part of it that is summed over the ranks.

        ``norms`` are by position; ``checked`` is of AdamW's parameters; ``here`` says which
        parameters have a gradient on this rank; ``squares`` are sums of squares of gradients, each
        counted on one rank; ``others`` are matrices missing from ``norms``, and their norms;
        ``late``: see `Skips`; ``grads`` are local, by parameter, for comparison by replicas."""
        fields, found, vector = self._fields, self.found, self._blank(late)
        for flag, is_here in zip(fields.flags, here, strict=True):
            if not is_here:
                vector[flag].zero_()
        positions, numbers = fields.counted
        norms = norms.to(vector.device)
        vector.index_copy_(0, numbers, norms.index_select(0, positions).square())
        bad = vector[fields.end + _BAD]
        every = (fields.matrices, norms), *checked
        found.not_finite = [self._flags(*pair) for pair in every]
        for indices, flags in found.not_finite:
            if indices:
                bad.add_(flags.sum().to(vector.device))
        if found_inf is not None:
            bad.add_(found_inf.to(vector.device))
        if self._on_host:  # takes a third of the time
            vector[fields.end + _GRADS].fill_(sum(map(float, squares)))
        for square in () if self._on_host else squares:
            vector[fields.end + _GRADS].add_(square.to(vector.device))
        if others is None:
            others = fields.not_sent[0], norms.index_select(0, fields.not_sent[1])
        if others[0]:
            below = (others[1] > 0) & (others[1] < self._eps_of(*others))
            found.below_here = others[0], below
            vector[fields.end + _BELOW].add_(below.sum().to(vector.device))
        if self._compares:
            rows = vector[fields.alike : fields.sent].view(-1, _SAMPLED + 2)
            held = {i: sample(g, _SAMPLED) for i, g in (grads or {}).items() if fields.samples[i]}
            zeros, pieces = next(iter(held.values()), vector).new_zeros(_SAMPLED), list[Tensor]()
            for i, is_sampled in enumerate(fields.samples):
                some = held.get(i, zeros)
                pieces += [some, zeros[len(some) :]]
                if is_sampled and i not in held:
                    rows[i, -1].zero_()
            rows[:, :_SAMPLED].copy_(torch.cat(pieces).view(-1, _SAMPLED))
            rows[:, -2].copy_(rows[:, :_SAMPLED].square().sum(1))
        return vector, vector[: fields.sent if self._compares else fields.alike]

    def _spread(self, vector: Tensor) -> Tensor:
        """Return the difference of each gradient between replicas, as a share of its mean square;
        empty if none is compared. All-reduces of gloo or NCCL give all their ranks the same bits,
        but clipping may round differently in each replica, by norms that other groups summed."""
        if not self._compares:
            return vector[:0]
        rows = vector[self._fields.alike : self._fields.sent].view(-1, _SAMPLED + 2)
        means = rows[:, :-1] / rows[:, -1:].clamp(min=1)  # over ranks that have the gradient
        size, alike = means[:, -1], means[:, :-1].square().sum(1)
        # A gradient that is mere rounding beside the others may differ entirely.
        return torch.where(size > 1e-12 * size.max(), 1 - alike / size, 0.0)

    def _flags(self, numbers: Sequence[int], values: Tensor) -> tuple[Sequence[int], Tensor]:
        """Flag non-finite values; empty if the host sees in one sum that all are finite."""
        if self._on_host and math.isfinite(float(values.sum())):
            return (), values[:0]
        return numbers, values.isfinite().logical_not_()

    def _eps_of(self, matrices: Sequence[int], like: Tensor) -> float | Tensor:
        """Return the eps of these matrices: one for all, or one each."""
        eps = self._digest.eps
        if len({*eps.values()}) == 1:
            return next(iter(eps.values()))
        each = [eps[self._group_of[i]] for i in matrices]
        if self._limits[0] != each:
            limits = torch.empty_like(like)
            for limit, value in zip(limits, each, strict=True):
                limit.fill_(value)  # does not wait for the device
            self._limits = each, limits
        return self._limits[1]

    def refuse(self, late: Tensor | None = None, *, is_new: bool = False) -> Tensor:
        """Return the vector of a rank that refuses this step; ``is_new``: has new parameters."""
        end, vector = self._fields.end, self._blank(late)
        vector[:end].zero_()
        vector[end + _BAD].fill_(1.0)
        vector[end + _REFUSE].fill_(1.0)
        vector[end + _RANK].fill_(self._transport.rank)
        vector[end + _NEW].fill_(float(is_new))
        return vector[: self._fields.sent if self._compares else self._fields.alike]

    def _blank(self, late: Tensor | None) -> Tensor:
        end, vector = self._fields.end, self._empty.clone()
        self._count += 1
        is_due = self._count <= 3 or is_exchange_step(self._count)
        self._compares = is_due and bool(self._fields.samples)
        if late is not None:
            self.found.since = self._schedule.last_full + 2  # steps are counted from 1
            vector[self._fields.late : self._fields.alike].copy_(late)
        self._last_values = self._schedule.t, self._digest.texts
        number = (self._schedule.t + sum(self._digest.numbers)) % _NUMBERS
        vector[end + _NUMBER].fill_(number)
        vector[end + _SQUARE].fill_(number * number)
        if not self._on_host:
            self._expected = vector[end : end + _NEW] * self._transport.world
        return vector

    # ---- receiving ---------------------------------------------------------------------------

    def all_are_new(self, vector: Tensor) -> bool:
        """Whether every rank has new parameters, by the summed vector. Waits for it."""
        return bool(vector[self._fields.end + _NEW] == self._transport.world)

    def late_steps(self, vector: Tensor) -> Tensor:
        """Return the number of block steps since the last full one that were skipped in part."""
        return (vector[self._fields.late : self._fields.alike] > 0).sum()

    def read(self, vector: Tensor, norms: Tensor, here: Sequence[bool]) -> Verdict | None:
        """Return the verdict of a summed vector; None if nothing may change. Replace ``norms`` by
        norms of whole matrices. Raises as `_raise`; where the host cannot read without waiting,
        nothing is read, and `raise_noted` raises it later."""
        fields = self._fields
        shared = vector.narrow(0, 0, fields.norms).sqrt()
        positions, numbers = fields.travels
        of_blocks = shared.index_select(0, numbers).to(norms.device)
        norms.index_copy_(0, positions.to(norms.device), of_blocks)
        if self._on_host:
            values = vector.tolist()
            self._raise(values[: fields.sent] + self._spread(vector).tolist())
            # Without a finite norm in float64 a matrix cannot be normalized.
            if self.found.is_bad:
                return None
            bad = None
            if not all(values[flag] for flag in fields.block_flags):
                bad = vector.index_select(0, fields.block_flag_index) == 0
            absent = {p: True for p, f in enumerate(fields.flags) if not values[f]}
            return Verdict(True, bad, absent)
        ok = self._accepts(vector, self.note(vector))
        skip = ok.logical_not()
        if all(here):
            return Verdict(ok, skip.to(norms.device), others=skip.float())
        stays = (vector == 0) | skip
        flags = stays.float()
        missing = {p: flags[fields.flags[p]] for p, is_here in enumerate(here) if not is_here}
        of_blocks = stays.index_select(0, fields.block_flag_index).to(norms.device)
        return Verdict(ok, of_blocks, missing, skip.float())

    def _accepts(self, vector: Tensor, spread: Tensor) -> Tensor:
        """Return whether no rank objects to the step, 0-d."""
        fields = self._fields
        ok = (vector[fields.end : fields.end + _NEW] == self._expected).all()
        ok &= vector[: fields.norms].isfinite().all()
        if self._layout is Layout.REPLICATED:
            ranks = vector[fields.norms : fields.end]  # numbers of ranks that have a gradient
            ok &= ((ranks == 0) | (ranks == self._transport.world)).all()
        if self._compares:
            ok &= (spread <= _MOST_SPREAD).all()
        return ok

    def outcome(self, vector: Tensor) -> tuple[Tensor, Exception | None]:
        """Return (whether something is not finite, whether a rank refuses, squares of gradients) by
        a summed vector, [3], for other stages; and an error that the host can see."""
        fields, error = self._fields, None
        last, norms = vector[fields.end : fields.late], vector[: fields.norms]
        bad, refused = (last[_BAD] > 0) | norms.isfinite().all().logical_not(), last[_REFUSE] > 0
        if self._on_host:
            try:
                self._raise(vector[: fields.sent].tolist() + self._spread(vector).tolist())
            except DmuonError as found:
                error = found
                refused.fill_(True)
        else:
            refused |= (self._accepts(vector, self._spread(vector)) | bad).logical_not()
        return torch.stack([bad.double(), refused.double(), last[_GRADS]]), error

    def hear(self, vector: Tensor, elsewhere: Tensor, square: Tensor) -> None:
        """Add to a summed vector what other stages found, [2], and a sum of squares."""
        last = vector[self._fields.end : self._fields.late]
        last[_BAD_ELSEWHERE : _REFUSED_ELSEWHERE + 1].copy_(elsewhere)
        last[_GRADS].copy_(square)

    def note(self, vector: Tensor) -> Tensor:
        """Keep a summed vector for `raise_noted`, with its `_spread`, which is returned."""
        sent, spread = vector[: self._fields.sent], self._spread(vector)
        self._pending = HostCopy(torch.cat([sent, spread]) if self._compares else sent)
        return spread

    def note_alone(self, finite: bool | Tensor) -> None:
        """Record whether this rank's gradients were finite, where ranks never agree."""
        self.found.is_bad = finite is False
        if isinstance(finite, Tensor):
            self._pending = HostCopy(finite.logical_not().view(1))

    def raise_noted(self) -> None:
        """Raise errors that the last full step's `read` could not, and record non-finite values,
        on every rank in the same step, or one would leave the others alone in a collective. The
        device has run a forward and a backward since, so it does not idle while the host waits.
        """
        found, noted, self._pending = self.found, self._pending, None
        found.is_bad, found.late = False, ()
        if noted is not None and self._schedule.never_full:
            found.is_bad = bool(noted.read()[0])
        elif noted is not None:
            self._raise(noted.read())

    def _raise(self, values: Sequence[float]) -> None:
        """Raise ConsensusError if a rank refuses or ranks take different steps; otherwise record
        non-finite values. OwnershipError: gradients that should be equal are not."""
        fields, found, world = self._fields, self.found, self._transport.world
        last = values[fields.end : fields.alike]
        count, rank, step, square = map(int, last[_REFUSE:_BAD_ELSEWHERE])
        found.is_bad = False
        if count:
            if count < world:  # otherwise each rank has raised its own error
                who = f"rank {rank} refuses" if count == 1 else f"{count} ranks refuse"
                raise ConsensusError(
                    f"{who} to take this step, because parameters, gradients or opt.param_groups "
                    "are wrong there: see the error raised there. Nothing was changed on any rank"
                )
            return
        if world * square != step * step:
            self._raise_difference()
        if last[_REFUSED_ELSEWHERE]:
            raise ConsensusError(
                "another pipeline stage (its rank in nonfinite_group) cannot take this step: look "
                "for the error in the output of its ranks. If there is none, stages are at "
                "different steps: load the same state in all. Nothing was changed here"
            )
        norms, found.square, found.late = values[: fields.norms], last[_GRADS], last[_LAST:]
        found.elsewhere = last[_BAD_ELSEWHERE] > 0
        found.is_bad = last[_BAD] > 0 or found.elsewhere or not all(map(math.isfinite, norms))
        if found.is_bad:  # the step is skipped, and non-finite gradients may differ
            return
        is_alike = self._layout is Layout.REPLICATED and world > 1
        for p, flag in zip(self._specs.parameters, fields.flags if is_alike else ()):
            if 0 < values[flag] < world:
                raise OwnershipError(
                    f"parameter {p.name!r} has a gradient on {values[flag]:.0f} of {world} ranks. "
                    "In the 'replicated' layout p.grad must be the average over all ranks, on all "
                    "of them: average with DistributedDataParallel, and clear gradients on all "
                    "ranks alike. Nothing was changed"
                )
        eps, pairs = self._digest.eps, zip(fields.travelling, norms) if fields.flags else ()
        found.below = [i for i, square in pairs if 0 < square < eps[self._group_of[i]] ** 2]
        found.below_eps = int(last[_BELOW]) + len(found.below)
        spread = values[fields.sent :]
        if spread and (most := max(spread)) > _MOST_SPREAD:
            name = self._specs.parameters[spread.index(most)].name
            raise OwnershipError(
                f"gradients differ between ranks: that of parameter {name!r} by "
                f"{100 * math.sqrt(most):.0f}%. In the {self._layout.value!r} layout p.grad must "
                f"be the average {_TO_AVERAGE[self._layout]}. Nothing was changed"
            )

    def _raise_difference(self) -> None:
        """Raise ConsensusError, on every rank, with the differences behind the last message."""
        steps, texts = zip(*self._transport.gather_objects(self._last_values))
        counts = different([{"the count": str(step)} for step in steps])
        if counts:
            raise ConsensusError(
                f"ranks take full steps at different step counts ({counts}): a function as period "
                "must depend on the step count alone, and all ranks must load the same state and "
                "call opt.step() equally often. Nothing was changed"
            )
        raise ConsensusError(
            f"ranks take this step with different hyperparameters: {different(texts)}. Set the "
            "same on all of them; schedulers must see the same on all (ReduceLROnPlateau: the mean "
            "loss of all ranks, not each its own). Nothing was changed"
        )

    # ---- names ---------------------------------------------------------------------------

    def names_below_eps(self) -> Iterator[str]:
        """Yield names that this rank knows; reads the values sent last."""
        yield from (self._specs.matrices[i].name for i in self.found.below)
        yield from suspects(self._specs, [self.found.below_here])


def suspects(specs: ModelSpecs, flags: Checked) -> Iterator[str]:
    """Yield names whose flags are set: of matrices in the first pair, of parameters in others."""
    for n, (numbers, values) in enumerate(flags):
        named = specs.parameters if n else specs.matrices
        for i, flag in zip(numbers, HostCopy(values).read(), strict=True):
            if flag:
                yield named[i].name


def own_verdict(
    norms: Tensor,
    parameters: Sequence[int],
    checked: Checked,
    here: Sequence[bool],
    found_inf: Tensor | None,
    device: torch.device,
) -> Verdict | None:
    """Return the verdict that a rank can reach by itself, the same on all replicas: a block without
    a gradient here, or with a non-finite one, stays unchanged. So does a parameter of AdamW's, with
    all others that have the same replicas. None if nothing may change.

    ``norms`` and ``parameters`` are by block. ``found_inf``, of torch's scaler, is known to all
    ranks: nothing changes where it is not zero."""
    on_host, zero = host_can_read(device), torch.zeros((), device=device)
    overflow = (zero if found_inf is None else found_inf.to(device)) != 0
    if on_host and bool(overflow):
        return None

    def not_finite(values: Tensor) -> Tensor:
        return values.isfinite().logical_not_().logical_or_(overflow.to(values.device))

    bad = not_finite(norms)
    of_others = [(some, not_finite(peaks)) for some, peaks in checked]
    every = [bad, *(flags for _, flags in of_others)]
    any_bad = torch.stack([flags.any().to(device) for flags in every]).any()
    finite = any_bad.logical_or_(overflow).logical_not_()
    missing = [n for n, p in enumerate(parameters) if not here[p]]
    bad = bad.clone() if missing else bad
    for n in missing:
        bad[n].fill_(True)
    stays: dict[int, bool | Tensor] = {p: True for p, is_here in enumerate(here) if not is_here}
    for some, flags in of_others:
        flag = flags.any()
        if not on_host:
            stays |= dict.fromkeys(some, flag.float())
        elif bool(flag):
            stays |= dict.fromkeys(some, True)
    if on_host:
        return Verdict(bool(finite), bad if bool(bad.any()) else None, stays, None, every)
    return Verdict(finite, bad, stays, overflow.float(), every)
