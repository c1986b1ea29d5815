"""Configuration, public names, documentation."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import math
import pkgutil
import re

import numpy as np
import pytest
import torch

import dmuon
import dmuon.types
from dmuon.config import (
    ADAMW_RULES,
    AdamWDefaults,
    DedicatedOptions,
    KernelOptions,
    MuonDefaults,
    PlannerOptions,
    ReplicatedOptions,
    ShardedOptions,
    check_muon_group,
    checked,
)
from dmuon.kernels.newton_schulz import resolve_ns_dtype

SUBMODULES = [
    m.name
    for m in pkgutil.walk_packages(dmuon.__path__, "dmuon.")
    if "__main__" not in m.name and not m.name.startswith("dmuon.integrations.")
]


def muon_group(**changes: object) -> dict:
    return check_muon_group(dataclasses.asdict(MuonDefaults()) | changes)


def adamw_group(**changes: object) -> dict:
    group = dataclasses.asdict(AdamWDefaults(lr=1e-3, weight_decay=0.1)) | changes
    return checked(ADAMW_RULES, group, owner="AdamW ")


def test_numbers_are_kept_as_pythons_own():
    """Ranks compare settings as text, and a config may give numpy's numbers."""
    given = {"lr": np.float32(0.5), "momentum": np.float64(0.75), "ns_steps": np.int64(3)}
    kept = muon_group(weight_decay=1, **given)
    assert {name: (type(kept[name]), kept[name]) for name in (*given, "weight_decay")} == {
        "lr": (float, 0.5),
        "momentum": (float, 0.75),
        "ns_steps": (int, 3),
        "weight_decay": (float, 1.0),
    }
    assert adamw_group(betas=[np.float64(0.5), 0])["betas"] == (0.5, 0.0)
    lr = torch.tensor(0.1)  # kept as torch keeps it
    assert muon_group(lr=lr)["lr"] is adamw_group(lr=lr)["lr"] is lr
    assert muon_group(momentum_mode="sgd", dampening=0.5)["dampening"] == 0.5


NO_NUMBERS = ["0.1", None, True, [0.1], 1j]
# By group and name: what is of a wrong type, and what is out of range.
WRONG = {
    (muon_group, "lr"): (
        NO_NUMBERS, [-1e-3, math.nan, math.inf, torch.ones(2), torch.tensor(-0.1), torch.tensor(1j)]
    ),
    (muon_group, "weight_decay"): ([torch.tensor(0.1), 10**400], [-0.1]),
    (muon_group, "momentum"): ([True], [-0.1, 1.5]),
    (muon_group, "eps"): (["1e-7"], [-1e-7, 0, 1e-39, math.inf]),
    (muon_group, "dampening"): ([None], [0.5]),
    (muon_group, "nesterov"): (["no", 1], []),
    (muon_group, "ns_steps"): (["5", 5.0, True], [0, 101, 2**70]),
    (muon_group, "adjust_lr_fn"): ([True, ["original"]], ["rms", "0.2", 0, -0.2, math.inf]),
    (muon_group, "momentum_mode"): ([None], ["nag"]),
    (adamw_group, "betas"): ([0.9, "ab", (0.9, "0.95")], [(0.9, 1.0), (-0.1, 0.9), (0.9,)]),
}  # fmt: skip


@pytest.mark.parametrize(("make", "name"), WRONG)
def test_a_wrong_hyperparameter_is_refused_by_name(make, name):
    prefix = "AdamW " if make is adamw_group else ""
    for error, values in zip((TypeError, ValueError), WRONG[make, name], strict=True):
        for value in values:
            with pytest.raises(error, match=rf"^{prefix}{name} .*found {re.escape(repr(value))}"):
                make(**{name: value})


def test_the_error_says_what_to_do_about_a_string_or_a_whole_float():
    with pytest.raises(TypeError, match=r"found '1e-3': a string.*YAML.*1\.0e-3"):
        muon_group(lr="1e-3")
    for name, value in {"lr": "0.02", "ns_steps": "5", "adjust_lr_fn": "0.2"}.items():
        with pytest.raises((TypeError, ValueError), match=rf"'{value}': a string; convert it$"):
            muon_group(**{name: value})
    with pytest.raises(TypeError, match=r"True or False, found '1e-3'$"):
        muon_group(nesterov="1e-3")
    with pytest.raises(TypeError, match=r"found 5\.0: write 5"):
        muon_group(ns_steps=5.0)


OPTIONS = PlannerOptions, KernelOptions, ReplicatedOptions, ShardedOptions, DedicatedOptions


