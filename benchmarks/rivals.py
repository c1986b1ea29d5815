"""Newton-Schulz of other projects, for `benchmarks.kernels --rivals`; docs/gpu.md says where to get
them. Each is found on the path, or left out by its name.

A rival takes a normalized stack ``[b, m, n]`` in bfloat16, in which all of them iterate, and gives
updates. Most iterate with coefficients of their own, so errors do not compare; times do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

Iteration = Callable[[Tensor], object]
MUON = (3.4445, -4.7750, 2.0315)


def torch_muon() -> Iteration:
    """The iteration of `torch.optim.Muon`, which takes matrices one by one."""
    from torch.optim._muon import _zeropower_via_newtonschulz as iteration  # has no public name

    return lambda x: [iteration(one, MUON, 5, 1e-7) for one in x]


def gram_newton_schulz(quack: bool) -> Iteration:
    """https://github.com/Dao-AILab/gram-newton-schulz, with symmetric products of QuACK or not."""
    if quack:
        import_module("quack")  # or it would fall back to torch
    found = import_module("gram_newton_schulz")
    form: Iteration = found.GramNewtonSchulz(ns_use_kernels=quack, compile_kwargs=None)
    return form


def dion() -> Iteration:
    """``newton_schulz_triton.py`` of https://github.com/microsoft/dion."""
    found = import_module("newton_schulz_triton")
    # All thirty configurations take 40 s to compile, for each shape.
    wanted = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64}
    for kernel in (found.ns_line_1_kernel, found.ns_line_2_kernel):
        alike = [c for c in kernel.configs if wanted.items() <= c.kwargs.items()]
        kernel.configs = alike[:4] or kernel.configs[:4]
    iteration: Iteration = found.newton_schulz_triton
    return iteration


def flash_muon() -> Iteration:
    """https://github.com/nil0x9/flash-muon, which takes matrices one by one."""
    iteration = import_module("flash_muon").fast_newtonschulz
    return lambda x: [iteration(one, 5) for one in x]


RIVALS: dict[str, Callable[[], Iteration]] = {
    "torch.optim.Muon": torch_muon,
    "gram-newton-schulz": partial(gram_newton_schulz, False),
    "gram-newton-schulz, QuACK": partial(gram_newton_schulz, True),
    "dion": dion,
    "flash-muon": flash_muon,
}


def prepared(make: Callable[[], Iteration], x: Tensor) -> Callable[[], object]:
    """The iteration on ``x``, as ours runs: on CUDA as a graph, where it can be captured."""
    run = partial(make(), x)
    if not x.is_cuda:
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and tries configurations
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    except RuntimeError:  # what waits for the device cannot be captured
        torch.cuda.synchronize()
        return run
    return graph.replay
