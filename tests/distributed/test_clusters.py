"""The scripts of docs/clusters.md, as the page has them: on two emulated nodes by hand, by a stub
of Slurm and with a Job's command; in Ray, where it is installed; and with a node that is lost."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks import nodes
from dmuon.reference import ReferenceMuon
from tests.distributed.harness import distributed
from tests.unit.test_imports import REPOSITORY
from tests.unit.test_pages import blocks

pytestmark = pytest.mark.cpu_only("its processes use gloo")

REASON = nodes.why_not()
PAGE = [block.code for block in blocks((REPOSITORY / "docs/clusters.md").read_text("utf-8"))]
ONE = "--nproc-per-node=8", "--nproc-per-node=1"
STEPS, EVERY, LAST = 12, 5, 7  # of a run; between checkpoints; the step before which a node is lost
HOSTS = """127.0.0.1 localhost
10.88.0.1 node0 train-0 train-0.train
10.88.0.2 node1 train-1 train-1.train
"""
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def changed(code: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in code, f"the page has no {old!r}"
        code = code.replace(old, new)
    return code


def block(text: str, *changes: tuple[str, str]) -> str:
    """The block of the page that holds this text."""
    (code,) = (code for code in PAGE if text in code)
    return changed(code, *changes)


def script(steps: int = STEPS) -> str:
    """*train.py* with few steps, and with losses and prices that can be compared."""
    exact = 'lr=3e-3, ns_dtype=torch.float32, dedicate={"costs": "analytic:cpu"}'
    sizes = ("STEPS, LENGTH = 200", f"STEPS, LENGTH = {steps}"), ("= 48, 20", f"= 24, {EVERY}")
    return block("def main()", *sizes, (":.4f", ":.9f"), ("lr=3e-3", exact))


def losses(printed: str) -> dict[int, tuple[float, int]]:
    """Of each step the loss and the number of ranks; of a step that was made twice the later."""
    found = re.findall(r"step (\d+): loss (\S+) on (\d+) ranks", printed)
    return {int(step): (float(loss), int(world)) for step, loss, world in found}


def check(printed: str, steps: int = STEPS) -> None:
    """Compare with the reference in one process."""
    page: dict[str, Any] = {"__name__": "train"}
    exec(script(steps), page)
    torch.manual_seed(0)
    model = page["Model"]()
    opt = ReferenceMuon(model, lr=3e-3, ns_dtype=torch.float32)
    data = torch.tensor(list(Path(pathlib.__file__).read_bytes()))
    found = losses(printed)
    assert [*found] == [*range(steps)], printed
    for step in range(steps):
        batch = page["sequences"](data, step)
        logits = model(batch[:, :-1].flatten())
        loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
        loss.backward()
        assert abs(loss.item() - found[step][0]) < 1e-5, (step, loss.item(), found[step])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()


ON_NODE = """#!/bin/bash
export PATH={path} PYTHONPATH={repository} OMP_NUM_THREADS=1
node=$1 host=$2; shift 2
exec ip netns exec {prefix}n$node unshare --uts --mount bash -c '
    hostname "$0" && mount --bind {folder}/hosts /etc/hosts && exec "$@"' "$host" "$@"
"""
SRUN = """#!/bin/bash
for node in 0 1; do
    SLURM_NODEID=$node SLURM_PROCID=$node on_node $node node$node "$@" & started+=($!)
done
for one in "${started[@]}"; do wait "$one" || exit 1; done
"""
SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames node[0-1]" ] && printf "node0\\nnode1\\n"\n'
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_CPUS_PER_TASK": "8"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Path]:
    """A folder with *train.py* and a command ``on_node NODE HOST COMMAND...``, for two nodes that
    know each other's names."""
    if REASON is not None:
        pytest.skip(REASON)
    (tmp_path / "train.py").write_text(script(3))
    (tmp_path / "hosts").write_text(HOSTS)
    with nodes.emulated(2) as made:
        given = {"path": PATH, "repository": REPOSITORY, "prefix": made.prefix, "folder": tmp_path}
        programs = {"on_node": ON_NODE.format(**given), "srun": SRUN, "scontrol": SCONTROL}
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(stat.S_IRWXU)
        yield tmp_path


