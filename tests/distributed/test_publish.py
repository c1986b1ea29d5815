"""When published values are seen, and that publishing overlaps."""

from __future__ import annotations

import copy
import gc
import statistics
import time

import pytest
import torch

import dmuon
from tests.distributed.harness import distributed
from tests.distributed.models import (
    Net,
    batch,
    dedicate,
    largest_difference,
    loss_of,
    reference_for,
    seeded,
    weights,
)
from tests.transports import DelayingTransport, RecordingTransport

# One matrix a batch and a batch a bucket, so that there is something to overlap.
SINGLY = dmuon.PlannerOptions(max_batch=1)
SMALL = dmuon.ReplicatedOptions(bucket_bytes=2048, publish_bucket_bytes=2048)


class LazyTransport(RecordingTransport):
    """Updates arrive only when somebody waits for them; notes who was waited for."""

    def broadcast(self, tensor, src, *, tag):
        work = super().broadcast(tensor, src, tag=tag)
        return _Watched(work, self.waited, len(self.events)) if tag == "updates" else work

    def __init__(self, inner):
        super().__init__(inner)
        self.waited = []


class _Watched:
    def __init__(self, work, waited, number):
        self.work, self.waited, self.number = work, waited, number

    def wait(self):
        self.work.wait()
        self.waited.append(self.number)


def one_step(rank, wrapper=None, **kwargs):
    """A model just after `step`, and what its weights will be."""
    expected_model = seeded(Net)
    own = dmuon.dedicate_params(expected_model)
    opt = dmuon.Muon(expected_model, lr=0.05, publish="sync")
    loss_of(expected_model, batch(0, rank)).backward()
    opt.step()
    own.close()
    model = seeded(Net)
    own, transport = dedicate(model, wrapper, options=SMALL, planner=SINGLY)
    opt = dmuon.Muon(model, lr=0.05, **kwargs)
    loss_of(model, batch(0, rank)).backward()
    opt.step()
    return model, own, opt, transport, weights(expected_model)


@distributed(2)
def test_step_returns_before_updates_are_waited_for(rank, world):
    model, own, opt, transport, expected = one_step(rank, LazyTransport)
    assert transport.waited == []
    assert largest_difference(weights(model), expected) > 1e-3, "not published yet"
    opt.synchronize()
    assert len(transport.waited) == sum(e.tag == "updates" for e in transport.events) > 4
    assert largest_difference(weights(model), expected) == 0.0
    own.close()


@distributed(2)
def test_a_block_waits_for_its_own_matrices_only(rank, world):
    model, own, _, transport, expected = one_step(rank, LazyTransport)
    x = torch.randn(2, 24)
    model.blocks[0](x)
    first = len(transport.waited)
    assert 0 < first < sum(e.tag == "updates" for e in transport.events)
    for name, p in model.blocks[0].named_parameters():
        assert torch.equal(p, expected[f"blocks.0.{name}"]), name
    model(batch(0, rank)[0])
    assert largest_difference(weights(model), expected) == 0.0
    own.close()


@pytest.mark.parametrize(
    "read", ["state_dict", "block state_dict", "eval", "train", "synchronize", "materialized"]
)
@distributed(2)
def test_reading_right_after_step_sees_published_values(rank, world, read):
    model, own, opt, _, expected = one_step(rank)
    name = "blocks.1.up.weight"
    if read == "state_dict":
        seen = model.state_dict()
        assert all(torch.equal(seen[n], expected[n]) for n in expected)
    elif read == "block state_dict":
        assert torch.equal(model.blocks[1].state_dict()["up.weight"], expected[name])
    elif read in ("eval", "train"):
        twin = seeded(Net)
        twin.load_state_dict(expected)
        model.train(read == "train")
        tokens = batch(5, rank)[0]
        with torch.set_grad_enabled(read == "train"):
            assert torch.equal(model(tokens), twin(tokens))
    elif read == "synchronize":
        opt.synchronize()
        assert largest_difference(weights(model), expected) == 0.0
    else:
        with own.materialized(model.blocks[1]):
            assert torch.equal(model.blocks[1].up.weight, expected[name])
    own.close()


@distributed(2)
def test_sync_publish_is_seen_by_code_that_holds_the_tensors(rank, world):
    model = seeded(Net)
    held = list(model.parameters())
    average = [p.detach().clone() for p in held]
    own = dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, lr=0.05, publish="sync")
    loss_of(model, batch(0, rank)).backward()
    opt.step()
    for a, p in zip(average, held):
        a.lerp_(p.detach(), 0.5)
    opt.synchronize()
    start = seeded(Net)
    for a, p, s in zip(average, held, start.parameters()):
        assert torch.equal(a, s.detach().lerp(p.detach(), 0.5))
    own.close()


@distributed(2)
def test_loading_weights_after_step_wins(rank, world):
    model, own, opt, _, _ = one_step(rank)
    other = seeded(Net, seed=3)
    model.load_state_dict(other.state_dict())
    opt.synchronize()
    assert largest_difference(weights(model), weights(other)) == 0.0
    own.close()


@distributed(2)
def test_a_copied_model_is_free_of_hooks(rank, world):
    model, own, opt, transport, _ = one_step(rank, RecordingTransport)
    opt.synchronize()
    average = copy.deepcopy(model)
    issued = len(transport.events)
    loss_of(average, batch(1, rank)).backward()
    assert len(transport.events) == issued
    assert all(p.grad is not None for n, p in average.named_parameters() if "spare" not in n)
    own.close()


