"""Configuration, public names, documentation."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import dmuon
import dmuon.types
from dmuon.config import (
    AdamWDefaults,
    MuonDefaults,
    PlannerOptions,
    ReplicatedOptions,
    check_adamw_group,
    check_muon_group,
)
from dmuon.types import DmuonError

REPOSITORY = Path(__file__).parents[2]
SUBMODULES = [
    m.name for m in pkgutil.walk_packages(dmuon.__path__, "dmuon.") if "__main__" not in m.name
]

# ---- configuration -----------------------------------------------------------------------


def muon_group(**changes: object) -> dict:
    return dataclasses.asdict(MuonDefaults()) | changes


def adamw_group(**changes: object) -> dict:
    return dataclasses.asdict(AdamWDefaults(lr=1e-3, weight_decay=0.1)) | changes


def test_the_defaults_are_valid():
    check_muon_group(muon_group())
    check_adamw_group(adamw_group())
    check_muon_group(muon_group(lr=torch.tensor(0.1), weight_decay=0, momentum=0.0))
    check_muon_group(muon_group(momentum_mode="sgd", dampening=0.5))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("lr", torch.ones(2)),
        ("weight_decay", -0.1),
        ("momentum", -0.1),
        ("momentum", 1.5),
        ("eps", -1e-7),
        ("adjust_lr_fn", "rms"),
        ("momentum_mode", "nag"),
        ("dampening", 0.5),
    ],
)
def test_a_muon_hyperparameter_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        check_muon_group(muon_group(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-3),
        ("weight_decay", -0.1),
        ("eps", -1e-8),
        ("eps", float("nan")),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("betas", (0.9,)),
    ],
)
def test_an_adamw_hyperparameter_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"AdamW {name}"):
        check_adamw_group(adamw_group(**{name: value}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: PlannerOptions(max_batch=0),
        lambda: PlannerOptions(ranks_per_node=0),
        lambda: ReplicatedOptions(bucket_bytes=0),
        lambda: ReplicatedOptions(publish_bucket_bytes=-1),
        lambda: ReplicatedOptions(reduce_dtype=torch.int32),
    ],
)
def test_options_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match=r"Options\."):
        make()


@pytest.mark.parametrize("options", [PlannerOptions, ReplicatedOptions, MuonDefaults])
def test_options_are_frozen(options):
    field = dataclasses.fields(options)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options(), field, 1)


def test_every_error_of_the_package_is_a_value_error_that_can_be_imported():
    errors = [n for n in dmuon.types.__all__ if n.endswith("Error")]
    assert len(errors) >= 5
    for name in errors:
        assert issubclass(getattr(dmuon.types, name), DmuonError)
    assert issubclass(DmuonError, ValueError)


# ---- public names ------------------------------------------------------------------------


def test_public_names_can_be_imported_and_are_sorted():
    assert dmuon.__all__ == sorted(dmuon.__all__)
    for name in dmuon.__all__:
        assert hasattr(dmuon, name)


@pytest.mark.parametrize("name", dmuon.__all__)
def test_public_names_are_documented(name):
    thing = getattr(dmuon, name)
    assert own_docstring(thing)
    if not inspect.isclass(thing):
        return
    for method, value in vars(thing).items():
        value = getattr(value, "__func__", value)
        value = value.fget if isinstance(value, property) else value
        if inspect.isfunction(value) and not method.startswith("_"):
            documented = [vars(base).get(method) for base in thing.__mro__]
            assert any(getattr(m, "__doc__", None) for m in documented if m), method


def own_docstring(thing: object) -> str:
    """The docstring, unless it is the signature that dataclasses make up."""
    doc = getattr(thing, "__doc__", None) or ""
    return "" if doc.startswith(f"{getattr(thing, '__name__', '')}(") else doc


def test_the_contract_of_this_version_is_public():
    assert {
        "dedicate_params", "Ownership", "OwnershipPlan", "LoadBalanceReport", "PlannerOptions",
        "ReplicatedOptions", "Muon", "newton_schulz", "clip_grad_norm_", "no_sync",
        "check_step_equivalence",
    } <= set(dmuon.__all__)  # fmt: skip
    assert dmuon.reference.ReferenceMuon.__doc__


@pytest.mark.parametrize("module", SUBMODULES)
def test_modules_are_documented_and_their_all_exists(module):
    loaded = importlib.import_module(module)
    assert loaded.__doc__ or Path(loaded.__file__).stat().st_size == 0
    for name in getattr(loaded, "__all__", []):
        assert hasattr(loaded, name)


def test_muon_begins_as_torch_muon_does():
    ours = list(inspect.signature(dmuon.Muon).parameters.values())
    theirs = list(inspect.signature(torch.optim.Muon).parameters.values())
    assert [p.name for p in ours[1 : len(theirs)]] == [p.name for p in theirs[1:]]
    differing = {p.name for p, q in zip(ours[1:], theirs[1:]) if p.default != q.default}
    assert differing == {"ns_coefficients", "adjust_lr_fn"}
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_muon_and_its_reference_share_their_defaults():
    ours = inspect.signature(dmuon.Muon).parameters
    theirs = inspect.signature(dmuon.reference.ReferenceMuon).parameters
    shared = ours.keys() & theirs.keys()
    assert {"lr", "momentum_mode", "adamw_betas", "ns_dtype"} <= shared
    assert {n for n in shared if ours[n].default != theirs[n].default} == set()


def test_defaults_in_config_are_those_of_the_signature():
    signature = inspect.signature(dmuon.Muon).parameters
    for field in dataclasses.fields(MuonDefaults):
        assert signature[field.name].default == field.default
    for field in dataclasses.fields(AdamWDefaults):
        assert signature[f"adamw_{field.name}"].default == field.default


def test_the_package_is_typed_and_its_version_is_that_of_the_project():
    assert (REPOSITORY / "dmuon" / "py.typed").exists()
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^version = "(.+)"$', project, re.M)[1] == dmuon.__version__


# ---- doctests ----------------------------------------------------------------------------

PURE = [
    m
    for m in SUBMODULES
    if m.startswith(("dmuon.scheduler.", "dmuon.kernels."))
    or m in ("dmuon.update", "dmuon.comm.routes", "dmuon.comm.blocks", "dmuon.config")
]


@pytest.mark.parametrize("module", PURE)
def test_examples_in_docstrings_are_true(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_examples_in_docstrings():
    finder = doctest.DocTestFinder()
    examples = {
        m: sum(len(t.examples) for t in finder.find(importlib.import_module(m))) for m in PURE
    }
    for module in (
        "update",
        "scheduler.cost_entries",
        "scheduler.specs",
        "comm.routes",
        "comm.blocks",
    ):
        assert examples[f"dmuon.{module}"] > 0
