"""CUDA graphs of Newton-Schulz calls: the host pays for one launch instead of thirty."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

__all__ = ["Graphs"]


class Graphs:
    """Captures and replays calls by key.

    A call runs eagerly the first time (kernels are compiled and libraries set up then), is captured
    the second time, and replayed from then on. What a capture raises is warned of, and everything
    runs eagerly from then on. A copy starts without graphs, which are about the original's memory.

    ``capture`` records a function and returns what replays it; by default a `torch.cuda.CUDAGraph`
    on ``device``.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        capture: Callable[[Callable[[], object]], Callable[[], None]] | None = None,
    ) -> None:
        self._device = device
        self._custom = capture
        self._replays: dict[Hashable, Callable[[], None] | None] = {}  # None: it ran once
        self.failure: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_replays": {}}

    def forget(self, key: Hashable) -> None:
        """Drop the graph of a call, if there is one: it will not come again."""
        self._replays.pop(key, None)

    def forget_all(self) -> None:
        """Drop all graphs: the memory they work on has moved."""
        self._replays.clear()

    def state(self) -> str:
        """For people: what is captured, or why nothing is."""
        if self.failure is not None:
            return f"off: {self.failure}"
        captured = sum(replay is not None for replay in self._replays.values())
        return f"{captured} of {len(self._replays)} captured"

    def run(self, key: Hashable, call: Callable[[], object]) -> None:
        """``call()``, or the replay of an earlier one with the same key.

        ``call`` reads and writes the same memory each time, and decides nothing on the host.
        """
        replay = self._replays.get(key)
        if replay is not None:
            replay()
            return
        if self.failure is not None or key not in self._replays:
            self._replays[key] = None
            call()
            return
        try:
            replay = self._capture(call)
        except RuntimeError as error:
            self.failure = " ".join(str(error).split())[:200] or type(error).__name__
            self._replays.clear()
            warnings.warn(
                f"dmuon: CUDA graphs are off, a capture failed ({self.failure}). Training goes on "
                "without them; KernelOptions(cuda_graphs=False) avoids this warning",
                RuntimeWarning,
                stacklevel=2,
            )
            call()
            return
        self._replays[key] = replay
        replay()

    def _capture(self, call: Callable[[], object]) -> Callable[[], None]:
        return self._custom(call) if self._custom else _capture_cuda(call, self._device)


def _capture_cuda(call: Callable[[], object], device: torch.device | None) -> Callable[[], None]:
    with torch.cuda.device(device):  # which need not be the current one
        graph = torch.cuda.CUDAGraph()
        # Other threads (the watchdog of NCCL) query events meanwhile: this one alone is recorded.
        # A stream of its own, for torch's is of the device that was captured on first.
        stream = torch.cuda.Stream(device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
    return graph.replay
