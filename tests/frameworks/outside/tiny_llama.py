"""A tiny Llama, its tokenizer and its examples in files, as the frameworks around Hugging Face's
Trainer want them; and what such a run leaves behind.

Token ``i`` is the word ``wi``, in two digits. Three of them serve as unk, pad and eos too, because
all rows have one length, so that nothing is padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.frameworks import common
from tests.frameworks.outside import cells

PAD = 1
EOS = 3  # which ends no example: ms-swift appends it only where it is missing
SAVED_STEP = f"checkpoint-{common.SAVED}"
LAST = f"checkpoint-{common.STEPS}"


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token:02}" for token in tokens)


def write(folder: Path, row: Callable[[list[int]], Any], **more: str) -> None:
    """``folder/model``, whose tokenizer has ``more`` attributes, and ``folder/data.jsonl``, which
    has ``row(tokens)`` for each example."""
    place = folder / "model"
    common.llama().save_pretrained(place)
    words = {text([i]): i for i in range(common.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=text([0])))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": text([0]), "pad_token": text([PAD]), "eos_token": text([EOS])}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **more).save_pretrained(place)
    rows = (json.dumps(row(tokens)) + "\n" for tokens in common.examples().tolist())
    (folder / "data.jsonl").write_text("".join(rows))


def loss_with_eos(model: Any, step: int) -> torch.Tensor:
    """The joint loss of a step where each example ends in an EOS."""
    tokens = common.batch(step)
    return common.loss_of(model, torch.nn.functional.pad(tokens, (0, 1), value=EOS))


def several_cpus() -> None:
    """Let Trainer resume in several processes on CPUs: there the device of accelerate 1.13 is
    "cpu:0", which `torch.load` does not know."""
    from accelerate import PartialState

    set_device = PartialState.set_device

    def plain(self: Any) -> None:
        set_device(self)
        if self.device.type == "cpu":
            self.device = torch.device("cpu")

    PartialState.set_device = plain


def found(output: Path) -> cells.Found:
    """Losses and last weights in the folder that Trainer wrote."""
    state = json.loads((output / LAST / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    return losses, load_file(output / LAST / "model.safetensors")


def config(text: str, how: cells.How, schedule: str) -> str:
    """The YAML of a framework around Trainer for this cell; ``schedule`` is its key."""
    found = yaml.safe_load(text) | {"gradient_accumulation_steps": 1 + how.accumulated}
    if how.clip:
        found["max_grad_norm"] = common.CLIP
    if how.scheduled:
        found |= {schedule: "linear", "warmup_steps": 2}
    if how.saved:
        found["resume_from_checkpoint"] = str(how.saved / "out" / SAVED_STEP)
    return yaml.safe_dump(found)
