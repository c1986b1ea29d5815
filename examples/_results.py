"""Results of a training run of the examples: a table, who is ahead at equal time, a JSON file, a
plot of the losses."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.table import Table

COLORS = {"dmuon": "#1d4ed8", "AdamW": "#ea580c"}
EQUAL = 0.01  # nats per byte: losses closer than this are called equal


@dataclass
class Run:
    """One optimizer's training. Losses are in nats per byte, averaged over the ranks."""

    name: str
    lr: float
    losses: list[float] = field(default_factory=list)  # one per step
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    step_ms: list[float] = field(default_factory=list)  # `optimizer.step()` on the slowest rank
    # Seconds of training at the end of each step: what each took on its slowest rank, added up.
    elapsed: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def seconds(self) -> float:
        return self.elapsed[-1]

    @property
    def train_loss(self) -> float:
        """Mean over the last tenth of the steps, because one batch alone says little."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])

    @property
    def validation_loss(self) -> float:
        return self.validation[-1][1]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def median_step_ms(self) -> float:
        return statistics.median(self.step_ms)

    def validation_at(self, seconds: float) -> float:
        """On a straight line between the validations around that time; NaN before the first."""
        steps, losses = zip(*self.validation, strict=True)
        times = [self.elapsed[step - 1] for step in steps]
        return float(np.interp(seconds, times, losses, left=math.nan))

    def to_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.name,
            "lr": self.lr,
            "steps": len(self.losses),
            "train_loss": self.train_loss,
            "validation_loss": self.validation_loss,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "median_step_ms": self.median_step_ms,
            "p10_step_ms": float(np.percentile(self.step_ms, 10)),
            "p90_step_ms": float(np.percentile(self.step_ms, 90)),
            "losses": self.losses,
            "elapsed": self.elapsed,
            "validation": [
                {"step": step, "seconds": self.elapsed[step - 1], "loss": loss}
                for step, loss in self.validation
            ],
        }


def results_table(runs: list[Run], title: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    table.add_column("optimizer")
    for column in ("lr", "steps", "train loss", "validation loss", "tokens/s", "step() ms"):
        table.add_column(column, justify="right")
    best = min(run.validation_loss for run in runs)
    for run in runs:
        loss = f"{run.validation_loss:.4f}"
        table.add_row(
            run.name,
            f"{run.lr:g}",
            str(len(run.losses)),
            f"{run.train_loss:.4f}",
            f"[bold green]{loss}[/]" if len(runs) > 1 and run.validation_loss == best else loss,
            f"{run.tokens_per_second:,.0f}",
            f"{run.median_step_ms:.1f}",
        )
    return table


def at_equal_time(first: Run, second: Run) -> str:
    """Who has the lower validation loss when the quicker of two runs ends.

    Validation, because training losses of one moment are of different batches. A straight line
    lies above a curve that flattens, so it does not flatter the run that goes on.
    """
    quicker, slower = sorted((first, second), key=lambda run: run.seconds)
    at = quicker.seconds
    losses = {run.name: run.validation_at(at) for run in (first, second)}
    best, worst = sorted(losses, key=losses.__getitem__)
    gap = losses[worst] - losses[best]
    if math.isnan(gap):
        verdict = "no comparison"
    elif gap < EQUAL:
        verdict = f"equal within {EQUAL}"
    else:
        verdict = f"{best} is ahead by {gap:.3f}"
    known = (f"{name} {'unknown' if x != x else f'{x:.4f}'}" for name, x in losses.items())
    line = f"At equal time ({at:.1f} s, when {quicker.name} ended): validation loss "
    line += f"{', '.join(known)}: {verdict}."
    done, steps = sum(moment <= at for moment in slower.elapsed), len(slower.losses)
    if done < steps:
        line += f" {slower.name} was at step {done} of {steps}, its learning-rate schedule"
        line += " unfinished, which counts against it."
    return line


def machine(device: torch.device) -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": _processor_name(),
        "cpus": os.cpu_count(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("dmuon", "torch", "numpy")},
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


def write_json(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def plot_losses(path: Path, runs: list[Run], title: str) -> None:
    """Draw every step's loss faintly, its moving mean, and the validation losses: against steps,
    and against seconds with the validation losses at equal time.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, sharey=True, figsize=(10, 4.6), layout="constrained"
    )
    for run in runs:
        _draw_run(left, run, list(range(1, len(run.losses) + 1)))
        _draw_run(right, run, run.elapsed)
    if len(runs) > 1:
        _mark_equal_time(right, runs)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    left.set_xlabel("step")
    right.set_xlabel("seconds of training")
    left.set_ylabel("cross-entropy (nats per byte)")
    left.set_ylim(*_loss_limits(runs))
    left.legend(frameon=False)
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=166)
    pyplot.close(figure)


def _draw_run(axes: Any, run: Run, x: list[float]) -> None:
    """``x``: where each step is."""
    color = COLORS.get(run.name)
    axes.plot(x, run.losses, color=color, alpha=0.2, linewidth=0.8)
    axes.plot(
        x, _moving_mean(run.losses), color=color, linewidth=1.8, label=f"{run.name}, training"
    )
    steps, losses = zip(*run.validation, strict=True)
    at = [x[step - 1] for step in steps]
    label = f"{run.name}, validation ({losses[-1]:.3f} at the end)"
    axes.plot(
        at, losses, "o", color=color, markeredgecolor="white", markersize=7, label=label, zorder=3
    )


def _mark_equal_time(axes: Any, runs: list[Run]) -> None:
    at = min(run.seconds for run in runs)
    axes.axvline(at, color="0.4", linewidth=1, linestyle="--")
    axes.text(at, 1, f"equal time: {at:.0f} s ", ha="right", va="top", color="0.3",
              transform=axes.get_xaxis_transform())  # fmt: skip
    for run in runs:
        loss, color = run.validation_at(at), COLORS.get(run.name)
        axes.plot(at, loss, "D", color="white", markeredgecolor=color, markersize=7, zorder=4)
        axes.annotate(
            f"{loss:.3f}",
            (at, loss),
            (0, 8),
            textcoords="offset points",
            ha="center",
            color=color,
            bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
        )


def _moving_mean(values: list[float]) -> NDArray[np.float64]:
    """Centred mean over a twentieth of the values, over fewer at both ends."""
    half = max(1, len(values) // 40)
    sums = np.concatenate(([0.0], np.cumsum(values)))
    centre = np.arange(len(values))
    first = np.maximum(centre - half, 0)
    last = np.minimum(centre + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _loss_limits(runs: list[Run]) -> tuple[float, float]:
    """Limits without the first fall from log(vocabulary), which would flatten the rest."""
    after_fall = [loss for run in runs for loss in run.losses[len(run.losses) // 15 :]]
    finite = list(filter(math.isfinite, after_fall))
    low, high = min(finite), max(finite)
    margin = 0.05 * (high - low)
    return low - margin, high + margin
