"""What does MuonBP cost in loss, and how do norms grow? The demo's model over periods, degrees of
tensor parallelism (TP) and kinds of step sizes.

``python -m benchmarks.muonbp --json out.json`` (docs/muonbp.md). In all trainings of a seed every
rank sees the same batches and starts from the same weights, so they differ in the optimizer alone.
Step sizes of a block step: ``two`` is `dmuon.Muon`'s default, by the dims of the block; ``tied``
takes the learning rate of the whole matrix.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim.lr_scheduler import LambdaLR

import dmuon
from benchmarks.demo import demo
from benchmarks.results import Benchmark, Cases, Row, picture, table
from benchmarks.timing import on_ranks

CONFIG = demo.GPTConfig(heads=4)  # which 2 or 4 ranks can share
SEQUENCES = 2  # per step, of CONFIG.context tokens
WINDOWS = 128  # of the validation text, as many tokens each
POINTS = 12  # of a training at which norms are noted, beside its beginning

LR = 8e-3  # the demo's best; AdamW's parameters always have it
LARGE = 3 * LR  # of the matrices
PERIODS = (1, 2, 4, 8, 16, math.inf)
DEGREES = (2, 4)
STEP_SIZES = ("two", "tied")
GROWING = (4, math.inf)  # periods that are tried at LARGE
KEYS = ("world", "period", "step_sizes", "lr", "seed", "steps")  # what tells trainings apart

RMS = 0.2  # of an update over its learning rate, `dmuon.Muon`'s default "match_rms_adamw"


# ---- a training --------------------------------------------------------------------------


def parallelize(model: demo.GPT) -> None:
    """Cut the matrices of each block over all ranks, by heads and by hidden units."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole: dict[str, Any] = {}
    for name, others in (("attention", 2), ("mlp", 0)):
        layouts = (Replicate(), *[None] * others)  # so that backward sums over ranks once
        whole[name] = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
    columns = [f"attention.{x}_proj" for x in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    cut: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    cut |= {name: RowwiseParallel() for name in ("attention.o_proj", "mlp.down_proj")}
    for block in model.blocks:
        parallelize_module(block, mesh, cut | whole)


def groups_of(model: nn.Module) -> dict[float, list[tuple[str, nn.Parameter]]]:
    """Named parameters by the learning rate of their matrix over that of this rank's block."""
    found: dict[float, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, p in model.named_parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        found[math.sqrt(max(p.shape) / max(local.shape))].append((name, p))
    return found


def optimizer(model: nn.Module, period: float, step_sizes: str, **settings: Any) -> dmuon.Muon:
    """One param group for each of `groups_of`."""
    ratios = groups_of(model)
    opt = dmuon.Muon(
        [{"params": named} for named in ratios.values()],
        adjust_lr_fn=RMS,
        period=period if math.isinf(period) else int(period),
        ns_dtype=torch.float32,
        **settings,
    )
    if step_sizes == "tied":
        opt.register_step_pre_hook(partial(tie, [*ratios], period, count()))
    return opt


def tie(
    ratios: Sequence[float], period: float, steps: Iterator[int], opt: dmuon.Muon, *_: Any
) -> None:
    """Before a step: in block steps the learning rate of a block becomes that of its matrix."""
    step = next(steps)
    is_full = not math.isinf(period) and step % period == 0
    for ratio, group in zip(ratios, opt.param_groups, strict=True):
        group["adjust_lr_fn"] = RMS if is_full else RMS * ratio


def norm_of(model: nn.Module) -> float:
    """The root of the sum of squares of all matrices of the blocks."""
    total = 0.0
    for name, p in model.named_parameters():
        if name.startswith("blocks.") and p.ndim == 2:
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            total += whole.detach().double().square().sum().item()
    return math.sqrt(total)


def train(job: Row, text: Any) -> Row:
    """The row of a training with what `KEYS` say; on one rank the model is plain, and whole."""
    steps, sizes = job["steps"], {"context": CONFIG.context}
    torch.manual_seed(job["seed"])
    model = demo.GPT(CONFIG)
    if job["world"] > 1:
        parallelize(model)
    settings = {"lr": job["lr"], "adamw_lr": LR, "weight_decay": demo.WEIGHT_DECAY}
    opt = optimizer(model, float(job["period"]), job["step_sizes"], **settings)
    own = opt.ownership
    schedule = LambdaLR(opt, lambda step: demo.warmup_then_cosine(step, steps))
    begin, losses, norms = time.perf_counter(), [], [(0, norm_of(model))]
    for step in range(steps):
        batch = text.training_batch(step, 0, sequences=SEQUENCES, seed=job["seed"], **sizes)
        loss = demo.next_byte_loss(model, *batch)
        loss.backward()
        dmuon.clip_grad_norm_(model, demo.CLIP_NORM)
        opt.step()
        opt.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % math.ceil(steps / POINTS) == 0 or step + 1 == steps:
            norms.append((step + 1, norm_of(model)))
    with torch.no_grad():
        windows = text.validation_batches(0, 1, sequences=8, total=WINDOWS, **sizes)
        found = [demo.next_byte_loss(model, *batch).item() for batch in windows]
    own.close()
    row: Row = {"set": "MuonBP loss", "optimizer": "dmuon", "layout": own.plan.layout.value}
    row |= job | {"tokens_per_step": SEQUENCES * CONFIG.context}
    row |= {"validation_loss": statistics.fmean(found)}
    row |= {"train_loss": statistics.fmean(losses[-max(1, steps // 10) :]), "norms": norms}
    return row | {"seconds": time.perf_counter() - begin}


def work(rank: int, jobs: list[Row]) -> list[Row]:
    """Their trainings, one after the other, on a core for each rank."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    text = demo.load_standard_library()
    return [train(job, text) for job in jobs]


def jobs_of(seeds: int, steps: int) -> list[Row]:
    """All trainings, those of as many ranks one after the other within a seed."""
    found = []
    for seed in range(seeds):
        # Where all steps are full the mesh changes nothing but rounding: seen with seed 0.
        worlds = (1, *DEGREES) if seed == 0 else DEGREES[:1]
        kinds: list[tuple[int, float, str, float]] = [
            *product(worlds, PERIODS[:1], STEP_SIZES[:1], (LR,)),
            *product(DEGREES, PERIODS[1:], STEP_SIZES, (LR,)),
            *product(DEGREES[:1], PERIODS[:1], STEP_SIZES[:1], (LARGE,)),
            *product(DEGREES[-1:], GROWING, STEP_SIZES, (LARGE,)),
        ]
        for world, period, sizes, lr in sorted(kinds, key=lambda kind: kind[0]):
            named = "inf" if math.isinf(period) else period
            values = world, named, sizes, lr, seed, steps
            found.append(dict(zip(KEYS, values, strict=True)))
    return found


# ---- results -----------------------------------------------------------------------------


def above_muon(rows: Sequence[Row]) -> dict[tuple[int, str, str], list[float]]:
    """What each seed's validation loss is above that of Muon, at `LR`: by degree of TP, name of the
    period, and step sizes."""
    mine = sorted((row for row in rows if row["lr"] == LR), key=lambda row: row["seed"])
    muon = {row["seed"]: row["validation_loss"] for row in of(mine, world=2, period=1)}
    found = defaultdict(list)
    for row in mine:
        if row["period"] != 1:
            kind = row["world"], name_of(row["period"]), row["step_sizes"]
            found[kind].append(row["validation_loss"] - muon[row["seed"]])
    return found


def of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """The rows that say so."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def name_of(period: float | str) -> str:
    """As pages and pictures call it."""
    return "∞" if period == "inf" or period == math.inf else str(period)


def spread_of(values: Sequence[float], form: str) -> str:
    """The mean and, of several values, the lowest and the highest.

    >>> spread_of([1.0, 2.0, 6.0], ".1f"), spread_of([1.0], ".1f")
    ('3.0 (1.0…6.0)', '1.0')
    """
    mean, ends = format(statistics.fmean(values), form), (min(values), max(values))
    return f"{mean} ({'…'.join(format(end, form) for end in ends)})" if values[1:] else mean


def loss_table(rows: Sequence[Row]) -> str:
    """Validation loss: that of Muon, and in thousandths what the others' is above it."""
    kinds = list(product(DEGREES, STEP_SIZES))
    above = above_muon(rows)
    lines = []
    for period in map(name_of, PERIODS[1:]):
        cells = []
        for world, sizes in kinds:
            values = [1e3 * x for x in above.get((world, period, sizes), [])]
            cells.append(spread_of(values, "+.0f") if values else "")
        lines.append((f"P = {period}", *cells))
    return table(("", *(f"TP {world}, {sizes}" for world, sizes in kinds)), lines)


def norm_table(rows: Sequence[Row]) -> str:
    """Norms at the end and validation losses of what is `grown`, at both rates."""
    both = [grown(rows, lr) for lr in (LR, LARGE)]
    lines = []
    for name in both[0]:
        line: list[object] = [name]
        for mine in (found[name] for found in both):
            losses = [row["validation_loss"] for row in mine]
            line.append(spread_of([row["norms"][-1][1] for row in mine], ".0f") if mine else "")
            line.append(f"{statistics.fmean(losses):.3f}" if mine else "")
        lines.append(line)
    heads = [f"{what}, {lr:g}" for lr in (LR, LARGE) for what in ("norm", "loss")]
    return table(("", *heads), lines)


def grown(rows: Sequence[Row], lr: float) -> dict[str, list[Row]]:
    """By name the rows of Muon, and of `GROWING` on the most ranks; of the seeds that all have."""
    found = {"Muon": of(rows, lr=lr, world=DEGREES[0], period=1)}
    for period, sizes in product(GROWING, STEP_SIZES):
        wanted = {"period": "inf" if math.isinf(period) else period, "step_sizes": sizes}
        mine = of(rows, lr=lr, world=DEGREES[-1], **wanted)
        found[f"P = {name_of(period)}, {sizes}"] = mine
    seeds = set.intersection(*({row["seed"] for row in mine} for mine in found.values()))
    return {k: [row for row in mine if row["seed"] in seeds] for k, mine in found.items()}


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Markdown by name, for docs/muonbp.md."""
    return {"loss": loss_table(rows), "norms": norm_table(rows)}


def draw(rows: Sequence[Row], path: str) -> None:
    """Loss against the period, a panel a degree of TP; norms against steps, a panel a rate."""
    above, names = above_muon(rows), [*map(name_of, PERIODS)]
    colors = dict(zip(STEP_SIZES, ("#1d4ed8", "#ea580c"), strict=True))
    with picture(path, 2, 2, (9, 6.6), share_x="row") as (_, (upper, lower)):
        upper[1].sharey(upper[0])
        for axes, world in zip(upper, DEGREES, strict=True):
            for sizes, color in colors.items():
                dots = [above.get((world, name, sizes), [0.0]) for name in names]
                means = [statistics.fmean(values) for values in dots]
                axes.plot(names, means, color=color, label=f"{sizes} step sizes")
                for name, values in zip(names, dots, strict=True):
                    axes.scatter([name] * len(values), values, 14, color=color)
            axes.axhline(0.0, color="gray", linewidth=0.8)
            axes.set(title=f"TP {world}, lr {LR:g}", xlabel="period P (1 is Muon)")
        upper[0].set_ylabel("validation loss above Muon's\n(nats a byte; dots are seeds)")
        for axes, lr in zip(lower, (LR, LARGE), strict=True):
            for name, mine in grown(rows, lr).items():
                points = [row["norms"] for row in mine]
                steps = [step for step, _ in points[0]] if points else []
                means = [statistics.fmean(n for _, n in at) for at in zip(*points, strict=True)]
                color = colors.get(name.rpartition(" ")[2], "black")
                style = "--" if name.startswith("P = 4") else "-"
                axes.plot(steps, means, style, color=color, label=name)
            axes.set(title=f"TP {DEGREES[-1]}, lr {lr:g}", xlabel="steps")
        lower[0].set_ylabel("norm of all matrices\n(mean over seeds)")
        for axes in (*upper, *lower):
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)


LINE = (
    "TP {world}, P={period}, {step_sizes}, lr {lr:g}, seed {seed}: validation "
    "{validation_loss:.4f}, train {train_loss:.4f}, {seconds:.0f} s"
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=120, help="of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind")


def cases(args: argparse.Namespace, known: list[Row]) -> Cases:
    jobs = jobs_of(args.seeds, args.steps)
    for seed, world in product(range(args.seeds), (1, *DEGREES)):
        mine = of(jobs, seed=seed, world=world)
        if mine:
            yield f"TP {world}, seed {seed}", partial(on_ranks, world, work, mine)


BENCHMARK = Benchmark(__doc__, cases, lambda row: LINE.format(**row), options, tables, draw)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
