"""The `doctor` command: what it says of a machine, and that nothing stops it."""

from __future__ import annotations

import getpass
import json
import os
import platform
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import dmuon
from dmuon import devices
from dmuon.__main__ import main
from dmuon.scheduler.costs import CacheKey, CostTable, add_to_cache
from dmuon.tools import doctor


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What the command prints, by name."""
    assert main(["doctor", "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_prints_fifteen_lines_at_most_and_nothing_private(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    printed = out.splitlines()
    found = lines(capsys)
    assert len(printed) == len(found) <= 15
    assert [line[:14].strip() for line in printed] == list(found)
    assert found["dmuon"] == dmuon.__version__
    assert found["torch"].partition(";")[0] == str(torch.__version__)
    assert found["python"] == platform.python_version()
    assert "failed" not in out and not dist.is_initialized()
    home = os.path.expanduser("~")
    assert home not in out and socket.gethostname() not in out
    if getpass.getuser() != "root":
        assert getpass.getuser() not in out


def test_each_line_says_why(capsys, monkeypatch):
    found = lines(capsys)
    assert found["launcher"] == "none (WORLD_SIZE is not set): one process"
    assert "gloo for tensors on cpu" in found["process groups"]
    assert found["solver"].startswith("HiGHS") and "highspy 1." in found["solver"]
    assert "not used: Triton kernels run on GPUs" in found["triton"]
    monkeypatch.setattr(devices, "cpu_has_bf16", lambda: False)
    slow = lines(capsys)["newton-schulz"]
    assert slow == "float32 on cpu: bfloat16 products are slow here (timed)"
    assert "/float32 for 1024x4096" in lines(capsys)["kernels"]
    monkeypatch.setattr(devices, "cpu_has_bf16", lambda: True)
    assert lines(capsys)["newton-schulz"].startswith("bfloat16 on cpu: bfloat16 products are fast")


def test_it_tells_of_a_launcher_without_making_a_process_group(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert lines(capsys)["launcher"] == "rank 3 of 16, 8 per node"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert "all on one node (LOCAL_WORLD_SIZE is not set)" in lines(capsys)["launcher"]
    assert not dist.is_initialized()


def test_it_counts_what_of_the_cache_fits(capsys, tmp_path, monkeypatch):
    assert ": 0 files" in lines(capsys)["cost cache"]
    folder = tmp_path / "cache" / "dmuon"
    name, this = f"{devices.of('cpu').name()}, 2 processes", str(torch.__version__)
    table = CostTable("here", {(8, 8, "float32"): {1: 1.0}, (8, 9, "float32"): {1: 2.0}})
    for key in (CacheKey(name, this, "torch-8", "float32", 5), CacheKey(name, "1.0", "t", "x", 5)):
        assert add_to_cache(folder, key, table) is None
    (folder / "other.json").write_text("[1")
    expected = "3 files, 1 KiB; 1 for this torch, device and threads, with 2 shapes"
    assert lines(capsys)["cost cache"] == f"{folder}: {expected}".replace(str(Path.home()), "~")
    fitting = folder / CacheKey(name, this, "torch-8", "float32", 5).file_name()
    fitting.write_text(fitting.read_text().replace("1.0", "3.0"))  # its digest no longer fits
    assert "; 0 for this torch" in lines(capsys)["cost cache"]
    monkeypatch.setenv("HOME", "nowhere")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert lines(capsys)["cost cache"].startswith("none, since there is no home directory")


@pytest.mark.parametrize(("sizes", "told"), [
    ("[2]", [True, False]), ("[1, 1]", [False, True]), ("[2, 1]", [True, True]),
])  # fmt: skip
def test_links_have_the_rates_that_were_measured(capsys, tmp_path, sizes, told):
    name = f"measured: vm; nodes of {sizes}"
    key = CacheKey(name, str(torch.__version__), "links", "", 0, False)
    add_to_cache(tmp_path / "cache" / "dmuon", key, CostTable.analytic("cpu"))
    found = lines(capsys)["links"]
    assert [words in found for words in ("inside a node", "to other nodes")] == told


class Card(devices.Device):
    def name(self) -> str:
        return "Card 7"

    def facts(self) -> str:
        return "driver 1"


def test_accelerators_are_named_and_counted(capsys, monkeypatch):
    monkeypatch.setitem(devices.TYPES, "xpu", Card)
    for name, value in (("device_count", 2), ("current_device_index", 0)):
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value)
    here = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: here)
    found = lines(capsys)
    assert found["accelerators"] == "2 x Card 7, driver 1"
    assert found["newton-schulz"] == "float16 on xpu:0: the fastest that is accurate enough"
    assert "/torch/float16 for 1024x4096 (by rule" in found["kernels"]
    assert "for tensors on xpu" in found["process groups"]


def test_what_fails_is_said_and_the_rest_is_printed(capsys, monkeypatch):
    def broken(own: devices.Device) -> str:
        raise OSError(f"{Path.home()}/lib.so\nis damaged")

    monkeypatch.setitem(doctor._LOOKS, "solver", broken)
    found = lines(capsys)
    assert found["solver"] == "failed: OSError: ~/lib.so is damaged"
    assert "failed" not in "".join(text for name, text in found.items() if name != "solver")


def test_it_works_without_optional_packages(capsys, monkeypatch):
    for name in ("pulp", "highspy", "triton"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    found = lines(capsys)
    assert "greedy and covering search alone; pip install 'pulp[highs]'" in found["solver"]
    assert "failed" not in str(found)


def test_it_names_what_an_older_torch_cannot_do(capsys, monkeypatch):
    newest = lines(capsys)["torch"]
    assert ("cannot do" in newest) is (torch.__version__ < "2.13")
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    monkeypatch.setattr(torch.serialization, "get_safe_globals", list)
    assert lines(capsys)["torch"] == (
        f"{torch.__version__}; cannot do: FSDP2 with parameters that some ranks do not use; "
        "torch.load(weights_only=True) of FSDP2 on top of tensor parallelism"
    )
