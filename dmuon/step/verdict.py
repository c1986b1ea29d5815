"""What a step may change: agreed by all ranks in one all-reduce, or known to a rank by itself.

::

    message   | squared norm of each matrix that travels | who has a gradient | non-finite found |
                sum over the ranks that hold it            > 0: somebody          > 0: skip
              | ranks that refuse | sum of their numbers | number of the step | its square |
                > 0: nothing may change                    not equal: ranks take different steps
              | ranks that have new parameters | matrices below eps, whose norms do not travel
                all: they plan again

The number of a step stands for its count and for all hyperparameters. What differs then, and names
of what only some ranks know not to be finite, ranks exchange when they have read the sum.

Where the host cannot read from the device without waiting, every answer is a mask there. What is an
error on all ranks is then read at the beginning of the next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dmuon.comm.consensus import different, refused
from dmuon.comm.transport import HostCopy, Transport, host_can_read
from dmuon.dtensors import sample
from dmuon.groups import Accepted
from dmuon.period import Schedule
from dmuon.scheduler.shards import ShardMap
from dmuon.scheduler.specs import ModelSpecs
from dmuon.types import ConsensusError, OwnershipError

# Numbers are compared modulo this: sums of their squares are exact in float64 up to 32,768 ranks.
_NUMBERS = 1 << 19
_SAMPLED = 16  # elements of a gradient that are compared
_EVERY = 256
_MOST_SPREAD = 1e-4  # of their mean square, over ranks: one percent, which no rounding makes


@dataclass(frozen=True, slots=True)
class Verdict:
    """``finite``: whether no gradient was found that is not; a 0-d bool where only the device
    knows.

    ``bad``: which blocks stay as they are; None for no block, a 0-d bool for all alike, or one by
    position. Of AdamW's parameters: the host knows that those ``skipped`` stay as they are;
    ``flags`` (0-d float32; not zero: it stays) of those that have their own; ``skip``, a flag for
    all others.
    """

    finite: bool | Tensor
    bad: Tensor | None = None
    skipped: frozenset[int] = frozenset()
    flags: Mapping[int, Tensor] = field(default_factory=dict)
    skip: Tensor | None = None


def is_exchange_step(step: int) -> bool:
    """Whether the ranks exchange their times at the end of this step, counted from 1.

    >>> [step for step in range(1, 800) if is_exchange_step(step)]
    [4, 16, 64, 256, 512, 768]
    """
    return step in (4, 16, 64) or (step > 0 and step % _EVERY == 0)


class VerdictMessage:
    """Fills and reads the message of one rank, whose blocks are of ``matrices``, by position.

    Only matrices that several ranks hold need a shared norm, and only what several ranks hold a
    shared flag. ``counts``: which blocks are those of the replica that counts. ``alike``: gradients
    that only some ranks have, or that differ, are an error. Without ``shards``, where owners have
    the gradients, every matrix has a norm, only to say which are not finite; who has a gradient is
    known. ``is_bad``: the last verdict that was read found something that is not
    finite.

    The vector of a rank ends in the flags of what it holds alone, which are not sent.
    """

    def __init__(
        self,
        specs: ModelSpecs,
        shards: ShardMap | None,
        transport: Transport,
        device: torch.device,
        schedule: Schedule,
        accepted: Accepted,
        group_of: Sequence[int],
        matrices: Sequence[int],
        counts: Sequence[bool],
        *,
        alike: bool = False,
    ) -> None:
        self._group_of, self._has_norms = group_of, shards is not None
        # Below eps in the last step that was read, how many matrices, and those whose norms travel.
        self.below_eps = 0
        self._below: list[int] = []
        self._specs, self._transport = specs, transport
        rank, self._world = transport.rank, transport.world
        self._schedule, self._accepted = schedule, accepted
        self._on_host = host_can_read(device)
        self._noted: HostCopy | None = None  # of what is an error on all ranks
        self._compared = 0  # steps whose gradients could be compared with other ranks'
        self.is_bad = False
        self._said: Any = ()  # what the number of the last message stands for
        self._matrices = matrices
        # Of the last message: which matrices, and then parameters, are not finite.
        self._flags_of_bad: list[tuple[Sequence[int], Tensor]] = [((), torch.zeros(0))]
        every = range(len(specs.matrices))
        travelling = [i for i in every if shards is None or not shards.is_local(i)]
        self._norm_of = norm_of = {i: n for n, i in enumerate(travelling)}
        self._device = device
        copies_of = [] if shards is None else shards.copies
        copies = [(p, ranks) for p, copies in enumerate(copies_of) for ranks in copies]
        shared = [copy for copy in copies if len(copy[1]) > 1]
        alone = [copy for copy in copies if copy[1] == (rank,)]
        self._norms, self._bad = len(travelling), len(travelling) + len(shared)
        self._sent = self._bad + 7
        flag_of = {p: self._norms + n for n, (p, ranks) in enumerate(shared) if rank in ranks}
        flag_of |= {p: self._sent + n for n, (p, _) in enumerate(alone)}
        self._flags = [flag_of[p] for p in range(len(copies_of))]
        self._alike = [p.name for p in specs.parameters] if alike and transport.world > 1 else []
        of_blocks = () if shards is None else matrices
        self._of_blocks = [self._flags[specs.matrices[i].parameter] for i in of_blocks]
        empty = torch.zeros(self._sent + len(alone), dtype=torch.float64)
        empty[self._flags] = 1.0
        self._empty = empty.to(device)

        def index(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        # Which matrices are only known here to have a norm below eps: numbers and flags.
        self._flags_below: tuple[Sequence[int], Tensor] = (), torch.zeros(0)
        self._limits: tuple[Any, Tensor] = (), torch.zeros(0)
        self._travelling = travelling
        stays = [n for n, i in enumerate(matrices) if i not in norm_of]
        self._stays = [matrices[n] for n in stays], index(stays)
        travels = [n for n, i in enumerate(matrices) if i in norm_of]
        counted = [n for n in travels if counts[n]]
        self._travels = index(travels), index([norm_of[matrices[n]] for n in travels])
        self._counted = index(counted), index([norm_of[matrices[n]] for n in counted])
        self._flag_index = index(self._of_blocks)

    def fill(
        self,
        norms: Tensor,
        checked: Sequence[tuple[Sequence[int], Tensor]],
        here: Sequence[bool],
        found_inf: Tensor | None,
        others: tuple[Sequence[int], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(this rank's vector, float64; the part of it that is summed over the ranks).

        ``norms`` by position, ``checked``: some of AdamW's parameters and a vector of what must be
        finite, ``here``: which parameters have a gradient on this rank. ``others``: matrices whose
        norms are known elsewhere than in ``norms``, and these.
        """
        vector = self._blank()
        for flag, is_here in zip(self._flags, here, strict=True):
            if not is_here:
                vector[flag].zero_()
        positions, numbers = self._counted
        norms = norms.to(vector.device)
        vector.index_copy_(0, numbers, norms.index_select(0, positions).square())
        bad = vector[self._bad]
        self._flags_of_bad = []
        for of, values in ((self._matrices, norms), *checked):
            self._flags_of_bad.append((of, values.isfinite().logical_not_()))
            bad.add_(self._flags_of_bad[-1][1].sum().to(vector.device))
        if found_inf is not None:
            bad.add_(found_inf.to(vector.device))
        if others is None:
            others = self._stays[0], norms.index_select(0, self._stays[1])
        if others[0]:
            found = (others[1] > 0) & (others[1] < self._eps_of(*others))
            self._flags_below = others[0], found
            vector[self._bad + 6].add_(found.sum().to(vector.device))
        return vector, vector.narrow(0, 0, self._sent)

    def _eps_of(self, matrices: Sequence[int], like: Tensor) -> float | Tensor:
        """The eps of these matrices: one for all, or one each."""
        eps = self._accepted.eps
        if len({*eps.values()}) == 1:
            return next(iter(eps.values()))
        each = [eps[self._group_of[i]] for i in matrices]
        if self._limits[0] != each:
            limits = torch.empty_like(like)
            for limit, value in zip(limits, each, strict=True):
                limit.fill_(value)  # which waits for no device
            self._limits = each, limits
        return self._limits[1]

    def numbers_of(self, matrices: Sequence[int]) -> Tensor:
        """For `norms_of`: where the norms of matrices that travel are."""
        return torch.tensor([self._norm_of[i] for i in matrices], device=self._device)

    def norms_of(self, vector: Tensor, numbers: Tensor) -> Tensor:
        """Norms of whole matrices from a summed vector, wherever they lie; 0 where they are not
        finite, because such matrices travel as zeros."""
        return vector.index_select(0, numbers).sqrt().nan_to_num_(0.0, 0.0)

    def refuse(self, *, is_new: bool = False) -> Tensor:
        """What a rank sends that cannot take this step, so that nothing changes on any rank;
        ``is_new``: because of new parameters."""
        vector = self._blank()
        vector[: self._bad].zero_()
        vector[self._bad : self._bad + 2].fill_(1.0)
        vector[self._bad + 2].fill_(self._transport.rank)
        vector[self._bad + 5].fill_(float(is_new))
        return vector.narrow(0, 0, self._sent)

    def all_are_new(self, vector: Tensor) -> bool:
        """Whether every rank has new parameters, by the sum of what they sent. Waits for it."""
        return bool(vector[self._bad + 5] == self._world)

    def _blank(self) -> Tensor:
        vector = self._empty.clone()
        self._said = self._schedule.t, [*self._accepted.texts]
        number = (self._schedule.t + self._accepted.number) % _NUMBERS
        vector[self._bad + 3].fill_(number)
        vector[self._bad + 4].fill_(number * number)
        if not self._on_host:
            # The sum where nothing is bad, no rank refuses, and all have this number.
            self._expected = vector[self._bad : self._bad + 5] * self._world
        return vector

    def compare(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """How far each gradient differs between ranks, as a share of its mean square, float64, in
        the first steps and then rarely; None else. A collective call, also of ranks that refuse.

        A few elements of each are compared. Not by norms: those of large gradients hardly differ,
        even between independent ones.
        """
        if not self._alike:
            return None
        self._compared += 1
        if self._compared > 3 and not is_exchange_step(self._compared):
            return None
        shape = len(self._alike), _SAMPLED
        found = torch.zeros(shape, dtype=torch.float64, device=self._device)
        for own, grad in zip(found, grads):
            if grad is not None and grad.numel():
                values = sample(grad, _SAMPLED)
                own[: len(values)].copy_(values)
        sums = torch.stack([found, found.square()])
        self._transport.all_reduce(sums, tag="gradients alike").wait()
        mean, square = sums.div_(self._world)
        size = square.sum(1)
        # What is nothing but rounding beside the others may differ in all of it.
        counts = (size > 1e-12 * size.max()) & sums.isfinite().all(2).all(0)
        return torch.where(counts, (square - mean.square()).sum(1) / size, 0.0)

    def note(self, vector: Tensor, spread: Tensor | None) -> None:
        """Have `raise_noted` look at a summed vector, where the host cannot read it, and at what
        `compare` found."""
        sent = vector[: self._sent]
        self._noted = HostCopy(sent if spread is None else torch.cat([sent, spread]))

    def raise_noted(self) -> None:
        """Raise what the last full step's `read` could not, and note if something was not finite.

        On every rank in the same step, however far its device is: a rank that raised earlier than
        the others would leave them alone in a collective. The device has had a forward and a
        backward pass since, so it does not run dry while the host waits.
        """
        noted, self._noted, self.is_bad = self._noted, None, False
        if noted is not None:
            self._raise(noted.read())

    def _raise(self, values: Sequence[float]) -> None:
        """Raise ConsensusError if a rank refuses, or if ranks take different steps; else note
        whether something is not finite; OwnershipError if gradients should be alike and are not."""
        count, ranks, step, square = map(int, values[self._bad + 1 : self._bad + 5])
        self.is_bad = False
        if count:
            if count < self._world:  # else each has raised its own error
                raise refused([ranks] if count == 1 else count)
            return
        if self._world * square != step * step:
            self._raise_difference()
        norms = values[: self._norms]
        self.is_bad = bool(values[self._bad]) or not all(map(math.isfinite, norms))
        if self.is_bad:  # the step is skipped, and such gradients differ
            return
        for name, flag in zip(self._alike, self._flags):
            if 0 < values[flag] < self._world:
                raise OwnershipError(
                    f"parameter {name!r} has a gradient on {values[flag]:.0f} of {self._world} "
                    "ranks. In the 'replicated' layout p.grad must be the average over all "
                    "ranks, on all of them, zeros where a rank has none: average with "
                    "DistributedDataParallel, and clear gradients on all ranks alike. Nothing "
                    "was changed"
                )
        least = min(filter(None, norms), default=math.inf) if self._has_norms else math.inf
        self._below = []
        if least < max(self._accepted.eps.values(), default=0.0) ** 2:
            eps = (self._accepted.eps[self._group_of[i]] for i in self._travelling)
            pairs = zip(self._travelling, norms, eps, strict=True)
            self._below = [i for i, square_, own in pairs if 0 < square_ < own * own]
        self.below_eps = int(values[self._bad + 6]) + len(self._below)
        spread = values[self._sent :]
        if spread and (most := max(spread)) > _MOST_SPREAD:
            raise OwnershipError(
                "gradients differ between ranks: that of parameter "
                f"{self._alike[spread.index(most)]!r} by {100 * math.sqrt(most):.0f}%. In the "
                "'replicated' layout p.grad must be the average over all ranks, and here nobody "
                "averages it. Wrap the model: torch.nn.parallel.DistributedDataParallel(model) "
                "(wrap it again after unfreezing; the last backward before a step outside of "
                "no_sync); or let dmuon average: dmuon.dedicate_params(model, "
                "options=dmuon.ReplicatedOptions(reduce_to_owner=True)) before dmuon.Muon(model). "
                "Nothing was changed"
            )

    def _raise_difference(self) -> None:
        """Raise ConsensusError, on every rank, with what differs in the last message."""
        steps, groups = zip(*self._transport.gather_objects(self._said))
        counts = different([{"the count": str(step)} for step in steps])
        if counts:
            raise ConsensusError(
                f"ranks take full steps at different step counts ({counts}): a period that is a "
                "function must depend on the step count alone, and all ranks must load the same "
                "state and call opt.step() equally often. Nothing was changed"
            )
        texts = [
            {
                f"{k} of opt.param_groups[{n}]": v
                for n, each in enumerate(all_)
                for k, v in each.items()
            }
            for all_ in groups
        ]
        raise ConsensusError(
            f"ranks take this step with different hyperparameters: {different(texts)}. Set the "
            "same on all of them; schedulers must see the same on all (ReduceLROnPlateau: the mean "
            "loss of all ranks, not each its own). Nothing was changed"
        )

    def names_below_eps(self) -> Iterator[str]:
        """Of those that this rank knows; reads what has been sent last."""
        matrices, (numbers, flags) = self._specs.matrices, self._flags_below
        yield from (matrices[i].name for i in self._below)
        yield from (matrices[i].name for i, f in zip(numbers, HostCopy(flags).read()) if f)

    def suspects(self) -> Iterator[str]:
        """The names of what is not finite in this rank's part of the last message; reads it."""
        return suspects(self._specs, *self._flags_of_bad)

    def read(
        self,
        vector: Tensor,
        norms: Tensor,
        here: Sequence[bool],
        spread: Tensor | None = None,
    ) -> Verdict | None:
        """The verdict of a summed vector and of what `compare` found; None if nothing may change.

        ``norms``, by position, become those of whole matrices. Nothing is read where the host would
        wait for it.

        Raises:
            DmuonError: see `_raise`; where the host cannot read, `raise_noted` raises it.
        """
        shared = vector.narrow(0, 0, self._norms).sqrt()
        positions, numbers = self._travels
        of_blocks = shared.index_select(0, numbers).to(norms.device)
        norms.index_copy_(0, positions.to(norms.device), of_blocks)
        if self._on_host:
            values = vector.tolist()
            self._raise(values[: self._sent] + ([] if spread is None else spread.tolist()))
            # A norm beyond float64 leaves no way to normalize.
            if self.is_bad:
                return None
            bad = None
            if not all(values[flag] for flag in self._of_blocks):
                bad = vector.index_select(0, self._flag_index) == 0
            skipped = (p for p, flag in enumerate(self._flags) if not values[flag])
            return Verdict(True, bad, frozenset(skipped))
        self.note(vector, spread)
        ok = (vector[self._bad : self._bad + 5] == self._expected).all() & shared.isfinite().all()
        if self._alike:
            ranks = vector[self._norms : self._bad]  # that have a gradient
            ok &= ((ranks == 0) | (ranks == self._world)).all()
        if spread is not None:
            ok &= (spread <= _MOST_SPREAD).all()
        bad = ok.logical_not()
        if all(here):
            return Verdict(ok, bad.to(norms.device), skip=bad.float())
        stays = (vector == 0) | bad
        missing = [p for p, is_here in enumerate(here) if not is_here]
        flags = {p: stays[self._flags[p]].float() for p in missing}
        of_blocks = stays.index_select(0, self._flag_index).to(norms.device)
        return Verdict(ok, of_blocks, flags=flags, skip=bad.float())


def suspects(
    specs: ModelSpecs,
    of_matrices: tuple[Sequence[int], Tensor],
    *of_others: tuple[Sequence[int], Tensor],
) -> Iterator[str]:
    """The names of the matrices and parameters of these numbers where the flags are set."""
    for n, (numbers, flags) in enumerate((of_matrices, *of_others)):
        named = specs.parameters if n else specs.matrices
        for i, flag in zip(numbers, HostCopy(flags).read(), strict=True):
            if flag:
                yield named[i].name


def own_verdict(
    norms: Tensor,
    parameters: Sequence[int],
    checked: Sequence[tuple[Sequence[int], Tensor]],
    here: Sequence[bool],
    found_inf: Tensor | None,
    device: torch.device,
) -> Verdict | None:
    """What a rank can know by itself, and replicas know alike: a block without a gradient here, or
    with one that is not finite, stays as it is. None if nothing may change.

    ``norms`` of blocks, whose ``parameters`` are these; ``checked``: some of AdamW's parameters and
    a vector of what must be finite. ``found_inf``: torch's scaler has shared its own verdict and
    lowers its scale on all ranks, so nothing changes where that is not zero.
    """
    overflow = torch.zeros((), dtype=torch.bool, device=device)
    if found_inf is not None:
        overflow = found_inf.to(device) != 0
    on_host = host_can_read(device)
    if on_host and bool(overflow):
        return None
    found = (norms, *(peaks for _, peaks in checked))
    finite = torch.stack([values.isfinite().all().to(device) for values in found]).all()
    finite.logical_and_(overflow.logical_not())
    bad = norms.isfinite().logical_not_().logical_or_(overflow.to(norms.device))
    for n, p in enumerate(parameters):
        if not here[p]:
            bad[n].fill_(True)
    missing = frozenset(p for p, is_here in enumerate(here) if not is_here)
    stays = [
        (some, peaks.isfinite().logical_not_().logical_or_(overflow.to(peaks.device)))
        for some, peaks in checked
    ]
    if on_host:
        infinite = (p for some, flags in stays for p, flag in zip(some, flags.tolist()) if flag)
        return Verdict(bool(finite), bad if bool(bad.any()) else None, missing.union(infinite))
    flags = {p: f for some, values in stays for p, f in zip(some, values.float().unbind())}
    return Verdict(finite, bad, missing, flags, overflow.float())
