"""Newton-Schulz of other projects, for `benchmarks.kernels --rivals`; docs/gpu.md says where to get
them. Each is found on the path, or left out by its name.

A rival takes a normalized stack ``[b, m, n]`` in the dtype in which it iterates, and gives updates.
Most iterate with coefficients of their own, so errors do not compare; times do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def dion(name: str) -> Iteration:
    """A function of ``newton_schulz_triton.py`` of https://github.com/microsoft/dion."""
    found = import_module("newton_schulz_triton")
    # Of the configurations that it tries, which take minutes to compile, those of large tiles.
    for number in (1, 2, 3):
        kernel = getattr(found, f"ns_line_{number}_kernel", None)
        if kernel is not None:
            kernel.configs = [c for c in kernel.configs if _is_large(c.kwargs)]
    iteration: Iteration = getattr(found, name)
    return iteration


def _is_large(sizes: Mapping[str, int]) -> bool:
    rows, cols, depth = (sizes[f"BLOCK_SIZE_{dim}"] for dim in "MNK")
    return rows == 128 and cols >= 128 and depth == 64


def flash_muon() -> Iteration:
    """https://github.com/nil0x9/flash-muon, which takes matrices one by one."""
    iteration = import_module("flash_muon").fast_newtonschulz
    return lambda x: [iteration(one, 5) for one in x]


RIVALS: dict[str, tuple[torch.dtype, Callable[[], Iteration]]] = {
    "torch.optim.Muon": (torch.bfloat16, torch_muon),
    "gram-newton-schulz": (torch.float16, partial(gram_newton_schulz, False)),
    "gram-newton-schulz, QuACK": (torch.float16, partial(gram_newton_schulz, True)),
    "dion": (torch.bfloat16, partial(dion, "newton_schulz_triton")),
    "dion, four steps": (torch.bfloat16, partial(dion, "newton_schulz_triton_fast")),
    "flash-muon": (torch.bfloat16, flash_muon),
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
