"""Builds wheel and sdist from a clean clone into dist/, and tries them as a new user would.

``python -m tests.release`` (`make dist`). The last commit counts, not the working tree. The wheel
is built from the sdist, and again from the clone; both must hold the same. It is installed into an
empty environment that has nothing but torch, and there, away from the sources, `USED` runs: the
line of the README, docs/first-run.md with two processes and TensorBoard, every command.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LINE = re.compile(r"^opt = dmuon\.Muon\(.*\)", re.MULTILINE)
SCRIPT = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

ONE_LINE = """
import importlib.metadata, importlib.resources, pathlib, sys
import torch
from torch import nn

import dmuon

assert pathlib.Path(dmuon.__file__).is_relative_to(sys.prefix), dmuon.__file__
assert importlib.metadata.version("dmuon") == dmuon.__version__ == "{version}"
files = importlib.resources.files("dmuon")
assert all(files.joinpath(n).is_file() for n in ("py.typed", "presets.json", "report/page.css"))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
{line}
losses = []
for _ in range(300):
    x = torch.randn(64, 16)
    loss = nn.functional.mse_loss(model(x), x[:, :4])
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.5 * losses[0], losses
print(opt.report())
print("loss %.3f -> %.3f" % (losses[0], losses[-1]))
"""

WRITTEN = """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator("runs/dmuon").Reload()
losses = [event.value for event in events.Scalars("loss")]
assert losses[-1] < 0.6 * losses[0] and "ns_ms" in events.Tags()["scalars"], losses
"""

# Run as `python ARGUMENTS` in the new environment, in an empty folder.
USED = (
    "one_line.py",
    "-m torch.distributed.run --standalone --nproc-per-node=2 train.py",
    "written.py",
    "-m dmuon --help",
    "-m dmuon doctor",
    "-m dmuon plan --model qwen2.5-7b --mesh 4x8 --save plan.json --html plan.html",
    "-m dmuon plan --verify plan.json",
    "-m dmuon profile --shapes 64x64,64x128 --budget 2 --cache-dir cache",
    "-m dmuon check --nproc 2 --steps 2",
)


def main() -> None:
    """Build, check, install and use; ends at the first thing that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist", help="default: dist/")
    out = parser.parse_args().out.resolve()
    if changed := output("git", "status", "--porcelain"):
        print(f"not committed, so not in the release:\n{changed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "clone")
        run("git", "clone", "--quiet", str(REPOSITORY), str(clone))
        wheel = build(clone, out)
        python = installed(wheel, clone, Path(folder, "environment"))
        use(python, programs(clone, wheel.name.split("-")[1]), Path(folder, "user"))
    print(f"ready: {', '.join(str(path) for path in sorted(out.iterdir()))}")


def build(clone: Path, out: Path) -> Path:
    """Wheel and sdist in ``out``; returns the wheel."""
    # Times of files are those of the commit, so that equal commits give equal wheels.
    os.environ["SOURCE_DATE_EPOCH"] = output("git", "log", "-1", "--format=%ct", cwd=clone)
    command = sys.executable, "-m", "build", "--no-isolation", "-q"
    shutil.rmtree(out, ignore_errors=True)
    run(*command, "--outdir", str(out), cwd=clone)  # the wheel from the sdist
    run(*command, "--wheel", "--outdir", "direct", cwd=clone)
    (wheel,) = out.glob("*.whl")
    assert files_in(wheel) == files_in(clone / "direct" / wheel.name)
    sources = {p.relative_to(clone).as_posix() for p in clone.glob("dmuon/**/*") if p.is_file()}
    assert sources == {name for name in files_in(wheel) if name.startswith("dmuon/")}
    paths = map(str, sorted(out.iterdir()))
    run(sys.executable, "-m", "twine", "check", "--strict", *paths, cwd=clone)
    return wheel


def files_in(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def installed(wheel: Path, clone: Path, folder: Path) -> str:
    """The interpreter of a new environment with torch, and then the wheel and what it needs."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = python, "-m", "pip", "--disable-pip-version-check", "install", "-qq"
    pins = "-c", str(clone / "constraints.txt")
    run(*pip, *pins, "torch")
    run(*pip, *pins, str(wheel))
    run(python, "-c", "import dmuon.tools.doctor")  # before more is installed
    run(*pip, *pins, "tensorboard")
    run(python, "-m", "pip", "--disable-pip-version-check", "check")
    return python


def programs(clone: Path, version: str) -> dict[str, str]:
    """What the pages tell users to write, by file name."""
    line = LINE.search((clone / "README.md").read_text(encoding="utf-8"))
    script = SCRIPT.search((clone / "docs" / "first-run.md").read_text(encoding="utf-8"))
    assert line and script, "README.md or docs/first-run.md has lost its code"
    assert "STEPS, LENGTH = 200" in script[1]
    fewer = script[1].replace("STEPS, LENGTH = 200", "STEPS, LENGTH = 30")
    one_line = ONE_LINE.format(version=version, line=line[0])
    return {"one_line.py": one_line, "train.py": fewer, "written.py": WRITTEN}


def use(python: str, files: dict[str, str], folder: Path) -> None:
    """Run `USED` there, beside these files."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    hidden = {name: os.environ.pop(name, None) for name in ("PYTHONPATH", "VIRTUAL_ENV")}
    try:
        for arguments in USED:
            print(f"$ python {arguments}", flush=True)
            tried = [python, *arguments.split()]
            done = subprocess.run(tried, cwd=folder, text=True, stdout=-1, stderr=subprocess.STDOUT)
            assert done.returncode == 0, done.stdout
    finally:
        os.environ.update({name: value for name, value in hidden.items() if value is not None})


def run(*command: str, cwd: Path = REPOSITORY) -> None:
    subprocess.run(command, cwd=cwd, check=True)


def output(*command: str, cwd: Path = REPOSITORY) -> str:
    return subprocess.run(command, cwd=cwd, check=True, text=True, stdout=-1).stdout.strip()


if __name__ == "__main__":
    main()
