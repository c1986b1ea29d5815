"""Routing: which parameters are matrices, which go to AdamW, and why.

`REASONS` is the only list of rules; docs/routing.md explains it and applies it to known models.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from dmuon.scheduler.specs import (
    Form,
    MatrixSpec,
    ModelSpecs,
    ParameterSpec,
    canonical_name,
    dtype_name,
)
from dmuon.types import Algorithm, DmuonError, Heads, Select, SelectionError, Splits, grouped

_HEAD = re.compile(
    "classifier|classification_head|embed_out|lm_heads?|logits|prediction_head|qa_outputs|"
    "seq_relationship|to_logits|unembed(ding)?"
)
# Inside a repeated block these name a projection as often as a head; a head is not repeated.
_HEAD_AT_THE_TOP = re.compile("head|output|output_layer|output_projection|score")
_EXPERTS = re.compile("expert|moe")
_ROUTERS = frozenset({"router", "gate", "gating"})
_WEIGHT_NAME = re.compile(r"weight|kernel|w\d+|.*_weight|.*_proj")
# The module of a weight: embed_tokens, wte, tok_embeddings, word_embeddings, pos_emb, ...
_EMBEDDING_NAME = re.compile(
    r"tok|w[tp]e|relative_attention_bias|(.*_)?emb(ed|edding|eddings)?(_(tokens|positions|in|table))?"
)
_POSITIONS_NAME = re.compile(r"pos|wpe")
_PATCHES_NAME = re.compile(r"patch_?embed(s|ding|dings|der)?")
_CONVOLUTION_NAME = re.compile(r".*conv.*|" + _PATCHES_NAME.pattern)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ORIGINAL = re.compile(r"(?:(.*)\.)?parametrizations\.(\w+)\.(original\d*)")
_ORIGINAL_OF_HOOKS = re.compile(r"(?:(.*)\.)?(\w+)_(orig|v|g)")
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LEAF = {"parametrizations"}
_LINEARS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase)
# Modules whose type decides how their weights are routed; for others the names decide.
_KNOWN = (*_EMBEDDINGS, *_NORMS, *_CONVOLUTIONS, *_TRANSPOSED, *_LINEARS)

# Remedies if neither a module nor a name tells how to route a parameter.
THREE_WAYS = (
    "pass the model (dmuon.Muon(model)); or call own = dmuon.dedicate_params(model) first; or say "
    'algorithm="muon" or "adamw" in its param group'
)


@dataclass(slots=True)
class _Use:
    """One parameter with every (module, name) under which the ``model`` uses it; the module is None
    if only names are known. ``name`` and ``algorithm`` are the user's. ``original`` is its name in
    a parametrization, if any; its places are then those of the parametrized weight."""

    name: str
    parameter: Tensor
    model: _Model
    places: list[tuple[nn.Module | None, str]] = field(default_factory=list)
    algorithm: Algorithm | None = None
    original: str = ""

    @property
    def module(self) -> nn.Module | None:
        return self.places[0][0]

    @property
    def place(self) -> str:
        return self.places[0][1]

    @property
    def path(self) -> list[str]:
        """The names of the modules around it, without numbers at the end (of `nn.Sequential`)."""
        path = self.place.split(".")[self.model.depth : -1]
        while path and path[-1].isdigit():
            path.pop()
        return path

    @property
    def blocks(self) -> list[int]:
        """The numbers of the repeated blocks around it."""
        return [int(part) for part in self.path if part.isdigit()]

    @property
    def is_convolution(self) -> bool:
        if self.parameter.ndim < 3 or isinstance(self.module, _KNOWN):
            return isinstance(self.module, _CONVOLUTIONS + _TRANSPOSED) and self.parameter.ndim > 2
        if any(_CONVOLUTION_NAME.fullmatch(part.lower()) for part in self.path[-2:]):
            return True
        return self.parameter.ndim > 3 and "expert" not in self.place

    @property
    def form(self) -> Form:
        """The form in which it is read as matrices."""
        if self.is_convolution:
            return Form.FLAT.stored(in_out=isinstance(self.module, _TRANSPOSED))
        form = Form.FLAT if self.parameter.ndim == 2 else Form.STACK
        return form.stored(in_out=not isinstance(self.module, _KNOWN) and self._is_in_out())

    def _is_in_out(self) -> bool:
        """Return True if shapes in the module show that it stores its weights ``(in, out)``, square
        ones included: transformers' `Conv1D` has its outputs in ``nf``, a bias has their length,
        and a fused ``gate_up_proj`` has twice as many outputs as ``down_proj`` has inputs."""
        path, _, own = self.place.rpartition(".")
        if own == "weight" and getattr(self.module, "nf", None) == self.parameter.shape[-1]:
            return True
        beside, found = self.model.beside[path], set()
        for local, p in beside.items():
            bias = beside.get(local.removesuffix("weight") + "bias", beside.get(f"{local}_bias"))
            down = beside.get(local.replace("gate_up", "down"), p)
            if p.ndim < 2 or not _WEIGHT_NAME.fullmatch(local):
                continue
            if bias is not None and p.shape[-1] != p.shape[-2]:
                found.add(bias.shape[-1] == p.shape[-1])
            elif down is not p:
                found.add(p.shape[-1] == 2 * down.shape[-2])
        return found == {True}

    def spec(self, algorithm: Algorithm, reason: str) -> ParameterSpec:
        p = self.parameter
        return ParameterSpec(self.name, tuple(p.shape), dtype_name(p.dtype), algorithm, reason)


class _Model:
    """The parameters of a model by id, and facts about the model that reasons and forms need.
    Reasons skip the first ``depth`` parts of names, which lead to the module that holds all."""

    def __init__(
        self,
        places: Iterable[tuple[str, Tensor, nn.Module | None]],
        depth: int = 0,
        modules: Iterable[nn.Module] = (),
    ) -> None:
        self.depth = depth
        self.uses: dict[int, _Use] = {}
        self.beside: dict[str, dict[str, Tensor]] = defaultdict(dict)  # by module
        taken: dict[str, int] = {}
        for full, p, module in places:
            name = canonical_name(full)
            # A user's own module may be called "module": then stripping could merge two names.
            name = name if taken.setdefault(name, id(p)) == id(p) else full
            use = self.uses.setdefault(id(p), _Use(name, p, self))
            name, use.original = _parametrized(name, module)
            use.places.append((module, name))
            path, _, local = name.rpartition(".")
            if not use.original or p.numel() >= self.beside[path].get(local, p).numel():
                self.beside[path][local] = p
        self.outputs: set[int] = set()
        for module in modules:
            head = getattr(module, "get_output_embeddings", None)
            with suppress(NotImplementedError):  # the same as None
                head = head() if callable(head) else None
            if isinstance(head, nn.Module):
                self.outputs |= {id(p) for p in head.parameters()}

    @cached_property
    def vocabularies(self) -> dict[tuple[int, ...], str]:
        """Names of embeddings by their shapes."""
        return {
            tuple(use.parameter.shape): use.place
            for use in self.uses.values()
            if use.parameter.ndim == 2 and _embedding(use) and not _POSITIONS_NAME.search(use.place)
        }


def _places(model: nn.Module) -> Iterable[tuple[str, Tensor, nn.Module]]:
    for module_name, module in model.named_modules(remove_duplicate=False):
        is_list = isinstance(module, ParametrizationList)
        held = model.get_submodule(f".{module_name}".rpartition(".parametrizations.")[0][1:])
        for local, p in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{module_name}.{local}".removeprefix("."), p, held if is_list else module


def _parametrized(name: str, module: nn.Module | None) -> tuple[str, str]:
    """Return the name of the weight that is computed from a parameter, and the parameter's name in
    that parametrization, by `torch.nn.utils.parametrize` or older hooks; else (``name``, "")."""
    found = _ORIGINAL.fullmatch(name)
    if not found and isinstance(module, _KNOWN) and (old := _ORIGINAL_OF_HOOKS.fullmatch(name)):
        found = old if hasattr(module, old[2]) else None
    return (".".join(filter(None, found.groups()[:2])), found[3]) if found else (name, "")


def _depth(model: nn.Module) -> int:
    """Return how many leading parts of all names are of modules that only wrap the model."""
    held = [(n, m) for n, m in model.named_children() if next(m.parameters(), None) is not None]
    if len(held) != 1 or next(model.parameters(recurse=False), None) is not None:
        return 0
    name, child = held[0]
    if name.isdigit() or isinstance(child, LISTS) or {*dict(child.named_children())} <= _LEAF:
        return 0
    return bool(canonical_name(name)) + _depth(child)


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return canonical names and trainable parameters, each once, in the order of `collect`."""
    uses = _Model(_places(model)).uses.values()
    return [(use.name, use.parameter) for use in uses if use.parameter.requires_grad]  # type: ignore[misc]


