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
    """Packages, with spaces between: ``requirements`` with what they need; ``bare`` without (where
    they pin another torch, or need much that is not used here). ``constrained``: constraints.txt
    holds for all of it. Versions of what ``shown`` names, beside torch's, are reported. ``more``:
    cells beside those that all have."""

    requirements: str
    shown: str
    bare: str = ""
    constrained: bool = False
    more: tuple[str, ...] = ()


ENVIRONMENTS = {
    "lightning": Environment(
        "lightning==2.6.6 jsonargparse[signatures]==4.41.0",
        shown="lightning jsonargparse",
        constrained=True,
    ),
    # Its command line reads URLs, which it does not ask for.
    "litgpt": Environment(
        "litgpt==0.5.13 requests==2.34.2",
        shown="litgpt lightning jsonargparse",
    ),
    "torchtune": Environment(
        "torchtune==0.6.1",
        shown="torchtune torchao",
        bare="torchao==0.14.1",
    ),
    # Not its cameras, motors and viewers, nor its torch and torchvision.
    "lerobot": Environment(
        "draccus==0.10.0 datasets==4.8.4 diffusers==0.35.2 huggingface_hub==0.35.3 "
        "accelerate==1.15.0 einops==0.8.1 av==15.1.0 jsonlines==4.0.0 packaging==25.0 termcolor "
        "gymnasium==1.2.3 deepdiff==8.6.1 imageio opencv-python-headless==4.12.0.88 pyserial==3.5",
        shown="lerobot accelerate datasets",
        bare="lerobot==0.4.4 torchvision==0.28.0",
    ),
    # axolotl imports quantizers and loggers that are not used here; nothing needs a GPU to import.
    "axolotl": Environment(
        "transformers==5.16.1 peft==0.20.0 accelerate==1.13.0 datasets==4.8.4 pydantic==2.12.5 "
        "PyYAML==6.0.3 addict==2.4.0 fire==0.7.1 typer==0.25.1 python-dotenv==1.0.1 "
        "colorama==0.4.6 einops==0.8.2 packaging==26.0 posthog==6.7.11 scipy==1.17.1 "
        "nvidia-ml-py==12.560.30 psutil==7.2.2 art==6.5 schedulefree==1.4.1 mistral-common==1.11.5 "
        "langdetect==1.0.9 numba==0.68.1 bitsandbytes==0.50.2 fastcore==2.2.41 triton==3.9.0 "
        "evaluate==0.4.6 wandb==0.31.0",
        shown="axolotl transformers accelerate",
        bare="axolotl==0.19.0 trl==1.9.0 axolotl-contribs-mit==0.0.6 axolotl-contribs-lgpl==0.0.7",
    ),
    "ms_swift": Environment(
        "transformers==5.16.1 peft==0.20.0 accelerate==1.13.0 datasets==4.8.4 modelscope==1.40.2 "
        "addict==2.4.0 einops==0.8.2 json-repair==0.64.6 dacite==1.9.2 tensorboard==2.21.0 "
        "safetensors==0.8.0 PyYAML==6.0.4 requests==2.34.2 pillow==13.0.0",
        shown="ms-swift transformers accelerate",
        bare="ms-swift==4.6.0",
    ),
    "nemo_automodel": Environment(
        "transformers==5.18.0 accelerate==1.15.0 datasets==4.8.4 PyYAML==6.0.4 torchdata==0.11.0 "
        "tiktoken==0.14.0",
        shown="nemo-automodel transformers",
        bare="nemo-automodel==0.7.0 megatron-fsdp==0.5.0 torchao==0.17.0 flashoptim==0.1.4",
    ),
    "torchtitan": Environment(
        "torchdata==0.11.0 torch_checkpointing==0.1.1 datasets==4.7.0 tokenizers==0.23.3 "
        "safetensors==0.8.0 tyro==1.0.17 tensorboard==2.21.0 einops==0.8.2 pillow==13.0.0 "
        "spmd_types==0.2.3 triton==3.9.0",
        shown="torchtitan",
        bare="torchtitan==0.3.0",
        more=("hsdp", "tp", "pp", "interleaved", "ep", "moved"),
    ),
    # Without the engines that generate, and without those of Megatron.
    "verl": Environment(
        "transformers==5.10.2 accelerate==1.15.0 datasets==4.8.4 hydra-core==1.3.8 "
        "codetiming==1.4.0 dill==0.4.1 pandas==3.1.1 peft==0.20.0 torchdata==0.11.0 "
        "tensordict==0.10.0 packaging pyarrow==26.0.1 ray==2.56.1 pillow==13.0.0 uvicorn==0.54.0 "
        "fastapi==0.165.0 tensorboard==2.21.0 matplotlib==3.11.2 ipython==9.18.1",
        shown="verl transformers tensordict",
        bare="verl==0.9.1",
    ),
}  # fmt: skip


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
    subprocess.run([*pip, ALWAYS[0], *wanted.requirements.split()], check=True)
    if wanted.bare:
        subprocess.run([*pip, "--no-deps", *wanted.bare.split()], check=True)
    stamp.write_text(text.hexdigest())
    return python
