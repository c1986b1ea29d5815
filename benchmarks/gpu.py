"""Everything that needs a GPU, in parts that fit calls of ten minutes.

``python -m benchmarks.gpu --out FOLDER`` runs its parts one after the other, each in a process of
its own with a time limit, and says at the end how to go on with those for which ``--budget-s`` did
not reach; ``--parts smoke,tests`` runs these. What is measured is on disk at once: rows in
``FOLDER/<part>.json``, output in ``<part>.log``. A row that fails is recorded and passed by. A part
that runs out of time is interrupted, so that it can end, and killed ten seconds later; one in which
nothing moves, or that crashed, goes on after the row in which it was. ``gpu.json`` and ``gpu.md``
have the whole, ``gpu.tar.gz`` all of it and what was compiled and tuned.

Needs torch with CUDA, Triton, pytest, NumPy and rich; neither a solver nor a network. ``--dry-run``
walks through all of it at toy sizes on a CPU, faults that it has to survive included.

Exit code: 0 if all parts and targets pass, 1 if one fails, 2 without a GPU (the plan is printed).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_contenders import SETS
from benchmarks.results import document, gpu_facts, has_failed, table, write_json

BUDGET_S = 560.0
ARCHIVE_BYTES = 15 << 20  # of the archive, caches included: it has to travel
_JUDGED_SETS = ("llama-8b", "experts")
_MODULES = ("benchmarks.gpu_parts", "benchmarks.gpu_accuracy", "benchmarks.kernels")
_TAIL = 25  # lines of a part's output that go into the page
_ROOT = Path(__file__).parents[1]
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_CACHES |= {"XDG_CACHE_HOME": "xdg"}  # where dmuon keeps what tuning chose


@dataclass(frozen=True, slots=True)
class Part:
    """``command`` after the interpreter; ``{out}`` stands for the folder, ``{budget}`` for the
    seconds after which it should begin nothing more. It gets at most ``most_s`` seconds, the last
    ``grace_s`` of them to end by itself. A row that takes longer than ``stall_s`` hangs: the part
    is stopped, and begun again after it. ``plant``: the fault that `Rows` plants."""

    name: str
    what: str
    most_s: float
    command: tuple[str, ...]
    stall_s: float = 200.0
    grace_s: float = 10.0
    plant: str = ""
    forked: bool = False  # from this process, which has imported torch


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended. ``note`` says why it failed, or what is to be said beside it."""

    name: str
    passed: bool
    seconds: float
    note: str
    rows: int
    failed: int
    tail: str


def parts(*, dry: bool = False) -> tuple[Part, ...]:
    """In the order in which they run: each is of use to the next, what is judged comes first."""
    device = "cpu" if dry else "cuda"

    def rows(name: str, *command: str) -> tuple[str, ...]:
        common = ("--device", device, "--json", f"{{out}}/{name}.json", "--budget-s", "{budget}")
        return ("-m", *command, *common, "--resume")

    def kernels(name: str, sets: Sequence[str], *, tune_s: int, case_s: float) -> tuple[str, ...]:
        if dry:
            sets, tune_s, case_s = ("odd",), 1, 0.02
        found = rows(name, "benchmarks.kernels", "--sets", *sets, "--dtype", name.split("_")[1])
        found += ("--tune-s", str(tune_s), "--case-s", str(case_s), "--max-call-s", "2")
        return found + (("--threads", "1", "--no-compile") if dry else ())

    def trains(name: str) -> tuple[str, ...]:
        return rows(name, "benchmarks.gpu_parts", name) + (("--toy",) if dry else ())

    accuracy = rows("accuracy", "benchmarks.gpu_accuracy", "--both-ways")
    pytest: tuple[str, ...] = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    pytest += ("--junitxml={out}/tests.xml",)
    if not dry and importlib.util.find_spec("xdist") is not None:
        pytest += ("-n", "12")  # kernels compile in parallel, and are in the cache from then on
    others = [name for name in SETS if name not in _JUDGED_SETS]
    judged = partial(kernels, sets=_JUDGED_SETS)
    found = (
        Part("smoke", "each kernel once, graphs, three steps of each layout", 90, trains("smoke")),
        Part("tests", "tests/gpu", 240, (*pytest, "tests/gpu")),
        Part("accuracy", "errors of every kernel in every dtype", 90, accuracy),
        Part("step", "dmuon.Muon in every layout, with and without graphs", 120, trains("step")),
        Part("kernels_float16", "a Llama-8B layer and experts in float16", 400,
             judged("kernels_float16", tune_s=150, case_s=3)),
        Part("kernels_bfloat16", "the same in bfloat16", 150,
             judged("kernels_bfloat16", tune_s=40, case_s=1)),
        Part("profile", "one full and one block step", 90, trains("profile")),
        Part("sanitizer", "three kernels under compute-sanitizer", 140, trains("sanitizer")),
        Part("rest_float16", "all other sets of shapes in float16", 360,
             kernels("rest_float16", others, tune_s=120, case_s=1)),
    )  # fmt: skip
    return tuple(map(_dry, found)) if dry else found