# ---- reasons -----------------------------------------------------------------------------


def _embedding(use: _Use) -> str | None:
    for module, name in use.places:
        path = name.removesuffix(".weight").rpartition(".")[2]
        named = not isinstance(module, _KNOWN) and name.endswith(".weight")
        if isinstance(module, _EMBEDDINGS) or (named and _EMBEDDING_NAME.fullmatch(path)):
            if name != use.place:
                return f"tied to embedding {name!r}"
            tied = [other for _, other in use.places if other != name]
            also = f", tied to {tied[0]!r}" if tied else ""
            how = type(module).__name__ if isinstance(module, _EMBEDDINGS) else "by its name"
            return f"embedding ({how}){also}"
    return None


def _gain(use: _Use) -> str | None:
    name = type(use.module).__name__
    return f"gain of a normalization ({name})" if isinstance(use.module, _NORMS) else None


def _depthwise(use: _Use) -> str | None:
    module, p = use.module, use.parameter
    if isinstance(module, _TRANSPOSED):
        return "grouped transposed convolution" if module.groups > 1 else None
    groups = module.groups if isinstance(module, _CONVOLUTIONS) else p.shape[0]
    if use.is_convolution and p.shape[1] == 1 < groups:
        return "depthwise convolution: one vector per channel"
    return None


