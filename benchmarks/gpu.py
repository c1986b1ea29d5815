"""Everything that needs a GPU, in one command of less than nine minutes.

``python -m benchmarks.gpu --out FOLDER`` runs its parts one after the other, each in a process of
its own with a time limit; a part that fails, hangs or crashes does not stop the others. ``FOLDER``
gets the output and the JSON of each part, and ``gpu.json`` and ``gpu.md`` with the whole. Needs
torch with CUDA, Triton, pytest, NumPy and rich; neither a solver nor a network.

Exit code: 0 if all parts and targets pass, 1 if one fails, 2 without a GPU (the plan is printed).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_targets
from benchmarks.results import document

__all__ = ["Outcome", "Part", "main", "parts", "run_part", "run_parts"]

TOTAL_S = 530.0
_TAIL = 40  # lines of a part's output that go into the page
_GRACE_S = 12.0  # that a part has to end by itself before it is killed
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Part:
    """``command`` after the interpreter; ``{out}`` stands for the folder, ``{budget}`` for the
    seconds after which it should begin nothing new. ``share_s`` is kept for it while the parts
    before it run; it gets what they leave over as well, up to ``most_s``."""

    name: str
    command: tuple[str, ...]
    share_s: float
    most_s: float
    what: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended. ``note`` says why it failed; "" if it passed."""

    name: str
    passed: bool
    seconds: float
    note: str
    tail: str


def parts() -> tuple[Part, ...]:
    """In the order in which they run: what the targets need first."""
    kernels = ("-m", "benchmarks.kernels", "--device", "cuda", "--budget-s", "{budget}")
    quick = ("-q", "-p", "no:cacheprovider")
    return (
        Part(
            "accuracy",
            ("-m", "benchmarks.gpu_accuracy", "--device", "cuda", "--json", "{out}/accuracy.json"),
            *(40, 90),
            what="errors of every kernel in float16, bfloat16, float32, float64",
        ),
        Part(
            "kernels_float16",
            (*kernels, "--dtype", "float16", "--tune-s", "90", "--case-s", "1.5")
            + ("--json", "{out}/kernels_float16.json"),
            *(200, 260),
            what="all sets of benchmarks.kernels in float16",
        ),
        Part(
            "step",
            ("-m", "benchmarks.gpu_step", "--device", "cuda", "--budget-s", "{budget}")
            + ("--json", "{out}/step.json"),
            *(90, 150),
            what="dmuon.Muon on one GPU in all layouts, with and without CUDA graphs",
        ),
        Part(
            "tests",
            ("-m", "pytest", *quick, "--junitxml={out}/tests.xml", "tests/gpu"),
            *(130, 240),
            what="tests/gpu",
        ),
        Part(
            "kernels_bfloat16",
            (*kernels, "--dtype", "bfloat16", "--sets", "llama-8b", "experts", "--tune-s", "30")
            + ("--case-s", "1", "--json", "{out}/kernels_bfloat16.json"),
            *(60, 150),
            what="a Llama-8B layer and the experts in bfloat16",
        ),
    )


def run_part(part: Part, out: Path, limit_s: float) -> Outcome:
    """Run one part; its output goes to ``<name>.log``. Kills it, and what it started, at the
    limit."""
    budget = max(5.0, limit_s - _GRACE_S)
    command = [sys.executable]
    command += [word.format(out=out, budget=f"{budget:.0f}") for word in part.command]
    log = out / f"{part.name}.log"
    begin = time.monotonic()
    with log.open("w") as file:
        # A session of its own, so that compilers that it started end with it.
        process = subprocess.Popen(
            command, cwd=_ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - begin
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
    passed, note = _judge(part, out, code, limit_s)
    return Outcome(part.name, passed, seconds, note, tail)


def _judge(part: Part, out: Path, code: int | None, limit_s: float) -> tuple[bool, str]:
    """(passed, why not)."""
    if code is None:
        return False, f"stopped after {limit_s:.0f} s"
    if code != 0:
        return False, f"exit code {code}"
    if part.name == "tests":
        ran, skipped = _counts(out / "tests.xml")
        if ran == skipped:
            return False, f"no test ran ({skipped} skipped)"
    written = [word.format(out=out, budget="") for word in part.command if word.endswith(".json")]
    rows = [_document(Path(path)) for path in written]
    if any(not found.get("rows") for found in rows):
        return False, "wrote no rows"
    left_out = [label for found in rows for label in found.get("left_out", ())]
    if left_out:
        return False, f"no time for {len(left_out)} cases: {left_out[0]}, ..."
    return True, ""


def _counts(path: Path) -> tuple[int, int]:
    """Tests in a JUnit file, and how many of them were skipped."""
    try:
        suites = ElementTree.parse(path).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):
        return 0, 0
    found = [(int(s.get("tests", 0)), int(s.get("skipped", 0))) for s in suites]
    return sum(total for total, _ in found), sum(skipped for _, skipped in found)


