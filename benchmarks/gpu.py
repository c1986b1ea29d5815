"""Everything that needs a GPU, in parts that fit calls of ten minutes.

``python -m benchmarks.gpu --out FOLDER`` runs its parts one after the other, each in a process of
its own with a time limit, and says at the end how to go on with those for which ``--budget-s`` did
not reach; ``--parts smoke,tests`` runs these. What is measured is on disk at once: rows in
``FOLDER/<part>.json``, output in ``<part>.log``. A row that fails is recorded and passed by. A part
that runs out of time is interrupted, so that it can end, and killed ten seconds later; one in which
nothing moves, or that crashed, goes on after the row in which it was. ``gpu.json`` and ``gpu.md``
have the whole, ``gpu.tar.gz`` all of it and what was compiled and tuned.

Needs torch with CUDA, Triton, pytest, NumPy and rich; neither a solver nor a network. ``--dry-run``
walks through all of it at toy sizes on a CPU.

Exit code: 0 if all parts and targets pass, 1 if one fails, 2 without a GPU (the plan is printed).
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_parts, kernels
from benchmarks.results import document, gpu_facts, has_failed, table, write_json

Row = dict[str, Any]

BUDGET_S = 560.0
ARCHIVE_BYTES = 15 << 20  # of the archive, caches included: it has to travel
_TAIL = 25  # lines of a part's output that go into the page
# The last one is where dmuon keeps what tuning chose.
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor",
           "XDG_CACHE_HOME": "xdg"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """``main(args)``, which writes `results.Rows`, in a process of its own.

    It gets at most ``most_s`` seconds, the last ``grace_s`` of them to end by itself. A row that
    takes longer than ``stall_s`` hangs: the part is stopped, and begun again after it. ``start``:
    "spawn", because a fork cannot use a GPU that its parent has asked anything.
    """

    name: str
    what: str
    most_s: float
    main: Callable[[list[str]], int]
    args: tuple[str, ...] = ()
    stall_s: float = 200.0
    grace_s: float = 10.0
    start: str = "spawn"


def parts(*, dry: bool = False) -> tuple[Part, ...]:
    """In the order in which they run: each is of use to the next, what is judged comes first."""

    def rows(name: str, what: str, most_s: float) -> Part:
        args = (name, "--device", "cpu", "--toy") if dry else (name, "--device", "cuda")
        return Part(name, what, most_s, gpu_parts.main, args)

    def times(name: str, what: str, most_s: float, sets: Sequence[str], *given: str) -> Part:
        args = ["--device", "cuda", "--sets", *sets, *given]
        if dry:
            args = ["--sets", "toy", "--case-s", "0.02", "--tune-s", "1", "--threads", "1"]
            args += ["--no-compile"]
        args += ["--dtype", name.split("_")[1]]
        return Part(name, what, most_s, kernels.main, tuple(args))

    judged = ("llama-8b", "experts")
    others = [name for name in kernels.DEFAULT_SETS["cuda"] if name not in judged]
    found = (
        rows("smoke", "each kernel once, graphs, three steps of each layout", 90),
        rows("tests", "tests/gpu", 240),
        rows("accuracy", "errors of every kernel in every dtype", 90),
        rows("step", "dmuon.Muon in every layout, with and without graphs", 120),
        times("kernels_float16", "a Llama-8B layer and experts in float16", 400, judged,
              "--tune-s", "150", "--case-s", "3"),
        times("kernels_bfloat16", "the same in bfloat16", 150, judged,
              "--tune-s", "40", "--case-s", "1"),
        rows("profile", "one full and one block step", 90),
        rows("sanitizer", "three kernels under compute-sanitizer", 140),
        times("rest_float16", "all other sets of shapes in float16", 360, others,
              "--tune-s", "120", "--case-s", "1"),
    )  # fmt: skip
    # A fork of this process has imported torch already. How long a dry run takes depends on what
    # else runs on the machine.
    return tuple(replace(p, start="fork", most_s=900) for p in found) if dry else found


# ---- one part ------------------------------------------------------------------------------


def run_part(part: Part, out: Path, limit_s: float) -> Row:
    """Run one part within ``limit_s`` seconds; how it ended, and why if it did not pass."""
    begin = time.monotonic()
    deadline = begin + limit_s
    log, path = out / f"{part.name}.log", out / f"{part.name}.json"
    for old in (log, path):
        old.unlink(missing_ok=True)
    notes: list[str] = []
    found: Row = {}
    while True:
        before = found
        code, stopped = _run(part, log, path, deadline)
        found = _document(path)
        why = stopped or (f"exit code {code}" if code not in (0, 1) else "")
        notes += [why] if why else []
        # Its last row hangs, or it was killed by a signal, or lost its device: the rest can go on.
        moved = any(found.get(key) != before.get(key) for key in ("rows", "running"))
        if not why or why.startswith("out of time") or not moved:
            break
        if deadline - time.monotonic() < 2 * part.grace_s:
            break
        notes.append("begun again")
    rows = found.get("rows", [])
    failed = [row for row in rows if has_failed(row)]
    left_out = found.get("left_out", [])
    if failed:
        reason = failed[0].get("failure", "out of its limit")
        notes.insert(0, f"{len(failed)} of {len(rows)} rows: {failed[0]['name']}: {reason}")
    elif left_out and not notes:
        notes.append(f"no time for {len(left_out)} rows: {left_out[0]}, ...")
    elif code and not notes:
        notes.append(f"exit code {code}")
    elif not rows and not notes:
        notes.append("wrote no rows")
    return {
        "name": part.name,
        "passed": not notes,
        "note": ", ".join(notes),
        "seconds": round(time.monotonic() - begin, 1),
        "rows": len(rows),
        "failed": len(failed),
        "tail": "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:]),
    }


def _run(part: Part, log: Path, path: Path, deadline: float) -> tuple[int | None, str]:
    """(exit code, why it was stopped) of one process."""
    budget_s = max(1.0, deadline - time.monotonic() - 1.5 * part.grace_s)
    args = [*part.args, "--json", str(path), "--budget-s", f"{budget_s:.0f}", "--resume"]
    context: Any = multiprocessing.get_context(part.start)
    process = context.Process(target=_child, args=(part.main, args, log))
    process.start()
    begin = time.time()
    why = ""
    try:
        while not why:
            process.join(0.1)
            if process.exitcode is not None:
                return process.exitcode, ""
            took = 0.0
            if _document(path).get("running") is not None:
                took = time.time() - max(begin, path.stat().st_mtime)
            if time.monotonic() > deadline - part.grace_s:
                why = "out of time"
            elif took > part.stall_s:
                why = f"a row hung for {took:.0f} s"
        _signal(process.pid, signal.SIGINT)
        process.join(part.grace_s)
        return process.exitcode, why + (", killed" if process.exitcode is None else ", interrupted")
    finally:
        # What it started ends with it, also where this process was told to stop.
        _signal(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _signal(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _child(main: Callable[[list[str]], int], args: list[str], log: Path) -> None:
    os.setsid()
    os.chdir(gpu_parts.ROOT)
    gc.freeze()  # what a fork inherits: benchmarks collect garbage in every round
    file = log.open("a", buffering=1)
    for stream in (1, 2):
        os.dup2(file.fileno(), stream)
    sys.stdout = sys.stderr = file
    # In a shell's background it would be ignored, and nothing could interrupt the part.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(main(args))


def _document(path: Path) -> Row:
    try:
        found: Row = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


# ---- all parts -----------------------------------------------------------------------------


def run_parts(
    plan: Sequence[Part],
    out: Path,
    budget_s: float,
    *,
    run: Callable[[Part, Path, float], Row] = run_part,
    done: Callable[[Row], None] = lambda outcome: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Every part in its time within ``budget_s`` seconds together, whatever becomes of the others;
    the names of those that were not begun, because less than half of their time was left."""
    deadline = clock() + budget_s
    later = []
    for part in plan:
        limit_s = min(part.most_s, deadline - clock())
        if limit_s < part.most_s / 2:
            later.append(part.name)
            continue
        print(f"{part.name}: {part.what}, at most {limit_s:.0f} s", flush=True)
        outcome: Row = {"name": part.name, "passed": False, "note": "stopped from outside"}
        try:
            outcome = run(part, out, limit_s)
        finally:
            done(outcome)
        verdict = "passed" if outcome["passed"] else f"FAILED, {outcome['note']}"
        print(f"{part.name}: {verdict}, in {outcome['seconds']:.0f} s", flush=True)
    return later


