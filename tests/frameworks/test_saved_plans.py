"""A plan saved from a configuration is what its transformers model runs, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dmuon
from dmuon.__main__ import main
from dmuon.catalogue import build
from dmuon.devices import cpu_has_bf16
from dmuon.scheduler.certificate import certify
from dmuon.scheduler.plan import OwnershipPlan, fitted_plan
from dmuon.scheduler.select import collect
from dmuon.scheduler.shards import evenly_sharded
from dmuon.scheduler.topology import Topology
from dmuon.tools.plan import LAYOUTS, memory_of
from tests.distributed.harness import distributed

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 48,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
    "pad_token_id": 0,
}  # fmt: skip
HEADS = SIZES | {"head_dim": 8}
MOE = HEADS | {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 2,
}  # fmt: skip
# What runs on tokens, by the class that `architectures` names.
TEXT: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": SIZES | {"tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": MOE | {"num_experts": 4},
    "DeepseekV3ForCausalLM": MOE | LATENT,
    "GptOssForCausalLM": MOE | {"num_local_experts": 4},
}
OTHERS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 48, "n_positions": 32,
    },
    "MambaForCausalLM": {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 48},
    "T5ForConditionalGeneration": {
        "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 48,
    },
    "ViTForImageClassification": {**SIZES, "image_size": 32, "patch_size": 8},
    "Gemma3ForConditionalGeneration": {
        "text_config": HEADS,
        "vision_config": {**SIZES, "image_size": 32, "patch_size": 8, "vision_use_head": False},
    },
}  # fmt: skip


def saved(name: str, path: Path, *options: str) -> OwnershipPlan:
    """The plan of a configuration, made by the command."""
    config = {"architectures": [name]} | (TEXT | OTHERS)[name]
    (path / "config.json").write_text(json.dumps(config))
    out = path / "plan.json"
    argv = ["--model", str(path), "--dtype", "float32", *options, "--save", str(out)]
    assert main(["plan", *argv]) == 0
    return OwnershipPlan.from_json(out.read_text())


def live(name: str) -> torch.nn.Module:
    """The model as a user makes it, on the CPU."""
    torch.manual_seed(0)
    made = getattr(transformers, name)
    model: torch.nn.Module = made(made.config_class(**TEXT[name]))
    return model


@pytest.mark.parametrize("name", TEXT | OTHERS)
def test_it_fits(name, tmp_path, capsys):
    plan = saved(name, tmp_path, "--mesh", "2x2", "--layout", "reduce_to_owner")
    config = json.loads((tmp_path / "config.json").read_text())
    specs = collect(build(config, "float32"), allow_meta=True)
    found = fitted_plan(plan, specs, Topology.flat(4), plan.layout)
    certificate = certify(found)
    assert certificate.ok and certificate.proven and found.loads_ms == plan.loads_ms


def options_of(layout: str) -> dict[str, Any]:
    if layout == "reduce_to_owner":
        return {"layout": "replicated", "options": dmuon.ReplicatedOptions(reduce_to_owner=True)}
    return {"layout": layout}


def nbytes(value: Any) -> int:
    """Of the tensors in a parameter's state that lie here, but for numbers of steps."""
    if isinstance(value, dict):
        return sum(nbytes(v) for key, v in value.items() if key != "step")
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.nbytes if isinstance(local, torch.Tensor) else 0


@distributed()
def run_it(rank: int, world: int, name: str, layout: str, text: str) -> dict[str, Any]:
    """A step of the live model with a saved plan; what it took on this rank."""
    plan, model = OwnershipPlan.from_json(text), live(name)
    if layout == "sharded":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    own = dmuon.dedicate_params(model, plan=plan, **options_of(layout))
    opt = dmuon.Muon(model, ns_dtype=torch.bfloat16)
    tokens = torch.randint(48, (2, 8))
    model(tokens, labels=tokens).loss.backward()
    opt.step()
    state = sum(nbytes(entry) for entry in opt.state.values())
    found = {
        "owners": own.plan.owners, "planned": own.plan.state_bytes[rank], "state": state,
        "step_bytes": opt.stats()["step_bytes"], "is_fast": cpu_has_bf16(),
        "domains": [sorted(own.plan.limits.domains[d]) for d in own.plan.limits.domain_of],
    }  # fmt: skip
    own.close()
    return found


_ON_PARAMS = ("sharded", "replicated")
_BUFFERS = ("operands", "inbound", "outbound", "assembly")


