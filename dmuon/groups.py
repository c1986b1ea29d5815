"""Param groups: the forms that `dmuon.Muon` accepts, and the entries of ``opt.param_groups``.

A group keeps every key its user put there, and has the hyperparameters its parameters need::

    matrices alone   lr weight_decay momentum nesterov ns_coefficients eps ...  as torch.optim.Muon
    others alone     lr weight_decay betas eps                                  as torch.optim.AdamW
    both             Muon's, and adamw_betas adamw_eps adamw_weight_decay adamw_lr_ratio
"""

from __future__ import annotations

import gc
import operator
import weakref
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import compress, islice, repeat
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dmuon import config
from dmuon.comm.hooks import refuse_fsdp1, reshard
from dmuon.kernels.newton_schulz import resolve_coefficients
from dmuon.rule import rule_of
from dmuon.scheduler.select import (
    LISTS,
    THREE_WAYS,
    Member,
    Route,
    Routes,
    collect,
    no_matrix,
    routes_of,
)
from dmuon.scheduler.specs import ModelSpecs, canonical_name
from dmuon.types import Algorithm, DmuonError, HyperDigest, OwnershipError, grouped

Group = dict[str, Any]
Pair = tuple[str | None, Tensor]
# A parameter's model (its number), its name there, the module that holds it, its name in that.
_Place = tuple[int, str, weakref.ref[nn.Module], str]

# Every param group with matrices holds these, so that tools which save only groups (torch's
# distributed checkpoint) also save the position in the schedule.
PROGRESS = {"step": "muon_step", "last_full": "muon_last_full", "period": "muon_period"}
# Keys that say which parameters are in a group; they are not hyperparameters.
MEMBERS = ("params", "param_names", "algorithm", "use_muon")
_FOR_ALL = {*config.SWITCH_RULES, "period", "ns_dtype", "dedicate"}
_RULES = config.ADAMW_RULES | config.MIXED_RULES | config.MUON_RULES
_OURS = {*_RULES, "adamw_lr", *PROGRESS.values()}
_MADE_UP = "param_groups."  # prefix of names given to parameters that no module holds
_DEDICATE = "select", "splits", "heads"
_KNOWN = {*_OURS, *_FOR_ALL, *config.FLAGS, *MEMBERS[2:]}


# ---- what users pass ---------------------------------------------------------------------


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside `DistributedDataParallel`, or ``model`` itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def read_groups(given: Any) -> list[Group]:
    """Convert any accepted form to group dicts with lists as "params", for `members`; a copy."""
    if isinstance(given, nn.Module):
        named = unwrapped(given).named_parameters()
        return [{"params": [(canonical_name(name), p) for name, p in named]}]
    if isinstance(given, Tensor | Mapping | set | frozenset) or not isinstance(given, Iterable):
        hint = ": pass its items() or its values()" if isinstance(given, Mapping) else ""
        if isinstance(given, set | frozenset):
            hint = ", which has another order on every rank: pass a list"
        raise TypeError(
            "Muon takes a module or an iterable of parameters (model.named_parameters()), found "
            f"{type(given).__name__}{hint}"
        )
    if not (entries := list(given)):
        raise ValueError(
            "dmuon.Muon got no parameters: an empty list, or an iterator that was used up before "
            "(model.parameters() is good for one use). Pass the model"
        )
    if not isinstance(entries[0], dict):
        return [{"params": entries}]
    groups = [dict(group) for group in entries]
    for group in groups:
        params: Any = group.get("params")
        single = isinstance(params, Tensor) or not isinstance(params, Iterable)
        group["params"] = [params] if single else list(params)
    return groups


def is_pair(entry: object) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


def entries_of(groups: Iterable[Group]) -> list[Any]:
    """Return the entries of all groups' "params", without names."""
    return [e[1] if is_pair(e) else e for group in groups for e in group["params"]]


def members(group: Group) -> list[Pair]:
    """Return the parameters of a group, each with its name or None."""
    found = entries_of([group])
    if wrong := [type(entry).__name__ for entry in found if not isinstance(entry, Tensor)]:
        expected = "parameters or (name, parameter) pairs"
        raise TypeError(f"the 'params' of a param group are {expected}, found {wrong[0]}")
    names = [e[0] for e in group["params"] if is_pair(e)] or group.get("param_names")
    if names is not None and len(names) != len(found):
        raise ValueError(
            f"a param group has {len(found)} parameters and {len(names)} names: name all of them"
        )
    return list(zip(names or repeat(None), found))


