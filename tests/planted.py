"""Planted faults: changes to the code that would make it wrong, and the tests that must notice.

::

    python -m tests.planted                    (all; CI does not run it)
    python -m tests.planted momentum verdict   (rows that name these)

Each row is planted in a copy of the tree, where its tests are run: they must fail. A row whose text
is no longer found is stale: write it anew, or delete it with the mechanism that it was about.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Fault:
    """``old`` in ``file`` becomes ``new``, and one of ``tests`` must fail."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def matrix(*layouts: str) -> tuple[str, ...]:
    test = "tests/distributed/test_matrix.py::test_layouts_train_as_one_process_does"
    return tuple(f"{test}[{layout}]" for layout in layouts)


def distributed(*tests: str) -> tuple[str, ...]:
    return tuple(f"tests/distributed/{test}" for test in tests)


RULE, PARAMS, OWNERS = "dmuon/rule.py", "dmuon/step/on_params.py", "dmuon/step/at_owners.py"
REDUCER, VERIFY = "dmuon/comm/reducer.py", "dmuon/step/verify.py"
ENGINE, OPERANDS = "dmuon/step/engine.py", "dmuon/step/operands.py"

FAULTS = [
    Fault("nesterov uses mu instead of mu squared", RULE,
          "torch._foreach_lerp_(out, grads, _lerp_weight(h.momentum, out[0]))", "pass",
          matrix("fsdp2")),
    Fault("dampening is ignored", RULE,
          "alpha=1 - h.dampening", "alpha=1.0", matrix("fsdp2")),
    Fault("narrow momentum is not written back", RULE,
          "            buffer.copy_(wide)", "            pass", matrix("reduced2")),
    Fault("a variant advances the state of skipped matrices", RULE,
          "torch.where(alive, state[name], kept, out=state[name])", "pass",
          distributed("test_variants.py::test_a_skipped_step_leaves_what_a_variant_keeps")),
    Fault("a variant's update is dropped", RULE,
          "            update.copy_(made)", "            pass", matrix("dedicated2", "fsdp2")),
    Fault("every element decays where decay is cautious", RULE,
          "decay=h.decay, lr=lr, stays=mask, cautious=h.cautious",
          "decay=h.decay, lr=lr, stays=mask", distributed("test_device_branches.py")),
    Fault("block steps ignore block_lr_ratio", PARAMS,
          "own = 1.0 if is_whole or ratio is None else ratio", "own = 1.0",
          matrix("fsdp2", "hsdp")),
    Fault("the learning rate of a transposed matrix is that of its stack", OWNERS,
          "    if plain == turned:", "    if True:",
          distributed("test_sharded.py::test_a_matrix_and_its_transpose_in_one_batch")),
    Fault("the message of a step leaves out found_inf", PARAMS,
          "inf, late = self._amp.found_inf, self._late", "inf, late = None, self._late",
          matrix("fsdp2")),
    Fault("gradients are not unscaled", PARAMS,
          "            if amp.scale is not None and grads:", "            if False:",
          matrix("fsdp2")),
    Fault("updates of adamw's parameters are left out at owners", OWNERS,
          "        self._update_adamw(self._grads, self._verdict)", "        pass",
          matrix("reduced2")),
    Fault("only updates of the first dtype are applied at owners", "dmuon/comm/owners_runtime.py",
          "for exchange in self._exchanges:\n            exchange.pipeline.apply_pending",
          "for exchange in self._exchanges[:1]:\n            exchange.pipeline.apply_pending",
          matrix("reduced2")),
    Fault("masters do not become weights at owners", OWNERS,
          "            torch._foreach_copy_(targets, payload)", "            pass",
          matrix("reduced2")),
    Fault("gradients are summed and not averaged", REDUCER,
          "self._scale = 1.0 / math.prod(owned.slices.grid.shape[:2])", "self._scale = 1.0",
          matrix("reduced2")),
    Fault("a second backward overwrites the first", REDUCER,
          "view.add_(part, alpha=self._scale)", "view.copy_(part)",
          distributed("test_reference.py::test_weights_used_in_bfloat16")),
    Fault("a gradient that is missing here is what was sent before", REDUCER,
          "                view.zero_()\n", "                pass\n",
          matrix("reduced2", "dedicated2")),
    Fault("ranks do not share who has gradients", REDUCER,
          'self._groups.world.all_reduce(flags, tag="flags", maximum=True).wait()', "pass",
          matrix("reduced2", "dedicated2")),
    Fault("the second level of a reduction is left out (HSDP)", REDUCER,
          "self.relays = is_here and owned.slices.grid.shape[0] > 1", "self.relays = False",
          matrix("dedicated hsdp")),
    Fault("a step with a non-finite gradient is taken at owners", OWNERS,
          "self._verdict = verdict or Verdict(False)", "self._verdict = Verdict(True)",
          matrix("reduced2", "dedicated2")),
    # Faults of which tests by hand told before the matrix did.
    Fault("weights do not decay", RULE,
          "                scale_all(targets[now], own)", "                pass", matrix("fsdp2")),
    Fault("every element decays where decay is cautious, by torch's operations", RULE,
          "            if h.cautious:\n                _decay",
          "            if False:\n                _decay", matrix("fsdp2")),
    Fault("masters are not rounded into weights", RULE,
          "            torch._foreach_copy_(weights[now], targets[now])", "            pass",
          matrix("fsdp2")),
    Fault("metrics leave matrices out of the norm of gradients", PARAMS,
          "        of_grads += operands.gradient_squares(of_blocks)", "        pass",
          matrix("fsdp2")),
    Fault("metrics leave owners' matrices out of the norm of gradients", OWNERS,
          "[*squares, square]", "[*squares]", matrix("reduced2", "dedicated2")),
    Fault("momentum does not advance in full steps", PARAMS,
          "                operands.commit(of_blocks, self._hypers, bad)", "                pass",
          matrix("fsdp2")),
    Fault("momentum does not advance in block steps", PARAMS,
          "        operands.commit(of_blocks, self._hypers, verdict.bad)", "        pass",
          matrix("fsdp2")),
    Fault("whole matrices take block_lr_ratio", PARAMS,
          "own = 1.0 if is_whole or ratio is None else ratio",
          "own = 1.0 if ratio is None else ratio", matrix("tp")),
    Fault("a variant is left out at owners", OWNERS,
          "        self._kept.accept(unit, payload, where)", "        pass",
          matrix("reduced2", "dedicated2")),
    Fault("owners apply updates by the rate that is not adjusted", OWNERS,
          "            rule.apply(*of, h, lr=lr, stays=stays)",
          "            rule.apply(*of, h, lr=h.lr, stays=stays)", matrix("reduced2")),
    Fault("planning again loses the momentum that there is", OPERANDS,
          "            if MOMENTUM in entry:", "            if False:", matrix("ddp2")),
    Fault("verification forgets the variant", VERIFY,
          "        if not rule.is_plain:", "        if False:",
          distributed("test_variants.py::test_corruption_is_told_from_a_variant")),
    Fault("verification takes the rate that is not adjusted", VERIFY,
          "        lr = hyper.adjusted(matrix.rows, matrix.cols)", "        lr = hyper.lr",
          distributed("test_verify.py")),
    Fault("verification forgets momentum", VERIFY,
          "momentum.to(self.working, copy=True)", "momentum.to(self.working, copy=True).zero_()",
          distributed("test_verify.py")),
    Fault("momentum of some matrices of a batch is lost at owners", OWNERS,
          "            set_rows(momentum, where, buffers)", "            pass",
          matrix("reduced2", "dedicated2")),
    Fault("masters of some matrices of a batch are lost at owners", OWNERS,
          "                set_rows(stack, where, part)", "                pass",
          matrix("reduced2")),
    Fault("what a variant keeps is not loaded", ENGINE,
          "                self._runtime.rows.collect(value, k.places, k.here)",
          "                pass", matrix("reduced2", "ddp2")),
    Fault("masters are not loaded", ENGINE,
          "        if key in saved:\n            copy_state",
          "        if key in saved and key != MASTER:\n            copy_state",
          matrix("ddp2", "fsdp2")),
    Fault("alternating projections are taken for neighbours", "dmuon/scheduler/select.py",
          "    steps = (step, 1) if dim == form.dims(len(shape))[0] else (1, step)",
          "    steps = (1, 1)", matrix("ddp2")),
    Fault("clipping allows twice the norm", "dmuon/ownership.py",
          "factor = (max_norm / (total + 1e-6)).clamp(max=1.0)",
          "factor = (2 * max_norm / (total + 1e-6)).clamp(max=1.0)", matrix("fsdp2")),
    Fault("operands of skipped matrices travel", PARAMS,
          "            operands.mask(bad)", "            pass", matrix("fsdp2", "ddp2")),
    Fault("pipeline stages do not hear what others found", "dmuon/step/verdict.py",
          "last[_BAD_ELSEWHERE : _REFUSED_ELSEWHERE + 1].copy_(elsewhere)", "pass",
          distributed("test_pipeline.py::test_stages_skip_a_step_together")),
    Fault("a stage that plans again meets the others once more", "dmuon/optim.py",
          "if run.stages is not None and not again:", "if run.stages is not None:",
          distributed("test_pipeline.py::test_a_stage_plans_again_while_the_others_wait")),
    Fault("clipping forgets other stages", "dmuon/ownership.py",
          "    if stages is not None:\n        total", "    if False:\n        total",
          distributed("test_pipeline.py::test_one_norm_over_all_stages")),
]  # fmt: skip


