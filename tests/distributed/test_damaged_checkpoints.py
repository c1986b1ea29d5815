"""Checkpoints that are damaged or of another model: an error on every rank, and nothing changes."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dmuon.dtensors import local_tensor
from dmuon.types import ConsensusError, OwnershipError
from tests.distributed.compare import assert_bitwise
from tests.distributed.test_checkpoints import CASES, Training, cases


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"))


def _truncated(folder: Path) -> None:
    for file in _files(folder):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _scrambled(folder: Path) -> None:
    for file in _files(folder):
        data = bytearray(file.read_bytes())
        for at in range(200, len(data), 97):
            data[at] ^= 0x5A
        file.write_bytes(data)


def _without(pattern: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        for file in folder.glob(pattern):
            file.unlink()

    return remove


def _short_metadata(folder: Path) -> None:
    file = folder / ".metadata"
    file.write_bytes(file.read_bytes()[:100])


DAMAGES = {
    "truncated": _truncated,
    "scrambled": _scrambled,
    "no data": _without("*.distcp"),
    "no metadata": _without(".metadata"),
    "truncated metadata": _short_metadata,
}


def values(training: Training) -> dict[str, Tensor]:
    """Copies of all weights and of the optimizer's state, as this rank has them."""
    state, found = training.state(), {}
    for name, weight in state["model"].items():
        found[name] = local_tensor(weight).clone()
    for name, entry in state["optim"]["state"].items():
        found |= {
            f"{name}: {k}": local_tensor(torch.as_tensor(v)).clone() for k, v in entry.items()
        }
    return found


MIX = "blocks.0.mix.weight"


def _entry(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["state"][MIX].update(values)


def _another_algorithm(state: dict[str, Any]) -> None:
    state["state"][MIX] = state["state"]["blocks.0.norm.weight"]


def _not_finite(state: dict[str, Any]) -> None:
    state["state"][MIX]["momentum_buffer"][-1, -1] = math.nan


def _no_momentum(state: dict[str, Any]) -> None:
    entries = state["state"]
    state["state"] = {n: e for n, e in entries.items() if "momentum_buffer" not in e}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another shape": (_entry(momentum_buffer=torch.zeros(15, 14)), r"blocks\.0\.mix\.weight"),
    "another algorithm": (_another_algorithm, r"blocks\.0\.mix\.weight"),
    "fewer parameters": (lambda s: s["param_groups"][0]["params"].pop(), "parameters in 1 groups"),
    "more parameters": (lambda s: s["param_groups"][0]["params"].append("another"), "in 1 groups"),
    "no tensor": (_entry(momentum_buffer="momentum"), r"blocks\.0\.mix\.weight"),
    "not finite": (_not_finite, r"not finite: momentum_buffer of blocks\.0\.mix\.weight"),
    "no momentum": (_no_momentum, "of 3 steps and has no momentum of any matrix"),
}


@cases("ddp", "reduce_to_owner", "dedicated", "fsdp2")
def test_what_is_damaged_or_does_not_fit_changes_nothing(rank, world, name, tmp_path):
    whole_folder = tmp_path / "whole"
    training = Training(CASES[name])
    training.train(range(2))
    training.save(str(whole_folder))
    training.train(range(2, 3))
    before = values(training)

    def unchanged(what: str) -> None:
        assert_bitwise(values(training), before, what)

    for damage, change in DAMAGES.items():
        place = tmp_path / damage
        if rank == 0:
            shutil.copytree(whole_folder, place)
            change(place)
        dist.barrier()
        state = copy.deepcopy(training.state())  # a read that breaks off has written to it
        with pytest.raises(BaseException) as caught:  # CheckpointException is one
            dcp.load(state, checkpoint_id=place)
        assert str(caught.value), damage
        unchanged(damage)
    whole = training.whole()["optim"]
    for what, (change, told) in WRONG.items():
        wrong = copy.deepcopy(whole)
        change(wrong)
        with pytest.raises((ValueError, RuntimeError), match=told):
            training.opt.load_state_dict(wrong)
        unchanged(what)
    alone = copy.deepcopy(whole)
    if rank == world - 1:
        alone["state"]["blocks.0.norm.weight"]["step"] = "three"
    with pytest.raises(
        OwnershipError if rank == world - 1 else ConsensusError, match="step='three'"
    ):
        training.opt.load_state_dict(alone)
    unchanged("wrong on the last rank alone")
    alone["state"]["blocks.0.norm.weight"]["step"] = torch.tensor(3.0)
    alone["param_groups"][0]["muon_step"] = 3 + rank
    with pytest.raises(ConsensusError, match="muon_step="):
        training.opt.load_state_dict(alone)
    unchanged("another state on each rank")
    parts = copy.deepcopy(training.opt.state_dict())
    last = next(e for e in parts["state"].values() if "momentum_buffer" in e)["momentum_buffer"]
    if rank == world - 1:
        local_tensor(last)[-1, -1] = math.inf
    with pytest.raises((OwnershipError, ConsensusError), match="not finite: momentum_buffer"):
        training.opt.load_state_dict(parts)
    unchanged("not finite on the last rank alone")
    training.load(str(whole_folder))
    training.train(range(2, 4))
    training.close()
