"""Progress display and step times of a training run of the examples."""

from __future__ import annotations

import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

LOG_LINES = 10  # per run, if there is no terminal for a progress bar


class Timer:
    """Times what is done in it: by the clock on a CPU, by events on CUDA, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._starts: list[Any] = []
        self._ends: list[Any] = []

    def __enter__(self) -> None:
        self._starts.append(self._now())

    def __exit__(self, *exception: object) -> None:
        self._ends.append(self._now())

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> list[float]:
        """One number each time; on CUDA only after a synchronization."""
        spans = zip(self._starts, self._ends, strict=True)
        if self._cuda:
            return [start.elapsed_time(end) for start, end in spans]
        return [1e3 * (end - start) for start, end in spans]


class Ticker:
    """On rank 0, a progress bar per run on a terminal or a few plain lines in a log."""

    def __init__(
        self, console: Console, names: list[str], steps: int, *, tokens_per_step: int
    ) -> None:
        self._console, self._steps, self._tokens_per_step = console, steps, tokens_per_step
        self._live = console.is_terminal and not console.quiet
        # Reading a loss waits for the device, so not every step does it.
        self._every = max(1, self._steps // (100 if self._live else LOG_LINES))
        self._shown = dict.fromkeys(names, 0)
        self._bar = Progress(
            TextColumn("{task.description:<5}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not self._live,
        )
        self._tasks = {name: self._bar.add_task(name, total=steps, figures="") for name in names}

    def __enter__(self) -> Ticker:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def tick(self, name: str, losses: list[Tensor], timer: Timer) -> None:
        """Show rank 0's mean loss and speed since the last call; `timer` has timed every step."""
        done = len(losses)
        if self._console.quiet or (done % self._every and done != self._steps):
            return
        shown, self._shown[name] = self._shown[name], done
        loss = torch.stack(losses[shown:]).mean().item()
        tokens = (done - shown) * self._tokens_per_step
        rate = 1e3 * tokens / sum(timer.milliseconds()[shown:])
        figures = f"loss {loss:.3f}  {rate:>7,.0f} tokens/s"
        self._bar.update(self._tasks[name], completed=done, figures=figures)
        if not self._live:
            line = f"{name:<5} step {done:>4}/{self._steps}  {figures}"
            self._console.print(line, highlight=False)
