"""Weights to where they are used: before a layer of modules runs, and again before its backward.

Each forward pass gathers every layer once, in the order of registration, each backward pass in
reverse, whatever modules a rank skips or calls in another order::

    forward    g0 g1 | run 0 | g2 | run 1 | g3 | run 2 ...      prefetch = 1
    backward   g3 g2 | run 3 | g1 | run 2 | ...

Backward passes by layer g right before the gather number g + prefetch + 1, on every rank: there
the gradients of g leave if none will come. On a rank that has them all they have left by then.

A layer that a rank has not asked for when the pass ends is received then, and dropped. One that is
asked for again after it has been dropped is sent once more, on all ranks that run the same program;
from the next pass on it is kept until its last call.

A module's outputs carry a tensor hook that fires before its backward begins. Hooks live on modules
and in autograd's graph, so they refer weakly to the `Prefetcher`, which they tell everything.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dmuon.comm.hooks import Hook, Remove, WaitPoint, opaque
from dmuon.comm.reducer import GradientReducer, at_end_of_backward
from dmuon.comm.storage import Layer, Storage, WeightState
from dmuon.config import DedicatedOptions
from dmuon.types import DmuonError, OwnershipError, State

_ANNOUNCED = "_dmuon_announced"  # set on what a module keeps from one pass to the next


# ---- passes over the model -------------------------------------------------------------------


class PassState(State):
    """Which pass over the model has begun and not ended, on this rank.

    ::

        state     what every rank issues while in it                            may become
        IDLE      nothing                                                       FORWARD, BACKWARD
        FORWARD   the gather of each layer, in the order of registration        IDLE
        BACKWARD  the gather of each layer in reverse, gradients in between     IDLE

    A pass is IDLE again once all of its collectives are issued, so none follows another directly.
    """

    IDLE = "idle", "FORWARD BACKWARD"
    FORWARD = "forward", "IDLE"
    BACKWARD = "backward", "IDLE"


@dataclasses.dataclass(slots=True)
class _Calls:
    """How a layer has been called, and what autograd has made of it."""

    expected: int  # forward calls in a pass, as in the last; at first, occurrences in the model
    ran: bool = False  # since the last step, also without autograd, as a checkpointed forward does
    running: int = 0  # forward calls that have not ended
    ended: int = 0  # forward calls in this pass that have
    recorded: int = 0  # uses that autograd recorded and whose backward has not come yet
    gradients: int = 0  # that have come in this backward pass
    awaited: int = 1  # how many of them there will be


class Prefetcher:
    """Makes weights available before passes over the model need them, and sends gradients in turn.
    The root's layer is needed first in both passes. A ``reducer`` comes with the optimizer."""

    def __init__(self, storage: Storage, options: DedicatedOptions) -> None:
        self.storage = storage
        self.layers = storage.layers
        self.state = PassState.IDLE
        self.steps = 0  # in which weights have changed
        self.backwards = 0  # backward passes since the last of them
        self.reducer: GradientReducer | None = None
        self._options = options
        self._calls = [_Calls(layer.occurrences) for layer in self.layers]
        self.number_of = {p: g for g, layer in enumerate(self.layers) for p in layer.parameters}
        self._first = sum(layer.is_root for layer in self.layers)
        self._ahead = 0  # layers whose new weights left with the step, in the order of forward
        self._launched = 0  # layers that were gathered in this pass
        self._passed = 0  # layers that this backward pass is done with
        self._needed: set[int] = set()  # asked for in this backward pass, and not freed
        self._recorded = False  # a forward pass by autograd, since the last step

    # ---- gathers -----------------------------------------------------------------------------

    def _turn(self, n: int) -> int:
        """The layer whose turn in this pass is number ``n``; also the turn of layer ``n``."""
        if self.state is PassState.FORWARD or n < self._first:
            return n
        return len(self.layers) + self._first - 1 - n

    def _launch_next(self, *, ending: bool = False) -> Layer:
        if self.state is PassState.BACKWARD:
            self._pass(ending=ending)
        layer = self.layers[self._turn(self._launched)]
        self._launched += 1
        if self._options.free_after_forward or layer.state is WeightState.FREED:
            self.storage.launch(layer, self.state.label)
        return layer

    def _use(self, g: int) -> None:
        """Launch ``g``, what comes before it and what is prefetched after it; then use ``g``."""
        last = min(self._turn(g) + self._options.prefetch, len(self.layers) - 1)
        while self._launched <= last:
            self._launch_next()
        layer = self.layers[g]
        if layer.state is WeightState.FREED:  # again: it was dropped in this pass
            self.storage.launch(layer, self.state.label)
        layer.use()
        self._calls[g].ran = True

    def _end(self) -> None:
        """Take part in the gathers of what was not asked for."""
        while self._launched < len(self.layers):
            layer = self._launch_next(ending=True)
            if self._options.free_after_forward and not layer.in_use:
                layer.free()
        self.state = self.state.to(PassState.IDLE)

    # ---- forward -----------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root is about to run; a pass that was broken off ends first."""
        self.recover()
        self.storage.check()
        self.end_forward()
        self._begin_forward()

    def _begin_forward(self) -> None:
        self.storage.ready()
        self.state = self.state.to(PassState.FORWARD)
        self._launched = 0 if self.storage.has_replicas else self._ahead
        self._ahead = 0
        for calls in self._calls:
            calls.running = calls.ended = 0

    def enter(self, g: int) -> None:
        """A module of the layer is about to run."""
        if self.state is PassState.IDLE:
            self._begin_forward()
        self._use(g)
        self._calls[g].running += 1

    def touch(self, g: int) -> None:
        """A part of the layer's modules runs, normally inside them."""
        if not self._calls[g].running:  # called by itself, so nobody announces its backward
            recorded = torch.is_grad_enabled()
            self.enter(g)
            self.leave(g, recorded=recorded, hold=recorded, free=False)

    def leave(self, g: int, *, recorded: bool, hold: bool, free: bool = True) -> None:
        """It has run. ``recorded``: by autograd; ``hold``: its backward may come unannounced; not
        ``free``: it is only about to run, and nothing will tell when it has."""
        layer, calls = self.layers[g], self._calls[g]
        if recorded and layer.in_use:  # not so after a backward inside of this forward
            calls.recorded += layer.record(hold=hold)
            self._recorded = True
        calls.running -= 1
        if calls.running > 0:
            return
        calls.ended += 1
        if free and calls.ended >= calls.expected:
            self._free_after_forward(layer)

    def _free_after_forward(self, layer: Layer) -> None:
        if self._options.free_after_forward and layer.state is not WeightState.HELD:
            layer.free()

    def end_forward(self) -> None:
        """Every rank has issued every gather of the pass when this returns."""
        if self.state is not PassState.FORWARD:
            return
        for layer, calls in zip(self.layers, self._calls, strict=True):
            calls.expected = calls.ended or calls.expected
            calls.running = 0
            self._free_after_forward(layer)
        self._end()

    # ---- backward ----------------------------------------------------------------------------

    def ensure_backward(self) -> None:
        if self.state is PassState.BACKWARD:
            return
        self._begin_backward()
        reducer, casts = self.reducer, self.storage.casts
        for layer, calls in zip(self.layers, self._calls, strict=True):
            # If the dtype of a parameter's data changes, autograd accumulates each use apart.
            parts = [max(1, calls.recorded) if casts(p) else 1 for p in layer.parameters]
            calls.awaited = sum(parts)
            if reducer is not None:
                reducer.expected.update(zip(layer.parameters, parts, strict=True))
        if reducer is not None and reducer.sync:
            reducer.begin()
        # Nested backward calls (re-entrant checkpointing) each end once; it may be over then.
        at_end_of_backward(self.recover)

    def _begin_backward(self) -> None:
        self.end_forward()
        self.state = self.state.to(PassState.BACKWARD)
        self._launched = 0
        self._passed = self._first
        self._needed.clear()
        for calls in self._calls:
            calls.gradients = 0

    def need(self, g: int) -> None:
        """The backward of the layer is about to run."""
        for i in [i for i in self._needed if i != g]:
            if self._calls[i].gradients >= self._calls[i].awaited:
                self.layers[i].free()
                self._needed.discard(i)
        self._needed.add(g)
        self._use(g)
        self._pass()

    def _pass(self, *, ending: bool = False) -> None:
        """Send gradients of the layers that backward has passed by, where others send theirs. Zeros
        for a layer that has not run since the step; when ``ending``, what there is."""
        end = max(self._passed, self._launched - self._options.prefetch)
        passed = [self._turn(n) for n in range(self._passed, end)]
        self._passed = end
        if self.reducer is None or not self.reducer.open:
            return
        for g in passed:
            parameters = self.layers[g].parameters
            if ending:
                self.reducer.give_up(parameters)
            elif not self._calls[g].ran:
                self.reducer.give_up([p for p in parameters if not self.storage.is_read(p)])

    def accumulated(self, parameter: int) -> None:
        """Autograd has accumulated into the parameter's ``grad``."""
        self.ensure_backward()
        if (g := self.number_of.get(parameter)) is not None:
            self._calls[g].gradients += 1
        if self.reducer is not None and self.reducer.open:
            self.reducer.accumulated(parameter)

    def recover(self) -> None:
        """Autograd is done, or has raised: issue the collectives that others count on, and free."""
        if self.state is not PassState.BACKWARD:
            return
        self._end_backward()
        if self.reducer is not None:
            self.reducer.finish()
        for layer, calls in zip(self.layers, self._calls, strict=True):
            # Each parameter got one gradient per use, so this many uses are done.
            calls.recorded = max(0, calls.recorded - -(-calls.gradients // len(layer.parameters)))

    def _end_backward(self) -> None:
        if self._options.free_after_forward:
            for layer in self.layers:
                layer.free()
        self._passed = self._first
        self._end()
        self.drop()
        self.backwards += 1

    # ---- between passes ----------------------------------------------------------------------

    def join_passes(self) -> None:
        """Take part in the others' passes since the step if no backward (and forward) ran here."""
        if self.backwards:
            return
        if self.reducer is not None:
            self.reducer.begin_owed()
        if self.state is PassState.IDLE and not self._recorded:
            self._begin_forward()
        self._begin_backward()
        self._end_backward()

    def drop(self) -> None:
        """Free every layer: the weights may have changed, or are no longer needed."""
        for layer in self.layers:
            layer.free()
        self.state = self.state.to(PassState.IDLE)
        self._ahead = 0

    def begin_access(self) -> None:
        """Someone is about to read or write the weights directly."""
        if self.state is not PassState.FORWARD:
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
        for calls in self._calls:
            calls.ran = False
            calls.recorded = 0

    def launch_ahead(self, todo: Set[int]) -> None:
        """Publish what is updated, up to the first layer with a matrix of ``todo``: all layers to
        the holders or, without replicas, the first ones that the next forward pass needs."""
        layers = self.layers
        if not self.storage.has_replicas:
            layers = layers[: self._first + self._options.prefetch + 1]
        for layer in layers[self._ahead :]:
            if not layer.matrices.isdisjoint(todo):
                return
            self._ahead += 1
            if self.storage.has_replicas:
                self.storage.publish(layer)
            else:
                self.storage.launch(layer, PassState.FORWARD.label)


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


def _while_alive(prefetcher: Prefetcher, action: Callable[..., None]) -> Callable[..., None]:
    """Calls ``action(prefetcher, ...)`` as long as there is a prefetcher."""
    weak = weakref.ref(prefetcher)

    def act(*args: Any) -> None:
        if (alive := weak()) is not None:
            action(alive, *args)

    return act


def _announce(
    prefetcher: Prefetcher, layers: Sequence[int], area: Sequence[nn.Module], output: Any
) -> bool:
    """Fetch weights before the backward of ``output`` (False: it has none), or of what is kept."""
    step = prefetcher.steps

    def before_backward(prefetcher: Prefetcher, _: Tensor) -> None:
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
        for g in layers:
            prefetcher.need(g)

    hook = _while_alive(prefetcher, before_backward)
    found = [t for t in _tensors_in(output) if t.requires_grad]
    for tensor in found:
        tensor.register_hook(hook)
    for tensor in _kept_tensors(area):
        if not any(tensor is t for t in found) and not hasattr(tensor, _ANNOUNCED):
            tensor.register_hook(hook)
            setattr(tensor, _ANNOUNCED, True)
    return bool(found)


def hook_module(
    prefetcher: Prefetcher, point: WaitPoint, layers: Sequence[int], area: Sequence[nn.Module]
) -> list[Remove]:
    """Hooks of a module that needs ``layers``; ``area``: it and what lies below, in no other."""
    module, weak_module = point.module, weakref.ref(point.module)

    def check_whole(prefetcher: Prefetcher) -> None:
        if (module := weak_module()) is not None:
            prefetcher.storage.check_whole(module)  # a copy of placeholders would be of no use

    def hook(action: Callable[..., None]) -> Hook:
        # The graph breaks there, so what is traced never sees placeholders.
        hidden = opaque(_while_alive(prefetcher, action), point)
        return Hook(hidden, _while_alive(prefetcher, check_whole))

    def before(prefetcher: Prefetcher, *_: Any) -> None:
        # In backward it is the recomputation of a checkpointed forward.
        in_backward = prefetcher.state is PassState.BACKWARD
        if point.is_root and not in_backward:
            prefetcher.begin_forward()
        enter = prefetcher.touch if point.in_layer else prefetcher.enter
        for g in layers:
            (prefetcher.need if in_backward else enter)(g)

    def after(prefetcher: Prefetcher, _: nn.Module, inputs: Any, output: Any) -> None:
        if prefetcher.state is PassState.BACKWARD:
            return
        recorded = torch.is_grad_enabled()
        announced = _announce(prefetcher, layers, area, output) if recorded else False
        for g in layers:
            prefetcher.leave(g, recorded=recorded, hold=recorded and not announced)
        if point.is_root:
            prefetcher.end_forward()

    handles = [module.register_forward_pre_hook(hook(before), prepend=not point.in_layer)]
    if not point.in_layer:
        handles.append(module.register_forward_hook(hook(after)))
    return [handle.remove for handle in handles]


# ---- state dicts of modules ------------------------------------------------------------------


class _StateDicts:
    """Hooks that put dedicated parameters into state dicts of modules, as rows on all ranks, and
    load them from any form, at the end of the outermost call; collective calls. Inside
    ``materialized`` they are whole, as in any module. ``given`` is what torch gives such hooks."""

    # Of a load that is open, or was cut off: torch has one list of errors per call.
    _errors: list[str] | None = None
    _root: weakref.ref[nn.Module]
    _found: dict[int, Any]
    _is_collective = False  # there are parameters below that are kept elsewhere

    def save(self, prefetcher: Prefetcher, names: Mapping[str, int], *given: Any) -> None:
        _, state, prefix, _ = given
        if found := prefetcher.storage.kept_elsewhere(names):
            prefetcher.storage.world.meet("model.state_dict()")
            prefetcher.begin_access()
        for name, p in found.items():
            state[prefix + name] = prefetcher.storage.saved(p)

    def load(self, prefetcher: Prefetcher, names: Mapping[str, int], *given: Any) -> None:
        module, state_dict, prefix, metadata, _, _, _, errors = given
        if self._errors is not errors:
            self._errors, self._root = errors, weakref.ref(module)
            self._found, self._is_collective = {}, False
        elsewhere = prefetcher.storage.kept_elsewhere(names)
        self._is_collective = self._is_collective or bool(elsewhere)
        for name, p in elsewhere.items():
            if (key := prefix + name) not in state_dict:
                continue
            if metadata.get("assign_to_params_buffers"):
                raise OwnershipError(
                    f"load_state_dict(assign=True) would put other parameters into the place of "
                    f"{key!r} and others, which owners store: leave it out"
                )
            flaw = prefetcher.storage.flaw(p, state_dict[key])
            errors += [flaw] if flaw else []
            self._found[p] = state_dict[key]
            # So torch copies what is there already.
            state_dict[key] = module.get_parameter(name)

    def loaded(self, prefetcher: Prefetcher, module: nn.Module, _: Any) -> None:
        if (errors := self._errors) is None or self._root() is not module:
            return
        self._errors = None
        if self._is_collective:
            prefetcher.begin_access()
            prefetcher.storage.load(self._found, errors)
            prefetcher.drop()  # what was launched ahead is old


def hook_state_dicts(
    prefetcher: Prefetcher, model: nn.Module, index: Mapping[int, int]
) -> list[Remove]:
    """The hooks of `_StateDicts`, on every module with dedicated parameters in it or below.
    ``index`` gives their numbers by id."""
    hooks, removers = _StateDicts(), []
    load, loaded, save = (
        _while_alive(prefetcher, action) for action in (hooks.load, hooks.loaded, hooks.save)
    )
    for module in model.modules():
        if not any(id(p) in index for p in module.parameters()):
            continue
        names = {n: index[id(p)] for n, p in module._parameters.items() if id(p) in index}
        handles = [
            module.register_load_state_dict_pre_hook(Hook(partial(load, names))),
            module.register_load_state_dict_post_hook(Hook(loaded)),
        ]
        if names:
            handles.append(module.register_state_dict_post_hook(Hook(partial(save, names))))
        removers += [handle.remove for handle in handles]
    return removers


def check_first_forward(storage: Storage, root: nn.Module) -> Remove:
    """Look for replaced parameters when the first module of ``root`` runs, before any other hook:
    only a global one comes before those of `fully_shard`, which gather. It removes itself."""
    weak = weakref.ref(storage)
    members = weakref.WeakSet(root.modules())

    def hook(module: nn.Module, inputs: Any) -> None:
        if (storage := weak()) is not None and module in members:
            storage.find_parameters()
        if storage is None or module in members:
            handle.remove()

    handle = register_module_forward_pre_hook(torch.compiler.disable(hook))
    return handle.remove
