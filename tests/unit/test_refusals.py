"""What is refused, or warned about, on one process: by name, before anything changes."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import dmuon
from dmuon.__main__ import main
from dmuon.ownership import ownerships_of
from dmuon.types import OwnershipError
from tests.unit.models import TinyGPT, assert_bitwise, clone, tokens, train, weights
from tests.unit.test_single_process import SETTINGS, backward, dedicated

LAYOUTS = pytest.mark.parametrize("layout", ["replicated", "dedicated"])


# What is meant by what users and other optimizers write.
SLIPS = {
    "momentm": "momentum", "mu": "momentum", "wieght_decay": "weight_decay", "wd": "weight_decay",
    "muon_lr": "lr", "LR": "lr", "use_nesterov": "nesterov", "backend_steps": "ns_steps",
    "beta": "betas", "epsilon": "eps", "adjust_lr_fun": "adjust_lr_fn", "adamw_wd":
    "adamw_weight_decay", "maximise": "maximize", "peroid": "period", "usemuon": "use_muon",
}  # fmt: skip


# ---- mistakes, and how they are told -----------------------------------------------------


def plan(**arguments: Any) -> Any:
    return lambda model: dmuon.dedicate_params(model, **arguments)


def muon(**settings: Any) -> Any:
    return lambda model: dmuon.Muon(model, **settings)


def planned(make: Any = lambda model: model, **settings: Any) -> Any:
    """An optimizer of what ``make`` makes of a model that is planned."""

    def call(model: nn.Module) -> None:
        dmuon.dedicate_params(model)
        dmuon.Muon(make(model), **settings)

    return call


def started(**settings: Any) -> Any:
    """An optimizer that plans."""
    return lambda model: dmuon.Muon(model, ns_dtype=torch.float32, **settings).report()


def group(of: Any = lambda m: m.named_parameters(), **said: Any) -> Any:
    return lambda model: dmuon.Muon([{"params": of(model), **said}])


def vectors(model: nn.Module) -> list[Any]:
    return [(n, p) for n, p in model.named_parameters() if p.ndim < 2]


def matrices(model: nn.Module) -> list[Any]:
    return [*model.blocks.get_submodule("0.up").named_parameters()][:1]


def again(model: nn.Module) -> None:
    stepped(model)
    dmuon.dedicate_params(nn.Sequential(model))


def second(model: nn.Module) -> None:
    stepped(model)
    dmuon.Muon(model)


def unplanned(**dedicate: Any) -> Any:
    return lambda model: dmuon.Muon(model, dedicate=dedicate)


TWICE = r"'embed\.weight' appears twice"
NO_NAMES = r"without names.*pass the model.*dedicate_params\(model\) first.*algorithm="
BEFORE = r"dmuon\.dedicate_params\(model, \.\.\.\) with these arguments before"
NOBODYS = r"param_groups\[0\] has '{}', which nobody reads.*{}"
# A call with a `TinyGPT`, the type of the error, words of its text.
MISTAKES: list[tuple[Any, type[Exception], str]] = [
    # Models.
    (lambda m: dmuon.dedicate_params(nn.Sequential(nn.LayerNorm(4), nn.Embedding(9, 4))),
     ValueError, "nothing for Muon to do"),
    (lambda m: dmuon.dedicate_params(TinyGPT().to("meta")),
     ValueError, r"'embed\.weight' is on the meta device"),
    (lambda m: dmuon.dedicate_params([nn.Parameter(torch.zeros(2, 2))]), TypeError, r"nn\.Module"),
    (lambda m: dmuon.dedicate_params(nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64))),
     ValueError, r"'0\.weight' is complex"),
    (again, OwnershipError, r"close\(\)"),
    (second, OwnershipError, "already have a dmuon.Muon"),
    # How to plan.
    (plan(layout="scattered"), ValueError, r"layout.*'scattered'"),
    (plan(layout="sharded"), ValueError, "layout='sharded'"),
    (plan(solver="simplex"), ValueError, "solver='simplex'"),
    (plan(costs="guessed"), ValueError, "costs='guessed'"),
    (plan(options={"bucket_bytes": 1}), TypeError, "ReplicatedOptions"),
    (plan(planner={"max_batch": 1}), TypeError, "PlannerOptions"),
    (plan(mesh="cpu"), ValueError, "mesh"),
    (plan(kernels="fast"), TypeError, "kernels must be KernelOptions, found str"),
    *((plan(kernels=dmuon.KernelOptions(**{key: value})), ValueError, words)
      for key, value, words in (
        ("method", "fast", "method must be one of auto, standard, gram"),
        ("backend", "cutlass", "'auto' or one of torch, .*'cutlass'"),
    )),
    *((started(dedicate={"kernels": dmuon.KernelOptions(**{key: value})}), ValueError, words)
      for key, value, words in (
        ("backend", "triton", "'triton' cannot run on cpu"),
        ("method", "gram[4]", r"diverges in torch\.float32 over 5 steps"),
        ("cuda_graphs", True, "needs a CUDA device, found cpu"),
    )),
    (plan(splits={"no.such": [1]}), ValueError, r"no\.such"),
    (plan(plan="plan.json"), TypeError, "plan must be .*from_json"),
    (plan(select=lambda name, p: True), ValueError, r"norm\.(bias|weight)'"),
    (unplanned(split={}), TypeError, r"dmuon\.dedicate_params \(.*splits.*found \['split'\]"),
    (unplanned(layout="dedicated"), OwnershipError, BEFORE),
    (unplanned(options=dmuon.ReplicatedOptions(reduce_to_owner=True)), OwnershipError, BEFORE),
    (planned(dedicate={"solver": "greedy"}), OwnershipError, "are planned: say it there"),
    # Parameters.
    *((planned(make), OwnershipError, TWICE) for make in (
        lambda m: [*m.parameters(), m.embed.weight],
        lambda m: [{"params": m.parameters()}, {"params": [m.embed.weight]}],
        lambda m: [*m.named_parameters(), ("embed.weight", m.embed.weight)],
    )),
    (planned(lambda m: m.blocks.parameters()), OwnershipError,
     r"not passed to dmuon\.Muon: embed\.weight"),
    (planned(lambda m: [*m.parameters(), nn.Parameter(torch.zeros(3, 5))]), OwnershipError,
     r"shape \(3, 5\).*not part of dedicate_params"),
    *((lambda m, wrong=wrong: dmuon.Muon(wrong), TypeError, "parameters")
      for wrong in (3, torch.zeros(2, 2), [3], [("name", 3)], [{"lr": 1.0}], {"a": 1}, {3})),
    *((lambda m, empty=empty: dmuon.Muon(empty), ValueError,
       "got no parameters.*used up.*Pass the model") for empty in ([], iter(()), ())),
    # Of a model that nobody keeps.
    (lambda m: dmuon.Muon(list(TinyGPT().parameters())), OwnershipError, NO_NAMES),
    (lambda m: dmuon.Muon([{"params": list(TinyGPT().blocks.parameters()), "use_muon": True},
                           {"params": list(TinyGPT().norm.parameters())}]),
     OwnershipError, NO_NAMES),
    (group(algorithm="sgd"), ValueError, r"algorithm='sgd'.*\"muon\" or \"adamw\""),
    # Settings.
    (planned(period=2), ValueError, r"period=2.*'replicated'"),
    (planned(period=float("inf")), ValueError, "period=inf"),
    (planned(block_lr_ratio=0.5), ValueError, "block_lr_ratio"),
    (muon(ns_dtype="half"), ValueError, "dtype.*'half'"),
    (muon(ns_coefficients="unheard of"), ValueError, "unheard of"),
    (muon(ns_coefficients=[(1, 2, 3)] * 4), ValueError, "4 coefficient triples for steps=5"),
    (muon(adamw_lr=-1.0), ValueError, "adamw_lr must be"),
    (muon(lr=0.0, adamw_lr=1e-3), ValueError, "groups of their own"),
    *((muon(adamw_betas=wrong), error, "^adamw_betas must be two numbers") for wrong, error in
      ((0.9, TypeError), ((0.9, 1.5), ValueError), ("0.9, 0.95", TypeError))),
    # Settings of groups, those that wait for their parameters included.
    (group(lr="1e-3"), TypeError, r"lr must be .*'1e-3' in opt\.param_groups\[0\]"),
    (group(betas="1e-3"), TypeError, r"^betas must be two .*'1e-3' in opt\.param_groups\[0\]"),
    (group(matrices, betas=(2, 3)), ValueError, "betas"),
    *((group(vectors, **{key: value}), error, words) for key, value, error, words in (
        ("momentum", -3, ValueError, "momentum must be .*found -3"),
        ("ns_steps", 0, ValueError, "ns_steps must be .*found 0"),
        ("adjust_lr_fn", "orig", ValueError, "adjust_lr_fn must be .*found 'orig'"),
        ("nesterov", 1, TypeError, "nesterov must be .*found 1"),
        ("ns_coefficients", "nonsense", ValueError, "unknown coefficient set"),
        ("variant", "typo", ValueError, "variant"),
    )),
    # Keys that nobody reads.
    *((group(**{key: value}), OwnershipError, NOBODYS.format(key, words)) for key, value, words in (
        ("maximize", True, "negate the loss"),
        ("capturable", True, "leave the flag out"),
        ("period", 4, r"all groups, so pass dmuon.Muon\(..., period"),
        ("ns_dtype", "bfloat16", "for all groups"),
        ("nonfinite", "raise", "for all groups"),
        ("heads", 3, "dedicate="),
    )),
    *((group(matrices, **{slip: 0.5}), OwnershipError, rf"'{slip}'.*did you mean '{meant}'")
      for slip, meant in SLIPS.items()),
    # Keywords of other optimizers.
    *((muon(**{key: True}), TypeError, words) for key, words in {
        "fused": "'fused'.*fused anyway.*leave the flag out",
        "maximize": "negate the loss",
        "wd": "'weight_decay'",
        "use_muon": r"a key of a param group.*'use_muon'",
        "heads": r"dedicate=\{'heads'",
        "selection": "remove it",  # not self
        "quite_another": "remove it",
    }.items()),
    (muon(betas=(0.8, 0.9), adamw_betas=(0.7, 0.9)), TypeError,
     "betas=.*adamw_betas=.*one of them"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:dmuon.Muon will not take betas")
@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_mistake_is_an_error_that_says_so_and_the_model_stays_usable(number):
    call, error, words = MISTAKES[number]
    model = TinyGPT()
    with pytest.raises(error, match=words):
        call(model)
    for own in ownerships_of(model):
        own.close()
    train(model, dmuon.Muon(model), tokens(), range(1))


def test_every_setting_of_a_wrong_type_is_refused_by_name():
    """`object()` is right for nothing, so a setting that takes it is not looked at."""
    model = TinyGPT()
    dmuon.dedicate_params(model)
    names = list(inspect.signature(dmuon.Muon).parameters)[1:-1]
    assert len(names) >= 22
    for name in set(names) - {"dedicate"}:
        message = name if name == "ns_dtype" else rf"^(adamw_)?{name} must be .*found <object"
        with pytest.raises((TypeError, ValueError), match=message):
            dmuon.Muon(model, **{name: object()})


def test_flags_at_the_values_that_change_nothing_are_taken():
    idle = dict.fromkeys(("foreach", "fused", "maximize", "capturable", "amsgrad"), False)
    opt = dmuon.Muon(TinyGPT(), differentiable=None, **idle)
    assert not opt.param_groups[0].keys() & {*idle}
    # What frameworks look for before they pass it.
    assert not inspect.signature(dmuon.Muon).parameters.keys() & {*idle}


def test_retired_names_are_taken_with_one_warning():
    with pytest.warns(
        FutureWarning, match=r"dmuon.Muon will not take betas= \(pass adamw_b"
    ) as told:
        opt = dmuon.Muon(TinyGPT(), betas=(0.8, 0.9))
    assert len(told) == 1 and told[0].filename == __file__
    assert opt.param_groups[0]["adamw_betas"] == (0.8, 0.9)
    with pytest.warns(FutureWarning, match=r"ShardedOptions will not take buffers= \(ignored\)"):
        options = dmuon.ShardedOptions(buffers=3)
    assert options == dmuon.ShardedOptions()
    with pytest.warns(FutureWarning, match=r"dmuon.Muon will not take publish= \(ignored\)"):
        dmuon.Muon(TinyGPT(), publish="async")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = dmuon.Muon(TinyGPT(), betas=None)
    assert opt.param_groups[0]["adamw_betas"] == (0.9, 0.95)


# ---- after the first step ----------------------------------------------------------------


def test_a_model_converted_after_planning_is_refused_by_name():
    model = TinyGPT()
    _, opt = dedicated(model)
    model.double()
    backward(model, 0)
    with pytest.raises(ValueError, match=r"weight.*float64"):
        opt.step()


def stepped(model: nn.Module, planned: bool = True, **settings: Any) -> dmuon.Muon:
    """An optimizer of a model after one step, of all that is planned, or of matrices (and
    embeddings) and vectors in two groups."""
    if planned:
        _, opt = dedicated(model, **settings)
    else:
        named = list(model.named_parameters())
        groups = [[(n, p) for n, p in named if (p.ndim > 1) == big] for big in (True, False)]
        opt = dmuon.Muon([{"params": group} for group in groups], **SETTINGS)
    train(model, opt, tokens(), range(1))
    return opt


def says(number: int, key: str, value: Any, words: str) -> tuple[Any, str]:
    """A key that nobody reads is written into a group."""
    text = rf"groups\[{number}\] has '{key}', which nobody reads.*{words}"
    return lambda groups: groups[number].update({key: value}), text


CHANGES: dict[str, tuple[Any, str]] = {
    "a flag": says(0, "maximize", True, "negate the loss"),
    "a setting of all groups": says(0, "period", 4, "for all groups, so pass"),
    "a slip": says(1, "wieght_decay", 0.1, "did you mean 'weight_decay'"),
    "a rate of AdamW": says(0, "adamw_lr", 0.1, "adamw_lr_ratio"),
    "betas beside matrices": says(0, "betas", (0.5, 0.5), "did you mean 'adamw_betas'"),
    "key deleted": (lambda groups: groups[0].pop("momentum"), "has lost .*'momentum'"),
    "key of AdamW deleted": (lambda groups: groups[1].pop("betas"), r"groups\[1\] has lost"),
    "group appended": (lambda groups: groups.append(dict(groups[0])), "has 3 groups, but 2"),
    "groups reversed": (lambda groups: groups.reverse(), r"groups\[0\] holds other"),
    "parameter removed": (lambda groups: groups[0]["params"].pop(), r"groups\[0\] holds other"),
    "parameters reversed": (lambda groups: groups[1]["params"].reverse(), "in another order"),
    "parameter exchanged": (
        lambda groups: groups[0]["params"].__setitem__(0, groups[0]["params"][0].detach()),
        r"groups\[0\] holds other",
    ),
} | {
    f"lr={value!r} in group {n}": (
        lambda groups, n=n, value=value: groups[n].update(lr=value),
        rf"lr must.*opt\.param_groups\[{n}\]",
    )
    for n in (0, 1) for value in ("1e-4", None, -1.0, float("nan"))
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_groups_are_refused_before_anything_changes(change):
    model = TinyGPT()
    opt = stepped(model, planned=False)
    before, rates = weights(model), [group["lr"] for group in opt.param_groups]
    backward(model, 1)
    alter, message = CHANGES[change]
    alter(opt.param_groups)
    with pytest.raises((TypeError, ValueError), match=message):
        opt.step()
    assert_bitwise(weights(model), before)
    if change.startswith("lr="):
        for group, lr in zip(opt.param_groups, rates):
            group["lr"] = lr
        opt.step()


# ---- half precision ----------------------------------------------------------------------


def half_precision(dtype: torch.dtype, layout: str = "replicated", weight: float = 0.02):
    """Two matrices of 32 x 32 whose entries are all ``weight``, rounded."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).to(dtype)
    for p in model.parameters():
        nn.init.constant_(p, weight)
    dmuon.dedicate_params(model, layout=layout)
    return model


