"""CUDA graphs of Newton-Schulz calls: the host pays for one launch instead of thirty."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable

import torch

__all__ = ["Graphs"]


class Graphs:
    """Captures and replays calls by key.

    A call runs eagerly the first time (kernels are compiled and libraries set up then), is captured
    the second time, and replayed from then on. Only keys that were announced are captured: shapes
    that come up now and then, as when a parameter has no gradient, would fill the memory. What a
    capture raises is warned of, and everything runs eagerly from then on.

    ``capture`` records a function and returns what replays it; by default a `torch.cuda.CUDAGraph`
    on ``device``.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
    ) -> None:
        self._capture = capture or (lambda call: _capture_cuda(call, device))
        self._announced: set[Hashable] = set()
        self._seen: set[Hashable] = set()
        self._replays: dict[Hashable, Callable[[], None]] = {}
        self.failure: str | None = None

    def announce(self, keys: Iterable[Hashable]) -> None:
        """These calls will come again and again."""
        self._announced.update(keys)

    def forget(self) -> None:
        """Drop all graphs: the memory they work on has moved."""
        self._replays.clear()

    def state(self) -> str:
        """For people: what is captured, or why nothing is."""
        if self.failure is not None:
            return f"off: {self.failure}"
        return f"{len(self._replays)} of {len(self._announced)} captured"

    def run(self, key: Hashable, call: Callable[[], None]) -> None:
        """``call()``, or the replay of an earlier one with the same key.

        ``call`` reads and writes the same memory each time, and decides nothing on the host.
        """
        replay = self._replays.get(key)
        if replay is not None:
            replay()
            return
        if self.failure is not None or key not in self._announced or key not in self._seen:
            self._seen.add(key)
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


def _capture_cuda(call: Callable[[], None], device: torch.device | None) -> Callable[[], None]:
    with torch.cuda.device(device):  # which need not be the current one
        graph = torch.cuda.CUDAGraph()
        # Other threads (the watchdog of NCCL) query events meanwhile: this one alone is recorded.
        # A stream of its own, for torch's is of the device that was captured on first.
        stream = torch.cuda.Stream(device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
    return graph.replay
