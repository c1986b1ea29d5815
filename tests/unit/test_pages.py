"""Run the code of README.md, docs/ and the pages beside them, page by page, as a reader would.

Each block says what it is. Python: each page has one namespace, and its blocks run in order, after
the model and data that pages may use without defining them (`prelude`), in a gloo group of one
process if the page makes one. Bash: lines of ``python -m dmuon`` are run. Data (`READERS`) are
read. A block that cannot run has a comment right above it that says why: ``<!-- not run: needs two
GPUs -->``; of its lines is checked that modules, files, targets and options exist. What is no code
is "text".
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import socket
import sys
import textwrap
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dmuon
from dmuon.__main__ import main
from tests.internals import parser_of
from tests.unit.models import TinyGPT
from tests.unit.test_imports import PAGES, REPOSITORY

BLOCK = re.compile(
    r"^(?: *<!-- not run: (?P<why>[^>]*?) -->\n\n?)?"
    r"(?P<indent> *)```(?P<kind>.*)\n(?P<code>(?:.*\n)*?)(?P=indent)```$",
    re.MULTILINE,
)


class Block(NamedTuple):
    kind: str
    line: int  # of its first statement
    code: str
    why_not: str | None


def blocks(text: str) -> list[Block]:
    return [
        Block(
            m["kind"],
            text.count("\n", 0, m.start("code")) + 1,
            textwrap.dedent(m["code"]),
            m["why"],
        )
        for m in BLOCK.finditer(text)
    ]


def _yaml(text: str) -> object:
    return list(pytest.importorskip("yaml").safe_load_all(text))


def _toml(text: str) -> object:
    return pytest.importorskip("tomllib").loads(text)


READERS = {"json": json.loads, "yaml": _yaml, "toml": _toml}
TARGETS = re.findall(
    r"^(\w+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
)


def prelude() -> dict[str, Any]:
    """Names that pages may use without defining them."""

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    tokens = [torch.randint(11, (4, 6)) for _ in range(2)]
    return {
        "torch": torch, "nn": nn, "dist": dist, "dmuon": dmuon, "build_model": TinyGPT,
        "model": TinyGPT(), "data": [(t, t.roll(-1, 1)) for t in tokens], "loss_fn": loss_fn,
        "steps": 10,
    }  # fmt: skip


# Definitions that single pages need in addition.
SHARDING = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group()
mesh = init_device_mesh("cpu", (1,))
"""
SHARDED = """
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
"""
LLAMA = """
import pytest
pytest.importorskip("transformers")
from tests.frameworks.common import Examples, llama
model, dataset = llama(), Examples()
loader = torch.utils.data.DataLoader(dataset, 4)
"""
ADAMW = """
import pytest; pytest.importorskip("accelerate")
from transformers import Trainer, TrainingArguments
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import *
from tests.frameworks.common import Examples
dataset, done, factor = Examples(), 2, lambda step: 0.9**step
adamw = torch.optim.AdamW(model.parameters())
for inputs, targets in data:
    loss_fn(model(inputs), targets).backward()
    adamw.step(), adamw.zero_grad()
dcp.save({"optimizer": get_optimizer_state_dict(model, adamw)}, checkpoint_id="out/adamw")
"""
TWO_OPTIMIZERS = """
matrices = {p: n for n, p in model.named_parameters() if n.endswith(("up.weight", "down.weight"))}
muon = torch.optim.Muon(list(matrices))
adamw = torch.optim.AdamW([p for p in model.parameters() if p not in matrices])
for inputs, targets in data:
    loss_fn(model(inputs), targets).backward()
    muon.step(), adamw.step(), model.zero_grad()
theirs = {"state": {}, "param_groups": [{"params": [], "step": 2, "mu": 0.95}]}
for i, p in enumerate(model.parameters()):
    theirs["param_groups"][0]["params"].append(i)
    theirs["state"][i] = {"momentum": p.detach() * 0.1}
    if p not in matrices:
        theirs["state"][i]["variance"] = p.detach() ** 2
"""
METRICS = """
import pytest
pytest.importorskip("lightning"), pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from tests.frameworks.common import Examples, llama
loader = torch.utils.data.DataLoader(data, batch_size=None)
trainer = transformers.Trainer(
    llama(),
    transformers.TrainingArguments("out", use_cpu=True, max_steps=2, logging_steps=1, report_to=[]),
    train_dataset=Examples(),
    optimizer_cls_and_kwargs=(dmuon.hf_factory, {"lr": 1e-3}),
)
"""
FEWER = "STEPS, LENGTH = 2"  # of a page that trains for a minute
GIVEN = {
    "docs/frameworks/accelerate.md": LLAMA + "pytest.importorskip('accelerate')",
    "docs/frameworks/lightning.md": "import pytest; pytest.importorskip('lightning'); "
    "loader = torch.utils.data.DataLoader(data, batch_size=None)",
    "docs/frameworks/peft.md": LLAMA + "pytest.importorskip('peft')",
    "docs/frameworks/trainer.md": LLAMA + "pytest.importorskip('accelerate')",
    "docs/check.md": """
loss_fn = lambda model, t: model(t).square().mean()
batches = lambda step, data_rank: torch.randint(11, (4, 6))
""",
    "docs/checkpoints.md": SHARDING + "rank, step, opt = 0, 1, dmuon.Muon(model)",
    "docs/clusters.md": "__name__ = '__main__'",
    "docs/costs.md": "model = nn.Linear(4096, 1024, dtype=torch.bfloat16)",
    "docs/dedicated.md": SHARDING + "shard_my_model, path = nn.Module.train, 'model.pt'",
    "docs/from-adamw.md": ADAMW,
    "docs/metrics.md": METRICS,
    "docs/migration.md": TWO_OPTIMIZERS,
    "docs/muonbp.md": SHARDING + SHARDED,
    "docs/plan-command.md": "MyModel = nn.Linear",
    "docs/sharded.md": SHARDING,
}


