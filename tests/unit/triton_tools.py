"""Triton kernels without a GPU: run by the interpreter, or compiled for one and looked at."""

from __future__ import annotations

import functools
import importlib.util
import io
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

# Functions of triton.language that are written in Triton; they were loaded to be compiled.
_LIBRARY = ("cdiv", "max", "sum", "zeros")


def interpreted(name: str) -> ModuleType:
    """A second copy of ``dmuon.kernels.<name>`` whose kernels run on the CPU, in numpy.

    The ordinary copy stays what it is, and so does Triton outside of calls into this one.
    """
    spec = importlib.util.find_spec(f"dmuon.kernels.{name}")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    for public in module.__all__:
        if isinstance(function := getattr(module, public), FunctionType):
            setattr(module, public, _with_library(function))
    return module


def _with_library(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with interpreted_library():
            return function(*args, **kwargs)

    return call


@contextmanager
def interpreted_library() -> Iterator[None]:
    """The functions of `_LIBRARY` are interpreted too, and triton.language is as before afterwards.

    Triton's interpreter does not undo all by itself: what it patches for functions that kernels
    call stays, and later compilations in the same process fail.
    """
    patched = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    before = [dict(vars(owner)) for owner in patched]
    library = {name: InterpretedFunction(getattr(tl, name).fn) for name in _LIBRARY}
    try:
        for name, function in library.items():
            setattr(tl, name, function)
        yield
    finally:
        for owner, old in zip(patched, before, strict=True):
            _restore(owner, old)


def _restore(owner: Any, old: Mapping[str, Any]) -> None:
    for name in vars(owner).keys() - old.keys():
        delattr(owner, name)
    for name, value in old.items():
        if vars(owner)[name] is not value and name != "__annotations__":
            setattr(owner, name, value)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of a kernel. Memory in bytes; ``shared`` is per program."""

    registers: int
    spilled: int
    shared: int
    mma: int
    wgmma: int
    async_copies: int
    wide_stores: int

    def tensor_core_instructions(self, arch: int) -> int:
        return self.wgmma if arch == 90 else self.mma


# Shared memory that a program can have (CUDA C++ Programming Guide, technical specifications).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    *,
    arch: int,
    warps: int,
    stages: int = 3,
    unaligned: tuple[str, ...] = (),
) -> Compiled:
    """Compile for sm_<arch>. Arguments in neither map are 32-bit integers; all pointers and
    integers are multiples of 16 but those in ``unaligned``."""
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict.fromkeys(constants, "constexpr") | {n: types.get(n, "i32") for n in names}
    aligned = [n for n in names if signature[n] != "fp32" and n not in unaligned]
    attributes = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(
        kernel, {n: signature[n] for n in kernel.arg_names}, dict(constants), attributes
    )
    # Fusion is Triton's default on a GPU; named, because some versions warn where it is not.
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    log = io.StringIO()
    with (
        triton.knobs.nvidia.scope(),
        triton.knobs.cache.scope(),
        tempfile.TemporaryDirectory() as folder,  # a result from the cache has no log
        redirect_stdout(log),
    ):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.cache.dir = folder
        result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return _read(log.getvalue(), result.asm["ptx"], result.metadata.shared)


def _read(log: str, ptx: str, shared: int) -> Compiled:
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(registers) == len(spills) == 1, log
    return Compiled(
        registers=int(registers[0]),
        spilled=max(map(int, spills[0])),
        shared=shared,
        mma=ptx.count("mma.sync"),
        wgmma=ptx.count("wgmma.mma_async"),
        async_copies=len(re.findall(r"cp\.async\.c[ag]\.", ptx)),
        wide_stores=ptx.count("st.global.v4"),
    )
