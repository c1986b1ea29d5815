"""Real processes for tests, on gloo or with a GPU each, started once and used by every test.

::

    @distributed(2, 4)
    def test_something(rank, world):        # runs on every rank; a failed assert fails the test
        ...

Each process group that a test leaves behind keeps threads of gloo's, which wake up all the time. So
the processes leave their groups after such a test and meet anew in a fresh one, which takes
milliseconds where starting them takes seconds. A pool that failed or hung is killed, and the next
test that needs one starts a new one. With ``--device cuda`` torch's default device is the GPU of a
process: models and data that a test makes lie there, and meshes and generators that it makes are of
``torch.get_default_device()``. Costs are analytic unless a test calls `dmuon.measure` itself.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fixed_costs import analytic_costs, fixed_products

TIMEOUT_S = 120.0
GRACE_S = 5.0  # for the other ranks once one has failed
MOST_THREADS = 64  # of a process: torch 2.11 keeps groups of meshes, whatever is emptied


BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def _serve(rank: int, world: int, pipe: Connection, device: str = "cpu") -> None:
    """Run what comes: a port and a prefix of a store to meet in, or a test's (module, name,
    arguments)."""
    # What was imported before the fork is neither looked at again nor, so, copied.
    gc.freeze()
    import torch

    import dmuon.api

    dmuon.api.measured_costs = analytic_costs  # type: ignore[attr-defined]
    fixed_products().start()
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device(device, rank))
    while (message := pipe.recv()) is not None:
        if len(message) == 2:
            if dist.is_initialized():
                _forget_meshes()  # which name groups that are gone
                gc.collect()  # what still holds a group would keep its threads running
                dist.destroy_process_group()
            port, prefix = message
            timeout = timedelta(seconds=TIMEOUT_S)
            # Answers in 0.1 ms, where a store in a file takes several.
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
            dist.init_process_group(
                BACKENDS[device],
                store=dist.PrefixStore(prefix, store),
                rank=rank,
                world_size=world,
                timeout=timeout,
            )
            pipe.send(("ok", None, _threads()))
            continue
        module, name, kwargs = message
        try:
            torch.manual_seed(0)
            function = _imported(module, name)
            result = getattr(function, "body", function)(rank, world, **kwargs)
            pipe.send(("ok", result, _threads()))
        except BaseException:
            pipe.send(("failed", traceback.format_exc(), 0))
    gc.collect()
    dist.destroy_process_group()
    pipe.close()


def _imported(module: str, name: str) -> Any:
    is_new = module not in sys.modules
    found = getattr(importlib.import_module(module), name)
    if is_new:  # see `_serve`
        gc.collect()
        gc.freeze()
    return found


def _forget_meshes() -> None:
    """Empty torch's caches of what it does on a mesh."""
    from torch.distributed.tensor import _redistribute, debug
    from torch.distributed.tensor._collective_utils import MeshTopoInfo

    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()


def _threads() -> int:
    """Threads of this process, gloo's too; 0 where the system does not list them."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0


# What takes seconds to import; the last two for what tests import when they first use `DTensor`
# or register hooks.
_IMPORTS = [
    "dmuon.api",
    "dmuon.tools.parallel_models",
    "torch.distributed.pipelining",
    "torch._dynamo",
]


class Pool:
    """``world`` processes, which meet in one group; each has a device of its own if it is not
    "cpu". ``threads``: of the one that has most."""

    def __init__(self, world: int, device: str = "cpu") -> None:
        self.world = world
        self.usable = True
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._meetings = 0
        multiprocessing.set_forkserver_preload(_IMPORTS)  # all share one import of torch
        context = multiprocessing.get_context("forkserver")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, theirs, device)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._meet()

    def _meet(self) -> None:
        """Have all processes leave every group and meet in a new one."""
        self._meetings += 1
        self._ask((self._store.port, str(self._meetings)))
        self._fresh = self.threads

    def run(self, module: str, name: str, kwargs: dict[str, Any]) -> list[Any]:
        """Call the body of a test, or a function ``(rank, world, **kwargs)``, on every rank.

        Returns results by rank, or raises AssertionError.
        """
        if self.threads > self._fresh:  # the test before has left groups behind
            self._meet()
        return self._ask((module, name, kwargs))

    def _ask(self, message: object) -> list[Any]:
        try:
            return self._answers(message)
        except BaseException:  # a time limit of pytest, too: later answers would be stale
            self.kill()
            raise

    def _answers(self, message: object) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(message)
        answers: dict[int, tuple[str, Any, int]] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(answers) < self.world and (left := deadline - time.monotonic()) > 0:
            silent = {p: r for r, p in enumerate(self._pipes) if r not in answers}
            for pipe in wait(list(silent), left):
                rank = silent[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    answers[rank] = ("failed", "the process died", 0)
                if answers[rank][0] == "failed":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failures = [f"rank {r}: {a[1]}" for r, a in sorted(answers.items()) if a[0] == "failed"]
        missing = [r for r in range(self.world) if r not in answers]
        if failures or missing:
            raise AssertionError("\n".join([*failures, f"no answer from ranks {missing}"]))
        self.threads = max(answer[2] for answer in answers.values())
        return [answers[r][1] for r in range(self.world)]

    def kill(self) -> None:
        self.usable = False
        for process in self._processes:
            process.kill()
        self._join()

    def close(self) -> None:
        if not self.usable:
            return
        self.usable = False
        for pipe in self._pipes:
            pipe.send(None)
        self._join()

    def _join(self) -> None:
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        del self._store


class Pools:
    """One pool a world size, made when first asked for; a test that needs more GPUs than there are
    is skipped."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        if self._device != "cpu" and world > (count := torch.cuda.device_count()):
            pytest.skip(f"needs {world} GPUs, found {count}")
        pool = self._pools.get(world)
        if pool is not None and pool.threads > MOST_THREADS:
            pool.close()
        if pool is None or not pool.usable:
            pool = self._pools[world] = Pool(world, self._device)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def distributed(*worlds: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test's body ``(rank, world, **params)`` on every rank of each of these worlds.

    Without any, the test's parameters name the world.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(pools: Pools, world: int, **kwargs: Any) -> None:
            pools(world).run(body.__module__, body.__name__, kwargs)

        parameters = [p for n, p in inspect.signature(body).parameters.items() if n != "rank"]
        fixture = inspect.Parameter("pools", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([fixture, *parameters])  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world", worlds)(test) if worlds else test

    return decorate