def run(page: str, text: str, **given: Any) -> int:
    """Run a page's blocks and return their number; errors name the page and the line."""
    namespace, count = prelude() | given, 0
    exec(GIVEN.get(page, ""), namespace)
    for block in blocks(text):
        place, is_run = f"{page}:{block.line}", block.why_not is None
        if block.kind == "python" and is_run:
            code = "\n" * (block.line - 1) + block.code.replace("STEPS, LENGTH = 200", FEWER)
            exec(compile(code, page, "exec"), namespace)
        elif block.kind == "bash":
            for line in block.code.replace("\\\n", " ").splitlines():
                try_command(shlex.split(line, comments=True), place, is_run)
        elif block.kind in READERS:
            READERS[block.kind](block.code)
        elif block.kind not in ("python", "text"):
            kinds = ", ".join(("python", "bash", *READERS, "text (no code)"))
            pytest.fail(f"{place}: a block must say what it is: {kinds}; found {block.kind!r}")
        count += is_run and block.kind != "text"
    return count


def try_command(words: list[str], place: str, is_run: bool) -> None:
    """Check a line of a shell, and run it if it ``is_run`` and ours."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if not words:
        return
    program, *arguments = words
    if program.rpartition("/")[2] == "python" and arguments[0] == "-m":
        _, module, *arguments = arguments
        assert find_spec(module), f"{place}: there is no module {module}"
        if module == "dmuon":
            parser_of(arguments).parse_args(arguments)
            if is_run:
                assert main(arguments) == 0, f"{place}: {' '.join(words)} fails"
                return
        elif module == "pytest":
            paths = [word for word in arguments if not word.startswith("-")]
            assert all((REPOSITORY / path).exists() for path in paths), f"{place}: {paths}"
    elif program == "make":
        assert arguments[0] in TARGETS, f"{place}: make has no target {arguments[0]}"
    if is_run:
        pytest.fail(f"{place}: {program!r} is not run here: say why, <!-- not run: ... -->")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One process as torchrun starts it; a page may leave a group, and files, behind."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    # Compiling the readers' code into kernels would take most of the time of these tests.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for name in ("wandb", "torch.utils.tensorboard"):
        writer = mock.MagicMock(__spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, writer)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


WITH_CODE = [page for page in PAGES if blocks(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.relative_to(REPOSITORY).as_posix())
def test_the_code_of_a_page_runs(page, alone):
    run(page.relative_to(REPOSITORY).as_posix(), page.read_text(encoding="utf-8"))


def test_blocks_are_found_and_a_wrong_one_is_seen():
    text = (
        "# A\n\n```python\nx = 1\n```\n\n- b\n\n  ```python\n  y = x + 1\n  ```\n\n"
        "<!-- not run: reason -->\n```python\nz = y / 0\n```\n"
    )
    assert [b[1::2] for b in blocks(text)] == [(4, None), (10, None), (15, "reason")]
    assert run("page.md", text) == 2
    with pytest.raises(ZeroDivisionError) as error:
        run("page.md", text.replace("not run: reason", ""))
    assert error.traceback[-1].lineno == 14 and str(error.traceback[-1].path).endswith("page.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_becomes_a_list(page):
    """A line that happens to begin with "1." or "- " inside a paragraph is a list in Markdown; and
    no words count lines of a block, which change."""
    before, fenced = "", False
    for line in page.read_text(encoding="utf-8").splitlines():
        fenced ^= line.lstrip().startswith("```")
        if not fenced and re.match(r"[0-9]+[.)] |[-+*] ", line):
            is_list = not before or re.match(r" |[-+*] |[0-9]+[.)] |<!--|#|\|", before)
            assert is_list, (page, before, line)
        before = line.rstrip()
    counted = r"\b(second|third|fourth|fifth) line\b"
    assert not re.search(counted, page.read_text(encoding="utf-8")), page


def test_no_block_is_missed():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert 2 * len(blocks(text)) == len(re.findall(r"^ *```", text, re.MULTILINE)), page


def test_the_reference_lists_every_public_name():
    text = (REPOSITORY / "docs/api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: dmuon\.(\w+)$", text, re.MULTILINE))
    assert listed == set(dmuon.__all__)
    assert all(f"](#dmuon.{name})" in text for name in listed)  # in the table of topics
