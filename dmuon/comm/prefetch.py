"""Prefetch of weights: before a layer of modules runs, and again before its backward.

Each forward pass gathers every layer once, in the order of registration, each backward pass in
reverse, even if a rank skips modules or calls them in another order::

    forward    g0 g1 | run 0 | g2 | run 1 | g3 | run 2 ...      prefetch = 1
    backward   g3 g2 | run 3 | g1 | run 2 | ...

Backward passes layer g right before gather number g + prefetch + 1, on every rank: if gradients of
g are still missing there, they leave then. On a rank that has all of them they have left before.

If a rank has not used a layer when the pass ends, the layer is received then, and dropped. A layer
used again after it was dropped is sent once more, on all ranks that run the same program; from the
next pass on it is kept until its last call.

A module's outputs carry a tensor hook that fires before its backward begins. Hooks live on modules
and in autograd's graph, so they hold only weak references to the `Prefetcher` that they call.
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

_ANNOUNCED = "_dmuon_announced"  # set on tensors that a module keeps between passes


# ---- passes over the model -------------------------------------------------------------------


class PassState(State):
    """The pass over the model that has begun and not ended on this rank.

    ::

        state     collectives that every rank issues in it                      may become
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
    """The calls of a layer, and autograd's use of them."""

    expected: int  # forward calls per pass, from the last one; at first, occurrences in the model
    ran: bool = False  # since the last step, also without autograd, as when checkpointed
    running: int = 0  # forward calls that have not ended
    ended: int = 0  # forward calls that have ended in this pass
    recorded: int = 0  # uses that autograd recorded and whose backward has not run yet
    gradients: int = 0  # gradients accumulated in this backward pass
    awaited: int = 1  # gradients expected in it


class Prefetcher:
    """Makes weights available before passes over the model need them, and sends gradients in turn.
    The root's layer is needed first in both passes. The optimizer sets the ``reducer``."""

    def __init__(self, storage: Storage, options: DedicatedOptions) -> None:
        self.storage = storage
        self.layers = storage.layers
        self.state = PassState.IDLE
        self.steps = 0  # that have changed weights
        self.backwards = 0  # backward passes since the last step
        self.reducer: GradientReducer | None = None
        self._options = options
        self._calls = [_Calls(layer.occurrences) for layer in self.layers]
        self.number_of = {p: g for g, layer in enumerate(self.layers) for p in layer.parameters}
        self._first = sum(layer.is_root for layer in self.layers)
        self._ahead = 0  # layers, in forward order, whose new weights left during the step
        self._launched = 0  # layers gathered in this pass
        self._passed = 0  # layers that this backward pass has finished
        self._needed: set[int] = set()  # layers used in this backward pass and not freed
        self._recorded = False  # whether autograd recorded a forward pass since the last step

    # ---- gathers -----------------------------------------------------------------------------

    def _turn(self, n: int) -> int:
        """Return the layer of turn ``n`` in this pass; also the turn of layer ``n``."""
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
        """Launch ``g``, all layers before it and the prefetched ones after it; then use ``g``."""
        last = min(self._turn(g) + self._options.prefetch, len(self.layers) - 1)
        while self._launched <= last:
            self._launch_next()
        layer = self.layers[g]
        if layer.state is WeightState.FREED:  # it was dropped in this pass
            self.storage.launch(layer, self.state.label)
        layer.use()
        self._calls[g].ran = True

    def _end(self) -> None:
        """Take part in the gathers of layers that were not used."""
        while self._launched < len(self.layers):
            layer = self._launch_next(ending=True)
            if self._options.free_after_forward and not layer.in_use:
                layer.free()
        self.state = self.state.to(PassState.IDLE)

    # ---- forward -----------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a pass before the root runs; end an interrupted forward first."""
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
        """Prepare for a call of one of the layer's modules."""
        if self.state is PassState.IDLE:
            self._begin_forward()
        self._use(g)
        self._calls[g].running += 1

    def touch(self, g: int) -> None:
        """Prepare for a call of a part of the layer's modules, normally inside them."""
        if not self._calls[g].running:  # called on its own, so no hook announces its backward
            recorded = torch.is_grad_enabled()
            self.enter(g)
            self.leave(g, recorded=recorded, hold=recorded, free=False)

    def leave(self, g: int, *, recorded: bool, hold: bool, free: bool = True) -> None:
        """End a call. ``recorded``: by autograd; ``hold``: its backward may begin unannounced; not
        ``free``: the module is only about to run, and no hook tells when it has."""
        layer, calls = self.layers[g], self._calls[g]
        if recorded and layer.in_use:  # False after a backward inside this forward
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
        """End the pass: on return every rank has issued all of its gathers."""
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
            # If the dtype of a parameter's data changes, autograd accumulates each use separately.
            parts = [max(1, calls.recorded) if casts(p) else 1 for p in layer.parameters]
            calls.awaited = sum(parts)
            if reducer is not None:
                reducer.expected.update(zip(layer.parameters, parts, strict=True))
        if reducer is not None and reducer.sync:
            reducer.begin()
        # Nested backward calls (re-entrant checkpointing) end one by one; the pass may be over.
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
        """Prepare for the backward of the layer."""
        for i in [i for i in self._needed if i != g]:
            if self._calls[i].gradients >= self._calls[i].awaited:
                self.layers[i].free()
                self._needed.discard(i)
        self._needed.add(g)
        self._use(g)
        self._pass()

    def _pass(self, *, ending: bool = False) -> None:
        """Send gradients of layers that backward has passed, at the same turn on all ranks: zeros
        for a layer that has not run since the step; when ``ending``, whatever has arrived."""
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
        """Count a gradient that autograd has accumulated into the parameter's ``grad``."""
        self.ensure_backward()
        if (g := self.number_of.get(parameter)) is not None:
            self._calls[g].gradients += 1
        if self.reducer is not None and self.reducer.open:
            self.reducer.accumulated(parameter)

    def recover(self) -> None:
        """End backward, complete or failed: issue collectives that other ranks expect, and free."""
        if self.state is not PassState.BACKWARD:
            return
        self._end_backward()
        if self.reducer is not None:
            self.reducer.finish()
        for layer, calls in zip(self.layers, self._calls, strict=True):
            # Each parameter got one gradient per use, so that many uses are done.
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
        """Take part in the other ranks' passes since the step if none ran here."""
        if self.backwards:
            return
        if self.reducer is not None:
            self.reducer.begin_owed()
        if self.state is PassState.IDLE and not self._recorded:
            self._begin_forward()
        self._begin_backward()
        self._end_backward()

    def drop(self) -> None:
        """Free every layer, because weights may have changed or are no longer needed."""
        for layer in self.layers:
            layer.free()
        self.state = self.state.to(PassState.IDLE)
        self._ahead = 0

    def begin_access(self) -> None:
        """Prepare for direct reads or writes of the weights."""
        if self.state is not PassState.FORWARD:
            self.recover()
            self.storage.check()
        self.storage.wait_published()

    def begin_step(self) -> None:
        """Prepare for a change of the weights."""
        self.drop()
        self.storage.wait_published()
        self.steps += 1
        self.backwards = 0
        self._recorded = False
        for calls in self._calls:
            calls.ran = False
            calls.recorded = 0

    def launch_ahead(self, todo: Set[int]) -> None:
        """Publish updated layers, up to the first one with a matrix of ``todo``: all layers to
        the holders or, without replicas, only those that the next forward pass needs first."""
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
    """Yield tensors of a module's output, nested in tuples, lists, mappings and dataclasses."""
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
    """Yield results that a forward keeps as attributes of modules, such as a router's loss."""
    for part in modules:
        for name, value in vars(part).items():
            if isinstance(value, Tensor) or (name[0] != "_" and isinstance(value, list | tuple)):
                yield from (t for t in _tensors_in(value) if t.grad_fn is not None)