def algorithm_of(group: Group) -> Algorithm | None:
    """Return a group's ``algorithm``, or that of Keller Jordan's ``use_muon``, or None."""
    if "use_muon" in group:
        return Algorithm.MUON if group["use_muon"] else Algorithm.ADAMW
    if (said := group.get("algorithm")) not in (None, "muon", "adamw"):
        raise ValueError(
            f'a param group has algorithm={said!r}: say "muon" or "adamw", or leave it out where '
            "parameters have names"
        )
    return None if said is None else Algorithm(said)


class ParamGroups:
    """The parameters of an optimizer by param group: their ``names``, canonical or made up, and the
    ``algorithms`` they need. ``routes`` says by name how each parameter is updated, decided when it
    was passed; for a frozen one, how it would be. ``models`` hold the parameters. ``defaults`` are
    the hyperparameters of matrices and of others, ``selection`` the user's select and splits.
    ``is_stage``: these are part of a pipeline, which may have no matrix."""

    def __init__(self, passed: object) -> None:
        self._passed = weakref.ref(passed) if isinstance(passed, nn.Module) else None
        self.models: list[weakref.ref[nn.Module]] = []
        self.names: list[list[str]] = []
        self.algorithms: list[set[Algorithm]] = []
        self.routes: dict[str, Route] = {}
        self.defaults: tuple[Group, Group] = {}, {}
        self.selection: dict[str, Any] = {}
        self.is_stage = False
        self._places: dict[str, _Place] = {}
        self._are_named = False  # torch accepts names for all groups or for none

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the optimizer does not track the original's models.
        return {**vars(self), "_passed": None, "models": [], "_places": {}}

    @property
    def passed(self) -> nn.Module | None:
        """The module passed to the optimizer, or None if it was given parameters."""
        return None if self._passed is None else self._passed()

    def read(
        self, given: Sequence[Group], planned: Mapping[Tensor, Route] | None = None
    ) -> list[Group]:
        """Complete users' groups with the hyperparameters that their parameters need. ``planned``
        holds the routes that `dedicate_params` chose; without it all parameters are routed here."""
        first, planned = len(self.names), planned or {}
        found = [members(group) for group in given]
        names, everyone = self._identified(given, found, planned)
        if not first:  # unless some names are made up
            given_names = any(name is not None for pairs in found for name, _ in pairs)
            made_up = any(name.startswith(_MADE_UP) for own in names for name in own)
            self._are_named = given_names or not made_up
        frozen: Routes = {}
        with suppress(DmuonError):  # a frozen parameter may never be trained
            frozen = self._routed(everyone, frozen=True)
        routes: Routes = {route[0].name: route for route in planned.values()}
        if not planned:
            # The head alone may be trained first, and matrices later.
            late = any(matrices for _, matrices in frozen.values())
            partial = self.is_stage or first > 0 or self._passed is None or late
            routes = self._routed(everyone, partial=partial)
        self.routes = {**frozen, **self.routes, **routes}
        made, algorithms = [], []
        for number, (group, own, pairs) in enumerate(zip(given, names, found), first):
            # Frozen parameters count, so that a scheduler of the group's lr reaches them later.
            kinds = {self.routes[n][0].algorithm for n in own if n in self.routes}
            kinds = kinds or {Algorithm.ADAMW}
            if "betas" in group:  # `completed` renames it in a mixed group
                place = f" in opt.param_groups[{number}]"
                config.checked({"betas": config.BETAS}, group, place=place)
            full = completed(group, kinds, *self.defaults)
            full |= check_group(full, number, kinds)
            labels = [said or name for name, (said, _) in zip(own, pairs)]
            kept = {"param_names": labels} if self._are_named else {}
            made.append({"params": [p for _, p in pairs], **kept, **full})
            algorithms.append(kinds)
        self.names += names
        self.algorithms += algorithms
        return made

    def _identified(
        self, given: Sequence[Group], found: list[list[Pair]], planned: Mapping[Tensor, Route]
    ) -> tuple[list[list[str]], list[Member]]:
        """Name all parameters by group, and find the live module that holds each."""
        unknown = [pair for pairs in found for pair in pairs if pair[1] not in planned]
        holders = self._holders(unknown)
        taken = {name: 0 for names in self.names for name in names}
        made: list[list[str]] = []
        everyone: list[Member] = []
        for number, (group, pairs) in enumerate(zip(given, found), len(self.names)):
            made.append([])
            algorithm = algorithm_of(group)
            for i, (label, p) in enumerate(pairs):
                model, place = holders.get(id(p), ((None, None), None))
                if p in planned:
                    name = planned[p][0].name
                elif label is not None:
                    name = canonical_name(label)
                elif place is not None:  # two models may use the same names
                    unique = (f"{k}.{place[1]}" if k else place[1] for k in range(len(taken) + 2))
                    name = next(n for n in unique if taken.setdefault(n, id(p)) == id(p))
                elif algorithm is not None or planned:
                    name = f"{_MADE_UP}{number}.{i}"
                else:
                    raise OwnershipError(
                        f"param group {number} has parameters without names that no live "
                        "module holds, and their shapes do not tell an embedding from a "
                        f"projection: {THREE_WAYS}"
                    )
                if place is not None:
                    self._places[name] = place
                made[-1].append(name)
                everyone.append(Member(name, p, algorithm, *model))
        return made, everyone

    def _holders(self, given: Sequence[Pair]) -> dict[int, tuple[FoundModel, _Place]]:
        """Map each parameter's id to the live model that holds it and its place there; record the
        models."""
        passed = self.passed
        found = [] if passed is None else [FoundModel(unwrapped(passed), passed)]
        if type(passed) in LISTS and passed in _copied_lists(_live_modules()):
            found, self._passed = [], None  # another module is the model
        known = names_in(found[0].model) if found else {}
        left = [(name, p) for name, p in given if id(p) not in known]
        holders: dict[int, tuple[FoundModel, _Place]] = {}
        for holder in [*found, *(find_models(left) if left else ())]:
            refuse_fsdp1(holder.around.modules())
            if (reference := weakref.ref(holder.model)) not in self.models:
                self.models.append(reference)
            number, names = self.models.index(reference), names_in(holder.model)
            for module in holder.model.modules():
                for local, p in _own(module):
                    if id(p) in names:
                        place = number, names[id(p)][0], weakref.ref(module), local
                        holders.setdefault(id(p), (holder, place))
        return holders

    def _routed(
        self, everyone: Sequence[Member], *, frozen: bool = False, partial: bool = True
    ) -> Routes:
        """Route the trainable parameters, or the frozen ones as if they were trainable."""
        if partial and all(m.parameter.requires_grad is frozen for m in everyone):
            return {}
        return routes_of(
            collect(everyone, **self.selection, allow_meta=True, frozen=frozen, partial=partial)
        )

    def named(self, groups: Sequence[Group]) -> list[tuple[str, Any]]:
        """Return the parameters that ``groups`` hold now, with their names."""
        found: list[tuple[str, Any]] = []
        for number, group in enumerate(groups):
            own = [canonical_name(name) for name in group.get("param_names", ())]
            names = own or (self.names[number] if number < len(self.names) else [])
            if len(names) != len(group["params"]) or len(self.names) != len(groups):
                raise OwnershipError(
                    f"opt.param_groups has {len(groups)} groups, {len(self.names)} were "
                    f"given; group {number} has {len(group['params'])} parameters and "
                    f"{len(names)} names: add groups with opt.add_param_group"
                )
            found += zip(names, group["params"])
        return found

    def refresh(self, groups: Sequence[Group]) -> nn.Module | None:
        """Replace parameters that no module holds any more, because `fully_shard` replaced them, by
        the model's current ones. Return the model if ``groups`` match a single one. OwnershipError:
        a live model has lost a parameter that has no gradient."""
        models = [reference() for reference in self.models]
        now: dict[tuple[int, str], Any] = {}
        for number, model in enumerate(models):
            if model is not None:
                reshard(model.modules())
                now |= {(number, canonical_name(n)): p for n, p in model.named_parameters()}
        named, held = self.named(groups), {id(p) for p in now.values()}
        if lost := {id(p) for _, p in named} - held:
            gc.collect()  # so that dropped modules hold nothing, on any rank
            live = _live_modules()
            if None in models:
                reshard(live)
            held |= {i for _, i in _uses(live, lost)}
        given = iter(named)
        for group in groups:
            group["params"] = [
                p if id(p) in held else self._now(name, p, now)
                for name, p in islice(given, len(group["params"]))
            ]
        ours = {id(p) for group in groups for p in group["params"]}
        if self._passed is not None:
            return self.passed if ours <= {id(p) for p in now.values()} else None
        model = models[0] if len(models) == 1 else None
        trained = () if model is None else model.parameters()
        return model if all(id(p) in ours for p in trained if p.requires_grad) else None

    def _now(self, name: str, p: Tensor, now: Mapping[tuple[int, str], Tensor]) -> Tensor:
        """Return the parameter that has replaced ``p``: by name in the model, from ``now``, or, if
        the model was a wrapper that is gone, in the module that held it."""
        if name not in self._places:
            return p
        number, full, module, local = self._places[name]
        if (number, full) in now:
            return now[number, full]
        holder = module()
        if now and holder is None and p.requires_grad and p.grad is None:
            raise OwnershipError(
                f"no module holds parameter {name!r} any more, and it has no gradient: its module "
                "was replaced or dropped since dmuon.Muon got it. Make the optimizer afterwards"
            )
        found = p if holder is None else dict(_own(holder)).get(local, p)
        # It may have been tied to another parameter since.
        return p if any(found is other for other in now.values()) else found

    def specs(self, named: Sequence[tuple[str, Tensor]]) -> ModelSpecs:
        """Return the specs of the parameters that are trained now."""
        seen: set[Any] = set()
        for name, p in named:
            if seen & {id(p), name}:
                raise OwnershipError(
                    f"parameter {name!r} appears twice in the param groups: list each once"
                )
            seen |= {id(p), name}
        missing = [Member(n, p) for n, p in named if p.requires_grad and n not in self.routes]
        self.routes |= self._routed(missing)
        specs = collect([Member(n, p) for n, p in named], routes=self.routes, partial=True)
        # No matrix is an error, unless others may be unfrozen or added after a head was trained.
        models = (reference() for reference in self.models)
        others = (p for model in models if model is not None for p in model.parameters())
        may_come = self.is_stage or any(p.ndim > 1 and not p.requires_grad for p in others)
        if not specs.matrices and not may_come:
            raise no_matrix(specs.parameters)
        return specs


