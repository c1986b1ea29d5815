"""`dmuon.Muon` as frameworks make it from a config: what each passes, in its smallest form."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import dmuon
from dmuon.integrations import keywords
from tests.distributed.harness import distributed
from tests.distributed.layouts import shard_units
from tests.frameworks import common

PAGES = Path(__file__).parents[2] / "docs" / "frameworks"
NUMBERS = {"lr": common.LR, "weight_decay": common.DECAY}
TEXT = {**NUMBERS, "ns_dtype": "float32"}  # as a YAML has it


def found(path: str) -> Any:
    """What a dotted name is of."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


BETAS = {"adamw_betas": [0.9, 0.95]}


def filtered(model: nn.Module) -> Any:
    """litgpt passes ``fused`` to optimizers that have such an argument."""
    own = found("dmuon.Muon")
    extra = {k: v for k, v in {"fused": True}.items() if k in inspect.signature(own).parameters}
    return own(model.parameters(), **TEXT, **extra)


def by_decay(model: nn.Module) -> Any:
    """Param groups, as most trainers make them."""
    kinds = [[p for p in model.parameters() if (p.ndim > 1) == big] for big in (True, False)]
    groups = [{"params": ps, "weight_decay": common.DECAY} for ps in kinds]
    return dmuon.Muon(groups, lr=common.LR, adamw_betas=(0.9, 0.95), ns_dtype="float32")


def verl(model: nn.Module) -> Any:
    """Two keys name the class; ``override_optimizer_config`` is laid over the config's own."""
    optim = {"optimizer_impl": "dmuon", "optimizer": "Muon"}
    override = {"ns_dtype": "float32", "adamw_betas": [0.9, 0.95]}
    return found(".".join(optim.values()))(model.parameters(), **(NUMBERS | override))


def nemo_automodel(model: nn.Module) -> Any:
    """``foreach=False`` under tensor parallelism where the class takes any keyword; a class called
    ``Muon`` would be taken for that of the package dion."""
    own = found("dmuon.integrations.DMuon")
    assert own.__name__ not in ("Muon", "NorMuon", "Dion", "Dion2")
    kinds = {p.kind for p in inspect.signature(own).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD in kinds
    return own(params=[p for p in model.parameters() if p.requires_grad], foreach=False, **TEXT)


def by_trainer(model: nn.Module) -> Any:
    """axolotl and ms-swift: the class and its arguments, of which some are text."""
    given = {"lr": common.LR} | keywords("ns_dtype=float32, betas=(0.9, 0.95)")
    groups = [{"params": [*model.parameters()], "weight_decay": common.DECAY}]
    return dmuon.Muon(groups, **given)


def torchtitan(model: nn.Module) -> Any:
    """Tensors beside their names, and flags that its container adds for all optimizers."""
    named = {big: {n: p for n, p in model.named_parameters() if (p.ndim > 1) == big}
             for big in (True, False)}  # fmt: skip
    flags = {"fused": True, "foreach": False}
    groups = [{"params": [*ps.values()], "param_names": [*ps], **flags} for ps in named.values()]
    return dmuon.Muon([group | NUMBERS for group in groups], ns_dtype="float32")


# What a framework does with `dmuon.Muon`, by its name.
HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "LightningCLI": lambda model: found("dmuon.Muon")(*(model.parameters(),), **TEXT),
    "litgpt": filtered,
    "torchtune, NeMo-RL": lambda model: found("dmuon.Muon")(
        model.parameters(), **TEXT, adamw_betas=[0.9, 0.95]
    ),
    "lerobot, named": lambda model: dmuon.Muon(dict(model.named_parameters()).items(), **TEXT),
    "torchtitan": torchtitan,
    "verl": verl,
    "nemo-automodel": nemo_automodel,
    "axolotl, ms-swift": by_trainer,
    "by keyword": lambda model: dmuon.Muon(params=model.parameters(), **TEXT, foreach=False),
    "a list": lambda model: dmuon.Muon(params=list(model.parameters()), **TEXT, fused=None),
    "groups": by_decay,
}


def configs(value: Any) -> Iterator[dict[str, Any]]:
    """Arguments of `dmuon.Muon` in a YAML, however it names the class."""
    for each in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from configs(each)
    if isinstance(value, dict) and "dmuon.Muon" in value.values():
        own = {k: v for k, v in value.items() if v != "dmuon.Muon"}
        yield own.get("init_args", own.get("kwargs", own))


def test_configs_that_pages_show_are_accepted():
    yaml, shown = pytest.importorskip("yaml"), []
    for page in sorted(PAGES.glob("*.md")):
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            shown += configs(yaml.safe_load(block))
    model = common.net()
    for given in shown:
        dmuon.Muon(model.parameters(), **given)
    assert len(shown) >= 3


WRAPPED = {
    "fully_shard": lambda model: shard_units(model, init_device_mesh("cpu", (2,))),
    "DDP": DistributedDataParallel,
}


@cache
def expected() -> Any:
    return common.by_hand(common.net)


def trained(hook: str, rank: int = 0, world: int = 1, wrap: str = "", first: bool = True) -> None:
    """Made before (``first``) or after the model is wrapped, it trains as the loop by hand."""
    model: Any = common.net()
    optimizer = HOOKS[hook](model) if first else None
    if wrap:
        model = WRAPPED[wrap](model)
    optimizer = optimizer or HOOKS[hook](model)
    losses = common.train(model, optimizer, common.schedule_of(optimizer), rank, world)
    common.assert_same((losses, common.weights(model)), expected())


@pytest.mark.parametrize("hook", HOOKS)
def test_one_process(hook):
    trained(hook)


@distributed()
def runs(rank, world, wrap, first):
    for hook in HOOKS:
        trained(hook, rank, world, wrap, first)


@pytest.mark.parametrize(("wrap", "first"), [("fully_shard", True), ("DDP", False)])
def test_two_processes(pools, wrap, first):
    pools(2).run(runs.__module__, runs.__name__, {"wrap": wrap, "first": first})


def test_it_may_be_made_before_the_process_group(monkeypatch):
    """LightningCLI makes it before the strategy has met the others."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for hook in HOOKS.values():
        optimizer = hook(common.net())
        with pytest.raises(ValueError, match="torch.distributed is not initialized"):
            optimizer.report()


@pytest.mark.parametrize(("given", "expected"), [
    (None, {}),
    ({"ns_steps": 6}, {"ns_steps": 6}),
    ("ns_steps=6,nesterov=False", {"ns_steps": 6, "nesterov": False}),
    ("betas=(0.9, 0.95), ns_dtype=float32", {"adamw_betas": (0.9, 0.95), "ns_dtype": "float32"}),
])  # fmt: skip
def test_keyword_arguments_as_text(given, expected):
    assert keywords(given) == expected


@pytest.mark.parametrize("given", ["ns_steps", "ns_steps=6 lr=1", "0.9, lr=1", "**x"])
def test_other_text_is_an_error(given):
    with pytest.raises(ValueError, match="name=value"):
        keywords(given)
