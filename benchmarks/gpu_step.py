"""Does `dmuon.Muon` on one device do what Muon does, in every layout and with every kernel?

``python -m benchmarks.gpu_step --json out.json`` trains a small model in one process beside
`ReferenceMuon` and compares every step, as `dmuon.check_step_equivalence` does: weights to 1e-5
where Newton-Schulz runs in float32, each update to 5% where it runs in half precision. Layouts
sharded, replicated and dedicated; CUDA graphs on and off; plain torch products, Triton kernels, and
what tuning chooses. Where graphs are on it has to have captured all calls.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon
from benchmarks.results import document
from dmuon.equivalence_trial import Rounding, Trial
from dmuon.kernels.backends import why_not
from dmuon.types import KernelChoice

__all__ = ["Setting", "main", "settings", "step_row"]

LAYOUTS = ("replicated", "dedicated", "sharded")
STEPS = 5  # graphs are captured in the second and replayed from the third on
_WIDTH, _HIDDEN, _TOKENS = 256, 640, 1024


@dataclass(frozen=True, slots=True)
class Setting:
    """One training run. ``costs``: "measured" lets tuning choose the kernels."""

    layout: str
    backend: str
    graphs: bool
    ns_dtype: str
    costs: str = "analytic"

    def __str__(self) -> str:
        graphs = "graphs" if self.graphs else "no graphs"
        return f"{self.layout}, {self.backend}, {graphs}, {self.ns_dtype}, {self.costs} costs"


class Block(nn.Module):
    """Square, wide and tall matrices, two of them narrow enough for the kernel of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.mix = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.up = nn.Linear(_WIDTH, _HIDDEN)
        self.down = nn.Linear(_HIDDEN, _WIDTH)
        self.narrow = nn.Linear(_WIDTH, 96)
        self.widen = nn.Linear(96, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(self.norm(x))
        y = y + self.down(torch.tanh(self.up(y)))
        return x + self.widen(torch.tanh(self.narrow(y)))


class Model(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def settings(device: torch.device) -> Iterator[Setting]:
    on_cuda = device.type == "cuda"
    backends = ["auto"]
    if on_cuda:
        backends = ["torch"] + ["triton"] * (why_not("triton", device, torch.float16) is None)
    half = "float16" if on_cuda else "float32"
    for layout in LAYOUTS:
        for backend in backends:
            for graphs in (True, False) if on_cuda else (False,):
                yield Setting(layout, backend, graphs, half)
        yield Setting(layout, backends[-1], on_cuda, "float32")
        yield Setting(layout, "auto", on_cuda, half, costs="measured")


def step_row(setting: Setting, device: torch.device, cache_dir: str) -> dict[str, Any]:
    """Train and compare; the verdict as a row. Needs an initialized process group."""
    torch.manual_seed(0)
    model: nn.Module = Model().to(device)
    twin = copy.deepcopy(model)
    if setting.layout == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    own = dmuon.dedicate_params(
        model,
        layout=setting.layout,
        costs=setting.costs,
        solver="greedy",  # one owner: there is nothing to plan, and no solver is needed
        planner=dmuon.PlannerOptions(profile_budget_s=2.0, cache_dir=cache_dir),
        kernels=dmuon.KernelOptions(
            backend=setting.backend, cuda_graphs=setting.graphs, tune_budget_s=5.0
        ),
    )
    ns_dtype = getattr(torch, setting.ns_dtype)
    try:
        rounding = Rounding.of(own, None, False)
        trial = Trial(own, twin, model, (0, 1), rounding, {"ns_dtype": ns_dtype})
        trial.run(STEPS, loss_of, lambda step, rank: _batch(step, device))
        kernels = trial.opt.stats()["kernels"]
        found = trial.row(*trial.gather_findings(), steps=STEPS, layout=setting.layout, mesh="1")
    finally:
        own.close()
    captured = not setting.graphs or _all_captured(kernels["cuda_graphs"])
    meant = setting.backend == "auto" or _all_on(setting.backend, kernels["ran"])
    return {
        "setting": str(setting),
        "layout": setting.layout,
        "passed": found.passed and captured and meant,
        "max_abs_diff": found.max_abs_diff,
        "max_update_diff": found.max_update_diff,
        "criterion": found.criterion,
        "tolerance": found.tolerance,
        "worst": found.worst,
        "cuda_graphs": kernels["cuda_graphs"],
        "ran": kernels["ran"],
    }


def _all_captured(state: str) -> bool:
    """Whether `Graphs.state` says that all calls are captured.

    >>> _all_captured("2 of 2 captured"), _all_captured("0 of 2 captured"), _all_captured("off: x")
    (True, False, False)
    """
    words = state.split()
    return len(words) == 4 and words[0] == words[2] != "0"


def _all_on(backend: str, ran: dict[str, str]) -> bool:
    """Whether everything that ran was multiplied by one backend.

    >>> _all_on("triton", {"1 x [64, 64]": "standard/triton/float16"}), _all_on("torch", {})
    (True, False)
    """
    return bool(ran) and {KernelChoice.parse(text).backend for text in ran.values()} == {backend}


def _batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """As many tokens that gradients have full rank: what is not determined is not compared."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(_TOKENS, 64, generator=generator)
    y = torch.randn(_TOKENS, _WIDTH, generator=generator)
    return x.to(device), y.to(device)


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| setting | weights | updates | graphs | |", "|---|---:|---:|---|---|"]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['setting']} | | | {row['error']} | **fail** |")
            continue
        verdict = "pass" if row["passed"] else f"**fail** ({row['worst']})"
        lines.append(
            f"| {row['setting']} | {row['max_abs_diff']:.1e} | {row['max_update_diff']:.1e} "
            f"| {row['cuda_graphs']} | {verdict} |"
        )
    return "\n".join(lines)


def run(device: torch.device, budget_s: float | None, cache_dir: str) -> list[dict[str, Any]]:
    """A row for each setting; what one raises is in its row, and the others run nevertheless."""
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    for setting in dict.fromkeys(settings(device)):
        if budget_s is not None and time.monotonic() - begin > budget_s:
            rows.append({"setting": str(setting), "passed": False, "error": "not begun: no time"})
            continue
        try:
            rows.append(step_row(setting, device, cache_dir))
        except (RuntimeError, ValueError, TypeError, AssertionError, ImportError) as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            rows.append({"setting": str(setting), "passed": False, "error": text})
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_step", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--budget-s", type=float, help="begin no further setting after that")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
        rows = run(device, args.budget_s, folder)
        dist.destroy_process_group()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(document(rows), file, indent=1)
    print(table(rows))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