# ---- whose parameters --------------------------------------------------------------------


class FoundModel(NamedTuple):
    """A live model that holds parameters, and the outermost module that wraps it."""

    model: nn.Module
    around: nn.Module


def names_in(model: nn.Module) -> dict[int, list[str]]:
    """Map each parameter's id to all of its canonical names."""
    named = model.named_parameters(remove_duplicate=False)
    return grouped((id(p), canonical_name(name)) for name, p in named)


def find_models(given: Sequence[Pair]) -> list[FoundModel]:
    """Find the live models that hold these parameters (with names or None), the one with the most
    parameters first. The search begins at the smallest module with all uses of its parameters, see
    `_model_in`. Not a collective call; takes 0.15 s on the host with transformers imported."""
    names = {id(p): canonical_name(name) for name, p in given if name is not None}
    left = {id(p) for _, p in given}
    live, found = _LiveModules(left), []
    while (smallest := live.smallest(left)) is not None:
        chain = live.chain(smallest)
        held = live.held[smallest] & left
        found.append(FoundModel(_model_in(chain, held, names), chain[-1]))
        left -= held
    return found


def _model_in(chain: Sequence[nn.Module], held: Set[int], names: Mapping[int, str]) -> nn.Module:
    """Choose the model of parameters ``held`` from a chain of modules, each inside the next: the
    first in which they have the given names. Without names, a single layer, an item of a list, or
    a module with all trainable parameters of its parent is taken to be part of its parent."""
    if held <= names.keys():
        for module in chain:
            known = names_in(module)
            if all(names[i] in known[i] for i in held):
                return module
    lists = [i for i, module in enumerate(chain) if isinstance(module, LISTS)]
    is_layer = next(chain[0].children(), None) is None
    start = min(max([int(is_layer), *(i + 1 for i in lists)]), len(chain) - 1)
    for module, around in zip(chain[start:], chain[start + 1 :]):
        if any(p.requires_grad and id(p) not in held for p in around.parameters()):
            return module  # such as a generator beside its discriminator
    return chain[-1]


