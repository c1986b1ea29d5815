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


def fit(place: Path, how: cells.How) -> float:
    """By ``lerobot-train``."""
    checkpoints = place / "trained" / "checkpoints"
    last = checkpoints / "last" / "pretrained_model"
    given = [f"--batch_size={FRAMES // how.processes}", f"--dataset.root={place / 'data'}"]
    if how.saved:  # only what was saved half-way is left
        shutil.copytree(how.saved, place, symlinks=True)
        shutil.rmtree(checkpoints / f"{common.STEPS:06d}")
        (checkpoints / "last").unlink()
        (checkpoints / "last").symlink_to(f"{common.SAVED:06d}")
        given += [f"--config_path={last / 'train_config.json'}", "--resume=true", PLUGIN]
    else:
        frames, begun = data(place / "data"), policy()
        begun.save_pretrained(place / "begin")
        for each in make_pre_post_processors(begun.config, dataset_stats=frames.meta.stats):
            each.save_pretrained(place / "begin")
        name = "linear" if how.scheduled else "constant"
        given += [*COMMAND, f"--scheduler.name={name}", "--scheduler.num_warmup_steps=2"]
        given += [f"--optimizer.grad_clip_norm={common.CLIP if how.clip else 0}"]
    cells.launch("-m", HERE, "lerobot", *given, processes=how.processes, folder=place)
    weights = dict(ACTPolicy.from_pretrained(last).named_parameters())
    losses = json.loads((place / "losses.json").read_text())
    # By hand on all frames as the policy sees them.
    preprocess, _ = make_pre_post_processors(policy().config, pretrained_path=str(place / "begin"))
    frames = next(iter(torch.utils.data.DataLoader(data(place / "data"), FRAMES)))

    def loss_at(model: nn.Module, step: int) -> Tensor:
        return model.forward(preprocess(dict(frames)))[0]

    return how.deviation((losses, weights), policy, loss_at=loss_at, eps=EPS, adamw_eps=EPS)


CELLS = cells.of(fit, {
    "train": "`lerobot-train --optimizer.type=dmuon`, one process.",
    "clip": "`--optimizer.grad_clip_norm=0.5`.",
    "schedule": "`--scheduler.type=diffuser --scheduler.name=linear "
    "--scheduler.num_warmup_steps=2`.",
    "accumulate": cells.Absent("lerobot-train steps after every batch."),
    "save": "Safetensors and JSON after 3 steps on 2 processes (DDP), `--resume=true` on 2.",
    "resume": "What 2 processes saved, on one.",
})  # fmt: skip

if __name__ == "__main__":
    cells.main(CELLS, lerobot=lerobot)
