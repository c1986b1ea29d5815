"""lerobot's own command with `--optimizer.type=dmuon`: an ACT policy on a data set of four frames.

Every batch is the whole data set, so that the order of its frames does not matter. The gradient of
the decoder's first self-attention is rounding alone, because it sees zeros, and so is that of the
bias of any keys: a large ``eps`` keeps Newton-Schulz and AdamW from making whole updates of it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.frameworks import common
from tests.frameworks.outside import cells

# A torchvision that is built for CUDA cannot load its operators beside a torch for CPUs, and looks
# them up when it is imported. None of them is used here.
LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for operator in (
    "nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward",
    "ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward",
    "deform_conv2d", "_deform_conv2d_backward",
):  # fmt: skip
    LIBRARY.define(f"{operator}(Tensor x) -> Tensor")

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.datasets.lerobot_dataset import LeRobotDataset  # noqa: E402
from lerobot.policies.act.configuration_act import ACTConfig  # noqa: E402
from lerobot.policies.act.modeling_act import ACTPolicy  # noqa: E402
from lerobot.policies.factory import make_pre_post_processors  # noqa: E402
from lerobot.scripts import lerobot_train  # noqa: E402

HERE = "tests.frameworks.outside.lerobot"
FRAMES, CHUNK = 4, 2
EPS = 0.01
FEATURES = {
    "observation.state": (6, FeatureType.STATE),
    "observation.environment_state": (5, FeatureType.ENV),
    "action": (3, FeatureType.ACTION),
}
PLUGIN = "--optimizer.discover_packages_path=dmuon.integrations.lerobot"
COMMAND = [
    "--dataset.repo_id=tiny/arm", "--policy.path=begin", "--policy.push_to_hub=false",
    "--output_dir=trained", f"--steps={common.STEPS}", f"--save_freq={common.SAVED}",
    "--num_workers=0", "--use_policy_training_preset=false",
    PLUGIN, "--optimizer.type=dmuon",
    f"--optimizer.lr={common.LR}", f"--optimizer.weight_decay={common.DECAY}",
    f"--optimizer.others={{ns_dtype: float32, eps: {EPS}, adamw_eps: {EPS}}}",
    "--scheduler.type=diffuser",
]  # fmt: skip


def data(folder: Path) -> LeRobotDataset:
    """The data set, made where it is missing."""
    if not folder.exists():
        shapes = {n: {"dtype": "float32", "shape": (s,)} for n, (s, _) in FEATURES.items()}
        names = {
            n: v | {"names": [f"{n}{i}" for i in range(*v["shape"])]} for n, v in shapes.items()
        }
        made = LeRobotDataset.create("tiny/arm", 10, names, root=folder, use_videos=False)
        generator = torch.Generator().manual_seed(1)
        for _ in range(FRAMES):
            frame = {n: torch.randn(s, generator=generator) for n, (s, _) in FEATURES.items()}
            made.add_frame(frame | {"task": "reach"})
        made.save_episode()
        made.finalize()
    deltas = {"action": [i / 10 for i in range(CHUNK)]}
    return LeRobotDataset("tiny/arm", root=folder, delta_timestamps=deltas)


def policy() -> Any:
    torch.manual_seed(0)
    features = {n: PolicyFeature(type=kind, shape=(size,)) for n, (size, kind) in FEATURES.items()}
    config = ACTConfig(
        output_features={"action": features.pop("action")}, input_features=features,
        dim_model=16, n_heads=2, dim_feedforward=24, n_encoder_layers=1, use_vae=False,
        chunk_size=CHUNK, n_action_steps=CHUNK, dropout=0.0, device="cpu", push_to_hub=False,
    )  # fmt: skip
    return ACTPolicy(config)


def lerobot(*arguments: str) -> None:
    """`lerobot-train`, which prints losses rounded: those of all ranks are kept as they are."""
    losses: list[float] = []
    update = lerobot_train.update_policy

    def kept(tracker: Any, *given: Any, **named: Any) -> Any:
        done = update(tracker, *given, **named)
        losses.append(common.mean_over_ranks(torch.tensor(tracker.loss.val)))
        return done

    lerobot_train.update_policy = kept
    sys.argv[1:] = arguments
    lerobot_train.main()
    Path("losses.json").write_text(json.dumps(losses))


def expected(folder: Path, clip: bool, scheduled: bool) -> cells.Found:
    """By the hand-written loop, on all frames as the policy sees them."""
    preprocess, _ = make_pre_post_processors(policy().config, pretrained_path=str(folder / "begin"))
    frames = next(iter(torch.utils.data.DataLoader(data(folder / "data"), FRAMES)))

    def loss_at(model: nn.Module, step: int) -> Tensor:
        return model.forward(preprocess(dict(frames)))[0]

    return common.by_hand(
        policy,
        clip=common.CLIP if clip else None,
        rate=common.factor if scheduled else lambda step: 1.0,
        loss_at=loss_at,
        eps=EPS,
        adamw_eps=EPS,
    )


def run(folder: Path, *, clip: bool = False, scheduled: bool = False, processes: int = 1) -> float:
    """The deviation of ``lerobot-train``, which goes on where ``folder`` has a checkpoint."""
    last = folder / "trained" / "checkpoints" / "last" / "pretrained_model"
    resumes = last.exists()
    if not resumes:
        frames, begun = data(folder / "data"), policy()
        begun.save_pretrained(folder / "begin")
        for each in make_pre_post_processors(begun.config, dataset_stats=frames.meta.stats):
            each.save_pretrained(folder / "begin")
    name = "linear" if scheduled else "constant"
    given = [
        *COMMAND, f"--scheduler.name={name}", "--scheduler.num_warmup_steps=2",
        f"--optimizer.grad_clip_norm={common.CLIP if clip else 0}",
    ]  # fmt: skip
    if resumes:
        given = [f"--config_path={last / 'train_config.json'}", "--resume=true", PLUGIN]
    given += [f"--batch_size={FRAMES // processes}", f"--dataset.root={folder / 'data'}"]
    cells.launch("-m", HERE, "lerobot", *given, processes=processes, folder=folder)
    weights = dict(ACTPolicy.from_pretrained(last).named_parameters())
    losses = json.loads((folder / "losses.json").read_text())
    return cells.deviation((losses, weights), expected(folder, clip, scheduled))


def train(folder: Path) -> float:
    """`lerobot-train --optimizer.type=dmuon`, one process."""
    return run(folder / "train")


def clip(folder: Path) -> float:
    """`--optimizer.grad_clip_norm=0.5`."""
    return run(folder / "clip", clip=True)


def schedule(folder: Path) -> float:
    """`--scheduler.type=diffuser --scheduler.name=linear --scheduler.num_warmup_steps=2`."""
    return run(folder / "schedule", scheduled=True)


def save(folder: Path) -> float:
    """Safetensors and JSON after 3 steps on 2 processes (DDP), `--resume=true` on 2."""
    whole = run(folder / "save", clip=True, scheduled=True, processes=2)
    interrupt(folder / "save")
    shutil.copytree(folder / "save", folder / "alone", symlinks=True)
    return max(whole, run(folder / "save", clip=True, scheduled=True, processes=2))


def resume(folder: Path) -> float:
    """What 2 processes saved, on one."""
    if not (folder / "alone").exists():
        save(folder)
    return run(folder / "alone", clip=True, scheduled=True)


def interrupt(folder: Path) -> None:
    """Leave only what was saved half-way."""
    saved = folder / "trained" / "checkpoints"
    shutil.rmtree(saved / f"{common.STEPS:06d}")
    (saved / "last").unlink()
    (saved / "last").symlink_to(f"{common.SAVED:06d}")


CELLS = {
    "train": train, "clip": clip, "schedule": schedule,
    "accumulate": "lerobot-train steps after every batch.", "save": save, "resume": resume,
}  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS, lerobot=lerobot)