class _LiveModules:
    """All live modules, garbage included; ``held`` has the ids of wanted parameters inside each."""

    def __init__(self, wanted: Set[int]) -> None:
        modules = _live_modules()
        uses = _uses(modules, wanted)
        if {i for _, i in uses} != wanted:
            reshard(modules)  # a gathered FSDP2 unit shows its unsharded parameters
            uses = _uses(modules, wanted)
        if {i for _, i in uses} != wanted and gc.get_freeze_count():
            modules = _live_modules(also_frozen=True)
            reshard(modules)
            uses = _uses(modules, wanted)
        own, copies = grouped(uses), _copied_lists(modules)
        for module in _copied_parameters(own):
            del own[module]
        # Each module with all of its descendants.
        self._inside = {m: {*m.modules()} for m in modules if m not in copies}
        self._uses = {
            module: [i for holder in own.keys() & inside for i in own[holder]]
            for module, inside in self._inside.items()
        }
        self.held = {module: {*ids} for module, ids in self._uses.items()}

    def smallest(self, wanted: Set[int]) -> nn.Module | None:
        """Return the smallest of the modules with the most of these parameters and their uses."""
        ranked = {m: (len(held & wanted), len(self._uses[m])) for m, held in self.held.items()}
        most = max(ranked.values(), default=(0, 0))
        best = [m for m, rank in ranked.items() if rank == most] if most[0] else []
        return min(best, key=lambda m: len(self._inside[m]), default=None)

    def chain(self, module: nn.Module) -> list[nn.Module]:
        """Return the module, then the modules around it that contain all of its parents."""
        found = [module]
        while parents := {m for m in self._inside if found[-1] in m.children()}:
            common = [m for m, of in self._inside.items() if parents <= of and m not in found]
            if not common:
                break
            found.append(min(common, key=lambda m: len(self._inside[m])))
        return found


