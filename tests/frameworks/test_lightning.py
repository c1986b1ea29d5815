"""Lightning: `configure_optimizers` in one process, under DDP, and with FSDP2; Fabric under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon.reference import ReferenceMuon
from tests.distributed.harness import distributed
from tests.distributed.layouts import shard_units
from tests.frameworks import common

lightning = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402

HERE = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False}  # fmt: skip


class Module(lightning.LightningModule):
    def __init__(self, given: str = "module", sharded: bool = False) -> None:
        super().__init__()
        self.net = common.net()
        self.given, self.sharded = given, sharded
        self.losses: list[float] = []
        self.found: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        if self.sharded and not isinstance(next(self.parameters()), DTensor):
            shard_units(self.net, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = common.muon(
            self.named_parameters() if self.given == "named parameters" else self
        )
        schedule = common.schedule_of(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, tokens: Tensor, number: int) -> Tensor:
        if self.given != "module":
            # Lightning's wrapper imitates the class of what it wraps.
            wrapper, inner = self.optimizers(), self.trainer.optimizers[0]
            assert str(wrapper.report()) == str(inner.report())
            assert wrapper.ownership is inner.ownership
        loss = common.loss_of(self.net, tokens)
        self.losses.append(common.mean_over_ranks(loss))
        return loss

    def on_train_end(self) -> None:
        self.found = common.weights(self.net)


def train(
    folder: str,
    *,
    resume: bool,
    strategy: Any = "auto",
    rank: int = 0,
    world: int = 1,
    **given: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the steps taken and the last weights; saves half-way, or begins there."""
    module = Module(**given)
    saver = ModelCheckpoint(folder, "at-{step}", every_n_train_steps=common.SAVED, save_top_k=-1)
    trainer = lightning.Trainer(
        strategy=strategy,
        devices=world,
        max_steps=common.STEPS,
        gradient_clip_val=common.CLIP,
        callbacks=[] if resume else [saver],
        enable_checkpointing=not resume,
        use_distributed_sampler=False,
        **HERE,
    )
    # Lightning's own sampler shuffles. It begins an epoch anew when it resumes (unless the loader
    # is stateful), so what was used goes to the end.
    examples = common.examples().roll(-common.SAVED * common.JOINT if resume else 0, 0)
    sampler = torch.utils.data.DistributedSampler(examples, world, rank, shuffle=False)
    data = torch.utils.data.DataLoader(examples, common.JOINT // world, sampler=sampler)
    at = f"{folder}/at-step={common.SAVED}.ckpt" if resume else None
    trainer.fit(module, data, ckpt_path=at)
    assert trainer.global_step == common.STEPS
    return module.losses, module.found


def test_one_process(tmp_path):
    expected = common.by_hand(common.net)
    for resume in (False, True):
        found = train(str(tmp_path), resume=resume, given="named parameters")
        common.assert_same(found, expected)


@distributed()
def runs(rank, world, folder, resume, sharded=False):
    expected = common.by_hand(common.net)
    with common.launched(rank, world):
        strategy = DDPStrategy(process_group_backend="gloo")
        if sharded:
            strategy = ModelParallelStrategy(
                data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo"
            )
        place = {"strategy": strategy, "rank": rank, "world": world}
        found = train(folder, resume=resume, sharded=sharded, **place)
        common.assert_same(found, expected)


def test_ddp(pools, tmp_path):
    common.saved_and_resumed(pools, runs, tmp_path)


def test_fsdp2(pools, tmp_path):
    common.saved_and_resumed(pools, runs, tmp_path, sharded=True)


@distributed()
def fabric_runs(rank, world, folder, resume):
    expected = common.by_hand(common.net)
    with common.launched(rank, world):
        strategy = lightning.fabric.strategies.DDPStrategy(process_group_backend="gloo")
        fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
        fabric.launch()
        model: nn.Module = common.net()
        inner = common.muon(model)
        schedule = common.schedule_of(inner)
        model, optimizer = fabric.setup(model, inner)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        if resume:
            fabric.load(f"{folder}/state.ckpt", state)
        how = {
            "resume": resume,
            "save": lambda: fabric.save(f"{folder}/state.ckpt", state),
            "backward": fabric.backward,
            "clip": lambda: fabric.clip_gradients(model, optimizer, max_norm=common.CLIP),
        }
        losses = common.train(model, optimizer, schedule, rank, world, **how)
        common.assert_same((losses, common.weights(model.module)), expected)


def test_fabric(pools, tmp_path):
    common.saved_and_resumed(pools, fabric_runs, tmp_path)


def is_late(name: str) -> bool:
    """What is frozen at first: embeddings and the first block."""
    return "embed" in name or ".0." in name


class Unfreezes(BaseFinetuning):
    """In the middle of training."""

    def freeze_before_training(self, pl_module: Any) -> None:
        for name, p in pl_module.named_parameters():
            p.requires_grad_(not is_late(name))

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        late = [pl_module.net.embed, pl_module.net.blocks[0]]
        self.make_trainable(late if epoch else [])
        if epoch == 1:
            lr = optimizer.param_groups[0]["lr"]
            self.unfreeze_and_add_param_group(late, optimizer, lr=lr, initial_denom_lr=1.0)


class Finetuned(Module):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        self.optimizer = common.muon(trained)
        return self.optimizer


def test_base_finetuning(tmp_path):
    """It adds groups of what is not in the optimizer, without names; a run that goes on assigns
    them, before anything is planned."""
    batches = common.examples()[: 3 * common.JOINT].split(common.JOINT)
    before: list[float] = []
    for epochs in (2, 3):
        module = Finetuned()
        trainer = lightning.Trainer(
            max_epochs=epochs,
            gradient_clip_val=common.CLIP,
            callbacks=[Unfreezes(), ModelCheckpoint(tmp_path, save_last=True)],
            **HERE,
        )
        loader = torch.utils.data.DataLoader(torch.cat(batches), common.JOINT)
        trainer.fit(module, loader, ckpt_path=str(tmp_path / "last.ckpt") if before else None)
        assert len(module.optimizer.param_groups) == 2
        before = module.losses = [*before, *module.losses]
    twin, losses = common.net(), []
    reference = ReferenceMuon(twin, **common.SETTINGS)
    for step, tokens in enumerate([*batches, *batches, *batches]):
        loss = common.loss_of(twin, tokens)
        loss.backward()
        for name, p in twin.named_parameters():
            p.grad = None if step < 3 and is_late(name) else p.grad
        torch.nn.utils.clip_grad_norm_(twin.parameters(), common.CLIP)
        reference.step()
        reference.zero_grad()
        losses.append(loss.item())
    common.assert_same((module.losses, module.found), (losses, common.weights(twin)))


class Half(Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Of what the step got: gradients are cleared before the next one."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))


class ClippedInHalf(Half):
    """Lightning leaves unscaling to an optimizer that takes the scale, and then does not clip."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        scaler = self.trainer.precision_plugin.scaler
        scaler.unscale_(getattr(optimizer, "optimizer", optimizer))
        torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


@pytest.mark.parametrize("kind", [ClippedInHalf, Half])
def test_gradients_in_half_precision_are_clipped_as_the_page_says(kind):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    module = kind()
    trainer = lightning.Trainer(
        max_steps=common.STEPS,
        gradient_clip_val=common.CLIP,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        enable_checkpointing=False,
        **HERE,
    )
    data = torch.utils.data.DataLoader(common.examples(), batch_size=common.JOINT)
    if kind is Half:
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            trainer.fit(module, data)
        return
    trainer.fit(module, data)
    assert module.norms == pytest.approx([common.CLIP] * common.STEPS, rel=1e-3)
    losses, _ = common.by_hand(common.net)
    torch.testing.assert_close(module.losses, losses, rtol=0.02, atol=0.0)