@pytest.mark.parametrize(
    ("name", "layout"),
    [("LlamaForCausalLM", layout) for layout in LAYOUTS]
    + [("Qwen3MoeForCausalLM", "sharded"), ("DeepseekV3ForCausalLM", "reduce_to_owner")],
)
def test_the_live_model_runs_it_and_takes_the_memory_that_was_told(
    name, layout, tmp_path, pools, capsys
):
    world = 4 if name == "Qwen3MoeForCausalLM" else 2
    options = "--mesh", str(world), "--layout", layout, "--costs", "analytic:cpu"
    plan = saved(name, tmp_path, *options)
    given = {"name": name, "layout": layout, "text": plan.to_json()}
    ranks = pools(world).run(__name__, "run_it", given)
    topology = Topology.flat(world)
    shards = evenly_sharded(plan.specs, topology, whole=layout != "sharded")
    for rank, found in enumerate(ranks):
        assert found["owners"] == plan.owners
        told = memory_of(plan, shards, rank)
        if layout != "dedicated":  # where FSDP2 was not asked to shard the rest
            assert found["state"] == told["momentum"] + told["AdamW state"]
        kept = {k: found["step_bytes"].get(k, 0) for k in _BUFFERS}
        if layout in _ON_PARAMS:
            assert found["planned"] == plan.state_bytes[rank] == found["state"]
        # At owners updates lie at multiples of 64 bytes, with a number per matrix behind them.
        room = 132 * len(plan.owners) * (layout == "reduce_to_owner")
        assert told["buffers"] <= sum(kept.values()) <= told["buffers"] + room
        # A CPU may take less, matrix by matrix; one that emulates half precision keeps float32
        # beside it.
        most = told["Newton-Schulz"] * (1 if found["is_fast"] else 3) + 1024
        assert 0 < found["step_bytes"]["newton_schulz"] <= most
        expected = [sorted(plan.limits.domains[d]) for d in plan.limits.domain_of]
        assert found["domains"] == expected


@distributed()
def run_dedicated(rank: int, world: int, name: str, text: str) -> dict[str, int]:
    """A step on 2 x 2 ranks, of which FSDP2 shards the rest; bytes of this rank by purpose."""
    plan, model = OwnershipPlan.from_json(text), live(name)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    own = dmuon.dedicate_params(model, mesh, plan=plan, layout="dedicated")
    fully_shard(model, mesh=mesh, ignored_params=own.dedicated_params)
    opt = dmuon.Muon(model, ns_dtype=torch.bfloat16)
    tokens = torch.randint(48, (2, 8), generator=torch.Generator().manual_seed(rank))
    model(tokens, labels=tokens).loss.backward()
    opt.step()
    opt.synchronize()
    state = {n: nbytes(opt.state[p]) for n, p in model.named_parameters()}
    muon = {plan.specs.parameters[i].name for i in plan.specs.muon_parameters()}
    # A stack of which several ranks keep a part shows a placeholder on all of them.
    buckets = [b for layer in own.runtime.storage.layers for b in layer.buckets]
    kept = sum(part.untyped_storage().nbytes() for b in buckets for _, part in b._kept)
    found = {
        "weights": kept + sum(nbytes(p) for p in {*model.parameters()} - own.dedicated_params),
        "momentum": sum(state[n] for n in muon),
        "AdamW state": sum(state[n] for n in state.keys() - muon),
    }
    own.close()
    return found


def test_dedicated_with_replicas_takes_the_memory_that_was_told(tmp_path, pools, capsys):
    name = "GptOssForCausalLM"
    options = "--mesh", "2x2", "--layout", "dedicated", "--costs", "analytic:cpu"
    plan = saved(name, tmp_path, *options)
    shards = evenly_sharded(plan.specs, plan.topology, whole=True)
    ranks = pools(4).run(__name__, "run_dedicated", {"name": name, "text": plan.to_json()})
    for rank, found in enumerate(ranks):
        told = memory_of(plan, shards, rank)
        assert found == {purpose: told[purpose] for purpose in found}
    kept = [found["weights"] for found in ranks]
    assert kept[:2] == kept[2:], "replicas keep the same weights"
    assert len({found["momentum"] for found in ranks}) > 1, "but each momentum lies with one owner"


@distributed(4)
def test_expert_parallel_shards_are_those_that_are_planned(rank, world):
    """As torchtitan shards fewer experts than there are ranks: over the inner axis by items, over
    the outer one by rows."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    config = {"architectures": ["Qwen3MoeForCausalLM"]} | MOE | {"num_experts": 2}
    torch.manual_seed(0)
    model = build(config, "float32").to_empty(device="cpu")
    for path, module in model.named_modules():
        on = (mesh, [Shard(1), Shard(0)]) if "experts" in path else (flat, [Shard(0)])
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(distribute_tensor(p.detach(), *on)))
    own = dmuon.dedicate_params(model, flat, costs="analytic")
    specs = collect(build(config, "float32"), allow_meta=True)
    planned = evenly_sharded(specs, Topology((2, 2), ("efsdp", "ep"), 4), 2).limits(None)
    found = own.plan.limits
    assert [found.domains[d] for d in found.domain_of] == [
        planned.domains[d] for d in planned.domain_of
    ]
    assert found.fixed_bytes == planned.fixed_bytes
    own.close()
