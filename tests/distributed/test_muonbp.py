"""MuonBP: block steps without traffic, full steps in between, against an oracle in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

import dmuon
from benchmarks import muonbp
from dmuon.dtensors import local_tensor
from tests.distributed.compare import gathered
from tests.distributed.harness import distributed
from tests.distributed.twins import both
from tests.transports import RecordingTransport


@distributed(4)
def test_block_steps_issue_no_collective_and_full_steps_the_planned_ones(rank, world):
    with both(layout="hsdp", transport=RecordingTransport, only={"period": 3}) as pair:
        sequences = []
        for step in range(7):
            pair.backward(step)
            pair.events.clear()
            with CommDebugMode() as comm:
                pair.opt.step()
                pair.opt.synchronize()
            events = [(e.op, e.tag) for e in pair.events]
            sequences.append(events)
            counts = comm.get_comm_counts()
            # On gloo an all-gather inside a node is two broadcasts, one from each of two ranks.
            issued = len(events) + sum(op == "all_gather" for op, _ in events)
            assert sum(counts.values()) == issued, (step, counts, events)
            assert pair.opt.stats()["full_step"] is (step % 3 == 0)
            if step % 3:
                assert events == []
            pair.opt.zero_grad()
        buckets = len(pair.own.runtime.pipeline.buckets)
        planned = ["norms", *["gather", "scatter", "replicate"] * buckets, "rms"]
        # The second full step is not among those that exchange times.
        assert sorted(tag for _, tag in sequences[3]) == sorted(planned)
        assert sequences[0] == sequences[3] == sequences[6]
        assert gathered(sequences) == [sequences] * world


@distributed(2)
def test_blocks_without_a_gradient_or_with_a_bad_one_are_left_alone(rank, world):
    """On this rank: rank 0 finds an inf in a block, rank 1 lacks the gradient of another one."""
    lost, bad = "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"
    with both(layout="fsdp2", only={"period": math.inf}) as pair:
        named = dict(pair.model.named_parameters())
        for step in range(2):
            pair.backward(step)
            if rank == 1:
                named[lost].grad = None
            elif step:
                named[bad].grad.to_local().view(-1)[0] = math.inf
            weights = {n: p.to_local().clone() for n, p in named.items()}
            pair.opt.step()
            same = {n for n, p in named.items() if torch.equal(p.to_local(), weights[n])}
            assert (lost in same) is (rank == 1)
            assert (bad in same) is (rank == 0 and step == 1)
            assert "blocks.1.mlp.up.weight" not in same
            assert all(t.isfinite().all() for t in pair.snapshot())
            pair.opt.zero_grad()
        assert pair.opt.stats()["finite"] is (rank == 1)
        assert pair.opt.stats()["skipped"] == int(rank == 0)


@distributed(4)
def test_replicas_decide_alike_about_adamw_where_a_shard_is_not_finite(rank, world):
    """Tensor parallelism: one rank finds an inf in its slice of a weight of AdamW's; those that
    every rank has whole stay equal."""
    with both(layout="tp+fsdp", only={"period": math.inf}) as pair:
        named = dict(pair.model.named_parameters())
        owned_by_adamw = {n: p for n, p in named.items() if "exp_avg" in pair.opt.state[p]}
        cut = {n for n, p in owned_by_adamw.items() if any(q.is_shard() for q in p.placements[1:])}
        assert cut and cut < owned_by_adamw.keys()
        for step in range(2):
            pair.backward(step)
            if step and rank == 0:
                named[min(cut)].grad.to_local().view(-1)[0] = math.inf
            pair.opt.step()
            pair.opt.zero_grad()
        for name in owned_by_adamw.keys() - cut:
            p = named[name]
            steps = gathered(float(pair.opt.state[p]["step"]))
            assert len(set(steps)) == 1, (name, steps)
        assert len(set(gathered(float(pair.opt.state[named[min(cut)]]["step"])))) == 2


SETTINGS = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.9, "nesterov": False}
TINY = muonbp.demo.GPTConfig(vocabulary=11, context=5, width=12, heads=2, hidden=30, depth=1)


def stepped(step_sizes: str, period: float, steps: int) -> dict[str, tuple[Tensor, ...]]:
    """Of each matrix of the benchmark's model after its last step: a rank's part before and after,
    and the momentum."""
    torch.manual_seed(0)
    model = muonbp.demo.GPT(TINY)
    muonbp.parallelize(model)
    opt = muonbp.optimizer(model, period, step_sizes, **SETTINGS)
    matrices = {n: p for n, p in model.named_parameters() if "_proj" in n}
    before: dict[str, Tensor] = {}
    for step in range(steps):
        tokens = torch.arange(30).reshape(6, 5) * (step + 3) % 11
        muonbp.demo.next_byte_loss(model, tokens, tokens.roll(1, 1)).backward()
        before = {n: local_tensor(p).clone() for n, p in matrices.items()}
        opt.step()
        opt.zero_grad()
    found = {}
    for name, p in matrices.items():
        momentum = local_tensor(opt.state[p]["momentum_buffer"])
        found[name] = before[name], local_tensor(p.detach()), momentum
    opt.ownership.close()
    return found


@pytest.mark.cpu_only("benchmarks of CPUs")
@distributed(2)
@pytest.mark.parametrize(("period", "steps"), [(math.inf, 1), (2, 2)])
def test_tied_block_steps_take_the_learning_rate_of_the_whole_matrix(rank, world, period, steps):
    """The benchmark's step sizes, against a block step by hand."""
    lr, kept = SETTINGS["lr"], 1 - SETTINGS["lr"] * SETTINGS["weight_decay"]
    smaller = 0
    for step_sizes in muonbp.STEP_SIZES:
        for name, (before, after, momentum) in stepped(step_sizes, period, steps).items():
            is_mlp = "mlp" in name  # its longer dim is cut: 30 to 15, and the other one is 12
            smaller += is_mlp
            longest = (15 if step_sizes == "two" else 30) if is_mlp else 12
            update = dmuon.newton_schulz(momentum, dtype=torch.float32)
            expected = before * kept - lr * 0.2 * math.sqrt(longest) * update
            torch.testing.assert_close(after, expected, rtol=0, atol=1e-6, msg=name)
    assert smaller == 2 * 3
