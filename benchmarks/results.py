"""The runner of all benchmarks: tables of cases, whose rows are on disk as they are measured."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

import dmuon
from dmuon import devices

Row = dict[str, Any]


Facts = dict[str, dict[str, Any]]
"""What a document says beside its rows, of the ``machine`` and of ``versions``."""


def document(rows: Sequence[Row], facts: Facts | None = None) -> dict[str, Any]:
    """``{"machine", "versions", "date", "rows"}``, with further facts of the first two."""
    cpu = devices.of("cpu").name().split(", ")[0]
    machine = {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system()}
    versions = {
        "dmuon": dmuon.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    more = facts or {"machine": {}, "versions": {}}
    found: dict[str, Any] = {"machine": machine | more["machine"]}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return found | {"versions": versions | more["versions"], "date": date, "rows": list(rows)}


def gpu_facts(device: torch.device) -> Facts:
    """Clocks, driver, versions and switches of torch; ``nvidia_smi`` says why if it cannot."""
    try:
        import triton

        versions: dict[str, Any] = {"triton": str(triton.__version__)}
    except ImportError:
        versions = {"triton": None}
    machine: dict[str, Any] = {"device": device.type}
    if device.type == "cuda":
        versions["cuda"] = torch.version.cuda or torch.version.hip
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        machine |= {"gpu": torch.cuda.get_device_name(device), "nvidia_smi": _nvidia_smi()}
        for switch in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction",
                       "tf32"):  # fmt: skip
            machine[f"allow_{switch}"] = getattr(torch.backends.cuda.matmul, f"allow_{switch}")
    return {"machine": machine, "versions": versions}


_ASKED = (
    "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,"
    "temperature.gpu"
)


def _nvidia_smi() -> dict[str, str] | str:
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not on the PATH"
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
    return dict(zip(_ASKED.split(","), found.stdout.splitlines()[0].split(", ")))


def command(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser with the first line of a module's docstring, and ``--json``."""
    parser = argparse.ArgumentParser(prog=prog, description=(doc or "").splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write the rows there, - for stdout")
    return parser


@contextmanager
def picture(
    path: str,
    rows: int,
    cols: int,
    size: tuple[float, float],
    share_x: Literal["all", "row", "none"] = "all",
) -> Iterator[Any]:
    """A figure with its axes, saved to ``path`` at the end; which of them ``share_x``."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, cols, figsize=size, layout="constrained", sharex=share_x)
    yield figure, axes
    figure.savefig(path, dpi=150)


def write_json(path: str, found: dict[str, Any]) -> None:
    """Replace the file at once: a reader finds the old one or the new one, never half of it."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path + ".part", "w") as file:
        json.dump(found, file, indent=1)
        file.write("\n")
    os.replace(path + ".part", path)


def read_rows(path: str) -> list[Row]:
    """The rows of a document."""
    with open(path) as file:
        rows: list[Row] = json.load(file)["rows"]
    return rows


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table; its first ``left`` columns hold words, the others numbers.

    >>> print(table(("a", "b"), [("x", 1), ("y", None)]))
    | a | b |
    |---|---:|
    | x | 1 |
    | y |  |
    """
    lines = [headings, *(["" if cell is None else cell for cell in row] for row in rows)]
    texts = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    rule = "|" + "---|" * left + "---:|" * (len(headings) - left)
    return "\n".join([texts[0], rule, *texts[1:]])


# ---- rows that are kept whatever happens ---------------------------------------------------

NO_TIME, INTERRUPTED = "no time was left", "interrupted after"
LOST = 75
"""The exit code of a process whose device answers no more; another one can go on after its row."""


class Rows:
    """Rows of one process in the file ``path`` (None: in memory), written anew after each.

    `attempt` runs one measurement. What it raises is recorded in its row and passed by, so that one
    failure never loses the rest; after ``budget_s`` seconds no further one is begun, and one that
    takes ``row_s`` seconds ends the process. With ``resume`` the rows that an earlier process left
    in the file are kept and not measured again, but for those that had no time; the one in which it
    ended is recorded as failed.
    """

    def __init__(
        self,
        path: str | None,
        device: torch.device,
        *,
        budget_s: float | None = None,
        row_s: float | None = None,
        resume: bool = False,
    ) -> None:
        self.rows: list[Row] = []
        self.device = device
        self._path = path
        self._begin = time.monotonic()
        self._budget_s = float("inf") if budget_s is None else budget_s
        self._row_s = row_s
        self._running: Row | None = None
        self.facts = gpu_facts(device)  # into the document's "machine" and "versions"
        if resume and path is not None and os.path.exists(path):
            with open(path) as file:
                found = json.load(file)
            self.rows = [row for row in found["rows"] if not had_no_time(row)]
            if found["running"] is not None:
                ended = {"failure": "the process ended while this was measured"}
                self.rows.append({**found["running"], **ended})
        self._known = {row["name"] for row in self.rows}
        self._write()

    @classmethod
    def of(cls, args: argparse.Namespace) -> Rows:
        """As the options of `row_options` say."""
        device = torch.device(args.device)
        if device.type == "cuda":  # with a number, as tensors have it
            device = torch.device("cuda", torch.cuda.current_device())
        how = {"budget_s": args.budget_s, "row_s": args.row_s, "resume": args.resume}
        return cls(args.json, device, **how)

    def beside(self, name: str) -> str | None:
        """The path of another file of the same run."""
        return None if self._path is None else os.path.join(os.path.dirname(self._path), name)

    @property
    def failed(self) -> list[Row]:
        """Rows that raised, or whose number is out of its limit."""
        return [row for row in self.rows if has_failed(row)]

    def forget_failures(self) -> None:
        """Measure again what failed in an earlier process."""
        self.rows = [row for row in self.rows if not has_failed(row)]
        self._known = {row["name"] for row in self.rows}
        self._write()

    def add(self, row: Row) -> None:
        """Keep a row of what is being measured; it needs no name then."""
        name = self._running["name"] if self._running is not None else ""
        self.rows.append({"name": name, **row})
        self._write()

    def attempt(self, name: str, measure: Callable[[], Row | None], **about: Any) -> bool:
        """Add the row that ``measure`` returns, or why there is none; whether there is.

        ``measure`` may `add` rows of its own and return None. ``about`` goes into the row in any
        case. A name that is in the file already is not measured again.

        Raises SystemExit(`LOST`) where the device does not answer after a failure.
        """
        if name in self._known:
            return False
        self._known.add(name)
        base = {"name": name, **about}
        if time.monotonic() >= self._begin + self._budget_s:
            self._end(base | {"left_out": NO_TIME})
            return False
        self._running = base
        begin = time.monotonic()
        failure = ""
        try:
            self._write()
            if self._row_s is not None:  # also where no signal reaches Python, as in a driver
                faulthandler.dump_traceback_later(self._row_s, exit=True)
            found = measure()
        except KeyboardInterrupt:
            self._end(base | {"failure": f"{INTERRUPTED} {time.monotonic() - begin:.1f} s"})
            raise
        except Exception as error:  # whatever it is: the other rows do not depend on it
            failure = in_words(error)
            self._end(base | {"failure": failure, "trace": traceback.format_exc(limit=-6)})
        finally:
            faulthandler.cancel_dump_traceback_later()
        if failure:
            print(f"{name}: FAILED, {failure}", flush=True)
            self._recover()  # now that the traceback holds no memory any more
            return False
        self._end(None if found is None else base | found)
        return True

    def _end(self, row: Row | None) -> None:
        self._running = None
        if row is not None:
            self.rows.append(row)
        self._write()

    def _recover(self) -> None:
        gc.collect()
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except Exception as error:  # after an illegal access every call of this process fails
            print(f"the device does not answer any more: {in_words(error)}", flush=True)
            # Not sys.exit(): cleaning up would wait for the device.
            os._exit(LOST)

    def document(self) -> dict[str, Any]:
        """What is in the file: rows, facts, and what is being measured."""
        found = document(self.rows, self.facts)
        found["left_out"] = [row["name"] for row in self.rows if had_no_time(row)]
        found["seconds"] = round(time.monotonic() - self._begin, 1)
        return found | {"running": self._running}

    def _write(self) -> None:
        if self._path is not None:
            write_json(self._path, self.document())


def had_no_time(row: Row) -> bool:
    """Whether it was not begun, or not ended, because its part was out of time."""
    return row.get("left_out") == NO_TIME or row.get("failure", "").startswith(INTERRUPTED)


def has_failed(row: Row) -> bool:
    """Whether it raised, or its number is out of its limit."""
    return "failure" in row or row.get("passed") is False


def in_words(error: BaseException) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def row_options(parser: argparse.ArgumentParser, *, device: str) -> None:
    """The options, beside ``--json``, of a command that writes `Rows`."""
    parser.add_argument("--device", choices=["cpu", "cuda"], default=device)
    parser.add_argument("--budget-s", type=float, help="begin nothing more after that")
    parser.add_argument("--row-s", type=float, help="end where one row takes longer")
    parser.add_argument("--resume", action="store_true", help="go on after the rows in the file")


# ---- a benchmark ---------------------------------------------------------------------------

Cases = Iterator[tuple[str, Callable[[], Sequence[Row]]]]
"""Names, and what measures the rows of each."""


@dataclass(frozen=True)
class Benchmark:
    """A table of cases and how their rows are shown; `main` runs the cases one after the other.

    ``cases`` gets the options and the rows so far, among them those of earlier cases. ``misses``
    tells whether a row is above a limit, which fails with ``--check``.
    """

    doc: str | None
    cases: Callable[[argparse.Namespace, list[Row]], Cases]
    line: Callable[[Row], str]
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    tables: Callable[[Sequence[Row]], dict[str, str]] | None = None
    draw: Callable[[Sequence[Row], str], None] | None = None
    misses: Callable[[Row, argparse.Namespace], bool] | None = None

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run what the command line asks for; 1 if a case failed or a limit is missed."""
        parser = command(self.doc)
        parser.add_argument("--only", default="", help="cases whose name has this in it")
        parser.add_argument("--resume", action="store_true", help="keep the rows in the file")
        if self.misses is not None:
            parser.add_argument("--check", action="store_true", help="fail above the limits")
        if self.tables is not None:
            parser.add_argument("--tables", metavar="JSON", help="print the tables of a file")
        if self.draw is not None:
            parser.add_argument("--picture", nargs=2, metavar=("PATH", "JSON"), help="draw JSON")
        self.options(parser)
        args = parser.parse_args(argv)
        if self.tables is not None and args.tables:
            print(*self.tables(read_rows(args.tables)).values(), sep="\n\n")
            return 0
        if self.draw is not None and args.picture:
            self.draw(read_rows(args.picture[1]), args.picture[0])
            return 0
        return self._run(args)

    def _run(self, args: argparse.Namespace) -> int:
        is_piped = args.json == "-"
        told = sys.stderr if is_piped else sys.stdout
        rows = Rows(None if is_piped else args.json, torch.device("cpu"), resume=args.resume)
        rows.forget_failures()

        def add(measure: Callable[[], Sequence[Row]]) -> None:
            for row in measure():
                rows.add(row)
                print(self.line(row), file=told, flush=True)

        for name, measure in self.cases(args, rows.rows):
            if args.only in name:
                rows.attempt(name, partial(add, measure))
        if is_piped:
            print(json.dumps(rows.document(), indent=1))
        good = [row for row in rows.rows if "failure" not in row]
        missed = [row for row in good if self.misses is not None and self.misses(row, args)]
        for row in missed:
            print(f"above its limit: {self.line(row)}", file=told)
        return int(bool(rows.failed) or (bool(missed) and args.check))