@contextmanager
def clocks(out: Path) -> Iterator[None]:
    """Clocks, temperature and power, twice a second, in ``clocks.csv``."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    asked = "timestamp,clocks.sm,clocks.mem,temperature.gpu,power.draw,utilization.gpu,memory.used"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv", "-lms", "500"]
    with (out / "clocks.csv").open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def pack(out: Path, limit: int = ARCHIVE_BYTES) -> list[str]:
    """Everything in ``out`` in ``gpu.tar.gz`` there, the caches last; what of them did not fit.

    Of Triton's cache only what is needed to run a kernel again: its binary and its metadata.
    """
    path = out / "gpu.tar.gz"
    files = [f for f in sorted(out.rglob("*")) if f.is_file() and not f.name.startswith(path.name)]
    results = [f for f in files if out / "cache" not in f.parents]
    cached = [f for f in files if out / "cache/xdg" in f.parents]
    cached += [f for f in files if out / "cache/triton" in f.parents
               if f.suffix in (".json", ".cubin")]  # fmt: skip
    left: list[str] = []
    part = path.with_name(path.name + ".part")
    with part.open("wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for file in results + cached:
            # Written blocks lag behind by what the compressor holds, a few kilobytes.
            if file in cached and raw.tell() + file.stat().st_size > limit:
                left.append(str(file.relative_to(out)))
            else:
                archive.add(file, arcname=str(Path("gpu") / file.relative_to(out)))
    os.replace(part, path)
    return left


def write_report(out: Path, outcomes: dict[str, Row], *, dry: bool) -> str:
    """``gpu.json``, ``gpu.md`` and the archive, also of what an earlier call ran; the tables."""
    rows = [outcomes[part.name] for part in parts() if part.name in outcomes]
    found = document(rows)
    for key, facts in gpu_facts(torch.device("cpu" if dry else "cuda")).items():
        found[key] |= facts
    judged = found["targets"] = [] if dry else targets(out)
    write_json(str(out / "gpu.json"), found)
    words = {True: "pass", False: "**fail**", None: "not for this GPU"}
    lines = [
        (row["name"], words[row["passed"]], row["note"], *map(row.get, ("seconds", "rows")))
        for row in rows
    ]
    blocks = [table(("part", "", "", "s", "rows"), lines, left=3)]
    if judged:
        lines = [(*map(row.get, ("name", "note")), words[row["passed"]], row["limit"], row["value"])
                 for row in judged]  # fmt: skip
        blocks += [table(("target", "by", "", "at most", "measured"), lines, left=3)]
    told = "\n\n".join(blocks)
    tails = [f"### {row['name']}\n\n```\n{row.get('tail', '')}\n```" for row in rows]
    about = json.dumps(found["machine"]) + "\n\n" + json.dumps(found["versions"])
    (out / "gpu.md").write_text("\n\n".join(["# GPU suite", about, told, *tails]) + "\n")
    if left := pack(out):
        print(f"{len(left)} files of the caches did not fit into the archive", flush=True)
    return told


# ---- targets -------------------------------------------------------------------------------

H200_LAYER_FLOOR_MS = 12.72
"""A Llama-8B layer in the Gram form with restart [2] and half of each symmetric product, at the
790 TFLOP/s that a large float16 product reaches on an H200."""
_LAYER, _EXPERTS = "llama-8b layer", "128 experts 768 x 2048"
TARGETS = (
    ("ms on an H200, 1.2 x its floor", _LAYER, "median_ms", 1.2 * H200_LAYER_FLOOR_MS),
    ("over the floor at the rate measured beside it", _LAYER, "ratio_to_floor", 1.2),
    ("over compiled standard in bfloat16", _LAYER, "ratio_to_compiled_bfloat16", 1 / 1.7),
    ("over the unbatched loop", _EXPERTS, "ratio_to_standard", 1 / 3),
)
"""Of float16: what, case, key of a row, and how much it may be at most."""


def targets(folder: Path) -> list[Row]:
    """Every target, from the files of the parts in ``folder``. ``value`` None: it was not measured,
    which is a failure; ``passed`` None: it does not apply."""
    found = _document(folder / "kernels_float16.json")
    is_h200 = "H200" in found.get("machine", {}).get("gpu", "")
    judged: list[Row] = []
    for what, case, key, limit in TARGETS:
        # Of dmuon's ways to run a case the fastest: planning takes the cheapest by measurement.
        mine = [
            (row[key], row["contender"])
            for row in found.get("rows", ())
            if key in row and row.get("case") == case and row["contender"].startswith("ours")
        ]
        value, by = min(mine, default=(None, "not measured"))
        applies = value is None or key != "median_ms" or is_h200
        passed = (value is not None and value <= limit) if applies else None
        judged.append({"name": f"{case}, float16, {what}", "limit": round(limit, 3),
                       "value": value, "passed": passed, "note": by})  # fmt: skip
    rows = _document(folder / "accuracy.json").get("rows", [])
    half = [row for row in rows if "float16" in row["name"]]
    worst = max((row["error"] / row["expected"] for row in half if "error" in row), default=None)
    within = bool(half) and all(row.get("passed", False) for row in half)
    judged.append({"name": "error in half precision, over that of the form", "value": worst,
                   "limit": gpu_parts.SLACK["float16"], "passed": within,
                   "note": f"{len(half)} rows"})  # fmt: skip
    return judged


# ---- the command ---------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    names = [part.name for part in parts()]
    parser.add_argument("--out", metavar="FOLDER", default="out/gpu")
    parser.add_argument("--parts", metavar="NAME,...", help=f"of {', '.join(names)}; default: all")
    parser.add_argument(
        "--budget-s", type=float, help=f"for this call (default: {BUDGET_S:g}; dry runs: no limit)"
    )
    parser.add_argument("--dry-run", action="store_true", help="walk through it on a CPU")
    args = parser.parse_args(argv)
    chosen = names if args.parts is None else args.parts.split(",")
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"--parts: there is no part {unknown[0]!r}; choose of {', '.join(names)}")
    if args.budget_s is None:
        args.budget_s = float("inf") if args.dry_run else BUDGET_S
    plan = [part for part in parts(dry=args.dry_run) if part.name in chosen]
    if not args.dry_run and not torch.cuda.is_available():
        print("torch finds no GPU here (--dry-run walks through it on a CPU). What would run:")
        for part in plan:
            print(f"{part.name:17} at most {part.most_s:3.0f} s  {part.what}")
            print(f"{'':17} python -m {part.main.__module__} {' '.join(part.args)}")
        return 2
    out = Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    known = [] if args.dry_run else _document(out / "gpu.json").get("rows", [])
    outcomes = {row["name"]: row for row in known}

    def done(outcome: Row) -> None:
        outcomes[outcome["name"]] = outcome
        write_report(out, outcomes, dry=args.dry_run)

    os.environ.update({name: str(out / "cache" / folder) for name, folder in _CACHES.items()})
    # A call that is cut off from outside ends its part and has all that was measured.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    later: list[str] = []
    stopped = True
    try:
        with clocks(out):
            later = run_parts(plan, out, args.budget_s, done=done)
        stopped = False
    except KeyboardInterrupt:
        print("Stopped from outside.")
    print(f"\n{write_report(out, outcomes, dry=args.dry_run)}\n")
    archive = out / "gpu.tar.gz"
    print(f"Everything is in {archive} ({archive.stat().st_size / 1e6:.1f} MB).")
    if later:
        print(f"Not begun in {args.budget_s:g} s: {', '.join(later)}. To go on:")
        print(f"python -m benchmarks.gpu --out {args.out} --parts {','.join(later)}")
    judged = [*outcomes.values(), *([] if args.dry_run else targets(out))]
    failed = stopped or later or any(row["passed"] is False for row in judged)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
