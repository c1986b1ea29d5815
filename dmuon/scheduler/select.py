"""Which parameters are matrices, which go to AdamW, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product

from torch import Tensor, nn

from dmuon.scheduler.specs import (
    MatrixSpec,
    ModelSpecs,
    ParameterSpec,
    canonical_name,
    dtype_name,
)
from dmuon.types import Algorithm, DmuonError, Select, SelectionError

HEAD_NAMES = frozenset({"lm_head", "head", "output", "embed_out", "score", "classifier"})
# Inside a repeated block these name a projection as often as a head; a head is not repeated.
_AMBIGUOUS_IN_BLOCK = frozenset({"head", "output", "score"})
_WEIGHT_NAME = re.compile(r"weight|kernel|w\d+|.*_weight|.*_proj")
# The module of a weight, where names are all that is known: embed_tokens, wte, word_embeddings, ...
_EMBEDDING_NAME = re.compile(r"(.*\.)?(w[tp]e|[a-z_]*embed(ding|der)?s?(_[a-z]+)?)(\.weight)?")
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(slots=True)
class _Use:
    """One parameter with every (module, name) under which the model uses it.

    The module is None where only names are known. ``algorithm`` is what the user said.
    """

    name: str
    parameter: Tensor
    places: list[tuple[nn.Module | None, str]] = field(default_factory=list)
    algorithm: Algorithm | None = None

    @property
    def transposed(self) -> bool:
        return isinstance(self.places[0][0], _TRANSPOSED) and self.parameter.ndim >= 3

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of its matrices, before they are split."""
        shape = self.parameter.shape
        if self.transposed:
            return shape[1], shape[0] * math.prod(shape[2:])
        if isinstance(self.places[0][0], _CONVOLUTIONS) and len(shape) >= 3:
            return shape[0], math.prod(shape[1:])
        return shape[-2], shape[-1]

    def spec(self, algorithm: Algorithm, reason: str) -> ParameterSpec:
        p, flipped = self.parameter, self.transposed and algorithm is not Algorithm.FROZEN
        return ParameterSpec(
            self.name, tuple(p.shape), dtype_name(p.dtype), algorithm, reason, flipped
        )


def _uses(places: Iterable[tuple[str, Tensor, nn.Module | None]]) -> list[_Use]:
    by_id: dict[int, _Use] = {}
    taken: dict[str, int] = {}
    for full, p, module in places:
        name = canonical_name(full)
        # A user's own module may be called "module": then stripping could merge two names.
        name = name if taken.setdefault(name, id(p)) == id(p) else full
        use = by_id.setdefault(id(p), _Use(name, p))
        use.places.append((module, name))
    return list(by_id.values())


