"""MuonBP: block steps without traffic, full steps in between, against an oracle in one process."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor.debug import CommDebugMode

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