@distributed(4)
def test_slow_collectives_cost_the_critical_path_not_their_sum(rank, world):
    model = seeded(Net, layers=6)
    own, transport = dedicate(model, DelayingTransport, options=SMALL, planner=SINGLY)
    opt = dmuon.Muon(model, lr=0.05, publish="sync")
    spent = {0.0: [], 0.05: []}
    for step in range(7):
        transport.delay_s = 0.05 if step % 2 else 0.0
        loss_of(model, batch(step, rank)).backward()
        transport.events.clear()
        torch.distributed.barrier()
        begin = time.perf_counter()
        opt.step()
        mine = time.perf_counter() - begin
        opt.zero_grad()
        spent[transport.delay_s].append(max(transport.gather_objects(mine)))
        count = sum(e.tag == "updates" for e in transport.events)
    growth = statistics.median(spent[0.05]) - statistics.median(spent[0.0])
    # One after the other, `count` broadcasts would add `count` delays; gradients may add one more.
    assert count >= 12
    assert growth < 0.5 * count * 0.05, (growth, count)
    own.close()


@distributed(2)
def test_closing_leaves_an_ordinary_module(rank, world):
    model, own, _, transport, expected = one_step(rank, RecordingTransport)
    own.close()
    assert largest_difference(weights(model), expected) == 0.0
    issued = len(transport.events)
    loss_of(model, batch(1, rank)).backward()
    assert len(transport.events) == issued
    assert model.blocks[0].up.weight.grad is not None
    again = dmuon.dedicate_params(model, planner=SINGLY)
    assert again.plan.fingerprint() == own.plan.fingerprint()
    again.close()


@distributed(2)
def test_bytes_handed_to_collectives_follow_the_shapes(rank, world):
    model = seeded(Net)
    own = dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, ns_dtype=torch.bfloat16)
    loss_of(model, batch(0, rank)).backward()
    opt.step()
    stats = opt.stats()
    matrices = sum(m.numel for m in own.plan.specs.matrices)
    spare = sum(m.numel for m in own.plan.specs.matrices if "spare" in m.name)
    # Gradients in float32 once; updates in bfloat16, the padding of a few buffers beside.
    assert stats["bytes"]["gradients"] == 4 * own.numel()
    assert 0 <= stats["bytes"]["updates"] - 2 * matrices <= 64 * 64
    assert stats["update_rms"].keys() == {m.name for m in own.plan.specs.matrices}
    seen = [v for n, v in stats["update_rms"].items() if "spare" not in n]
    assert all(0.1 < v < 0.3 for v in seen), seen  # match_rms_adamw aims at 0.2
    assert spare and stats["update_rms"]["spare.weight"] == 0.0
    assert own.runtime.transport.gather_objects(stats["update_rms"])[0] == stats["update_rms"]
    assert stats["ns_ms"] > 0
    own.close()


@distributed(2)
def test_closing_gives_ddp_back(rank, world):
    """DDP takes one communication hook for life; ours steps aside and comes back."""
    model = seeded(Net)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    for _ in range(2):
        own = dmuon.dedicate_params(wrapped)
        opt = dmuon.Muon(wrapped, lr=0.02)
        loss_of(wrapped, batch(0, rank)).backward()
        opt.step()
        opt.zero_grad()
        own.close()
        with pytest.raises(ValueError, match="closed"):
            opt.step()
        loss_of(wrapped, batch(1, rank)).backward()
        mine = model.blocks[0].up.weight.grad.clone()
        total = mine.clone()
        torch.distributed.all_reduce(total)
        assert torch.allclose(mine, total / world, atol=1e-7), "DDP averages by itself"
        wrapped.zero_grad()


class ReachesIn(Net):
    """Its forward never calls its blocks, only parts of them; one weight is read without a call."""

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in self.blocks:
            y = torch.nn.functional.linear(block.norm(x), block.up.weight, block.up.bias)
            x = x + block.down(torch.nn.functional.gelu(y))
        return self.lm_head(self.mid(x))


class ByMethod(Net):
    """Used through a method; the root itself is never called."""

    def encode(self, tokens):
        return Net.forward(self, tokens)


@pytest.mark.parametrize("kind", [ReachesIn, ByMethod])
@distributed(2)
def test_models_that_bypass_wait_points_are_trained_right(rank, world, kind):
    model, twin = seeded(kind), seeded(Net)
    own, _transport = dedicate(model, LazyTransport, options=SMALL, planner=SINGLY)
    opt = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    reference = reference_for(twin, lr=0.02)
    for step in range(4):
        call = model.encode if kind is ByMethod else model
        loss_of(call, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()
        for r in range(world):
            (loss_of(twin, batch(step, r)) / world).backward()
        reference.step()
        reference.zero_grad()
    opt.synchronize()
    assert largest_difference(weights(model), weights(twin)) <= 1e-5
    own.close()


@distributed(2)
def test_our_group_ends_with_torch_distributed(rank, world):
    """Whoever forgets `close` must not carry our group's threads into the interpreter's exit."""
    own = dmuon.dedicate_params(seeded(Net))
    transport = own.runtime.transport
    torch.distributed.destroy_process_group(transport.group)  # as destroying all of them does
    gc.collect()
    with pytest.raises(ValueError, match="process group is gone"):
        transport.group  # noqa: B018
    own.close()
