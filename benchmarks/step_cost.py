"""How long is `step()` in each layout, per matrix, and is it slower than in another checkout?

``python -m benchmarks.step_cost --json out.json`` (docs/benchmarks.md). ``median_ms`` is `step`
alone, of the slowest rank; ``whole_ms`` from before backward to the end of
the next forward, where a layout may have moved work. Costs are analytic and kernels chosen by the
fixed rule, so that both checkouts plan alike. ``layout`` "sharded" is FSDP2, the others a plain
module; AdamW on a plain module has gradients that nobody averages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import init_device_mesh

from benchmarks.models import Alike, Stack, Training, on_random, shard
from benchmarks.results import Benchmark, Cases, Row
from benchmarks.timing import Laps, joined, ratio, take_turns, timed_row

# So that both checkouts plan alike: costs of the model, and kernels by the fixed rule.
FIXED: dict[str, Any] = {
    "costs": "analytic:cpu",
}
HERE = Path(__file__).parents[1]
LAYOUTS = ("sharded", "replicated", "dedicated")
# Name: ranks, rounds, width of the data, model. A round is one step of every contender.
SETS: dict[str, tuple[int, int, int, Callable[[], nn.Module]]] = {
    "400 of 16 x 16": (2, 41, 16, lambda: Alike(400, 16)),
    "8 layers, w=256": (4, 15, 256, lambda: Stack(8, 256)),
    "4 layers, w=512": (4, 9, 512, lambda: Stack(4, 512)),
    "toy": (1, 3, 8, lambda: Alike(4, 8)),
}
WARM_UP = 4


def contender(case: str, optimizer: str, layout: str) -> Training:
    """dmuon in one layout, or AdamW on the parameters that it would have."""
    world, _, width, build = SETS[case]
    torch.manual_seed(0)
    model = build()
    if layout == "sharded":
        shard(model, mesh=init_device_mesh("cpu", (world,)))
    if optimizer == "AdamW":
        return Training(
            model, on_random(4, width), [torch.optim.AdamW(model.parameters(), foreach=True)]
        )
    muon = {"ns_dtype": torch.float32}
    return Training.of_muon(model, on_random(4, width), {"layout": layout, **FIXED}, **muon)


# ---- processes that take turns -------------------------------------------------------------

# The dmuon of a checkout, and these benchmarks beside it.
_BEGIN = (
    "import sys; here, other = sys.argv[1:3]; sys.path.insert(0, other); import dmuon; "
    "assert dmuon.__file__.startswith(other), dmuon.__file__; sys.path[0] = here; "
    "from benchmarks.step_cost import serve; serve(*sys.argv[3:])"
)


def serve(rank: str, case: str, contenders: str, folder: str) -> None:
    """One rank: a line with a contender's number asks for a turn of it, and has its times."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed is no answer
    torch.set_num_threads(1)
    with joined(folder, int(rank), SETS[case][0]):
        field = [contender(case, optimizer, layout) for optimizer, layout in json.loads(contenders)]
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(field[int(line)].turn()), file=answers, flush=True)
        for training in field:
            training.close()