def _gain_of_original(use: _Use) -> str | None:
    path, _, local = use.place.rpartition(".")
    shape, largest = use.parameter.shape, use.model.beside[path][local].shape
    fits = len(shape) == len(largest) and all(a in (1, b) for a, b in zip(shape, largest))
    is_gain = use.original and fits and shape != largest
    return f"{use.original!r}, a gain beside a larger one" if is_gain else None


def _bare(use: _Use) -> str | None:
    names = [name.rpartition(".")[2] for _, name in use.places]
    is_weight = any(map(_WEIGHT_NAME.fullmatch, names))
    return None if is_weight else f"bare parameter {names[0]!r} is not named as a weight"


def _vector(use: _Use) -> str | None:
    rows, cols = use.form.matrix_shape(use.parameter.shape)
    return f"{rows} x {cols} is a vector" if rows == 1 or cols == 1 else None


def _first(use: _Use) -> str | None:
    if any(use.blocks) or isinstance(use.module, _TRANSPOSED):
        return None
    if any(_PATCHES_NAME.fullmatch(part) for part in use.path):
        return "first layer (patch embedding)"
    if use.is_convolution and use.parameter.shape[1] in (1, 3):
        return f"first layer (convolution of {use.parameter.shape[1]} channels)"
    return None


def _router(use: _Use) -> str | None:
    path, model = use.path, use.model
    experts = ".".join([*use.place.split(".")[: model.depth], *path[:-1], "experts", ""])
    beside = any(f"{module}.".startswith(experts) for module in model.beside)
    if "router" in path[-2:] or (path and path[-1] in _ROUTERS and beside):
        return "router of a mixture of experts"
    return None


def _head(use: _Use) -> str | None:
    if id(use.parameter) in use.model.outputs:
        return "output head (get_output_embeddings)"
    for place in (replace(use, places=[found]) for found in use.places):
        for name in {*place.path[:1], *place.path[-1:]}:
            at_the_top = not place.blocks or name == place.path[0]
            if _HEAD.fullmatch(name) or (at_the_top and _HEAD_AT_THE_TOP.fullmatch(name)):
                return f"output head ({name!r})"
        if place.path == ["fc"]:
            return "output head ('fc')"
    vocabulary = use.model.vocabularies.get(tuple(use.parameter.shape))
    if vocabulary is not None and not use.blocks:
        return f"output head (as large as embedding {vocabulary!r})"
    return None