def _while_alive(prefetcher: Prefetcher, action: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``action(prefetcher, ...)`` to run only as long as there is a prefetcher."""
    weak = weakref.ref(prefetcher)

    def act(*args: Any) -> None:
        if (alive := weak()) is not None:
            action(alive, *args)

    return act


def _announce(
    prefetcher: Prefetcher, layers: Sequence[int], area: Sequence[nn.Module], output: Any
) -> bool:
    """Fetch weights before the backward of ``output`` (False: it has none) or of kept tensors."""
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
    """Hook a module that needs ``layers``; ``area``: it and its descendants in no other layer."""
    module, weak_module = point.module, weakref.ref(point.module)

    def check_whole(prefetcher: Prefetcher) -> None:
        if (module := weak_module()) is not None:
            prefetcher.storage.check_whole(module)  # a copy of placeholders would be useless

    def hook(action: Callable[..., None]) -> Hook:
        # The graph breaks there, so traced code never sees placeholders.
        hidden = opaque(_while_alive(prefetcher, action), point)
        return Hook(hidden, _while_alive(prefetcher, check_whole))

    def before(prefetcher: Prefetcher, *_: Any) -> None:
        # A forward during backward recomputes a checkpointed one.
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
    """Hooks that put dedicated parameters into modules' state dicts, as rows on all ranks, and load
    them from any form at the end of the outermost call; collective calls. Inside ``materialized``
    they are whole, as in any module. ``given`` has the arguments of torch's hooks."""

    # The list of errors of an open or interrupted load: torch has one per call.
    _errors: list[str] | None = None
    _root: weakref.ref[nn.Module]
    _found: dict[int, Any]
    _is_collective = False  # whether parameters in the module are kept elsewhere

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
            # So torch copies values that are already there.
            state_dict[key] = module.get_parameter(name)

    def loaded(self, prefetcher: Prefetcher, module: nn.Module, _: Any) -> None:
        if (errors := self._errors) is None or self._root() is not module:
            return
        self._errors = None
        if self._is_collective:
            prefetcher.begin_access()
            prefetcher.storage.load(self._found, errors)
            prefetcher.drop()  # layers launched ahead have old weights


def hook_state_dicts(
    prefetcher: Prefetcher, model: nn.Module, index: Mapping[int, int]
) -> list[Remove]:
    """Add the hooks of `_StateDicts` to every module with dedicated parameters in or below it.
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
    only a global hook precedes those of `fully_shard`, which gather. It removes itself."""
    weak = weakref.ref(storage)
    members = weakref.WeakSet(root.modules())

    def hook(module: nn.Module, inputs: Any) -> None:
        if (storage := weak()) is not None and module in members:
            storage.find_parameters()
        if storage is None or module in members:
            handle.remove()

    handle = register_module_forward_pre_hook(torch.compiler.disable(hook))
    return handle.remove