def run(folder: Path, commands: list[list[str]], **environment: str) -> str:
    """What commands print that run at the same time; all must end well."""
    given = os.environ | {"PATH": f"{folder}:{PATH}", "CHECKPOINTS": str(folder / "checkpoints")}
    how: dict[str, Any] = {"cwd": folder, "env": given | environment, "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    processes = [subprocess.Popen(command, **how) for command in commands]
    try:
        printed = "".join(process.communicate()[0] for process in processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
    assert not any(process.returncode for process in processes), printed
    return printed


def by_hand(folder: Path) -> str:
    code = block("--rdzv-id=run1", ONE)
    return run(folder, [["on_node", str(n), f"node{n}", "bash", "-ec", code] for n in range(2)])


def by_sbatch(folder: Path) -> str:
    code = block("#SBATCH", ONE)
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\d+)$", code, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1"
    (folder / "train.sbatch").write_text(code)
    command = ["bash", "-e", "train.sbatch"]
    return run(folder, [command], SLURM_NNODES=asked["nodes"], **SLURM)


def by_job(folder: Path) -> str:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(block("kind: Job", ("/shared", str(folder))))
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (
        service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    )
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    assert {v["name"] for v in pod["volumes"]} == {m["name"] for m in container["volumeMounts"]}
    given = {variable["name"]: variable["value"] for variable in container["env"]}
    words = [word.replace(*ONE) for word in container["command"]]
    return run(folder, [["on_node", str(n), f"{name}-{n}", *words] for n in range(2)], **given)


@pytest.mark.parametrize("start", [by_hand, by_sbatch, by_job])
def test_two_nodes(start: Any, cluster: Path) -> None:
    printed = start(cluster)
    assert "2 ranks on 2 nodes" in printed, printed
    assert {world for _, world in losses(printed).values()} == {2}
    check(printed, 3)


def test_ray(tmp_path: Path) -> None:
    """``pip install 'ray[train]'`` in an environment of its own, and run this test there."""
    pytest.importorskip("ray")
    few = ("num_workers=16, use_gpu=True", "num_workers=2, use_gpu=False")
    (tmp_path / "train.py").write_text(script())
    (tmp_path / "launch.py").write_text(block("TorchTrainer", few, ("/shared", str(tmp_path))))
    printed = run(tmp_path, [[sys.executable, "launch.py"]], PYTHONPATH=str(REPOSITORY))
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-10"
    check(printed)


# Three agents of torchrun at the same moment; the last one's node is lost.
AGENTS = """
import os, sys
from torch.distributed import run

agents = []
for node in range(3):
    agents.append(os.fork())
    if not agents[-1]:
        os.environ["NODE"] = str(node)
        run.main([f"--rdzv-conf=is_host={node == 0},last_call_timeout=5", *sys.argv[1:]])
        os._exit(0)
ended = [os.waitpid(agent, 0)[1] for agent in agents]
sys.exit(ended != [0, 0, 9])
"""
LOST = f"""
        if step == {LAST} and os.environ["NODE"] == "2":
            os.kill(os.getppid(), 9), os.kill(os.getpid(), 9)
        loss.backward()"""


@distributed()
def planned(rank: int, world: int, folder: str, steps: int) -> str:
    """What *train.py* prints on these ranks, each on a node of its own."""
    printed, names = io.StringIO(), {"__name__": "__main__"}
    about = {"CHECKPOINTS": folder, "LOCAL_WORLD_SIZE": "1"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, about))
        stack.enter_context(mock.patch("torch.distributed.destroy_process_group"))
        stack.enter_context(contextlib.redirect_stdout(printed))
        exec(script(steps), names)
    return printed.getvalue()


@pytest.mark.timeout(600)  # of which half a minute goes by in waiting for the node
def test_a_node_is_lost_and_the_others_go_on(pools: Any, tmp_path: Path) -> None:
    code = block("--nnodes=2:3", ONE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        code = changed(code, ("node0:29500", f"localhost:{free.getsockname()[1]}"))
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "train.py").write_text(changed(script(), ("\n        loss.backward()", LOST)))
    code = changed(code, ("torchrun", f"{shlex.quote(sys.executable)} agents.py"))
    given = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    found = losses(printed := run(tmp_path, [["bash", "-ec", code]], **given))
    check(printed)
    assert [world for _, world in found.values()] == [3] * EVERY + [2] * (STEPS - EVERY)

    folder = {"folder": str(tmp_path / "planned")}
    before, *_ = pools(3).run(__name__, "planned", {**folder, "steps": EVERY})
    after, *_ = pools(2).run(__name__, "planned", {**folder, "steps": STEPS})
    expected = losses(before + after)
    assert found.keys() == expected.keys()
    for step, (loss, world) in expected.items():
        assert found[step][1] == world and abs(found[step][0] - loss) < 1e-6, (step, loss)
