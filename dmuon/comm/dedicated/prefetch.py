"""Weights to where they are used: before a group of modules runs, and again before its backward.

Each forward pass broadcasts every group once, in the order of registration, each backward pass in
the reverse order; an *order* knows how far it has come. A rank that skips a module, or calls two in
another order, still issues the same broadcasts in the same order as the others::

    forward    b0 b1 | run 0 | b2 | run 1 | b3 | run 2 ...      prefetch = 1
    backward   b3 b2 | run 3 | b1 | run 2 | ...

Backward passes by group g right before the broadcast of its place g + prefetch + 1, on every rank:
there the gradients of g leave if it is known that none will come, and on a rank that has them all
they have left by then.

What a rank has not asked for when the pass ends, it receives then, and drops. A group that is asked
for again after it has been dropped is sent once more, on all ranks that run the same program; from
the next pass on it is kept until its last call.

A module's outputs carry a tensor hook that fires before its backward begins. Hooks live on modules
and in autograd's graph, so they refer to the `Prefetcher`, whom they tell everything, weakly.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dmuon.comm.dedicated.storage import Group, Storage
from dmuon.comm.hooks import Hook, Remove, WaitPoint
from dmuon.comm.reducer import GradientReducer, at_end_of_backward
from dmuon.config import DedicatedOptions
from dmuon.types import DmuonError, OwnershipError

_ANNOUNCED = "_dmuon_announced"  # set on what a module keeps from one pass to the next


# ---- passes over the model -------------------------------------------------------------------


class _Order:
    """In which order a pass launches groups, how many of them it has (``cursor``), and whether it
    has begun and not ended (``open``)."""

    def __init__(self, groups: Sequence[int], phase: str) -> None:
        self.groups = groups
        self.phase = phase
        self.place = {g: i for i, g in enumerate(groups)}
        self.cursor = 0
        self.open = False


class Prefetcher:
    """Has weights there when passes over the model need them, and sends gradients in turn.

    The root's group is needed first in both passes. There is a ``reducer`` once an optimizer has
    bound itself; unless it is to ``sync`` it waits. ``steps`` counts how often weights have
    changed, ``backwards`` the backward passes since then.
    """

    def __init__(self, storage: Storage, options: DedicatedOptions) -> None:
        self.storage = storage
        self.groups = storage.groups
        self.steps = 0
        self.backwards = 0
        self.reducer: GradientReducer | None = None
        self.load: _Load | None = None  # the call that is open, or was cut off
        self._prefetch = options.prefetch
        self._free = options.free_after_forward
        first = [g for g, group in enumerate(self.groups) if group.is_root]
        others = [g for g, group in enumerate(self.groups) if not group.is_root]
        self._first = len(first)
        self.forward = _Order([*first, *others], "forward")
        self.backward = _Order([*first, *reversed(others)], "backward")
        self._ahead = 0  # groups whose new weights have left, in the order of forward
        self._needed: set[int] = set()  # asked for in this backward pass, and not freed
        self._passed = 0  # how many groups of it are passed
        self._recorded = False  # a forward pass by autograd, since the last step

    # ---- broadcasts --------------------------------------------------------------------------

    def _next(self, order: _Order, *, ending: bool = False) -> Group:
        if order is self.backward:
            self._pass(ending=ending)
        group = self.groups[order.groups[order.cursor]]
        order.cursor += 1
        if self._free or not group.valid:
            self.storage.launch(group, order.phase)
        return group

    def _ask(self, order: _Order, g: int) -> None:
        """Launch ``g``, what comes before it, and what is prefetched behind it; have ``g``."""
        last = min(order.place[g] + self._prefetch, len(order.groups) - 1)
        while order.cursor <= last:
            self._next(order)
        if not self.groups[g].valid:
            self.storage.launch(self.groups[g], order.phase)  # again: it was dropped in this pass
        self.groups[g].use()

    def _complete(self, order: _Order) -> None:
        """Take part in the broadcasts of what was not asked for."""
        while order.cursor < len(order.groups):
            group = self._next(order, ending=True)
            if self._free and not group.in_use:
                group.free()
        order.open = False

    # ---- forward -----------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root is about to run; a pass that was broken off ends first."""
        self.recover()
        self.storage.check()
        self.end_forward()
        self._open_forward()

    def _open_forward(self) -> None:
        self.storage.ready()
        self.forward.open = True
        self.forward.cursor = 0 if self.storage.has_replicas else self._ahead
        self._ahead = 0
        for group in self.groups:
            group.running = group.calls = 0

    def enter(self, g: int) -> None:
        """A module of the group is about to run."""
        if not self.forward.open:
            self._open_forward()
        self._ask(self.forward, g)
        self.groups[g].ran = True
        self.groups[g].running += 1

    def touch(self, g: int) -> None:
        """A part of the group's modules runs, normally inside them."""
        if not self.groups[g].running:  # called by itself, so nobody announces its backward
            recorded = torch.is_grad_enabled()
            self.enter(g)
            self.leave(g, recorded=recorded, keep=recorded, free=False)

    def leave(self, g: int, *, recorded: bool, keep: bool, free: bool = True) -> None:
        """It has run. ``recorded``: by autograd; ``keep``: its backward may come unannounced; not
        ``free``: it is only about to run, and nothing will tell when it has."""
        group = self.groups[g]
        if recorded:
            group.epochs += not group.recorded
            group.recorded = self._recorded = True
        group.running -= 1
        group.keep = group.keep or keep
        if group.running > 0:
            return
        group.calls += 1
        if free and self._free and group.calls >= group.expected and not group.keep:
            group.free()

    def end_forward(self) -> None:
        """Every rank has issued every broadcast of the pass when this returns."""
        if not self.forward.open:
            return
        for group in self.groups:
            group.expected = group.calls or group.expected
            group.running = 0
            if self._free and group.valid and not group.keep:
                group.free()
        self._complete(self.forward)

    # ---- backward ----------------------------------------------------------------------------

    def ensure_backward(self) -> None:
        """Begin the backward pass if this is the first that is heard of it."""
        if self.backward.open:
            return
        self._open_backward()
        reducer, casts = self.reducer, self.storage.casts
        for group in self.groups:
            # Changing the dtype of a parameter's data makes autograd accumulate apart.
            parts = [max(1, group.epochs) if casts(p) else 1 for p in group.parameters]
            group.awaited = sum(parts)
            if reducer is not None:
                reducer.expected.update(zip(group.parameters, parts, strict=True))
        if reducer is not None and reducer.sync:
            reducer.begin()
        # Nested backward calls (re-entrant checkpointing) each end once; it may be over then.
        at_end_of_backward(self.recover)

    def _open_backward(self) -> None:
        self.end_forward()
        self.backward.open = True
        self.backward.cursor = 0
        self._passed = self._first
        self._needed.clear()
        for group in self.groups:
            group.arrived = 0

    def need(self, g: int) -> None:
        """The backward of the group is about to run."""
        for i in [i for i in self._needed if i != g]:
            if self.groups[i].arrived >= self.groups[i].awaited:
                self.groups[i].free()
                self._needed.discard(i)
        self._needed.add(g)
        self.groups[g].ran = True
        self._ask(self.backward, g)
        self._pass()

    def _pass(self, *, ending: bool = False) -> None:
        """Send gradients of the groups that backward has passed by, at their places among the
        broadcasts, where the ranks that have all of theirs send them.

        Zeros of a group that has not run since the step; as the pass is ``ending``, what there is
        of any.
        """
        end = max(self._passed, self.backward.cursor - self._prefetch)
        passed = [self.groups[g] for g in self.backward.groups[self._passed : end]]
        self._passed = end
        if self.reducer is None or not self.reducer.open:
            return
        for group in passed:
            if ending:
                self.reducer.give_up(group.parameters)
            elif not group.ran:
                pinned = self.storage.is_pinned
                self.reducer.give_up([p for p in group.parameters if not pinned(p)])

    def accumulated(self, parameter: int) -> None:
        """Autograd has accumulated into the parameter's ``grad``."""
        self.ensure_backward()
        group = self.storage.group_of.get(parameter)
        if group is not None:
            group.arrived += 1
        if self.reducer is not None and self.reducer.open:
            self.reducer.accumulated(parameter)

    def recover(self) -> None:
        """Autograd is done, or has raised: the other ranks count on the rest of the pass.

        Every rank has issued every broadcast of it when this returns; nothing stays materialized.
        """
        if not self.backward.open:
            return
        self._close_backward()
        if self.reducer is not None:
            self.reducer.finish()
        for group in self.groups:
            # Each parameter got a gradient of so many uses.
            used = -(-group.arrived // len(group.parameters))
            group.epochs = max(0, group.epochs - used)

    def _close_backward(self) -> None:
        for group in self.groups:
            if self._free and group.valid:
                group.free()
        self._passed = self._first
        self._complete(self.backward)
        self.drop()
        self.backwards += 1

    # ---- between passes ----------------------------------------------------------------------

    def pass_by(self) -> None:
        """Join the other ranks' passes since the step if no backward ran here.

        They count on this rank's part all the same, and in the same order: of a backward pass, and
        of the forward pass before it if there was none here.
        """
        if self.backwards:
            return
        if self.reducer is not None:
            self.reducer.begin_owed()
        if not self.forward.open and not self._recorded:
            self._open_forward()
        self._open_backward()
        self._close_backward()

    def drop(self) -> None:
        """Free every group: the weights may have changed, or are no longer needed."""
        for group in self.groups:
            if group.valid or group.in_use:
                group.free()
        self.forward.open = self.backward.open = False
        self._ahead = 0

    def begin_access(self) -> None:
        """Someone is about to read or write the weights directly."""
        if not self.forward.open:
            self.recover()
            self.storage.check()
        self.storage.wait_published()

    def begin_step(self) -> None:
        """The weights are about to change."""
        self.drop()
        self.storage.wait_published()
        self.steps += 1
        self.backwards = 0
        self._recorded = False
        for group in self.groups:
            group.ran = False
            group.epochs = 0

    def launch_ahead(self, todo: Set[int]) -> None:
        """Publish what is updated, up to the first group with a matrix of ``todo``: all groups to
        the holders or, without replicas, the first ones that the next forward pass needs."""
        groups = self.forward.groups
        if not self.storage.has_replicas:
            groups = groups[: self._first + self._prefetch + 1]
        for g in groups[self._ahead :]:
            if not self.groups[g].matrices.isdisjoint(todo):
                return
            self._ahead += 1
            if self.storage.has_replicas:
                self.storage.publish(self.groups[g])
            else:
                self.storage.launch(self.groups[g], "forward")


# ---- hooks on modules ------------------------------------------------------------------------


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output: in tuples, lists, mappings and dataclasses, nested."""
    if isinstance(value, Tensor):
        yield value
        return
    members: Any = ()
    if isinstance(value, Mapping):
        members = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        members = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    for member in members:
        yield from _tensors_in(member)


def _kept_tensors(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Results that a forward keeps as attributes of modules, such as the loss of a router."""
    for part in modules:
        for name, value in vars(part).items():
            if isinstance(value, Tensor) or (name[0] != "_" and isinstance(value, list | tuple)):
                yield from (t for t in _tensors_in(value) if t.grad_fn is not None)


def _announce(
    prefetcher: Prefetcher, groups: Sequence[int], area: Sequence[nn.Module], output: Any
) -> bool:
    """Have the weights there before the backward of ``output``; whether that can be.

    Backward may also begin at what the modules of ``area`` keep.
    """
    step, weak = prefetcher.steps, weakref.ref(prefetcher)

    def before_backward(grad: Tensor) -> None:
        prefetcher = weak()
        if prefetcher is None:
            return
        if prefetcher.steps != step:
            raise DmuonError(
                "opt.step() changed weights between this forward pass and its backward, which "
                "would give gradients of neither: call backward before opt.step()"
            )
        if torch.is_grad_enabled():
            raise DmuonError(
                "create_graph=True: weights of the 'dedicated' layout are freed when backward is "
                "done, so there is no second derivative. Use layout='replicated' for it"
            )
        prefetcher.ensure_backward()
        for g in groups:
            prefetcher.need(g)

    found = [t for t in _tensors_in(output) if t.requires_grad]
    for tensor in found:
        tensor.register_hook(before_backward)
    for tensor in _kept_tensors(area):
        if not any(tensor is t for t in found) and not hasattr(tensor, _ANNOUNCED):
            tensor.register_hook(before_backward)
            setattr(tensor, _ANNOUNCED, True)
    return bool(found)


def hook_module(
    prefetcher: Prefetcher, point: WaitPoint, groups: Sequence[int], area: Sequence[nn.Module]
) -> list[Remove]:
    """Hooks of one module, which needs ``groups``; ``area`` is itself and what lies below it in no
    other group."""
    module = point.module
    weak, weak_module = weakref.ref(prefetcher), weakref.ref(module)

    def check_whole(*_: Any) -> None:
        prefetcher, module = weak(), weak_module()
        if prefetcher is not None and module is not None:
            prefetcher.storage.check_whole(module)  # a copy of placeholders would be of no use

    def hook(action: Callable[[Prefetcher, Any], None]) -> Hook:
        def act(module: nn.Module, *args: Any) -> None:
            prefetcher = weak()
            if prefetcher is not None:
                action(prefetcher, args[-1] if args else None)

        # Opaque to torch.compile: the graph breaks, and what is traced never sees placeholders.
        opaque = torch.compiler.disable(act)

        def unless_compiled(module: nn.Module, *args: Any) -> None:
            # In compiled code the hook of the module around it has done it.
            if not torch.compiler.is_compiling():
                opaque(module, *args)

        return Hook(unless_compiled if point.in_block else opaque, check_whole)

    def before(prefetcher: Prefetcher, _: Any) -> None:
        in_backward = prefetcher.backward.open  # for the recomputation of a checkpointed forward
        if point.is_root and not in_backward:
            prefetcher.begin_forward()
        enter = prefetcher.touch if point.in_block else prefetcher.enter
        for g in groups:
            (prefetcher.need if in_backward else enter)(g)

    def after(prefetcher: Prefetcher, output: Any) -> None:
        if prefetcher.backward.open:
            return
        recorded = torch.is_grad_enabled()
        announced = _announce(prefetcher, groups, area, output) if recorded else False
        for g in groups:
            prefetcher.leave(g, recorded=recorded, keep=recorded and not announced)
        if point.is_root:
            prefetcher.end_forward()

    handles = [module.register_forward_pre_hook(hook(before), prepend=not point.in_block)]
    if not point.in_block:
        handles.append(module.register_forward_hook(hook(after)))
    return [handle.remove for handle in handles]


@dataclasses.dataclass
class _Load:
    """A call of ``load_state_dict`` of ``module``, while torch goes through what lies below it.

    ``errors`` is the call's own list of what does not fit. ``any_apart`` says whether there are
    dedicated parameters below that are not whole, ``found`` which of them the state dict has.
    """

    module: weakref.ref[nn.Module]
    errors: list[str]
    any_apart: bool = False
    found: dict[int, Any] = dataclasses.field(default_factory=dict)


def hook_state(prefetcher: Prefetcher, module: nn.Module, names: Mapping[str, int]) -> list[Remove]:
    """Have state dicts of ``module`` hold its own dedicated parameters, by ``names`` their numbers,
    as rows on all ranks, and load them from any form; collective calls. Inside ``materialized``
    they are whole, as in any module.

    What is loaded is kept when all of it has been looked at, on all ranks: at the end of the
    outermost call. So every module that has dedicated parameters below it has these hooks.
    """
    weak = weakref.ref(prefetcher)

    def save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        prefetcher = weak()
        if prefetcher is None:
            return
        found = prefetcher.storage.apart(names)
        if found:
            prefetcher.storage.meet("model.state_dict()")
            prefetcher.begin_access()
        for name, p in found.items():
            state_dict[prefix + name] = prefetcher.storage.saved(p)

    def load(
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        prefetcher = weak()
        if prefetcher is None:
            return
        call, storage = prefetcher.load, prefetcher.storage
        if call is None or call.errors is not errors:  # torch has one list for a call
            call = prefetcher.load = _Load(weakref.ref(module), errors)
        apart = storage.apart(names)
        call.any_apart = call.any_apart or bool(apart)
        for name, p in apart.items():
            key = prefix + name
            if key not in state_dict:
                continue
            if metadata.get("assign_to_params_buffers"):
                raise OwnershipError(
                    f"load_state_dict(assign=True) would put other parameters into the place of "
                    f"{key!r} and others, which owners store: leave it out"
                )
            flaw = storage.flaw(p, state_dict[key])
            errors += [flaw] if flaw else []
            call.found[p] = state_dict[key]
            # What torch copies then is what is there.
            state_dict[key] = module.get_parameter(name)

    def loaded(module: nn.Module, keys: Any) -> None:
        prefetcher = weak()
        call = prefetcher.load if prefetcher is not None else None
        if prefetcher is None or call is None or call.module() is not module:
            return
        prefetcher.load = None
        if call.any_apart:
            prefetcher.begin_access()
            prefetcher.storage.load(call.found, call.errors)
            prefetcher.drop()  # what was launched ahead is old

    handles = [
        module.register_load_state_dict_pre_hook(Hook(load)),
        module.register_load_state_dict_post_hook(Hook(loaded)),
    ]
    if names:
        handles.append(module.register_state_dict_post_hook(Hook(save)))
    return [handle.remove for handle in handles]


def check_first_forward(storage: Storage, root: nn.Module) -> Remove:
    """Look for replaced parameters in the first forward pass, before any other hook.

    `fully_shard` puts its hooks before those of modules, and gathers there; only a global hook
    comes first. It removes itself when the first module of ``root`` runs.
    """
    weak = weakref.ref(storage)
    members = weakref.WeakSet(root.modules())

    def hook(module: nn.Module, inputs: Any) -> None:
        storage = weak()
        if storage is not None and module in members:
            storage.find_parameters()
        if storage is None or module in members:
            handle.remove()

    handle = register_module_forward_pre_hook(torch.compiler.disable(hook))
    return handle.remove
