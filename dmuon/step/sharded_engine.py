"""Muon in the `sharded` layout: momentum on shards, Newton-Schulz at owners or on blocks.

`begin` looks up gradients, `launch` takes a full step or a block step; what both work on is a
`Bench`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from dmuon.adamw import make_adamw_state, refresh_masters
from dmuon.comm import streams
from dmuon.comm.sharded import ShardedRuntime
from dmuon.dtensors import local_tensor
from dmuon.ownership import Ownership
from dmuon.step.block_step import BlockStep
from dmuon.step.engine import Amp, Settings, group_of_matrices, rest_by_group
from dmuon.step.full_step import FullStep
from dmuon.step.shard_state import ShardState, copy_state
from dmuon.step.sharded_bench import Bench, Outcome
from dmuon.update import Rates, scale_all

__all__ = ["ShardedEngine"]


class ShardedEngine:
    """See `dmuon.step.engine.Engine`."""

    def __init__(self, ownership: Ownership, optimizer: Optimizer, settings: Settings) -> None:
        runtime = cast(ShardedRuntime, ownership.runtime)
        self._ownership = ownership
        self._runtime = runtime
        self._optimizer = optimizer
        self._settings = settings
        on_host = streams.host_can_read(runtime.device)
        groups = group_of_matrices(ownership, optimizer)
        runtime.bind(groups, settings.ns_dtype)
        kept = ShardState(runtime, optimizer, groups, settings.master_weights)
        rest = rest_by_group(ownership, optimizer)
        for params in rest.values():
            for p in params:  # made now, so that every rank saves the same keys
                make_adamw_state(p, optimizer.state, settings.master_weights, on_device=not on_host)
        self.bench = Bench(runtime, optimizer, settings, kept, rest, on_host, ownership.kernels)
        self._full = FullStep(self.bench)
        self._block = BlockStep(self.bench)
        blocks = [] if settings.schedule.always_full else self._block.calls()
        self.bench.kernels.reserve([*self._full.calls(), *blocks], self._full.lasting())
        self._outcome = Outcome()
        self._grads: list[Tensor | None] = []
        self._amp = Amp()
        self._skipped = 0
        self._seen_loads = 0

    # ---- a step --------------------------------------------------------------------------

    def begin(self, amp: Amp) -> None:
        self._runtime.reduce_gradients()
        self._outcome.settle()
        self.bench.kept.follow()
        self._refresh_masters()
        self._grads = self._runtime.local_gradients()
        self._amp = amp
        present = [g for g in self._grads if g is not None]
        if amp.scale is not None and present:
            # A tensor, for reading it would wait for the device.
            scale_all(present, amp.scale.reciprocal().to(present[0].device))

    def _refresh_masters(self) -> None:
        if not self._settings.master_weights:
            return
        self.bench.kept.make_masters()
        if self._runtime.loads != self._seen_loads:
            self._seen_loads = self._runtime.loads
            self.bench.kept.refresh_masters()
            for params in self.bench.rest.values():
                refresh_masters(self._optimizer.state, params)

    def launch(self) -> None:
        schedule = self._settings.schedule
        # Rates as they are now: a scheduler may change the groups before an update is applied.
        rates = [Rates.of(group) for group in self._optimizer.param_groups]
        watch = self._ownership.telemetry.begin_step()
        kind = self._full if schedule.is_full(schedule.t) else self._block
        self._outcome = kind.run(self._grads, rates, watch, self._amp.found_inf)
        self._grads = []

    def rest(self) -> None:
        """AdamW ran while the first buckets travelled."""

    def finish(self) -> None:
        if self._outcome.full:  # a block step issues no collective, and this may
            self._ownership.telemetry.finish_step()

    # ---- reading and state ---------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        self._runtime.synchronize()
        outcome = self._outcome
        outcome.settle()
        names = [m.name for m in self._runtime.plan.specs.matrices]
        finite = outcome.finite if isinstance(outcome.finite, bool) else bool(outcome.finite)
        return {
            "update_rms": {names[i]: float(v) for i, v in outcome.rms()},
            "full_step": outcome.full,
            "finite": finite,
            "skipped": self.bench.skipped(),
            "step_bytes": self.step_bytes(),
            "kernels": self.bench.kernels.report(),
        }

    def step_bytes(self) -> dict[str, int]:
        """Bytes beside weights, gradients and optimizer state that a full step takes, by purpose.

        "operands" to "assembly" are allocated once and kept (see `pipeline_elements`), and so is
        "newton_schulz", the workspace of `Orthogonalizer`. Of the others one is alive at a time:
        "norms" for the largest block in float64, whose norm is taken (on a CPU);
        "updates" while an owner computes, a float32 copy of half-precision updates for their RMS;
        "adamw" for its two temporaries of the largest local tensor (on a CPU; its fused form has
        none); "block_step" for what "updates" is there.
        """
        kept = self.bench.kept
        dtype = self._settings.ns_dtype
        found = {"operands": sum(o.numel() * o.element_size() for o in kept.operands)}
        for purpose, elements in self._runtime.buffer_elements().items():
            found[purpose] = elements * dtype.itemsize
        found["newton_schulz"] = self.bench.kernels.nbytes
        largest = max((o.numel() for o in kept.operands), default=0)
        found["norms"] = 8 * largest if self.bench.on_host else 0
        found["updates"] = self._update_bytes()
        sizes = [
            local_tensor(p).numel() * (4 if self._settings.master_weights else p.dtype.itemsize)
            for params in self.bench.rest.values()
            for p in params
        ]
        found["adamw"] = 2 * max(sizes, default=0) if self.bench.on_host else 0
        if not self._settings.schedule.always_full:
            found["block_step"] = self._block.batch_bytes()
        return found

    def _update_bytes(self) -> int:
        if self._settings.ns_dtype.itemsize >= 4:
            return 0
        mine = [u.numel for u in self._runtime.units if u.owner == self._ownership.rank]
        return 4 * max(mine, default=0)

    def before_state_dict(self) -> None:
        """Everything is in the optimizer's state already."""

    def check_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self.bench.kept.check(saved)

    def load_state(self, saved: Mapping[Tensor, dict[str, Any]]) -> None:
        self.bench.kept.load(saved)
        for params in self.bench.rest.values():
            for p in params:
                entry, state = saved.get(p, {}), self._optimizer.state[p]
                if "exp_avg" not in entry:  # it had no gradient before the state was saved
                    for value in state.values():
                        local_tensor(value).zero_()
                    continue
                if "master_weight" in entry and "master_weight" not in state:
                    state["master_weight"] = torch.empty_like(p.detach(), dtype=torch.float32)
                for key in state:
                    copy_state(state[key], torch.as_tensor(entry[key]))
