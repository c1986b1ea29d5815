"""What dmuon is measured against: the known ways to run Muon on W ranks, each in its smallest form.

| class | model | each matrix is orthogonalized | what travels in `step` |
|---|---|---|---|
| `GatherThenCompute` | FSDP2 | on every rank | all-gather of every momentum |
| `SameShapeBuckets` | FSDP2 | on one rank | two all-to-alls, per W matrices of one shape |
| `ParallelMuon` | FSDP2 | on one rank | the same, per W matrices in the order of their cost |
| `Redundant` | replicated | on every rank | nothing |
| `RoundRobin` | replicated | on one rank | every new weight, from its owner to all |
| `SameShapeAllGather` | replicated | on one rank | an all-gather of weights, per W of one shape |

All of them are Muon with the meanings of `torch.optim.Muon` and ``match_rms_adamw``, for 2-D
parameters with a gradient, and all of them send what goes into and comes out of Newton-Schulz in
its dtype. `sent_bytes` is what this rank sent to others in the last `step`, by formula: pieces that
a rank keeps for itself do not count, and a broadcast counts once for each receiver.
"""

from benchmarks.baselines.gather_then_compute import GatherThenCompute
from benchmarks.baselines.parallel_muon import ParallelMuon
from benchmarks.baselines.redundant import Redundant
from benchmarks.baselines.round_robin import RoundRobin
from benchmarks.baselines.same_shape_buckets import SameShapeAllGather, SameShapeBuckets

__all__ = [
    "GatherThenCompute",
    "ParallelMuon",
    "Redundant",
    "RoundRobin",
    "SameShapeAllGather",
    "SameShapeBuckets",
]