def _uses(modules: Iterable[nn.Module], wanted: Set[int]) -> list[tuple[nn.Module, int]]:
    return [(module, id(p)) for module in modules for _, p in _own(module) if id(p) in wanted]


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters that the module holds directly, with their local names."""
    return [*module.named_parameters(recurse=False, remove_duplicate=False)]


def _copied_lists(modules: Sequence[nn.Module]) -> set[nn.Module]:
    """Find top-level lists of another module's children, as ``nn.ModuleList(m.children())``."""
    inside = {child for module in modules for child in module.children()}
    lists = [m for m in modules if type(m) in LISTS and m not in inside]
    parts = {m: {*m.children()} for m in lists}
    others = [m for m in modules if m not in parts] if lists else []
    return {m for m in lists if parts[m] and any(parts[m] <= {*o.modules()} - {o} for o in others)}


def _copied_parameters(own: Mapping[nn.Module, Sequence[int]]) -> list[nn.Module]:
    """Find modules whose every wanted parameter is also in a smaller module, such as a
    ``ParameterDict`` of a model's parameters; ``own`` maps modules to wanted ids."""
    lists = nn.ParameterList, nn.ParameterDict
    holders = grouped((i, module) for module, ids in own.items() for i in ids)
    every = {module: {id(p) for _, p in _own(module)} for module in own}

    def is_smaller(other: nn.Module, module: nn.Module) -> bool:
        or_equal = isinstance(module, lists) and not isinstance(other, lists)
        return every[other] < every[module] or (or_equal and every[other] == every[module])

    return [
        module
        for module, ids in own.items()
        if all(any(is_smaller(other, module) for other in holders[i]) for i in ids)
    ]


def _live_modules(*, also_frozen: bool = False) -> list[nn.Module]:
    """List all modules that the garbage collector tracks. Frozen objects (`gc.freeze`) appear only
    after a thaw, and freezing them again also freezes everything else."""
    kinds = [nn.Module]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    if also_frozen:
        gc.collect()
        gc.unfreeze()
    objects = gc.get_objects()
    if also_frozen:
        gc.freeze()
    modules: Any = compress(objects, map({*kinds}.__contains__, map(type, objects)))
    # Another thread may be inside `nn.Module.__init__`.
    return [m for m in modules if {"_parameters", "_modules"} <= vars(m).keys()]


