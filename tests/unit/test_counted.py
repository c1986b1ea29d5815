"""What a step at real sizes dispatches, and which memory it takes, counted on fake CUDA tensors."""

from __future__ import annotations

import math

import pytest

from dmuon.config import BATCH_BYTES
from tests.fake_cuda import largest, llama, rank_of

LLAMA = llama(12)  # as wide as Llama-3-8B
MIB = 1 << 20
# Of `step_bytes`, what is alive for a moment.
TEMPORARIES = ("norms", "updates", "block_step")


@pytest.mark.parametrize(
    ("world", "period", "calls", "launches"),
    [(8, 1, 570, 770), (64, 1, 400, 620), (8, 3, 420, 680)],
)
def test_a_step_at_real_sizes_takes_bounded_memory_and_few_launches(world, period, calls, launches):
    """Beside weights, gradients and optimizer state: operands, two buckets each way of what a rank
    has and of what it owns, and three of the largest matrix, in float32, for assembling,
    Newton-Schulz and masked momentum."""
    matrices = sum(math.prod(shape) for shape in LLAMA.values() if len(shape) == 2)
    with rank_of(LLAMA, world, period=period) as rank:
        formula = rank.engine.step_bytes()
        kept = sum(n for purpose, n in formula.items() if purpose not in TEMPORARIES)
        momentum = 4 * matrices // world
        assert abs(rank.bound.alive - momentum - kept) <= 2 * MIB, (rank.bound.alive, formula)
        bucket = max(BATCH_BYTES, 2 * largest(LLAMA))
        bound = 2 * matrices // world + 8 * bucket + 3 * 4 * largest(LLAMA)
        assert kept <= bound, (kept // MIB, bound // MIB, formula)
        for _ in range(2):  # the second one is a block step, if there are any
            count = rank.step()
        assert rank.engine._outcome.full is (period == 1)
        assert count.most <= 8 * MIB and count.alive <= MIB, (count.most, count.alive)
        assert count.calls.total() <= calls, count.calls.most_common(20)
        # Of lists of several shapes or dtypes each tensor is a launch.
        assert count.launches <= launches, count.slow
        assert not count.reads
        # Nothing large is copied to float64 on the way to a norm.
        assert count.copied <= MIB, count.copied / MIB
