"""Several nodes on one machine: network namespaces with a link each, as slow as wanted.

    with emulated(4, rate="1gbit") as nodes:
        rows = nodes.on_ranks(2, body, ...)  # 4 nodes x 2 ranks; `body` as for timing.on_ranks

    node 0   node 1   node 2   node 3     "eth0" in the namespace of each node,
      |        |        |        |        token buckets (tc tbf) at both ends of each link,
    ------------- bridge -------------    the other ends here, where their bytes are counted

Ranks of one node reach each other without the link. Needs root and iproute2 (`ip`, `tc`). Names
carry the process ID: what a killed process left behind is removed by the next start.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import spawn

from benchmarks.results import Row, read_rows
from benchmarks.timing import as_rank

_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1
_BURST = "128kb"  # of a token bucket: two of the largest packets that the kernel hands down
_LIBC = ctypes.CDLL(None, use_errno=True)
LinkBytes = tuple[tuple[int, int], ...]
"""Of each node's link: bytes out of the node, bytes into it, with headers."""


class NoNodes(RuntimeError):
    """This machine cannot emulate nodes; the text says why and what helps."""


@dataclass(frozen=True)
class Nodes:
    """``count`` nodes, as `emulated` made them. May be passed to their ranks."""

    prefix: str
    count: int
    rate: str | None

    def name(self, node: int) -> str:
        """Of a node's namespace and of the outer end of its link."""
        return f"{self.prefix}n{node}"

    def link_bytes(self) -> LinkBytes:
        """What went over each link since it was made; in ranks too."""

        def count(node: int, direction: str) -> int:
            path = f"/sys/class/net/{self.name(node)}/statistics/{direction}_bytes"
            return int(Path(path).read_text())

        # What the bridge receives from a node is what the node sent.
        return tuple((count(node, "rx"), count(node, "tx")) for node in range(self.count))

    def on_ranks(self, each: int, body: Callable[..., list[Row]], *given: Any) -> list[Row]:
        """``body(rank, *given)`` in ``each`` gloo processes per node; the first one's rows.

        All of them are killed when this ends, whatever the reason.
        """
        with tempfile.TemporaryDirectory() as folder:
            arguments = (os.getpid(), self, each, folder, body, *given)
            context = spawn(_work, arguments, nprocs=self.count * each, join=False)
            try:
                while not context.join():
                    pass
            finally:
                for process in context.processes:
                    process.kill()
            return read_rows(f"{folder}/rows.json")


def bits_per_s(rate: str) -> float:
    """The number behind a rate of `tc`.

    >>> bits_per_s("200mbit"), bits_per_s("1gbit")
    (200000000.0, 1000000000.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if found is None or not float(found[1]):
        raise ValueError(f"rate: {rate!r} is not of the form '200mbit' or '1gbit'")
    return float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


@contextmanager
def emulated(count: int, rate: str | None = None) -> Iterator[Nodes]:
    """Up to 200 nodes whose links carry ``rate`` in each direction (None: what the machine can).

    Raises:
        NoNodes: without root, without iproute2, or where the kernel refuses.
        ValueError: a rate that is none, or a count that is not 1 to 200.
    """
    if not 1 <= count <= 200:
        raise ValueError(f"count: {count} nodes asked for; 1 to 200 can be emulated")
    if rate is not None:
        bits_per_s(rate)
    reason = why_not()
    if reason is not None:
        raise NoNodes(reason)
    remove_leftovers()
    nodes = Nodes(_new_prefix(), count, rate)
    try:
        _make(nodes)
        yield nodes
    finally:
        _remove(nodes.prefix)


_made = itertools.count()


def _new_prefix() -> str:
    """Of names that tell whose nodes these are: a process may have several sets of them."""
    return f"dm{os.getpid()}x{next(_made)}"


def why_not() -> str | None:
    """Why nodes cannot be emulated here, None if nothing is known to stand in the way."""
    if sys.platform != "linux":
        return "emulated nodes are network namespaces, which only Linux has"
    if os.geteuid() != 0:
        return "emulated nodes need root: network namespaces and traffic shaping are made"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 (apt install iproute2)"
    probe = Nodes(_new_prefix(), 1, "1mbit")
    try:
        _make(probe)
    except NoNodes as error:
        return str(error)
    finally:
        _remove(probe.prefix)
    return None


def remove_leftovers() -> None:
    """Remove nodes of processes that are no more."""
    found = set(re.findall(r"\bdm(\d+)x\d+[nb]", _call("ip netns list") + _call("ip -o link show")))
    for pid in found:
        if not os.path.exists(f"/proc/{pid}"):
            _remove(rf"dm{pid}x\d+")


def _make(nodes: Nodes) -> None:
    bridge = f"{nodes.prefix}b"
    _call(f"ip link add {bridge} type bridge")
    _call(f"ip link set {bridge} up")
    for node in range(nodes.count):
        name = nodes.name(node)
        _call(f"ip netns add {name}")
        _call(f"ip link add {name} type veth peer name eth0 netns {name}")
        _call(f"ip link set {name} master {bridge} up")
        _call(f"ip -n {name} address add 10.88.0.{node + 1}/24 dev eth0")
        for device in ("eth0", "lo"):
            _call(f"ip -n {name} link set {device} up")
        if nodes.rate is not None:
            shape = f"root tbf rate {nodes.rate} burst {_BURST} latency 200ms"
            _call(f"tc -n {name} qdisc add dev eth0 {shape}")
            _call(f"tc qdisc add dev {name} {shape}")


def _remove(prefix: str) -> None:
    """Links first: a namespace lives as long as a process in it does. ``prefix`` is a pattern."""
    links = _call("ip -o link show", may_fail=True)
    for link in set(re.findall(rf"\b({prefix}[nb]\d*)[@:]", links)):
        _call(f"ip link delete {link}", may_fail=True)
    names = _call("ip netns list", may_fail=True)
    for name in re.findall(rf"^({prefix}n\d*)\b", names, re.MULTILINE):
        _call(f"ip netns delete {name}", may_fail=True)


def _call(command: str, *, may_fail: bool = False) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        said = " ".join(done.stderr.split())
        raise NoNodes(f"nodes cannot be emulated here: `{command}` failed: {said}")
    return done.stdout


# ---- in the processes of a node ------------------------------------------------------------


def enter(namespace: str) -> None:
    """Put this thread, and those that it starts, into a network namespace."""
    file = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if _LIBC.setns(file, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    finally:
        os.close(file)


def _dies_with(parent: int) -> None:
    """Be killed when the process ``parent``, which started this one, ends; or has ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _work(
    rank: int,
    parent: int,
    nodes: Nodes,
    each: int,
    folder: str,
    body: Callable[..., list[Row]],
    *given: Any,
) -> None:
    _dies_with(parent)
    enter(nodes.name(rank // each))
    world = nodes.count * each
    about = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each}
    os.environ |= {name: str(value) for name, value in about.items()}
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    as_rank(rank, world, folder, body, *given)
