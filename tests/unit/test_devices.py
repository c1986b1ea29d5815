"""Devices, as far as a CPU shows them: types, names, memory, graphs, any accelerator."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import types
from unittest import mock

import pytest
import torch

import dmuon
from dmuon import devices
from dmuon.config import KernelOptions
from dmuon.kernels.newton_schulz import resolve_coefficients
from dmuon.kernels.runner import Call, Orthogonalizer

CPU, F32 = torch.device("cpu"), torch.float32


def test_any_accelerator_has_half_precision_and_is_not_read():
    for kind in ("cuda", "xpu", "mps", "hpu", "mtia"):
        device = devices.of(kind)
        assert device.ns_dtype().itemsize == 2 and not device.is_cpu
        assert not devices.host_can_read(device.device)
    assert devices.of("hpu").ns_dtype() is torch.bfloat16, "its float16 is not for matrices"
    assert {name for name in devices.TYPES if devices.of(name).graphs()} == {devices.GPU}
    assert devices.of("xpu").graphs() is None and "this is xpu" in devices.of("xpu").why_no_triton()


def test_an_accelerator_tells_its_own_name_and_memory_never_the_hosts():
    device = devices.of("xpu:1")
    module = types.SimpleNamespace(get_device_name=lambda d: f"Max 1550 {d.index}")
    with mock.patch("torch.get_device_module", return_value=module):
        assert device.name() == "Max 1550 1"
    with mock.patch("torch.get_device_module", return_value=types.SimpleNamespace()):
        assert device.name() == "xpu"
    with mock.patch("torch.accelerator.get_memory_info", return_value=(3, 5)):
        assert device.memory() == (3, 5)
    with mock.patch("torch.accelerator.get_memory_info", side_effect=RuntimeError):
        assert device.memory() == (math.inf, math.inf)
    with (
        mock.patch("torch.mps.recommended_max_memory", return_value=9),
        mock.patch("torch.mps.driver_allocated_memory", return_value=2),
    ):
        assert devices.of("mps").memory() == (7, 9)


def test_old_gpus_are_told_why_there_is_no_triton():
    device = devices.of("cuda:0")
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert "PyTorch finds no GPU" in device.why_no_triton()
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("dmuon.devices._capability", return_value=(7, 5)),
        mock.patch("torch.version.hip", None),
    ):
        assert "compute capability 7.5; use a GPU with 8.0" in device.why_no_triton()


def test_free_memory_of_the_host_is_what_is_available_or_less_in_a_container(tmp_path):
    for path, text, expected in (
        ("proc/nothing", "", (math.inf, math.inf)),
        ("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    5 kB\n", (5 * 1024, 9 * 1024)),
        ("sys/fs/cgroup/memory.current", "500\n", (5 * 1024, 9 * 1024)),
        ("sys/fs/cgroup/memory.max", "max\n", (5 * 1024, 9 * 1024)),
        ("sys/fs/cgroup/memory.max", "2500\n", (2000, 2500)),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        assert devices.host_memory(tmp_path) == expected


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_all_graphs_share_a_pool_and_copies_have_their_own(monkeypatch, duplicate):
    pools = []

    def capturing(graph, *, pool, stream, capture_error_mode):
        assert (stream, capture_error_mode) == ("stream", "thread_local")
        pools.append(pool)
        return contextlib.nullcontext()

    graph = types.SimpleNamespace(replay=lambda: None)
    for name, value in {
        "device": lambda device: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "graph_pool_handle": object,
        "CUDAGraph": lambda: graph,
        "graph": capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(devices, "_capture_stream", lambda index: "stream")
    graphs = devices.CudaGraphs(CPU)
    twin = duplicate(graphs)
    for one in (graphs, graphs, twin, twin, duplicate(graphs)):
        one(lambda: None)
    assert pools[0] is pools[1] and pools[2] is pools[3] and len(set(map(id, pools))) == 3
    runner = Orthogonalizer(CPU, F32, KernelOptions(), capture=graphs)
    call = Call((1, 6, 9), resolve_coefficients("polar_express", 5), "standard/torch/float32")
    for _ in range(2):  # what was captured before is gone
        runner.reserve([call], capture=True)
    assert len(set(map(id, pools))) == 5


def test_kernels_are_probed_when_a_step_is_bound(monkeypatch):
    """A first probe inside `step` would wait for the device."""
    probed: list[torch.device] = []
    monkeypatch.setattr("dmuon.step.engine.list_kernels", probed.append)
    model = torch.nn.Linear(4, 4)
    dmuon.dedicate_params(model)
    dmuon.Muon(model)
    assert probed == [CPU]