# ---- hyperparameters ---------------------------------------------------------------------

# These decide which state exists, so they cannot change after planning.
BOUND = "variant", "momentum_dtype"


def completed(
    group: Group, algorithms: Collection[Algorithm], muon: Group, adamw: Mapping[str, Any]
) -> Group:
    """Return a group's hyperparameters for these algorithms and all other keys of the user, which
    `check_group` checks.

    Values in the group override the defaults, ``muon`` and ``adamw``, for all of its parameters:
    its ``lr`` and ``weight_decay`` apply to both algorithms unless it also has ``adamw_lr`` or
    ``adamw_weight_decay``."""
    idle = [k for k, v in group.items() if config.is_idle(k, v, in_group=True)]
    own = {k: v for k, v in group.items() if k not in (*MEMBERS, *idle)}
    if Algorithm.ADAMW not in algorithms:
        return muon | own
    if Algorithm.MUON not in algorithms:
        inherited = {k: muon[k] if v is None else v for k, v in adamw.items()}
        said = {k: own.pop(f"adamw_{k}", None) for k in adamw}
        return inherited | own | {k: v for k, v in said.items() if v is not None}
    if "betas" in own and "adamw_betas" not in own:
        own["adamw_betas"] = own.pop("betas")
    made = muon | {
        "adamw_betas": adamw["betas"],
        "adamw_eps": adamw["eps"],
        "adamw_weight_decay": None if "weight_decay" in own else adamw["weight_decay"],
    }
    if "adamw_lr_ratio" in own:
        return made | own
    rate = own.pop("adamw_lr", None if "lr" in own else adamw["lr"])
    made |= {"adamw_lr_ratio": 1.0, **own}
    if rate is not None:
        if not float(made["lr"]):
            raise ValueError(
                f"lr=0 and adamw_lr={rate}: AdamW's rate is kept in proportion to lr, so "
                "that a scheduler of lr scales both; begin with the lr of full steps, or put the "
                "matrices and the others into groups of their own"
            )
        made["adamw_lr_ratio"] = float(rate) / float(made["lr"])
    return made


def check_group(group: Group, number: int, algorithms: Collection[Algorithm]) -> Group:
    """Check the hyperparameters of param group ``number``; return them with Python numbers.

    Raises:
        TypeError, ValueError: a value has a wrong type or is out of range.
        OwnershipError: a key is missing, or asks for a change that would not happen.
    """
    place = f" in opt.param_groups[{number}]"
    is_muon, is_adamw = Algorithm.MUON in algorithms, Algorithm.ADAMW in algorithms
    needed = {**(config.MUON_RULES if is_muon else config.ADAMW_RULES)}
    needed |= config.MIXED_RULES if is_muon and is_adamw else {}
    waiting = {k: _RULES[k] for k in _RULES.keys() & group.keys() - needed.keys()}
    kept = config.checked(waiting, group, place=place)
    if missing := [name for name in needed if name not in group]:
        raise OwnershipError(
            f"opt.param_groups[{number}] has lost {missing}: set "
            f"opt.param_groups[{number}][{missing[0]!r}] again"
        )
    for key in sorted(group.keys() - needed.keys() - {*MEMBERS}, key=str):
        if not config.is_idle(key, group[key], in_group=True) and (advice := _instead(key, needed)):
            raise OwnershipError(
                f"opt.param_groups[{number}] has {key!r}, which nobody reads: {advice}"
            )
    kept |= config.checked(needed, group, owner="AdamW " * (not is_muon), place=place)
    if is_muon:
        config.check_muon_group(kept, place)
    rule_of(kept, place)
    if "ns_coefficients" in kept:
        resolve_coefficients(kept["ns_coefficients"], kept.get("ns_steps", 5))
    return kept


def _instead(key: str, needed: Collection[str]) -> str | None:
    """Return advice on a key that the user expects to take effect and that is not read; None for
    the user's own keys, and for hyperparameters of parameters that may be added later."""
    if key in config.FLAGS:
        return config.instead(key, needed)
    if key in _DEDICATE:
        return f"it goes into dmuon.Muon(..., dedicate={{{key!r}: ...}})"
    if key in _FOR_ALL:
        return f"it holds for all groups, so pass dmuon.Muon(..., {key}=...)"
    if key == "adamw_lr" and "adamw_lr_ratio" in needed:
        return "set 'adamw_lr_ratio', AdamW's learning rate over 'lr'"
    if f"adamw_{key}" in needed and key in _OURS:
        return f"did you mean 'adamw_{key}'? Else remove it"
    if key in _OURS or str(key).startswith("_") or not config.near(key, _KNOWN):
        return None
    return config.instead(key, _KNOWN) + ". Begin names of your own keys with '_'"