# The first reason decides; a parameter without one is a matrix. So is a router, which gains most of
# all matrices (Moonlight, figure 4). docs/routing.md has the sources of the others.
REASONS: tuple[Callable[[_Use], str | None], ...] = (
    lambda use: f"{use.parameter.ndim}-D" if use.parameter.ndim < 2 else None,
    lambda use: None if use.parameter.numel() else "empty",
    _embedding,
    _gain,
    _gain_of_original,
    _depthwise,
    _bare,
    _vector,
    _first,
    _router,
    _head,
)


def _route(use: _Use, select: Select | None) -> tuple[Algorithm, str]:
    if use.algorithm is not None:
        chosen, who = use.algorithm is Algorithm.MUON, "the param group says"
        remedy = 'put it into a param group with algorithm="adamw"'
    elif select is None:
        for reason in REASONS:
            if (found := reason(use)) is not None:
                return Algorithm.MUON if reason is _router else Algorithm.ADAMW, found
        return Algorithm.MUON, "weight"
    else:
        chosen, who = select(use.name, use.parameter), "select chose"
        remedy = "return False for it, so that AdamW updates it"
        if not isinstance(chosen, bool):
            raise SelectionError(
                f"select({use.name!r}, parameter) must return True or False, found {chosen!r}"
            )
    if chosen and (use.parameter.ndim < 2 or use.parameter.numel() == 0):
        raise SelectionError(
            f"{who} Muon for {use.name!r} of shape {tuple(use.parameter.shape)}, but Muon takes "
            f"non-empty matrices (2 or more dims): {remedy}"
        )
    if use.algorithm is not None:
        return use.algorithm, f"its param group says {use.algorithm.value}"
    return (Algorithm.MUON, "selected") if chosen else (Algorithm.ADAMW, "not selected")


# ---- pieces of a parameter ---------------------------------------------------------------


# How to read matrices; the dim to cut; the sizes of pieces; the step from row to row of a piece.
_Cut = tuple[Form, int, tuple[int, ...], int]
_Settings = Mapping[str, Splits | Heads]  # "splits" and "heads"
_EXAMPLES = {"splits": [512, 128, 128], "heads": 8}
_INTERLEAVED = re.compile(r"interleaved:[0-9]{1,18}")


def _cuts(use: _Use, setting: str, patterns: Splits | Heads) -> Iterator[tuple[str, _Cut]]:
    """Yield (pattern, cut) for each pattern of ``splits`` or ``heads`` that fits."""
    key = "sizes" if setting == "splits" else setting
    for pattern, given in patterns.items():
        if not fnmatchcase(use.name, pattern):
            continue
        shape, form = use.parameter.shape, use.form
        said = given if isinstance(given, Mapping) else {key: given}
        where = f"{setting}[{pattern!r}]"
        if key not in said or not said.keys() <= {key, "dim", "transposed"}:
            raise SelectionError(
                f"{where} must be {_EXAMPLES[setting]} or a dict of {key!r} and, if needed, 'dim' "
                f"and 'transposed', found {given!r}"
            )
        read = form.stored(in_out=bool(said.get("transposed", form.is_in_out)))
        dims = read.dims(len(shape))
        if (dim := said.get("dim", dims[0])) not in (*dims, *(d - len(shape) for d in dims)):
            raise SelectionError(
                f"{where}: dim must be one of {sorted(dims)}, the dims of the matrices in "
                f"{use.name!r} {list(shape)}, found {dim!r}"
            )
        dim, value = dim % len(shape), said[key]
        unit = f"{'row' if dim == dims[0] else 'column'}s of {use.name!r}"
        sizes, step, wrong = _sizes(setting, value, shape[dim], unit)
        if wrong:
            # Would it fit if the weight were stored the other way?
            is_known = {*said} != {key} or isinstance(use.module, _KNOWN)
            if not is_known and not _sizes(setting, value, shape[dims[1]], unit)[2]:
                first, told = read.is_in_out, {key: value, "transposed": not read.is_in_out}
                wrong += f". If it is stored {'outputs' if first else 'inputs'} first, say {told}"
            elif setting == "splits" and not isinstance(value, str | Sequence):
                wrong += f". For equal pieces say heads={{{pattern!r}: 2}}"
            raise SelectionError(f"{where} = {value!r}: {wrong}")
        yield pattern, (read, dim, sizes, step)


