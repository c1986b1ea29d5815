"""Configuration, public names, documentation."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import dmuon
import dmuon.types
from dmuon.config import (
    AdamWDefaults,
    DedicatedOptions,
    KernelOptions,
    MuonDefaults,
    PlannerOptions,
    ReplicatedOptions,
    ShardedOptions,
    check_adamw_group,
    check_muon_group,
)
from dmuon.kernels.newton_schulz import newton_schulz, resolve_ns_dtype
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


def test_numbers_are_kept_as_pythons_own():
    """Ranks compare settings as text, and a config may give numpy's numbers."""
    given = {"lr": np.float32(0.5), "momentum": np.float64(0.75), "ns_steps": np.int64(3)}
    kept = check_muon_group(muon_group(weight_decay=1, **given))
    assert {name: (type(kept[name]), kept[name]) for name in (*given, "weight_decay")} == {
        "lr": (float, 0.5),
        "momentum": (float, 0.75),
        "ns_steps": (int, 3),
        "weight_decay": (float, 1.0),
    }
    assert check_adamw_group(adamw_group(betas=[np.float64(0.5), 0]))["betas"] == (0.5, 0.0)


def test_a_tensor_is_kept_as_lr_as_torch_keeps_it():
    lr = torch.tensor(0.1)
    assert check_muon_group(muon_group(lr=lr))["lr"] is lr
    assert check_adamw_group(adamw_group(lr=lr))["lr"] is lr


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
        ("lr", torch.tensor(-0.1)),
        ("lr", torch.tensor(1j)),
        ("eps", 0),
        ("ns_steps", 0),
        ("ns_steps", -1),
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


NO_NUMBERS = ["0.1", "1e-3", None, True, [0.1], 1j, {}]
WRONG_TYPES = {
    "lr": NO_NUMBERS,
    "weight_decay": [*NO_NUMBERS, torch.tensor(0.1), 10**400],
    "momentum": NO_NUMBERS,
    "eps": NO_NUMBERS,
    "dampening": NO_NUMBERS,
    "nesterov": ["no", "false", 1, None],
    "ns_coefficients": [3, None, 0.5],
    "ns_steps": ["5", 5.0, None, True, (5,)],
    "adjust_lr_fn": [True, 3, ["original"]],
    "momentum_mode": [None, 3],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in WRONG_TYPES for value in WRONG_TYPES[name]]
)
def test_a_muon_hyperparameter_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be .*, found {re.escape(repr(value))}"):
        check_muon_group(muon_group(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", "1e-3"),
        ("lr", None),
        ("weight_decay", "0.1"),
        ("eps", None),
        ("betas", 0.9),
        ("betas", "ab"),
        ("betas", None),
        ("betas", (0.9, "0.95")),
        ("betas", torch.tensor([0.9, 0.95])),
    ],
)
def test_an_adamw_hyperparameter_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=rf"^AdamW {name} must be .*, found "):
        check_adamw_group(adamw_group(**{name: value}))


def test_the_error_says_what_to_do_about_a_string_or_a_whole_float():
    with pytest.raises(TypeError, match=r"found '1e-3': a string.*YAML.*1\.0e-3"):
        check_muon_group(muon_group(lr="1e-3"))
    with pytest.raises(TypeError, match=r"found 5\.0: write 5"):
        check_muon_group(muon_group(ns_steps=5.0))


def test_every_field_of_the_options_has_a_rule():
    """`object()` is right for nothing, so a field that takes it is not looked at."""
    for options in (
        PlannerOptions,
        KernelOptions,
        ReplicatedOptions,
        ShardedOptions,
        DedicatedOptions,
    ):
        for field in dataclasses.fields(options):
            name = f"{options.__name__}.{field.name}"
            with pytest.raises(TypeError, match=rf"^{name} must be .*, found <object"):
                options(**{field.name: object()})


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: PlannerOptions(max_batch="16"), TypeError),
        (lambda: PlannerOptions(max_batch=16.0), TypeError),
        (lambda: PlannerOptions(max_batch=True), TypeError),
        (lambda: PlannerOptions(time_limit_s="10"), TypeError),
        (lambda: PlannerOptions(time_limit_s=float("nan")), ValueError),
        (lambda: PlannerOptions(owner_memory_bytes="80GB"), TypeError),
        (lambda: PlannerOptions(cache_dir=3), TypeError),
        (lambda: KernelOptions(tune_budget_s=float("nan")), ValueError),
        (lambda: ReplicatedOptions(bucket_bytes=25e6), TypeError),
        (lambda: ReplicatedOptions(reduce_dtype="bfloat16"), TypeError),
        (lambda: ReplicatedOptions(broadcast_parameters="no"), TypeError),
        (lambda: ReplicatedOptions(timeout_s=float("inf")), ValueError),
        (lambda: ShardedOptions(buffers=None), TypeError),
        (lambda: ShardedOptions(timeout_s="30"), TypeError),
        (lambda: DedicatedOptions(prefetch=-1), ValueError),
        (lambda: DedicatedOptions(free_after_forward=0), TypeError),
        (lambda: DedicatedOptions(groups="blocks"), TypeError),
        (lambda: DedicatedOptions(param_dtype="bfloat16"), TypeError),
        (lambda: DedicatedOptions(param_dtype=torch.int8), ValueError),
    ],
)
def test_wrong_options_are_refused_by_name(make, error):
    with pytest.raises(error, match=r"Options\.\w+ must be .*, found "):
        make()


def test_options_take_what_they_name(tmp_path):
    PlannerOptions(10, 1 << 30, np.int64(8), float("inf"), 4, tmp_path)
    DedicatedOptions(0, False, lambda name, module: True, torch.bfloat16, timeout_s=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_newton_schulz_dtype_may_be_text(dtype):
    name = str(dtype).removeprefix("torch.")
    assert resolve_ns_dtype(name, "cpu") is resolve_ns_dtype(f"torch.{name}", "cpu") is dtype
    x = torch.randn(3, 5)
    assert torch.equal(newton_schulz(x, dtype=name), newton_schulz(x, dtype=dtype))


@pytest.mark.parametrize("dtype", ["half", "int8", "float8_e4m3fn", "", None, 16, torch.int32])
def test_other_newton_schulz_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"ns_dtype.*bfloat16.*found"):
        resolve_ns_dtype(dtype, "cpu")


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
    errors = [n for n in vars(dmuon.types) if n.endswith("Error")]
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
def test_modules_are_documented(module):
    loaded = importlib.import_module(module)
    assert loaded.__doc__ or Path(loaded.__file__).stat().st_size == 0


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


@pytest.mark.parametrize("module", SUBMODULES)
def test_examples_in_docstrings_are_true(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_examples_in_docstrings():
    finder = doctest.DocTestFinder()
    examples = {
        m: sum(len(t.examples) for t in finder.find(importlib.import_module(m))) for m in SUBMODULES
    }
    assert examples["dmuon.update"] and examples["dmuon.scheduler.specs"]
    assert sum(count > 0 for count in examples.values()) >= 15