def _document(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def run_parts(
    plan: Sequence[Part],
    out: Path,
    total_s: float,
    *,
    run: Callable[[Part, Path, float], Outcome] = run_part,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Every part within ``total_s`` seconds together, whatever becomes of the others."""
    deadline = clock() + total_s
    outcomes = []
    for number, part in enumerate(plan):
        kept = sum(later.share_s for later in plan[number + 1 :])
        limit_s = max(part.share_s / 2, min(part.most_s, deadline - clock() - kept))
        print(f"{part.name}: {part.what}, at most {limit_s:.0f} s", flush=True)
        outcome = run(part, out, limit_s)
        verdict = "passed" if outcome.passed else f"FAILED, {outcome.note}"
        print(f"{part.name}: {verdict} ({outcome.seconds:.0f} s)", flush=True)
        outcomes.append(outcome)
    return outcomes


def _page(outcomes: Sequence[Outcome], found: list[gpu_targets.Target], head: str) -> str:
    blocks = [f"# GPU suite\n\n{head}", "## Targets", gpu_targets.table(found), "## Parts"]
    lines = ["| part | s | |", "|---|---:|---|"]
    for one in outcomes:
        verdict = "pass" if one.passed else f"**fail**: {one.note}"
        lines.append(f"| {one.name} | {one.seconds:.0f} | {verdict} |")
    blocks.append("\n".join(lines))
    for one in outcomes:
        blocks.append(f"### {one.name}\n\n```\n{one.tail}\n```")
    return "\n\n".join(blocks) + "\n"


def _write(out: Path, outcomes: Sequence[Outcome]) -> bool:
    """``gpu.json`` and ``gpu.md``; whether everything passed."""
    found = gpu_targets.targets(out)
    result = document([asdict(outcome) for outcome in outcomes])
    result["machine"]["gpu"] = torch.cuda.get_device_name()
    result["versions"]["cuda"] = torch.version.cuda
    result["targets"] = [asdict(target) for target in found]
    (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    head = f"{result['machine']['gpu']}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    page = _page(outcomes, found, head)
    (out / "gpu.md").write_text(page)
    print(gpu_targets.table(found))
    return all(o.passed for o in outcomes) and all(t.passed is not False for t in found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", metavar="FOLDER", default="out/gpu")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="for all parts together")
    parser.add_argument("--only", nargs="+", choices=[p.name for p in parts()], help="these parts")
    parser.add_argument("--dry-run", action="store_true", help="list the parts, run nothing")
    args = parser.parse_args(argv)
    plan = [part for part in parts() if args.only is None or part.name in args.only]
    has_gpu = torch.cuda.is_available()
    if args.dry_run or not has_gpu:
        if not has_gpu:
            print("torch finds no GPU here. What would run:")
        for part in plan:
            print(f"{part.name:17} {part.share_s:3.0f} to {part.most_s:3.0f} s  {part.what}")
            print(f"{'':17} python {' '.join(part.command)}")
        return 0 if has_gpu else 2
    out = Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    return 0 if _write(out, run_parts(plan, out, args.total_s)) else 1


if __name__ == "__main__":
    sys.exit(main())