@pytest.mark.parametrize("options", OPTIONS)
def test_every_field_of_the_options_has_a_rule_and_none_can_be_set(options):
    """`object()` is right for nothing, so a field that takes it is not looked at."""
    for field in dataclasses.fields(options):
        name = f"{options.__name__}.{field.name}"
        with pytest.raises(TypeError, match=rf"^{name} must be .*, found <object"):
            options(**{field.name: object()})
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options(), field.name, 1)


@pytest.mark.parametrize(("options", "name", "value", "error"), [
    (PlannerOptions, "max_batch", "16", TypeError),
    (PlannerOptions, "max_batch", 0, ValueError),
    (PlannerOptions, "time_limit_s", math.nan, ValueError),
    (PlannerOptions, "owner_memory_bytes", "80GB", TypeError),
    (ReplicatedOptions, "bucket_bytes", 25e6, TypeError),
    (ReplicatedOptions, "reduce_dtype", "bfloat16", TypeError),
    (ReplicatedOptions, "reduce_dtype", torch.int32, ValueError),
    (ReplicatedOptions, "timeout_s", math.inf, ValueError),
    (ShardedOptions, "timeout_s", 1e30, ValueError),
    (DedicatedOptions, "prefetch", -1, ValueError),
    (DedicatedOptions, "groups", "blocks", TypeError),
])  # fmt: skip
def test_wrong_options_are_refused_by_name(options, name, value, error):
    with pytest.raises(error, match=rf"^{options.__name__}\.{name} must be .*, found "):
        options(**{name: value})


def test_the_newton_schulz_dtype_may_be_text():
    for name in ("float16", "bfloat16", "float32", "float64"):
        for text in (name, f"torch.{name}"):
            assert resolve_ns_dtype(text, "cpu") is getattr(torch, name)
    for other in ("half", "int8", "float8_e4m3fn", "", None, 16, torch.int32):
        with pytest.raises(ValueError, match=r"ns_dtype.*bfloat16.*found"):
            resolve_ns_dtype(other, "cpu")


def test_public_names_can_be_imported_and_are_sorted():
    assert dmuon.__all__ == sorted(dmuon.__all__)
    assert all(hasattr(dmuon, name) for name in dmuon.__all__)
    assert dmuon.reference.ReferenceMuon.__doc__


@pytest.mark.parametrize("name", dmuon.__all__)
def test_public_names_are_documented(name):
    thing = getattr(dmuon, name)
    # But for the signature that dataclasses make up.
    assert thing.__doc__ and not thing.__doc__.startswith(f"{getattr(thing, '__name__', '')}(")
    for method, value in vars(thing).items() if inspect.isclass(thing) else ():
        value = getattr(value, "__func__", value)
        value = value.fget if isinstance(value, property) else value
        if inspect.isfunction(value) and not method.startswith("_"):
            documented = [vars(base).get(method) for base in thing.__mro__]
            assert any(getattr(m, "__doc__", None) for m in documented if m), method


def test_muon_begins_as_torch_muon_does():
    ours = list(inspect.signature(dmuon.Muon).parameters.values())
    theirs = list(inspect.signature(torch.optim.Muon).parameters.values())
    assert [p.name for p in ours[1 : len(theirs)]] == [p.name for p in theirs[1:]]
    differing = {p.name for p, q in zip(ours[1:], theirs[1:]) if p.default != q.default}
    assert differing == {"ns_coefficients", "adjust_lr_fn"}
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) : -1])
    assert ours[-1].kind is inspect.Parameter.VAR_KEYWORD  # words of other optimizers


def test_muon_its_reference_and_config_share_their_defaults():
    ours = inspect.signature(dmuon.Muon).parameters
    theirs = inspect.signature(dmuon.reference.ReferenceMuon).parameters
    shared = ours.keys() & theirs.keys()
    assert {"lr", "momentum_mode", "adamw_betas", "ns_dtype"} <= shared
    assert {n for n in shared if ours[n].default != theirs[n].default} == set()
    for prefix, defaults in (("", MuonDefaults), ("adamw_", AdamWDefaults)):
        for field in dataclasses.fields(defaults):
            assert ours[prefix + field.name].default == field.default


def test_examples_in_docstrings_are_true():
    tried = {}
    for module in SUBMODULES:
        result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
        assert result.failed == 0, module
        tried[module] = result.attempted
    assert tried["dmuon.rule"] and tried["dmuon.scheduler.specs"]
    assert sum(count > 0 for count in tried.values()) >= 15