def as_here(group: Group, now: Group) -> Group:
    """Overlay a saved group on ``now``, without keys that are not read here or change no update."""
    left = {k for k in group.keys() - now.keys() - _OURS if config.near(k, _KNOWN)}  # foreign keys
    left |= {k for k in _OURS - now.keys() if f"adamw_{k}" in now}
    left |= {*_DEDICATE, *BOUND, *config.FLAGS}
    left -= {flag for flag in ("maximize", "amsgrad") if group.get(flag)}  # to be refused
    return now | {k: v for k, v in group.items() if k not in left}


def describe(group: Group, number: int, members: object) -> list[str]:
    """List, in lines, a group's values that ranks must agree on; ``members``: its parameters."""
    values = _texts({k: v for k, v in group.items() if k in {*_KNOWN, *_DEDICATE}})
    values["parameters"] = str(members)
    return [f"param_groups[{number}]: {k}={v}" for k, v in values.items()]


def _texts(values: Group) -> dict[str, str]:
    # A tensor's own repr would name its device.
    return {k: repr(v.tolist() if isinstance(v, Tensor) else v) for k, v in values.items()}


class Accepted:
    """The planned param groups, checked again at each step where they may have changed; ``params``
    are the parameters that each must still hold, ``digest`` is compared across ranks."""

    def __init__(
        self, groups: Sequence[Group], algorithms: Sequence[Collection[Algorithm]]
    ) -> None:
        self.params = [list(group["params"]) for group in groups]
        self._algorithms = algorithms
        is_bound = [Algorithm.MUON in kinds for kinds in algorithms]
        self._bound = [{k: repr(g[k]) for k in BOUND if b} for g, b in zip(groups, is_bound)]
        # Keys and hyperparameters that have passed the checks.
        self._known: list[tuple[set[str], Group]] = [(set(), {}) for _ in algorithms]
        self.digest = HyperDigest([0] * len(algorithms))

    def check(self, groups: Sequence[Group], count: int) -> None:
        """Check ``groups``, of which there must be ``count``, and turn their numbers into Python's.
        Raises as `check_group`. Groups added since planning are checked when they are planned."""
        if len(groups) != count:
            raise OwnershipError(
                f"opt.param_groups has {len(groups)} groups, but {count} were given: "
                "add groups with opt.add_param_group, and freeze parameters that are not trained"
            )
        each = enumerate(zip(groups, self.params, self._known))
        for number, (group, params, (keys, known)) in each:
            now = group.get("params", ())
            if len(now) != len(params) or not all(map(operator.is_, now, params)):
                raise OwnershipError(
                    f"opt.param_groups[{number}] holds other parameters than it was made with "
                    f"({len(now)}, then {len(params)}), or in another order: leave "
                    "group['params'] as it is, and freeze a parameter by giving it no gradient"
                )
            if group.keys() == keys and all(group[k] is v for k, v in known.items()):
                continue
            kept = check_group(group, number, self._algorithms[number])
            for key, text in self._bound[number].items():
                if repr(kept[key]) != text:
                    raise OwnershipError(
                        f"opt.param_groups[{number}][{key!r}] was {text} when owners were planned, "
                        f"and is {kept[key]!r} now: make a new dmuon.Muon with it"
                    )
            group.update(kept)
            # Tensors and lists can change in place, so they are checked every time.
            lasting = all(isinstance(v, float | int | str | tuple | None) for v in kept.values())
            self._known[number] = ({*group} if lasting else set()), kept
            texts = {f"{k} of opt.param_groups[{number}]": v for k, v in _texts(kept).items()}
            self.digest.texts = {**self.digest.texts, **texts}  # verdicts hold the previous dict
            self.digest.numbers[number] = zlib.crc32(repr(texts).encode())
            if "ns_steps" in kept:
                self.digest.eps[number] = kept["eps"]
