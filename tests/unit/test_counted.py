"""What a step at real sizes dispatches, and which memory it takes, counted on fake CUDA tensors.

Assumed, because nothing can be launched there: `dmuon.kernels.triton_lists` takes one launch for
all tensors of the same dtypes in a call, and touches each tensor that it reads or writes once
(`tests.fake_cuda.ListKernels` stands for it); a graph is one launch, and what it touches is not
counted. All else is what torch dispatches.
"""

from __future__ import annotations

import math

import pytest
import torch

from dmuon.config import BATCH_BYTES
from tests.fake_cuda import largest, llama, rank_of

LLAMA = llama(32)  # the matrices of Llama-3-8B
ELEMENTS = sum(math.prod(shape) for shape in LLAMA.values() if len(shape) == 2)
MIB, GIB = 1 << 20, 1 << 30
# Of `step_bytes`, what is alive for a moment.
TEMPORARIES = ("norms", "passes", "transposes", "products", "updates")
BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(("world", "how", "launches", "per_element"), [
    # Bytes an element: 8 for norms; 8 + 4 + 2 for momentum and operand; 2 + 4 to its place and
    # 2 + 2 from it at the owner, 2 for the RMS of updates; 2 + 4 + 4 for weights.
    (8, {}, 215, 42),
    (8, BF16 | {"master_weights": True, "period": 3}, 255, 34),
])  # fmt: skip
def test_a_step_at_real_sizes(world, how, launches, per_element):
    """Beside weights, gradients and optimizer state it takes two buckets each way of what a rank
    has and of what it owns, and two of the largest matrix, for assembling and Newton-Schulz."""
    with rank_of(LLAMA, world, **how) as rank:
        formula = rank.engine.step_bytes()
        kept = sum(n for purpose, n in formula.items() if purpose not in TEMPORARIES)
        weight = how.get("dtype", torch.float32).itemsize
        state = 4 if weight == 4 or "master_weights" in how else weight
        state += 4 * ("master_weights" in how)
        assert abs(rank.bound.alive - state * ELEMENTS // world - kept) <= 4 * MIB, formula
        bucket = max(BATCH_BYTES, 2 * largest(LLAMA))
        assert kept <= min(8 * bucket + 2 * 4 * largest(LLAMA), 2.5 * GIB), formula
        for _ in range(2):  # the second one is a block step, if there are any
            count = rank.step()
        assert rank.engine._last.full is ("period" not in how)
        temporary = sum(formula.get(purpose, 0) for purpose in TEMPORARIES)
        assert count.most - temporary <= MIB and count.alive <= MIB, (count.most, formula)
        assert not count.reads
        # Of lists of several dtypes each tensor is a launch: of AdamW's masters, once.
        vectors = sum(len(shape) == 1 for shape in LLAMA.values()) * ("master_weights" in how)
        assert count.slow.total() == vectors, count.slow
        assert count.launches <= launches, count.calls
        calls = count.calls["_fused_adamw_"]
        assert calls == 1, "one for all of AdamW's parameters"
        touched = count.touched.total()
        plan, share = rank.engine._runtime.plan, ELEMENTS // world
        owned = sum(m.numel for m, owner in zip(plan.specs.matrices, plan.owners) if not owner)
        touched -= 12 * max(0, owned - share)  # an owner of more than its share has that to copy
        assert touched <= (per_element + 0.1) * share, count.touched
        assert touched >= (per_element - 1) * ELEMENTS // world, "less is a mistake in counting"
        # Nothing large is copied to float64 on the way to a norm.
        assert count.copied <= MIB, count.copied / MIB


def test_what_comes_from_owners_goes_to_all_replicas_without_a_copy():
    """A copy for each replica would take gigabytes at the sender."""
    few = llama(4)
    with rank_of(few, 128, replicas=16) as rank:
        rank.step()
        scattered = [args[0] for tag, args in rank.sent if tag == "scatter"]
        gathered = [args[0] for tag, args in rank.sent if tag == "replicate"]
        assert len(gathered) == len(scattered) == len(rank.engine._runtime.pipeline.buckets)
        copied = 0
        for came, parts in zip(scattered, gathered, strict=True):
            assert len(parts) == 16 and 0 < parts[0].nbytes < sum(p.nbytes for p in parts)
            # The bytes that it hands over are those that have come, where they came.
            copied += parts[0].nbytes * (place_of(parts[0]) != place_of(came))
        assert copied == 0
        # Of each matrix comes an eighth, by the link to its owner or from one replica.
        shards = 2 * sum(math.prod(s) for s in few.values() if len(s) == 2) // 8
        assert sum(part.nbytes for parts in gathered for part in parts) == shards
        assert rank.engine.step_bytes()["outbound"] <= shards + 4 * largest(few)


def place_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()


def test_without_kernels_a_step_takes_the_memory_that_it_tells():
    """As many passes as torch has operations, over pieces of the operands; and one more over the
    gradients, for their norm, which the kernels find as they read them."""
    few = llama(8)
    elements = sum(math.prod(shape) for shape in few.values() if len(shape) == 2)
    with rank_of(few, 8, fused=False) as rank:
        formula = rank.engine.step_bytes()
        for _ in range(2):
            count = rank.step()
        passes = formula["passes"]
        assert passes / 2 - MIB <= count.most <= passes + MIB, (count.most, formula)
        assert sum(formula.values()) <= 2.5 * GIB
        assert count.touched.total() <= 123 * elements // 8 and not count.reads
