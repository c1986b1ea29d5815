"""What a user sees while costs are measured and kernels are chosen."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dmuon.scheduler.profile import Want

__all__ = ["Progress"]

_SHOW_AFTER_S = 2.0


class Progress:
    """A bar on standard error, if measuring takes more than two seconds and someone watches."""

    def __init__(
        self,
        total: int,
        *,
        shown: bool,
        what: str = "dmuon measures Newton-Schulz",
        console: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._what = what
        self._console = console
        self._clock = clock
        self._visible_at = clock() + _SHOW_AFTER_S if shown else None
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, want: Want) -> None:
        """``done`` of the wants are through, ``want`` is next."""
        self.show(done, *want.key[:2], want.batch)

    def show(self, done: int, rows: int, cols: int, batch: int) -> None:
        """``done`` are through, a batch of this shape is next."""
        if self._visible_at is None or self._clock() < self._visible_at:
            return
        if self._bar is None and not self._start():
            return
        text = f"{self._what}: {batch} x [{rows}, {cols}]"
        self._bar.update(self._bar.task_ids[0], completed=done, description=text, refresh=True)

    def _start(self) -> bool:
        from rich import progress
        from rich.console import Console

        console = self._console or Console(stderr=True)
        if not console.is_terminal:
            self._visible_at = None
            return False
        # It draws when told to, for a thread that draws would disturb what is measured.
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
        )
        self._bar.add_task("", total=self._total)
        self._bar.start()
        return True