def _places(model: nn.Module) -> Iterable[tuple[str, Tensor, nn.Module]]:
    for module_name, module in model.named_modules(remove_duplicate=False):
        for local, p in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{module_name}.{local}" if module_name else local, p, module


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Canonical names and trainable parameters, each once, in registration order.

    This is the order of `ModelSpecs.parameters` as `collect` gives them.
    """
    uses = _uses(_places(model))
    return [(use.name, use.parameter) for use in uses if use.parameter.requires_grad]  # type: ignore[misc]


def _is_head(name: str) -> str | None:
    modules = name.split(".")[:-1]
    if not modules:
        return None
    if modules[0] in HEAD_NAMES:
        return modules[0]
    last = modules[-1]
    if last not in HEAD_NAMES:
        return None
    repeated = any(part.isdigit() for part in modules[:-1])
    return None if repeated and last in _AMBIGUOUS_IN_BLOCK else last


def _default_route(use: _Use) -> tuple[Algorithm, str]:
    p, local = use.parameter, use.name.rsplit(".", 1)[-1]
    if p.ndim < 2:
        return Algorithm.ADAMW, f"{p.ndim}-D"
    if p.numel() == 0:
        return Algorithm.ADAMW, "empty"
    for module, name in use.places:
        if isinstance(module, _EMBEDDINGS) or (module is None and _EMBEDDING_NAME.match(name)):
            if name != use.name:
                return Algorithm.ADAMW, f"tied to embedding {name!r}"
            tied = [other for _, other in use.places if other != name]
            also = f", tied to {tied[0]!r}" if tied else ""
            how = "by its name" if module is None else type(module).__name__
            return Algorithm.ADAMW, f"embedding ({how}){also}"
        if isinstance(module, _NORMS):
            return Algorithm.ADAMW, f"gain of a normalization ({type(module).__name__})"
        if isinstance(module, _TRANSPOSED) and module.groups > 1:
            return Algorithm.ADAMW, "grouped transposed convolution"
    for _, name in use.places:
        head = _is_head(name)
        if head is not None:
            return Algorithm.ADAMW, f"output head ({head!r})"
    if not any(_WEIGHT_NAME.fullmatch(name.rsplit(".", 1)[-1]) for _, name in use.places):
        return Algorithm.ADAMW, f"bare parameter {local!r} is not named as a weight"
    rows, cols = use.matrix_shape
    if rows == 1 or cols == 1:
        return Algorithm.ADAMW, f"{rows} x {cols} is a vector"
    return Algorithm.MUON, "weight"


def _route(use: _Use, select: Select | None) -> tuple[Algorithm, str]:
    if use.algorithm is not None:
        chosen, who = use.algorithm is Algorithm.MUON, "the param group says"
        remedy = 'put it into a param group with algorithm="adamw"'
    elif select is None:
        return _default_route(use)
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
    said = use.algorithm is not None
    if chosen:
        return Algorithm.MUON, "its param group says muon" if said else "selected"
    return Algorithm.ADAMW, "its param group says adamw" if said else "not selected"


def _row_sizes(
    use: _Use,
    splits: Mapping[str, Sequence[int]],
    heads: Mapping[str, int],
    used: set[str],
) -> tuple[int, ...]:
    """How many rows each piece of the parameter's matrices has; fitting patterns go to ``used``."""
    rows, found = use.matrix_shape[0], []
    for pattern, given in splits.items():
        if fnmatchcase(use.name, pattern):
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise SelectionError(
                    f"splits[{pattern!r}] must be a list of row counts that add up to the {rows} "
                    f"rows of {use.name!r}, found {given!r}"
                )
            found.append((pattern, tuple(given)))
    for pattern, count in heads.items():
        if fnmatchcase(use.name, pattern):
            if not isinstance(count, int) or count < 1 or rows % count:
                raise SelectionError(
                    f"heads[{pattern!r}] = {count!r} does not divide the {rows} rows of "
                    f"{use.name!r}"
                )
            found.append((pattern, (rows // count,) * count))
    used.update(pattern for pattern, _ in found)
    if not found:
        return (rows,)
    if len({sizes for _, sizes in found}) > 1:
        raise SelectionError(
            f"{use.name!r} matches several patterns of splits/heads that disagree: "
            + ", ".join(repr(pattern) for pattern, _ in found)
        )
    pattern, sizes = found[0]
    are_counts = all(isinstance(size, int) and size > 0 for size in sizes)
    if not are_counts or sum(sizes) != rows:
        total = f"; they add up to {sum(sizes)}" if are_counts else ""
        raise SelectionError(
            f"splits[{pattern!r}] = {list(sizes)} must be positive row counts that add up to the "
            f"{rows} rows of {use.name!r}{total}"
        )
    if len(sizes) > 1 and use.transposed:
        raise SelectionError(
            f"{use.name!r} is the weight of a transposed convolution, which cannot be split: "
            f"remove it from the pattern {pattern!r}"
        )
    return sizes


def _matrices(use: _Use, index: int, sizes: tuple[int, ...]) -> list[MatrixSpec]:
    p, (rows, cols) = use.parameter, use.matrix_shape
    stack, dtype = p.numel() // (rows * cols), dtype_name(p.dtype)
    made, start = [], 0
    for item, size in product(range(stack), sizes):
        row = start // cols - item * rows
        name = use.name + (f"[{item}]" if stack > 1 else "")
        name += f"[{row}:{row + size}]" if len(sizes) > 1 else ""
        made.append(MatrixSpec(name, index, size, cols, dtype, start, use.transposed))
        start += size * cols
    # A piece is written through a flat view of its parameter, which only contiguous storage has.
    if len(made) > 1 and not p.is_contiguous():
        raise SelectionError(
            f"{use.name!r} holds {len(made)} matrices but its storage is not contiguous (strides "
            f"{p.stride()}): make it contiguous before dmuon.dedicate_params(model)"
        )
    return made


def _check(uses: list[_Use], allow_meta: bool) -> None:
    """Refuse trainable parameters that nothing here can update."""
    first: _Use | None = None
    for use in uses:
        name, p = use.name, use.parameter
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise DmuonError(
                f"parameter {name!r} is uninitialized (a lazy module): run one forward pass "
                "before dmuon.dedicate_params(model)"
            )
        if p.is_meta and not allow_meta:
            raise DmuonError(
                f"parameter {name!r} is on the meta device: materialize the model "
                "(model.to_empty(device=...) and initialize it) before dmuon.dedicate_params(model)"
            )
        if p.is_complex():
            raise DmuonError(
                f"parameter {name!r} is complex ({p.dtype}); Newton-Schulz and AdamW here take "
                "real parameters. Freeze it, or store torch.view_as_real of it"
            )
        if any(isinstance(m, _EMBEDDINGS) and m.sparse for m, _ in use.places):
            raise SelectionError(
                f"{name!r} is the weight of an embedding with sparse=True, whose sparse "
                "gradients cannot be averaged with the others: build it with sparse=False"
            )
        if p.is_meta:
            continue
        first = first or use
        if p.device != first.parameter.device:
            raise DmuonError(
                f"parameter {name!r} is on {p.device} but {first.name!r} is on "
                f"{first.parameter.device}: move the model to one device before "
                "dmuon.dedicate_params(model)"
            )
    if not uses:
        raise DmuonError("the model has no trainable parameter: nothing to optimize")


def collect(
    model: nn.Module,
    *,
    select: Select | None = None,
    splits: Mapping[str, Sequence[int]] | None = None,
    heads: Mapping[str, int] | None = None,
    allow_meta: bool = False,
) -> ModelSpecs:
    """Route every trainable parameter of ``model`` to Muon or AdamW, with the reason.

    ``splits`` and ``heads`` map patterns of canonical names to row sizes, or to a number of equal
    pieces. A convolution is flattened to ``(out, rest)``; any other parameter with more than two
    dims is a stack of matrices. ``allow_meta`` takes parameters on the meta device, for planning
    without the model.

    Raises:
        SelectionError: nothing is selected, a chosen parameter is no matrix, or a pattern does
            not fit.
        DmuonError: a parameter cannot be handled at all (meta device, uninitialized, complex,
            on another device than the others, sparse gradients), or none is trainable.
    """
    return _collect(_uses(_places(model)), select, splits, heads, allow_meta)


def collect_named(
    named: Iterable[tuple[str, Tensor]],
    *,
    algorithms: Sequence[Algorithm | None] | None = None,
    select: Select | None = None,
    splits: Mapping[str, Sequence[int]] | None = None,
    heads: Mapping[str, int] | None = None,
    allow_meta: bool = False,
) -> ModelSpecs:
    """`collect` for parameters of which only names and shapes are known.

    ``algorithms`` holds for each of ``named`` what its user said, MUON or ADAMW, which wins over
    ``select`` and all rules, or None. A parameter that comes twice counts once.

    Raises: as `collect`.
    """
    pairs = list(named)
    uses = _uses((name, p, None) for name, p in pairs)
    said = {id(p): a for (_, p), a in zip(pairs, algorithms or (), strict=bool(algorithms)) if a}
    for use in uses:
        use.algorithm = said.get(id(use.parameter))
    return _collect(uses, select, splits, heads, allow_meta)


def _collect(
    everything: list[_Use],
    select: Select | None,
    splits: Mapping[str, Sequence[int]] | None,
    heads: Mapping[str, int] | None,
    allow_meta: bool,
) -> ModelSpecs:
    uses = [use for use in everything if use.parameter.requires_grad]
    _check(uses, allow_meta)
    if select is not None and not callable(select):
        raise SelectionError(
            f"select must be a function (name, parameter) -> bool, found {select!r}"
        )
    for setting, example, given in (("splits", [512, 128, 128], splits), ("heads", 8, heads)):
        if given is not None and not isinstance(given, Mapping):
            raise SelectionError(
                f"{setting} must map name patterns to row counts, found {given!r}: pass "
                f"{setting}={{'*.qkv_proj.weight': {example}}}"
            )
    splits, heads = splits or {}, heads or {}
    used: set[str] = set()
    parameters: list[ParameterSpec] = []
    matrices: list[MatrixSpec] = []
    for index, use in enumerate(uses):
        algorithm, reason = _route(use, select)
        if algorithm is Algorithm.MUON:
            made = _matrices(use, index, _row_sizes(use, splits, heads, used))
            matrices += made
            reason += "" if len(made) == 1 else f", {len(made)} matrices"
        parameters.append(use.spec(algorithm, reason))
    if not matrices:
        raise SelectionError(
            "no parameter was selected as a matrix, so there is nothing for Muon to do. Routing: "
            + "; ".join(f"{p.name} {list(p.shape)}: {p.reason}" for p in parameters[:20])
            + ". Pass select=lambda name, p: ... to choose, or use torch.optim.AdamW"
        )
    for setting, patterns in (("splits", splits), ("heads", heads)):
        for pattern in patterns:
            if pattern not in used:
                raise SelectionError(
                    f"{setting}[{pattern!r}] matches no matrix parameter. Matrix parameters: "
                    + ", ".join(p.name for p in parameters if p.algorithm is Algorithm.MUON)
                )
    frozen = tuple(
        use.spec(Algorithm.FROZEN, "requires_grad is False")
        for use in everything
        if not use.parameter.requires_grad
    )
    return ModelSpecs(tuple(parameters), tuple(matrices), frozen)