def tree(folder: Path) -> Path:
    """A copy of what tests need, beside the same environment."""
    copy = folder / "tree"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    return copy


def ran(tests: tuple[str, ...], copy: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--as-drawn"]
    command += ["-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


@cache
def is_green(tests: tuple[str, ...], copy: Path) -> bool:
    """Whether these pass in the honest tree; else their failing says nothing of a fault."""
    return ran(tests, copy).returncode == 0


def outcome(fault: Fault, copy: Path) -> str:
    """ "caught", "NOT CAUGHT", "stale", or why the tests tell nothing."""
    path = copy / fault.file
    honest = path.read_text(encoding="utf-8") if path.exists() else ""
    if honest.count(fault.old) != 1:
        return "stale"
    if not is_green(fault.tests, copy):
        return "its tests fail without it"
    path.write_text(honest.replace(fault.old, fault.new), encoding="utf-8")
    try:
        run = ran(fault.tests, copy)
    finally:
        path.write_text(honest, encoding="utf-8")
    # 1 is for tests that fail; others are for tests that are not there, or do not run.
    return {0: "NOT CAUGHT", 1: "caught"}.get(run.returncode, f"no tests: {run.stdout[-300:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the descriptions of rows, or files")
    names = parser.parse_args().names
    chosen = [f for f in FAULTS if not names or any(name in f"{f.what} {f.file}" for name in names)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = tree(Path(folder))
        for fault in chosen:
            began = time.monotonic()
            found = outcome(fault, copy)
            missed += found != "caught"
            print(f"{found:10} {fault.what} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