def _sizes(
    setting: str, value: Any, total: int, unit: str
) -> tuple[tuple[int, ...], int, str | None]:
    """Return (sizes of pieces that add up to ``total``, step from row to row, error or None)."""
    is_interleaved = setting == "splits" and bool(_INTERLEAVED.fullmatch(str(value)))
    if is_interleaved or setting == "heads":
        count = int(value.removeprefix("interleaved:")) if is_interleaved else value
        if not isinstance(count, int) or count < 1 or total % count:
            return (), 1, f"the number must be an integer >= 1 that divides the {total} {unit}"
        return (total // count,) * count, count if is_interleaved else 1, None
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    are_counts = is_list and all(isinstance(size, int) and size > 0 for size in value)
    if are_counts and sum(value) == total:
        return tuple(value), 1, None
    added = f", not to {sum(value)}" if are_counts else ""
    wrong = f"positive counts that add up to the {total} {unit}{added}, or 'interleaved:2'"
    return (), 1, f"it must be a list of {wrong}"


def _cut(use: _Use, reason: str, settings: _Settings, used: set[str]) -> _Cut:
    """Return how to cut a parameter into matrices; add fitting patterns to ``used``."""
    found = [*_cuts(use, "splits", settings["splits"]), *_cuts(use, "heads", settings["heads"])]
    patterns = [pattern for pattern, _ in found]
    used.update(patterns)
    if len({cut for _, cut in found}) > 1:
        raise SelectionError(
            f"{use.name!r} matches several patterns of splits/heads that disagree: "
            + ", ".join(map(repr, patterns))
        )
    if found:
        return found[0][1]
    form = use.form
    is_guess = use.module is None and form.is_stack and not _EXPERTS.search(use.place)
    if is_guess and reason == "weight":
        raise SelectionError(
            f"parameter {use.name!r} of shape {list(use.parameter.shape)} may be a convolution or "
            f"a stack of matrices, and no live module holds it: {THREE_WAYS}"
        )
    dim = form.dims(use.parameter.ndim)[0]
    return form, dim, (use.parameter.shape[dim],), 1


def _matrices(use: _Use, index: int, cut: _Cut) -> list[MatrixSpec]:
    p, (form, dim, sizes, step) = use.parameter, cut
    shape, dtype = list(p.shape), dtype_name(p.dtype)
    lead = len(shape) - 2 if form.is_stack else 0
    inner, stride = math.prod(shape[lead:]), math.prod(shape[dim + 1 :])
    steps = (step, 1) if dim == form.dims(len(shape))[0] else (1, step)
    made = []
    for item in range(math.prod(shape[:lead])):
        first = 0
        for size in sizes:
            shape[dim] = size
            rows, cols = form.matrix_shape(shape)
            name = use.name + (f"[{item}]" if inner < p.numel() else "")
            if len(sizes) > 1:
                taken = f"{first}::{step}" if step > 1 else f"{first}:{first + size}"
                name += f"[{':, ' if dim > lead else ''}{taken}]"
            start = item * inner + first * stride
            made.append(MatrixSpec(name, index, rows, cols, dtype, start, form, steps))
            first += size if step == 1 else 1
    # A piece is written through a flat view of its parameter, which only contiguous storage has.
    if len(made) > 1 and not p.is_contiguous():
        raise SelectionError(
            f"{use.name!r} holds {len(made)} matrices but its storage is not contiguous (strides "
            f"{p.stride()}): make it contiguous first"
        )
    return made


def _check(uses: list[_Use], allow_meta: bool) -> None:
    """Raise an error for trainable parameters that cannot be updated."""
    first = next((use for use in uses if not use.parameter.is_meta), None)
    for use in uses:
        name, p = use.name, use.parameter
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise DmuonError(
                f"parameter {name!r} is uninitialized (a lazy module): run one forward pass first"
            )
        if p.is_meta and not allow_meta:
            raise DmuonError(
                f"parameter {name!r} is on the meta device: materialize the model first "
                "(model.to_empty(device=...), then initialize it)"
            )
        if p.is_complex():
            raise DmuonError(
                f"parameter {name!r} is complex ({p.dtype}), expected a real one: freeze it, or "
                "store torch.view_as_real of it"
            )
        if any(isinstance(m, _EMBEDDINGS) and m.sparse for m, _ in use.places):
            raise SelectionError(
                f"{name!r} is the weight of an embedding with sparse=True: pass sparse=False"
            )
        if first is not None and not p.is_meta and p.device != first.parameter.device:
            raise DmuonError(
                f"parameter {name!r} is on {p.device} but {first.name!r} is on "
                f"{first.parameter.device}: move the model to one device first"
            )
    if not uses:
        raise DmuonError(
            "the model has no trainable parameter: nothing to optimize (peft: "
            "PeftModel.from_pretrained(..., is_trainable=True))"
        )


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter with its name in an optimizer. The user's ``algorithm`` overrides all reasons.
    ``model`` is the live model that holds it (None: names decide), ``around`` the outermost module
    around the model."""

    name: str
    parameter: Tensor
    algorithm: Algorithm | None = None
    model: nn.Module | None = None
    around: nn.Module | None = None


# By name: each trainable parameter and its matrices.
Route = tuple[ParameterSpec, tuple[MatrixSpec, ...]]
Routes = Mapping[str, Route]


def routes_of(specs: ModelSpecs) -> Routes:
    """Return the routes of a plan's specs, with one matrix in place of all its copies."""
    found = grouped((matrix.parameter, matrix.original) for matrix in specs.matrices)
    return {p.name: (p, tuple(dict.fromkeys(found[i]))) for i, p in enumerate(specs.parameters)}


def collect(
    given: nn.Module | Sequence[Member],
    *,
    select: Select | None = None,
    splits: Splits | None = None,
    heads: Heads | None = None,
    routes: Routes | None = None,
    allow_meta: bool = False,
    frozen: bool = False,
    partial: bool = False,
) -> ModelSpecs:
    """Route every trainable parameter of a model, or of an optimizer's members, to Muon or AdamW,
    each parameter once and with the reason.

    docs/routing.md explains ``splits`` and ``heads``. A convolution is flattened to
    ``(out, rest)``; any other parameter with more than two dims is a stack of matrices.

    ``routes`` of an earlier call override the reasons; dtypes may have changed since.
    ``allow_meta`` accepts parameters on the meta device. ``frozen`` routes the frozen members as if
    they were trained. ``partial``: there may be no matrix, and ``splits`` and ``heads`` may match
    none, because parameters are added later.

    Raises:
        SelectionError: nothing is selected, a chosen parameter is no matrix, a pattern does not
            fit, or a parameter's shape differs from ``routes``.
        DmuonError: a parameter cannot be handled at all (meta device, uninitialized, complex,
            on another device than the others, sparse gradients), or none is trainable.
    """
    everything = _in_model(given) if isinstance(given, nn.Module) else _in_groups(given, frozen)
    taken = [use for use in everything if use.parameter.requires_grad is not frozen]
    _check(taken, allow_meta)
    settings: _Settings = {"splits": splits or {}, "heads": heads or {}}
    _check_settings(select, settings)
    used: set[str] = set()
    parameters: list[ParameterSpec] = []
    matrices: list[MatrixSpec] = []
    for index, use in enumerate(taken):
        if routes is not None:
            parameter, made = _as_before(use, index, routes)
        else:
            algorithm, reason = _route(use, select)
            made = []
            if algorithm is Algorithm.MUON:
                made = _matrices(use, index, _cut(use, reason, settings, used))
                reason += "" if len(made) == 1 else f", {len(made)} matrices"
                ends = dict.fromkeys(m.name[m.name.rindex("[") :] for m in made if "::" in m.name)
                reason += " " + ", ".join([*ends][:4]) if ends else ""
            reason += ", under a parametrization" if use.original else ""
            parameter = use.spec(algorithm, reason)
        parameters.append(parameter)
        matrices += made
    if not partial:
        _check_selected(parameters, matrices, settings, used)
    left = tuple(
        use.spec(Algorithm.FROZEN, "requires_grad is False")
        for use in everything
        if not use.parameter.requires_grad and not frozen
    )
    return ModelSpecs(tuple(parameters), tuple(matrices), left)


def _in_model(model: nn.Module, around: nn.Module | None = None) -> list[_Use]:
    modules = (model if around is None else around).modules()
    return [*_Model(_places(model), _depth(model), modules).uses.values()]


def _in_groups(members: Sequence[Member], frozen: bool) -> list[_Use]:
    """Return the trained members, or, with ``frozen``, the frozen ones; each parameter once."""
    known = _Model((m.name, m.parameter, None) for m in members if m.model is None).uses
    models = {id(m.model): (m.model, m.around) for m in members if m.model is not None}
    for model, around in models.values():
        known |= {id(use.parameter): use for use in _in_model(model, around)}
    chosen: dict[int, _Use] = {}
    for member in members:
        p = member.parameter
        is_asked = not p.requires_grad and p.is_floating_point() if frozen else p.requires_grad
        if id(p) not in chosen and is_asked:
            use = chosen[id(p)] = known[id(p)]
            use.name, use.algorithm = member.name, member.algorithm
    return [*chosen.values()]


def _as_before(use: _Use, index: int, routes: Routes) -> tuple[ParameterSpec, list[MatrixSpec]]:
    """Return a parameter and its matrices as in ``routes``, in the current dtype."""
    before, matrices = routes[use.name]
    if before.shape != tuple(use.parameter.shape):
        raise SelectionError(
            f"parameter {use.name!r} has shape {list(use.parameter.shape)} now and had "
            f"{list(before.shape)} when dmuon.Muon was made: make the optimizer anew"
        )
    spec = use.spec(before.algorithm, before.reason)
    return spec, [replace(m, parameter=index, dtype=spec.dtype) for m in matrices]


def _check_settings(select: Select | None, settings: _Settings) -> None:
    if select is not None and not callable(select):
        raise SelectionError(f"select must be a function (name, parameter) -> bool, not {select!r}")
    for setting, given in settings.items():
        if not isinstance(given, Mapping):
            raise SelectionError(
                f"{setting} must map name patterns to row counts, found {given!r}: pass "
                f"{setting}={{'*.qkv_proj.weight': {_EXAMPLES[setting]}}}"
            )


def no_matrix(parameters: Sequence[ParameterSpec]) -> SelectionError:
    """Return the error for parameters without any matrix."""
    return SelectionError(
        "no parameter was selected as a matrix, so there is nothing for Muon to do. Routing: "
        + "; ".join(f"{p.name} {list(p.shape)}: {p.reason}" for p in parameters[:20])
        + ". Say what is one (select=lambda name, p: ..., in dmuon.Muon as dedicate={'select': "
        "...}), use torch.optim.AdamW, or, for a stage of a pipeline, pass nonfinite_group="
    )


def _check_selected(
    parameters: list[ParameterSpec], matrices: list[MatrixSpec], settings: _Settings, used: set[str]
) -> None:
    """Raise SelectionError if there is no matrix, or a pattern matches none."""
    if not matrices:
        raise no_matrix(parameters)
    for setting, patterns in settings.items():
        for pattern in sorted(patterns.keys() - used):
            names = [p.name for p in parameters if p.algorithm is Algorithm.MUON]
            raise SelectionError(
                f"{setting}[{pattern!r}] matches none of {len(names)} matrix parameters, such as "
                f"{', '.join(get_close_matches(pattern, names, 3, 0.0))}"
            )