def _dry(part: Part) -> Part:
    """A part as it runs on a CPU, three of them with a fault that has to be survived."""
    faults = {
        "accuracy": "raise:2",  # the row fails, and the others are there
        "kernels_bfloat16": "hang:2",  # until the part's time is over: interrupted
        "rest_float16": "stuck:2",  # no signal helps: killed, and begun again after the row
    }
    plant = faults.get(part.name, "")
    command = part.command + (("--plant", plant) if plant else ())
    grace_s = 2.0 if plant.startswith("stuck") else 30.0
    # Ample limits: how long it takes depends on what else runs on the machine.
    return replace(
        part, command=command, most_s=300, stall_s=120, grace_s=grace_s, plant=plant, forked=True
    )


# ---- one part ------------------------------------------------------------------------------


def run_part(part: Part, out: Path, limit_s: float) -> Outcome:
    """Run one part within ``limit_s`` seconds; its output goes to ``<name>.log``."""
    begin = time.monotonic()
    deadline = begin + limit_s
    log, rows = out / f"{part.name}.log", out / f"{part.name}.json"
    for old in (log, rows):
        old.unlink(missing_ok=True)
    how: list[str] = []
    while True:
        progress = len(_document(rows).get("rows", ()))
        code, why = _run(part, out, log, deadline)
        how += [why] if why else []
        moved = len(_document(rows).get("rows", ())) > progress
        # Its last row hangs, or it was killed by a signal, or lost its device: the rest can go on.
        in_time = not why.startswith("out of time")
        goes_on = in_time and (why or code not in (0, 1)) and moved
        if not goes_on or deadline - time.monotonic() < 2 * part.grace_s:
            break
        how += [] if why else [f"exit code {code}"]
        how.append("begun again")
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
    found = _document(rows).get("rows", [])
    passed, note = _judge(part, out, code, how)
    failed = sum(map(has_failed, found))
    return Outcome(part.name, passed, time.monotonic() - begin, note, len(found), failed, tail)


def _run(part: Part, out: Path, log: Path, deadline: float) -> tuple[int | None, str]:
    """(exit code, why it was stopped) of one process; None where it had to be killed."""
    budget = max(1.0, deadline - time.monotonic() - 1.5 * part.grace_s)
    values = {"{out}": str(out), "{budget}": f"{budget:.0f}"}
    command = list(part.command)
    for name, value in values.items():
        command = [word.replace(name, value) for word in command]
    rows = out / f"{part.name}.json"
    ended_in = _document(rows).get("running")  # a process before this one
    pid, poll = _start(command, out, log, forked=part.forked)
    why = ""
    try:
        while (code := poll()) is None and not why:
            time.sleep(0.1)
            took, is_planted = _row_took(rows, ended_in)
            kind = part.plant.partition(":")[0] if is_planted else ""
            if kind == "hang" or time.monotonic() > deadline - part.grace_s:
                why = "out of time"
            elif kind == "stuck" or took > part.stall_s:
                why = f"a row hung for {took:.0f} s"
        if why:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGINT)
            end = time.monotonic() + part.grace_s
            while (code := poll()) is None and time.monotonic() < end:
                time.sleep(0.05)
            why += ", interrupted" if code is not None else ", killed"
    finally:
        # What it started ends with it, also where this process was told to stop.
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        while poll() is None:
            time.sleep(0.01)
    return code, why


