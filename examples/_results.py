"""Results of a training run of the examples: a table, a JSON file, a plot of the losses."""

from __future__ import annotations

import json
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


@dataclass
class Run:
    """One optimizer's training. Losses are in nats per byte, averaged over the ranks."""

    name: str
    lr: float
    losses: list[float] = field(default_factory=list)  # one per step
    validation: list[tuple[int, float]] = field(default_factory=list)  # (steps done, loss)
    step_ms: list[float] = field(default_factory=list)  # `optimizer.step()` on the slowest rank
    tokens: int = 0
    seconds: float = 0.0  # of training, without validation

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
            "validation": [{"step": step, "loss": loss} for step, loss in self.validation],
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
    """Draw every step's loss faintly, its moving mean, and the validation losses.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.2), layout="constrained")
    for run in runs:
        _draw_run(axes, run)
    axes.set_title(title, loc="left", fontsize=12, pad=12)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per byte)")
    axes.set_xlim(0, max(len(run.losses) for run in runs) * 1.02)
    axes.set_ylim(*_loss_limits(runs))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_run(axes: Any, run: Run) -> None:
    color = COLORS.get(run.name)
    steps = np.arange(1, len(run.losses) + 1)
    axes.plot(steps, run.losses, color=color, alpha=0.2, linewidth=0.8)
    axes.plot(
        steps, _moving_mean(run.losses), color=color, linewidth=1.8, label=f"{run.name}, training"
    )
    at, losses = zip(*run.validation, strict=True)
    label = f"{run.name}, validation ({losses[-1]:.3f} at the end)"
    axes.plot(
        at, losses, "o", color=color, markeredgecolor="white", markersize=7, label=label, zorder=3
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
    low, high = min(after_fall), max(after_fall)
    margin = 0.05 * (high - low)
    return low - margin, high + margin
