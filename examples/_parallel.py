"""Distribute the GPT of the examples with PyTorch itself: FSDP2, tensor parallelism.

This file does not use dmuon, which reads the layout from the parameters afterwards.
"""

from __future__ import annotations

from _gpt import GPT
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)


def shard_with_fsdp2(model: GPT, mesh: DeviceMesh) -> GPT:
    """Shard each block separately and the rest with the root, in place."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def split_with_tensor_parallelism(model: GPT, mesh: DeviceMesh) -> GPT:
    """Split each block's linear layers by heads and by hidden units, in place.

    Embedding, norms and head stay whole and plain on every rank. All ranks of ``mesh`` must see the
    same batch.

    Raises:
        ValueError: the heads or hidden units are not a multiple of the number of ranks.
    """
    config, size = model.config, mesh.size()
    for name in ("heads", "hidden"):
        if getattr(config, name) % size:
            raise ValueError(
                f"GPTConfig.{name} must be a multiple of the {size} ranks of the mesh, found "
                f"{getattr(config, name)}"
            )
    # The gradient of the input is summed over the ranks once, not once per projection.
    whole = Replicate()
    plan = {
        "attention": PrepareModuleInput(
            input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "attention.q_proj": ColwiseParallel(),
        "attention.k_proj": ColwiseParallel(),
        "attention.v_proj": ColwiseParallel(),
        "attention.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model