def _row_took(path: Path, but: dict[str, Any] | None) -> tuple[float, bool]:
    """Seconds since the row began that runs now, 0 where none does or ``but`` that one; and whether
    a fault is planted in it: nobody has to wait to know that it never ends."""
    running = _document(path).get("running")
    if running is None or running == but:
        return 0.0, False
    return time.time() - path.stat().st_mtime, "planted" in running


def _start(
    command: Sequence[str], out: Path, log: Path, *, forked: bool
) -> tuple[int, Callable[[], int | None]]:
    """Its process id, in a session of its own, and what gives its exit code when it has one."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's background: a part would inherit it, and nothing could interrupt it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    env = {name: str(out / "cache" / folder) for name, folder in _CACHES.items()}
    env["PYTHONUNBUFFERED"] = "1"
    if forked:
        child = multiprocessing.get_context("fork").Process(target=_child, args=(command, log, env))
        child.start()
        assert child.pid is not None
        return child.pid, lambda: child.exitcode
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=_ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **env},
        )
    return process.pid, process.poll


def _child(command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
    os.setsid()
    os.chdir(_ROOT)
    os.environ.update(env)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(target, stream)
    assert command[0] == "-m"
    warnings.filterwarnings("ignore", message=".*found in sys.modules.*")  # as it is meant to be
    sys.argv = list(command[1:])
    runpy.run_module(command[1], run_name="__main__", alter_sys=True)


def _judge(part: Part, out: Path, code: int | None, how: Sequence[str]) -> tuple[bool, str]:
    """(passed, why not or what else)."""
    if part.name == "tests":
        return _judge_tests(part, out, code, how)
    ended = ", ".join(how)
    rows = _document(out / f"{part.name}.json").get("rows", [])
    failed = [row for row in rows if has_failed(row)]
    if failed:
        first = failed[0]
        words = first.get("failure", "out of its limit")
        return False, f"{len(failed)} of {len(rows)} rows: {first['name']}: {words}"
    if part.plant:
        planted = next((row for row in rows if "planted" in row and "failure" in row), None)
        if planted is None or (code != 0 and "out of time, interrupted" not in ended):
            return False, f"the planted fault was not survived; {ended or f'exit code {code}'}"
        text = f"planted fault survived ({planted['failure']}"
        return len(rows) > 1, f"{text}; {ended})" if ended else f"{text})"
    if ended or code != 0:
        return False, ended or f"exit code {code}"
    left_out = _document(out / f"{part.name}.json").get("left_out", ())
    if left_out:
        return False, f"no time for {len(left_out)} rows: {left_out[0]}, ..."
    return bool(rows), "" if rows else "wrote no rows"


def _judge_tests(part: Part, out: Path, code: int | None, how: Sequence[str]) -> tuple[bool, str]:
    """A JUnit file: none may fail, and on a GPU not all may be skipped."""
    if how or code != 0:
        return False, ", ".join(how) or f"exit code {code}"
    try:
        suites = list(ElementTree.parse(out / "tests.xml").getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError) as error:
        return False, f"no result: {error}"
    ran, skipped = (sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "skipped"))
    note = f"{ran - skipped} tests, {skipped} skipped"
    return ran > skipped or part.forked, note


def _document(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


# ---- all parts -----------------------------------------------------------------------------


def run_parts(
    plan: Sequence[Part],
    out: Path,
    budget_s: float,
    *,
    run: Callable[[Part, Path, float], Outcome] = run_part,
    done: Callable[[Outcome], None] = lambda outcome: None,
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
        begin = clock()
        try:
            outcome = run(part, out, limit_s)
        except KeyboardInterrupt:
            done(Outcome(part.name, False, clock() - begin, "stopped from outside", 0, 0, ""))
            raise
        verdict = "passed" if outcome.passed else "FAILED"
        note = f", {outcome.note}" if outcome.note else ""
        print(f"{part.name}: {verdict} in {outcome.seconds:.0f} s{note}", flush=True)
        done(outcome)
    return later


@contextmanager
def _clocks(out: Path) -> Iterator[None]:
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


def pack(out: Path, path: Path, limit: int = ARCHIVE_BYTES) -> list[str]:
    """Everything in ``out`` in one archive, the caches last; what of them did not fit.

    Of Triton's cache only what is needed to run a kernel again: its binary and its metadata.
    """
    cache = out / "cache"
    files = [f for f in sorted(out.rglob("*")) if f.is_file()]
    results = [f for f in files if cache not in f.parents and not f.name.startswith(path.name)]
    kept = [f for f in files if (cache / "xdg") in f.parents]
    kept += [
        f for f in files if (cache / "triton") in f.parents and f.suffix in (".json", ".cubin")
    ]
    left: list[str] = []
    part = path.with_name(path.name + ".part")
    with part.open("wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for file in results + kept:
            # Written blocks lag behind by what the compressor holds, a few kilobytes.
            if file in kept and raw.tell() + file.stat().st_size > limit:
                left.append(str(file.relative_to(out)))
            else:
                archive.add(file, arcname=str(Path("gpu") / file.relative_to(out)))
    os.replace(part, path)
    return left


class _Report:
    """What is known so far, of parts that an earlier call ran too, and the files that say it."""

    def __init__(self, out: Path, archive: Path, *, dry: bool) -> None:
        self._out, self._archive, self._dry = out, archive, dry
        known = _document(out / "gpu.json").get("parts", [])
        self.outcomes = {} if dry else {one["name"]: Outcome(**one) for one in known}
        self._facts = gpu_facts(torch.device("cpu" if dry else "cuda"))

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        self.write()

    def targets(self) -> list[Target]:
        found = targets(self._out)
        return [replace(target, passed=None) for target in found] if self._dry else found

    def passed(self) -> bool:
        parts_pass = all(outcome.passed for outcome in self.outcomes.values())
        return parts_pass and all(target.passed is not False for target in self.targets())

    def write(self) -> None:
        """``gpu.json``, ``gpu.md`` and the archive."""
        found = document(())
        del found["rows"]
        for key, facts in self._facts.items():
            found[key] |= facts
        outcomes = [self.outcomes[one.name] for one in parts() if one.name in self.outcomes]
        found["parts"] = [asdict(outcome) for outcome in outcomes]
        found["targets"] = [asdict(target) for target in self.targets()]
        write_json(str(self._out / "gpu.json"), found)
        machine = found["machine"]
        name = machine.get("gpu", f"{machine['cpu']}, a dry run")
        told = ", ".join(f"{key} {value}" for key, value in found["versions"].items() if value)
        blocks = ["# GPU suite", f"{name}; {told}", "## Parts", self.parts_table()]
        blocks += ["## Targets", targets_table(self.targets())]
        blocks += [f"### {one.name}\n\n```\n{one.tail}\n```" for one in outcomes]
        (self._out / "gpu.md").write_text("\n\n".join(blocks) + "\n")
        left = pack(self._out, self._archive)
        if left:
            print(f"{len(left)} files of the caches did not fit into the archive", flush=True)

    def parts_table(self) -> str:
        lines = [
            (one.name, "pass" if one.passed else "**fail**", one.note, f"{one.seconds:.0f}",
             one.rows or "", one.failed or "")
            for one in self.outcomes.values()
        ]  # fmt: skip
        return table(("part", "", "", "s", "rows", "failed"), lines, left=3)


# ---- targets -------------------------------------------------------------------------------

H200_LAYER_FLOOR_MS = 12.72
"""A Llama-8B layer in the Gram form with restart [2] and half of each symmetric product, at the
790 TFLOP/s that a large float16 product reaches on an H200."""
_LAYER, _EXPERTS = "llama-8b layer", "128 experts 768 x 2048"


@dataclass(frozen=True, slots=True)
class Target:
    """``value`` None: it was not measured, which is a failure; ``passed`` None: does not apply."""

    name: str
    limit: str
    value: float | None
    passed: bool | None
    note: str = ""


def targets(folder: Path) -> list[Target]:
    """Every target, from the files of the parts in ``folder``."""
    kernels = _document(folder / "kernels_float16.json")
    is_h200 = "H200" in kernels.get("machine", {}).get("gpu", "")

    def best(case: str, value: Callable[[dict[str, Any]], float | None]) -> tuple[Any, str]:
        """The lowest value among dmuon's ways to run a case, and which it is: planning takes the
        cheapest by measurement."""
        found = [
            (number, row["contender"])
            for row in kernels.get("rows", ())
            if "median_ms" in row and row["case"] == case and row["contender"].startswith("ours")
            if (number := value(row)) is not None
        ]
        return min(found) if found else (None, "not measured")

    def at_most(limit: str, value: Callable[[dict[str, Any]], float]) -> Target:
        number, note = best(_LAYER, value)
        passed = number is not None and number <= 1.2
        return Target(f"{_LAYER}, float16", f"<= 1.2 x {limit}", number, passed, note)

    def faster(case: str, dtypes: str, least: float, key: str, words: str) -> Target:
        number, note = best(case, lambda row: row.get(key))
        gain = None if number is None else 1 / number
        passed = gain is not None and gain >= least
        return Target(f"{case}, {dtypes}", f">= {least:g} x {words}", gain, passed, note)

    h200 = at_most(f"{H200_LAYER_FLOOR_MS} ms", lambda row: row["median_ms"] / H200_LAYER_FLOOR_MS)
    words, key = "over compiled standard", "ratio_to_compiled_bfloat16"
    half = [
        r for r in _document(folder / "accuracy.json").get("rows", ()) if "float16" in r["name"]
    ]
    worst = max((row["error"] / row["expected"] for row in half if "error" in row), default=None)
    within = bool(half) and all(row.get("passed", False) for row in half)
    return [
        h200 if is_h200 or h200.value is None else replace(h200, passed=None),
        at_most("floor at the rate measured beside it", lambda row: row["ratio_to_floor"]),
        faster(_LAYER, "float16 over bfloat16", 1.7, key, words),
        faster(_EXPERTS, "float16", 3.0, "ratio_to_standard", "over the unbatched loop"),
        Target("errors in half precision", "within the table of each form", worst, within,
               f"{len(half)} rows"),
    ]  # fmt: skip


def targets_table(found: Sequence[Target]) -> str:
    words = {True: "pass", False: "**fail**", None: "not for this GPU"}
    lines = [
        (one.name, one.limit, one.note, words[one.passed], one.value and f"{one.value:.2f}")
        for one in found
    ]
    return table(("target", "limit", "by", "", "measured"), lines, left=4)


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
    parser.add_argument("--archive", metavar="PATH", help="default: FOLDER/gpu.tar.gz")
    parser.add_argument("--dry-run", action="store_true", help="walk through it on a CPU")
    args = parser.parse_args(argv)
    chosen = names if args.parts is None else args.parts.split(",")
    unknown = [name for name in chosen if name not in names]
    if args.budget_s is None:
        args.budget_s = float("inf") if args.dry_run else BUDGET_S
    if unknown:
        parser.error(f"--parts: there is no part {unknown[0]!r}; choose of {', '.join(names)}")
    plan = [part for part in parts(dry=args.dry_run) if part.name in chosen]
    if not args.dry_run and not torch.cuda.is_available():
        print("torch finds no GPU here (--dry-run walks through it on a CPU). What would run:")
        for part in plan:
            print(f"{part.name:17} at most {part.most_s:3.0f} s  {part.what}")
            print(f"{'':17} python {' '.join(part.command)}")
        return 2
    out = Path(args.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    archive = Path(args.archive).absolute() if args.archive else out / "gpu.tar.gz"
    return _run_all(plan, out, archive, args)


def _run_all(plan: Sequence[Part], out: Path, archive: Path, args: argparse.Namespace) -> int:
    if args.dry_run:
        print("A dry run: toy sizes on a CPU; three parts have a planted fault.", flush=True)
        # Once, for all that are forked.
        for name in ("torch.distributed.fsdp", "pytest", *_MODULES):
            importlib.import_module(name)
    report = _Report(out, archive, dry=args.dry_run)
    # A call that is cut off from outside ends its part and has all that was measured.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    later: list[str] = []
    stopped = False
    try:
        with _clocks(out):
            later = run_parts(plan, out, args.budget_s, done=report.add)
    except KeyboardInterrupt:
        stopped = True
    finally:
        report.write()
    print(f"\n{report.parts_table()}\n")
    if args.dry_run:
        print("Targets are not judged: this is a dry run.")
    else:
        print(targets_table(report.targets()))
    print(f"\nEverything is in {archive} ({archive.stat().st_size / 1e6:.1f} MB).")
    if later:
        print(f"Not begun in {args.budget_s:g} s: {', '.join(later)}. To go on:")
        print(f"python -m benchmarks.gpu --out {args.out} --parts {','.join(later)}")
    if stopped:
        print("Stopped from outside.")
    return 0 if report.passed() and not later and not stopped else 1


if __name__ == "__main__":
    sys.exit(main())