# Half a unit in the last place of 0.02 is 2**-14 = 6.1e-5 in bfloat16 and 2**-17 = 7.6e-6 in
# float16; an update is 0.2 lr with "match_rms_adamw" and lr / sqrt(32) with "original".
LOST = [
    (torch.bfloat16, {"lr": 3e-4, "adjust_lr_fn": "original"}, "5.3e-05", "6.1e-05"),
    (torch.float16, {"lr": torch.tensor(1e-5)}, "2e-06", "7.6e-06"),
]
KEPT = [
    (torch.bfloat16, {"lr": 4e-4, "adjust_lr_fn": "original"}, 0.02),
    (torch.bfloat16, {"lr": 1e-4, "master_weights": True}, 0.02),
    (torch.bfloat16, {"lr": 0.0}, 0.02),
    (torch.float32, {"lr": 1e-9}, 0.02),
    # Weights that are not there yet.
    *((torch.bfloat16, {"lr": 1e-4}, weight) for weight in (0.0, float("nan"))),
]


@LAYOUTS
@pytest.mark.parametrize(("dtype", "settings", "update", "ulp"), LOST)
def test_updates_that_are_rounded_away_are_told_once_with_the_numbers(
    dtype, settings, update, ulp, layout
):
    model = half_precision(dtype, layout)
    with pytest.warns(RuntimeWarning) as caught:
        dmuon.Muon(model, **settings)
    text = (
        rf"lr={float(settings['lr']):g} a typical update of a {str(dtype)[6:]} matrix is {update}, "
        rf"and half a unit in the last place of its typical weight, 0\.02, is {ulp}.*"
        r"master_weights=True"
    )
    (warning,) = caught
    assert re.search(text, str(warning.message)) and warning.filename == __file__


