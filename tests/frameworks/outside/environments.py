"""What each framework is tried with: an environment of its own, pinned."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
# torch in the build that lies nearest, on most machines without a GPU the one for CPUs, and what
# dmuon needs.
ALWAYS = ("torch==2.13.0", "numpy", "pulp[highs]>=3.3", "rich")


@dataclass(frozen=True)
class Environment:
    """``requirements``: with what they need; ``bare``: without (where they pin another torch, or
    need much that is not used here). ``constrained``: constraints.txt holds for all of it. Versions
    of what ``shown`` names, beside torch's, are reported."""

    requirements: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    constrained: bool = False
    shown: tuple[str, ...] = ()


ENVIRONMENTS = {
    "lightning": Environment(
        ("lightning==2.6.6", "jsonargparse[signatures]==4.41.0"),
        constrained=True,
        shown=("lightning", "jsonargparse"),
    ),
    "ms_swift": Environment(
        (
            "transformers==5.16.1", "peft==0.20.0", "accelerate==1.13.0", "datasets==4.8.4",
            "modelscope==1.39.1", "addict", "einops", "json-repair", "dacite", "tensorboard",
            "safetensors", "PyYAML", "requests", "pillow",
        ),
        bare=("ms-swift==4.6.0",),
        shown=("ms-swift", "transformers", "accelerate"),
    ),
}


def prepared(name: str, folder: Path) -> Path:
    """The interpreter of the environment of ``name`` in ``folder``, made where it is missing or was
    made from other requirements."""
    wanted = ENVIRONMENTS[name]
    place = folder / name
    python, stamp = place / "bin" / "python", place / "made-from"
    text = hashlib.sha256(repr((ALWAYS, astuple(wanted), sys.version_info[:2])).encode())
    if stamp.exists() and stamp.read_text() == text.hexdigest():
        return python
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    if wanted.constrained:
        pip += ["-c", str(REPOSITORY / "constraints.txt")]
    subprocess.run([*pip, *ALWAYS], check=True)
    if wanted.requirements:
        subprocess.run([*pip, ALWAYS[0], *wanted.requirements], check=True)
    if wanted.bare:
        subprocess.run([*pip, "--no-deps", *wanted.bare], check=True)
    stamp.write_text(text.hexdigest())
    return python
