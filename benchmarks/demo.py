"""Trainings of examples/train_gpt.py, for benchmarks that ask what something costs in loss."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

# The examples are scripts: their folder is on the path when they run, and so it must be here.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_gpt as demo
from _gpt import GPT as GPT
from _gpt import GPTConfig as GPTConfig
from _results import COLORS as COLORS


def job_of(rank: int, **arguments: Any) -> demo.Job:
    """The demo's training in float32 on CPUs, silent."""
    ranks = demo.Ranks(rank, dist.get_world_size(), torch.device("cpu"))
    given = Namespace(dtype="float32", period=1, block_lr_ratio=None, **arguments)
    text = demo.load_standard_library()
    return demo.Job(given, ranks, Console(quiet=True), text, demo.GPTConfig())