def test_warnings_point_at_the_users_line_and_come_once():
    """Through torch's wrappers of `step`, through a scheduler's, and from planning."""
    model, frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    frozen.weight.requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        opt = dmuon.Muon(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0)
        late = dmuon.Muon(list(frozen.named_parameters()))
        for _ in range(3):
            opt.step()
            schedule.step()
            frozen.bias.grad = torch.ones(4)
            late.step()
        state = {"state": {}, "param_groups": opt.state_dict()["param_groups"]}
        state["state"] = {0: {"momentum_buffer": torch.zeros(4, 4)}}
        opt.load_state_dict(state)
    told = [w for w in caught if "dmuon" in str(w.message)]
    assert {w.filename for w in told} == {__file__}
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    found = [lines[w.lineno - 1].strip() for w in told]
    assert found == ["opt.step()", "late.step()", "opt.load_state_dict(state)"]
    assert "did you call backward()?" in str(told[0].message)


@pytest.mark.parametrize(("dtype", "settings", "weight"), KEPT)
def test_nothing_is_said_where_updates_count(dtype, settings, weight):
    model = half_precision(dtype, weight=weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dmuon.Muon(model, **settings)


def test_the_worst_of_several_groups_is_told():
    model = half_precision(torch.bfloat16)
    groups = [{"params": [layer.weight], "lr": lr} for layer, lr in zip(model, (1e-4, 1e-6))]
    with pytest.warns(RuntimeWarning, match="lr=1e-06") as caught:
        dmuon.Muon(groups)
    assert len(caught) == 1


# ---- several processes that do not know each other ---------------------------------------


STARTS: dict[str, Any] = {
    "dedicate_params": lambda: dmuon.dedicate_params(TinyGPT()),
    "Muon": lambda: dmuon.Muon(TinyGPT()).report(),  # it may be made before the group
    "check_step_equivalence": lambda: dmuon.check_step_equivalence(
        TinyGPT, lambda m, x: m(x).sum(), lambda step, rank: tokens()(0)
    ),
}


@pytest.mark.parametrize("start", STARTS)
def test_processes_of_a_launcher_without_a_process_group_are_refused(monkeypatch, start):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = rf"dmuon\.{start}: .*WORLD_SIZE=2.*torch\.distributed\.init_process_group\(\)"
    with pytest.raises(OwnershipError, match=message):
        STARTS[start]()


def test_a_model_dedicated_before_there_was_a_process_group_is_refused(monkeypatch):
    model = TinyGPT()
    dmuon.dedicate_params(model, costs="analytic")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    told = r"init_process_group\(\) before dmuon.dedicate_params"
    with pytest.raises(OwnershipError, match=told):
        dmuon.Muon(model)


def test_a_world_size_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2.0")
    with pytest.raises(OwnershipError, match=r"WORLD_SIZE='2.0' must be"):
        dmuon.dedicate_params(TinyGPT())


@pytest.mark.parametrize(("text", "group"), [
    ("1", False), ("", False), (None, False), ("8", True), ("two", True),
])  # fmt: skip
def test_a_world_of_one_needs_no_process_group_and_one_that_is_there_counts(
    monkeypatch, text, group
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if text is not None:
        monkeypatch.setenv("WORLD_SIZE", text)
    if group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stepped(TinyGPT()).ownership.close()
    finally:
        if group:
            dist.destroy_process_group()


@pytest.mark.parametrize("command", [
    ["plan", "--model", "qwen2.5-0.5b", "--mesh", "4", "--costs", "analytic:h100"],
    ["profile", "--shapes", "8x8", "--max-batch", "1", "--out", "-"],
], ids=lambda command: command[0])  # fmt: skip
def test_commands_of_one_process_run_under_a_launcher(monkeypatch, capsys, command):
    """They plan and measure for processes that they are no part of."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command) == 0
    assert capsys.readouterr().out


# ---- parameters that were replaced -------------------------------------------------------


def assign_state(model: nn.Module) -> None:
    model.load_state_dict(clone(model).state_dict(), assign=True)
    for p in model.parameters():
        p.requires_grad_(True)


def replace_gain(model: nn.Module) -> None:
    model.norm.weight = new(model.norm.weight)


def new(p: torch.Tensor, **how: bool) -> nn.Parameter:
    return nn.Parameter(p.detach().clone(), **how)


ANOTHER, NONE = "is another parameter object", "was no parameter"
REPLACEMENTS: dict[str, tuple[Any, str, str]] = {
    "adapter": (
        lambda m: m.blocks[0].up.add_module("adapter", nn.Linear(2, 2)),
        r"blocks\.0\.up\.adapter\.weight", NONE,
    ),
    "weight": (
        lambda m: setattr(m.blocks[0].up, "weight", new(m.blocks[0].up.weight)),
        r"blocks\.0\.up\.weight", ANOTHER,
    ),
    "gain": (replace_gain, r"norm\.weight", ANOTHER),
    "state": (assign_state, r"embed\.weight", ANOTHER),
    "untied": (
        lambda m: setattr(m.lm_head, "weight", new(m.embed.weight)), r"lm_head\.weight", ANOTHER,
    ),
    "weight norm": (
        lambda m: nn.utils.parametrizations.weight_norm(m.lm_head),
        r"lm_head\.parametrizations\.weight\.original\d", NONE,
    ),
}  # fmt: skip


@LAYOUTS
@pytest.mark.parametrize("case", REPLACEMENTS)
def test_a_parameter_that_was_replaced_is_refused_by_name(case, layout):
    replace, name, what = REPLACEMENTS[case]
    model = TinyGPT()
    if case == "untied":
        model.lm_head.weight = model.embed.weight
    wrapped = torch.compile(model, backend="eager") if case == "gain" else model
    opt = stepped(wrapped, layout=layout)
    replace(model)
    backward(model, 1)
    message = rf"'{name}' {what}.*in place.*own\.close\(\)"
    with pytest.raises(OwnershipError, match=message):
        dmuon.clip_grad_norm_(wrapped, 1.0)
    with pytest.raises(OwnershipError, match=message):
        opt.step()
    opt._run.ownerships[0].close()
    stepped(wrapped, layout=layout).ownership.close()  # what the message says


FOLLOWED: dict[str, Any] = {
    "a gain frozen": lambda m: setattr(m.norm, "weight", new(m.norm.weight, requires_grad=False)),
    "a module dropped": lambda m: setattr(m, "blocks", m.blocks[:1]),
    "parametrized": lambda m: nn.utils.parametrize.register_parametrization(
        m.norm, "bias", nn.Identity()
    ),
    "tied": lambda m: setattr(m.lm_head, "weight", m.embed.weight),
    "loaded in place": lambda m: m.load_state_dict(clone(m).state_dict()),
}


@LAYOUTS
@pytest.mark.parametrize("change", FOLLOWED)
def test_what_replaces_no_trained_parameter_is_followed(change, layout):
    model = TinyGPT()
    opt = stepped(model, layout=layout)
    FOLLOWED[change](model)
    train(model, opt, tokens(), range(1, 3))
    backward(model, 3)
    with mock.patch.object(nn.Module, "named_parameters") as searched:
        opt.step()
    assert not searched.called  # the change has been looked at once
    replace_gain(model)
    backward(model, 4)
    with pytest.raises(OwnershipError, match=r"'norm\.weight'"):
        opt.step()


@LAYOUTS
def test_a_schedule_may_miss_zero_by_a_rounding(layout):
    model = TinyGPT()
    _, opt = dedicated(model, layout=layout)
    schedule = LinearLR(opt, end_factor=0.0, total_iters=10)
    for step in range(12):
        train(model, opt, tokens(), [step])
        schedule.step()
    assert [group["lr"] for group in opt.param_groups] == [0.0] * len(opt.param_groups)
    opt.param_groups[0]["lr"] = -1e-6
    backward(model, 0)
    with pytest.raises(ValueError, match=r"lr must be a finite number >= 0, found -1e-06"):
        opt.step()