class Side:
    """The ranks of one checkout, which wait for a turn."""

    def __init__(
        self, checkout: Path, case: str, contenders: Sequence[tuple[str, str]], stack: ExitStack
    ) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        given = (case, json.dumps(contenders), folder)
        self.ranks = []
        for rank in range(SETS[case][0]):
            process = subprocess.Popen(
                [sys.executable, "-c", _BEGIN, str(HERE), str(checkout), str(rank), *given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            self.ranks.append(process)
        stack.callback(self.close)
        assert all(answer == "ready" for answer in self._answers())

    def turn(self, contender: int) -> Laps:
        for process in self.ranks:
            assert process.stdin is not None
            print(contender, file=process.stdin, flush=True)
        found: list[list[float]] = [json.loads(answer) for answer in self._answers()]
        return tuple(map(max, zip(*found)))

    def _answers(self) -> list[str]:
        answers = []
        for process in self.ranks:
            assert process.stdout is not None
            answers.append(process.stdout.readline().strip())
            if not answers[-1]:
                raise RuntimeError(f"a rank ended with exit code {process.wait()}; see above")
        return answers

    def close(self) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


# ---- measuring -----------------------------------------------------------------------------


def measure(case: str, layouts: Sequence[str], checkouts: Sequence[Path], rounds: int) -> list[Row]:
    """Rows of one case, first those of this checkout."""
    field = [(optimizer, name) for name in layouts for optimizer in ("dmuon", "AdamW")]
    field = [one for one in field if one != ("AdamW", "dedicated")]  # plain, as replicated's
    names = [" ".join(one) for one in field]
    with ExitStack() as stack:
        sides = [Side(checkout, case, field, stack) for checkout in checkouts]
        turns = {
            f"{which}: {name}": partial(side.turn, number)
            for number, name in enumerate(names)
            for which, side in enumerate(sides)
        }
        times = take_turns(turns, rounds, warm_up=WARM_UP)
    with torch.device("meta"):
        matrices = sum(p.ndim == 2 for p in SETS[case][3]().parameters())
    rows = []
    for which, checkout in enumerate(checkouts):
        for (optimizer, layout), name in zip(field, names):
            whole, _, step, _ = zip(*times[f"{which}: {name}"])
            row = timed_row(case, optimizer, layout, SETS[case][0], step)
            row |= {
                "checkout": "here" if which == 0 else checkout.name,
                "whole_ms": statistics.median(whole),
                "matrices": matrices,
                "us_per_matrix": 1e3 * row["median_ms"] / matrices,
            }
            model = "sharded" if layout == "sharded" else "replicated"
            if adamw := times.get(f"{which}: AdamW {model}"):
                row["ratio_to_adamw"] = ratio(step, [laps[2] for laps in adamw])
            if which == 0 and len(checkouts) > 1:
                others = list(zip(*times[f"1: {name}"]))
                row["ratio_to_other"] = ratio(step, others[2])
                row["whole_ratio_to_other"] = ratio(whole, others[0])
            rows.append(row)
    return rows


def line(row: Row) -> str:
    """A row in words."""
    text = (
        f"{row['set']:16} {row['checkout']:10} {row['optimizer']:5} {row['layout']:10} "
        f"step {row['median_ms']:8.2f} ms ({row['p10_ms']:.2f}-{row['p90_ms']:.2f}), "
        f"{row['us_per_matrix']:7.1f} us a matrix, whole {row['whole_ms']:8.2f} ms"
    )
    if "ratio_to_adamw" in row:
        text += f", {row['ratio_to_adamw']:.2f} x AdamW"
    if "ratio_to_other" in row:
        text += f", {row['ratio_to_other']:.3f} x other (whole {row['whole_ratio_to_other']:.3f})"
    return text


def checkout(text: str) -> Path:
    """The root of another checkout."""
    if not (Path(text) / "dmuon" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no dmuon/ in it; name its root")
    return Path(text).resolve()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS)[:-1])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--rounds", type=int, help="of each set, after a few to warm up")
    parser.add_argument("--against", metavar="PATH", type=checkout, help="another checkout")
    parser.add_argument("--limit", type=float, default=1.05, help="of --check")


def cases(args: argparse.Namespace, known: list[Row]) -> Cases:
    checkouts = [HERE] + [args.against] * (args.against is not None)
    for case in args.sets:
        yield case, partial(measure, case, args.layouts, checkouts, args.rounds or SETS[case][1])


def misses(row: Row, args: argparse.Namespace) -> bool:
    return row["optimizer"] == "dmuon" and bool(row.get("ratio_to_other", 0.0) > args.limit)


BENCHMARK = Benchmark(__doc__, cases, line, options, misses=misses)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
