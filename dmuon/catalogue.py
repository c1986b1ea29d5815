"""Models to plan for without weights: presets, Hugging Face configurations, users' functions.

transformers builds a configuration on the meta device, so that names, shapes, order and fused
experts are those of the model that will be trained. `presets.json` holds such results (``python -m
tests.make_presets`` writes it), and the publication of the sizes (``source``). A row of
``parameters`` has a name, the kind of the module that holds it, and its shape or the name of the
weight that it is tied to. ``{0..31}`` repeats a block: all rows of one block come before those of
the next. ``head`` is the model's name for its output embeddings.

Importing this module does not load torch, so the command line shows presets without it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby
from operator import and_, eq
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dmuon.scheduler.json_files import cut, decode, parse, read_text
from dmuon.scheduler.topology import layer_of
from dmuon.types import Algorithm, Heads, PlanError, Splits, grouped

if TYPE_CHECKING:
    from torch import nn

    from dmuon.scheduler.specs import ModelSpecs, ParameterSpec

_PRESETS = Path(__file__).with_name("presets.json").read_text(encoding="utf-8")
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(json.loads(_PRESETS))
OWN_FUNCTION = "--model module:function, a function that returns the model (on the meta device)"

# For a configuration without its model's class: the first task that has a model for it. Tasks with
# an encoder or a vision tower come first, because many of their decoders can be trained alone, too.
_TASKS = (
    "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "MASKED_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION",
)  # fmt: skip
_NOT_BUILT = {"auto_map", "quantization_config", "architectures", "model_type"}
_NOT_BUILT |= {"attn_implementation", "_attn_implementation"}


def rows_of(parameters: Sequence[Sequence[Any]]) -> Iterator[tuple[str, str, Any]]:
    """Yield the rows of a preset, one per parameter: (name, kind, shape or tied weight's name).

    >>> [name for name, *_ in rows_of([["h.{0..1}.a", "", [2]], ["h.{0..1}.b", "", [2]]])]
    ['h.0.a', 'h.0.b', 'h.1.a', 'h.1.b']
    """
    for block, rows in groupby(parameters, lambda row: row[0].rpartition("}")[0]):
        head, _, numbers = block.partition("{")
        first, _, last = numbers.partition("..")
        repeated = [*rows]
        for number in range(int(first or 0), int(last or 0) + 1):
            for name, kind, shape in repeated:
                rest = name[len(block) + 1 :] if block else name
                yield (f"{head}{number}{rest}" if block else rest), kind, shape


def _skeleton(preset: Mapping[str, Any]) -> nn.Module:
    """Make modules with a preset's parameters and no forward, which are routed as live ones."""
    import torch
    from torch import nn

    kinds: dict[str, Callable[[], nn.Module]] = {
        "Linear": partial(nn.Linear, 1, 1, bias=False),
        "Embedding": partial(nn.Embedding, 1, 1),
        "LayerNorm": partial(nn.LayerNorm, 1, bias=False),
        "RMSNorm": partial(nn.RMSNorm, 1),
        "Conv2d": partial(nn.Conv2d, 1, 1, 1, bias=False),
    }
    root, modules = nn.Module(), dict[str, nn.Module]()

    def module(name: str, kind: str) -> nn.Module:
        if not name:
            return root
        if name not in modules:
            path, _, own = name.rpartition(".")
            modules[name] = kinds.get(kind, nn.Module)()
            module(path, "").add_module(own, modules[name])
        return modules[name]

    for name, kind, shape in rows_of(preset["parameters"]):
        path, _, own = name.rpartition(".")
        holder, tied = module(path, kind), isinstance(shape, str)
        p = root.get_parameter(shape) if tied else nn.Parameter(torch.empty(shape))
        setattr(holder, own, p)
        if kind == "Conv1D" and own == "weight":  # transformers' own class, stored (in, out)
            holder.nf = p.shape[1]  # type: ignore[assignment]
    if head := modules.get(preset.get("head", "")):
        root.get_output_embeddings = lambda: head  # type: ignore[assignment]
    return root


def _class_of(config: Mapping[str, Any], transformers: Any) -> tuple[Any, Any]:
    """Return the classes of a model and of its configuration."""
    names, kind = config.get("architectures") or [], config.get("model_type")
    here = f"transformers {transformers.__version__}"
    remote = " (its own code, auto_map, is not run)" if "auto_map" in config else ""
    if names:
        name = names[0] if isinstance(names, list) else names
        found: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if is_model:
            return found, found.config_class
        lacking = f"{here} has no model {name!r}, which 'architectures' names{remote}"
    else:
        lacking = "the configuration has no 'architectures'"
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        if names:
            raise PlanError(f"{lacking}: install a version that has it, or pass {OWN_FUNCTION}")
        nested = [k for k, v in config.items() if isinstance(v, dict) and "model_type" in v]
        inside = f" (beside that, {', '.join(nested)} would each be a configuration)" * bool(nested)
        what = f"has no model_type {kind!r}" if kind else "needs 'architectures' or 'model_type'"
        raise PlanError(f"{here} {what}{remote}{inside}: add it, or pass {OWN_FUNCTION}")
    settings = transformers.CONFIG_MAPPING[kind]
    tasks = [getattr(transformers, f"MODEL_FOR_{task}_MAPPING") for task in _TASKS]
    tasks = [of[settings] for of in (*tasks, transformers.MODEL_MAPPING) if settings in of]
    if not (classes := [of[0] if isinstance(of, tuple) else of for of in tasks]):
        raise PlanError(f"{here} has no model for model_type {kind!r}: pass {OWN_FUNCTION}")
    end = "For" + str(name).rpartition("For")[2] if names else ""
    made = next((found for found in classes if found.__name__.endswith(end)), classes[0])
    told = f"planned as {made.__name__}, its model of model_type {kind!r}"
    logging.getLogger("dmuon").warning("%s: %s", lacking, told)
    return made, settings


def _decoded(given: Any) -> Any:
    """Decode floats that transformers writes as ``{"__float__": "Infinity"}``. PlanError if a part
    of the configuration is on the internet, because the file may come from anyone."""
    if isinstance(given, list):
        return [_decoded(each) for each in given]
    if not isinstance(given, dict):
        return given
    if given.get("__float__") in ("Infinity", "-Infinity", "NaN"):
        return float(given["__float__"])
    if isinstance(given.get("backbone"), str) and not given.get("backbone_config"):
        raise PlanError(
            f"the configuration names a backbone, {given['backbone']!r}, that transformers would "
            f"look up on the internet: give its 'backbone_config', or pass {OWN_FUNCTION}"
        )
    return {key: _decoded(value) for key, value in given.items()}


def build(config: Mapping[str, Any], dtype: str | None = None) -> nn.Module:
    """Build the model that a Hugging Face configuration describes, on the meta device.

    ``architectures`` names its class; if transformers does not know it, ``model_type`` decides.
    Weights are trained unquantized, and code that comes with a configuration is not run. ``dtype``
    replaces the dtype in the configuration.

    Raises:
        PlanError: transformers is not installed, does not know the model, or cannot build it.
    """
    import torch

    wanted = getattr(torch, dtype or dtype_of(config))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise PlanError(
            f"a configuration is built by transformers, which is missing ({error}): pip install "
            f"transformers, or plan a preset ({', '.join(PRESETS)})"
        ) from error
    level = transformers.logging.get_verbosity()
    try:
        transformers.logging.set_verbosity_error()
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            made, settings = _class_of(config, transformers)
            given = {k: v for k, v in _decoded(config).items() if k not in _NOT_BUILT}
            with torch.device("meta"):
                model: nn.Module = made(settings.from_dict(given))
            return model.to(wanted)
    except PlanError:
        raise
    except Exception as error:  # transformers may raise anything
        raise PlanError(
            f"transformers {transformers.__version__} cannot build the model of this "
            f"configuration: {cut(f'{type(error).__name__}: {error}')}"
        ) from error
    finally:
        transformers.logging.set_verbosity(level)


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype in a configuration, or in that of its language model; else bfloat16."""
    from dmuon.scheduler.specs import ITEM_SIZE

    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    given = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    name = next(filter(None, given), "bfloat16")
    if not isinstance(name, str) or name not in ITEM_SIZE:
        known = ", ".join(ITEM_SIZE)
        raise PlanError(f"the model configuration has dtype {name!r}; pass --dtype, one of {known}")
    return name


def _from_function(text: str) -> nn.Module:
    """Call ``module:function`` and return its model; the module may be in the current folder."""
    from torch import nn

    module_name, _, function_name = text.partition(":")
    folder, doing = os.getcwd(), f"importing {module_name!r}"
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
            doing, function = text, getattr(module, function_name, None)
            model = function() if callable(function) else None
    except (Exception, SystemExit) as error:  # of the user's code, so not our defect
        raise PlanError(f"{doing} failed: {error!r}") from error
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)
    if not callable(function):
        raise PlanError(f"module {module_name!r} has no function {function_name!r}")
    if not isinstance(model, nn.Module):
        raise PlanError(f"{text} returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def _load(text: str, dtype: str | None) -> nn.Module:
    import torch

    if preset := PRESETS.get(text.lower()):
        with torch.device("meta"):
            return _skeleton(preset).to(getattr(torch, dtype or "bfloat16"))
    if os.path.exists(text) or text.endswith(".json"):
        path = Path(text, "config.json") if os.path.isdir(text) else Path(text)
        try:
            config = decode(dict[str, Any], parse(read_text(path)))
        except OSError as error:
            raise PlanError(f"cannot read {str(path)!r}: {error.strerror}") from error
        except ValueError as error:
            raise PlanError(f"{str(path)!r} is no configuration: {error}") from error
        return build(config, dtype)
    if all(part.strip() for part in text.partition(":")):
        model = _from_function(text)
        return model if dtype is None else model.to(getattr(torch, dtype))
    # Published names come with an owner and a suffix: "Qwen/Qwen2.5-7B-Instruct".
    name = text.rsplit("/", 1)[-1].lower()
    ways = "or the path of a Hugging Face config.json, or module:function"
    hint = f". Presets: {', '.join(PRESETS)}; {ways}"
    if close := ", ".join(difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.5)):
        hint = f"; did you mean {close}? python -m dmuon plan --help lists all presets"
    raise PlanError(f"no preset and no file {text!r}{hint}")


def model_specs(
    text: str, dtype: str | None = None, *, splits: Splits | None = None, heads: Heads | None = None
) -> ModelSpecs:
    """Return the parameters and matrices of the model that ``text`` names.

    ``text`` is a name in `PRESETS`, the path of a Hugging Face ``config.json`` (or its folder), or
    ``module:function``: a function without arguments, importable from here or the current folder,
    that returns a model, best on the meta device. ``dtype`` replaces the model's own.

    Raises:
        PlanError: nothing has that name, a configuration is unreadable, or a function fails.
        DmuonError: the parameters cannot be routed (see `collect`).
    """
    return stages_of(text, dtype, splits=splits, heads=heads)[0].specs


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank of a pipeline holds of a model. ``is_dense``: only other ranks have experts."""

    rank: int
    specs: ModelSpecs
    is_dense: bool = False

    @property
    def key(self) -> str:
        """Equal for stages that differ in nothing but names."""
        held = [(*p.shape, p.dtype, p.algorithm) for p in self.specs.parameters + self.specs.frozen]
        return str((held, [(m.parameter, m.start, m.shape, m.form) for m in self.specs.matrices]))

    @property
    def holds(self) -> list[str]:
        """The names of its layers, and then of other modules."""
        names = [p.name for p in self.specs.parameters + self.specs.frozen]
        found = dict.fromkeys(layer_of(n) or n.rpartition(".")[0] or n for n in names)
        return sorted(found, key=lambda name: not layer_of(name))

    def to_dict(self) -> dict[str, Any]:
        return {"stage": self.rank, "holds": self.holds, "matrices": len(self.specs.matrices)}


def stages_of(
    text: str, dtype: str | None = None, ranks: int = 1, parts: int = 1, *, is_v: bool = False,
    splits: Splits | None = None, heads: Heads | None = None,
) -> list[Stage]:  # fmt: skip
    """Cut the layers of the model of `model_specs` into equal parts, ``parts`` for each rank of a
    pipeline. Rank r has parts r, r + ranks, ..., or if ``is_v`` part r and the r-th from the end.

    Layers have a number in their names, and matrices. Any other parameter stays with the layer
    before or after it that shares more of its name. A weight with names on several ranks, such as a
    tied embedding, is on each of them. PlanError if there are too few layers."""
    from dmuon.scheduler.select import Member, collect, trainable_parameters
    from dmuon.scheduler.specs import ITEM_SIZE, canonical_name

    known = ", ".join(ITEM_SIZE)
    if dtype not in (None, *ITEM_SIZE):
        raise PlanError(f"unknown dtype {dtype!r}, expected one of {known}")
    model = _load(text, dtype)
    routed = partial(collect, splits=splits, heads=heads, allow_meta=True)
    specs = routed(model)
    if other := [p for p in specs.parameters if p.dtype not in ITEM_SIZE]:
        name, dtype = other[0].name, other[0].dtype
        raise PlanError(f"parameter {name!r} has dtype {dtype}, expected one of {known}")
    if ranks * parts == 1:
        return [Stage(0, specs)]
    named = [(canonical_name(n), p) for n, p in model.named_parameters(remove_duplicate=False)]
    trained = zip(specs.parameters, trainable_parameters(model), strict=True)
    muon = {p for spec, (_, p) in trained if spec.algorithm is Algorithm.MUON}
    layers = [*dict.fromkeys(layer_of(n) for n, p in named if p in muon and layer_of(n))]
    if len(layers) < ranks * parts:
        raise PlanError(f"--pp {ranks}x{parts} needs as many layers, found {len(layers)} in {text}")
    of_part = [*range(ranks)] * parts
    if is_v:
        of_part[ranks:] = reversed(range(ranks))
    part_of = _parts_of([name for name, _ in named], layers, ranks * parts)
    rank_of = {name: of_part[part] for name, part in part_of.items()}
    last, uses, made = 0 if is_v else ranks - 1, Counter(p for _, p in named), []
    for rank in range(ranks):
        here = grouped((p, name) for name, p in named if rank_of[name] == rank)
        own = routed([Member(n[0], p, model=model) for p, n in here.items()], partial=True)
        held = zip(own.parameters, (p for p in here if p.requires_grad), strict=True)
        alone = [_untied(s, rank == last) if len(here[p]) < uses[p] else s for s, p in held]
        frozen = tuple(p for p in specs.frozen if rank_of[p.name] == rank)
        made.append(replace(own, parameters=tuple(alone), frozen=frozen))
    dense = [not any(m.form.is_stack for m in own.matrices) for own in made]
    return [Stage(r, own, dense[r] and not all(dense)) for r, own in enumerate(made)]


def _untied(spec: ParameterSpec, is_last: bool) -> ParameterSpec:
    """Return a tied embedding where it is the table alone, or the head."""
    table, tied, _ = spec.reason.partition(", tied to")
    return replace(spec, reason=f"tied to {table}" if is_last else table) if tied else spec


def _parts_of(names: Sequence[str], layers: Sequence[str], parts: int) -> dict[str, int]:
    """Return the part of the layer that each parameter belongs to, or stays with. The first and the
    last part, with the embedding and the head, are the last to get a layer more.

    >>> [*_parts_of([*"0123456789"], [*"0123456789"], 4).values()]
    [0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    """
    each, more = divmod(len(layers), parts)
    longer = [*range(1, parts - 1), 0][:more]
    part_of = [n for n in range(parts) for _ in range(each + (n in longer))]
    index, found, at = {layer: i for i, layer in enumerate(layers)}, dict[str, int](), -1
    for name in names:
        at = index.get(layer_of(name), at)
        around = {i: layers[i].split(".") for i in (at, at + 1) if 0 <= i < len(layers)}
        path = name.split(".")
        nearest = max(around, key=lambda i: sum(accumulate(map(eq, path, around[i]), and_)))
        found[name] = part_of[nearest]
    return found
