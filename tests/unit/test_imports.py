"""What no single file can show: who imports whom, how much there is, what importing does."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import dmuon
from dmuon.__main__ import COMMANDS

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "dmuon"
FILES = sorted(PACKAGE.rglob("*.py"))
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted(REPOSITORY.glob("docs/**/*.md"))]


MODULES = {
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Every module, or name in a module, that the source imports, wherever it does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def resolve(name: str) -> str:
    """The module of the package that an imported name belongs to."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


SOURCES = {module: path.read_text(encoding="utf-8") for module, path in MODULES.items()}
TREES = {module: ast.parse(source) for module, source in SOURCES.items()}
PACKAGES = {m: ".".join(p.relative_to(REPOSITORY).parts[:-1]) for m, p in MODULES.items()}
ALL_IMPORTS = {module: list(imports(TREES[module], PACKAGES[module])) for module in MODULES}
GRAPH = {
    name: {resolve(i) for i in found if i.split(".")[0] == "dmuon"} - {name}
    for name, found in ALL_IMPORTS.items()
}

# Room -> rooms it may import besides itself. A room not listed joins others and is free, but for
# the rules on `api` below.
MAY_IMPORT = {
    "types": set(),
    "devices": set(),
    "config": {"types", "devices"},
    "tensors": {"types", "devices"},
    "kernels": {"types", "config", "devices", "tensors"},
    "rule": {"types", "config", "devices", "tensors", "kernels"},
    "step": {
        "types", "config", "devices", "tensors", "dtensors", "scheduler",
        "kernels", "rule", "comm",
    },
    "dtensors": {"types", "config", "devices", "scheduler"},
    "scheduler": {"types", "config"},
    "report": {"types", "config", "scheduler"},
    "catalogue": {"types", "config", "scheduler"},
    "comm": {"types", "config", "devices", "scheduler", "dtensors"},
}  # fmt: skip


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in MAY_IMPORT])
def test_imports_go_one_way(module):
    allowed = MAY_IMPORT[room(module)] | {room(module)}
    assert {m for m in GRAPH[module] if room(m) not in allowed} == set()


def importers_of(prefix: str, *rooms: str) -> set[str]:
    """In these rooms, or in any."""
    return {
        module
        for module, found in ALL_IMPORTS.items()
        if (not rooms or room(module) in rooms)
        and any(name == prefix or name.startswith(prefix + ".") for name in found)
    }


def test_who_imports_what():
    assert "dmuon.scheduler.plan" in GRAPH["dmuon.api"]  # the graph is not empty
    tops = {"dmuon", "dmuon.__main__", "dmuon.optim", "dmuon.tools.equivalence"}
    assert {m for m, found in GRAPH.items() if "dmuon.api" in found} <= tops
    plugins = {m for m in MODULES if room(m) == "integrations"}
    assert {m for m, found in GRAPH.items() if "dmuon" in found} <= {"dmuon.tools.doctor", *plugins}
    assert {m for m, found in GRAPH.items() if found & plugins} <= plugins  # their frameworks do
    # `parallel_models` makes DTensors, for the built-in models of the `check` command.
    allowed = {"dmuon.dtensors", "dmuon.tools.parallel_models"}
    assert importers_of("torch.distributed.tensor") <= allowed
    assert not importers_of("torch.distributed", "scheduler", "kernels", "rule", "tensors")
    assert not importers_of("torch.cuda", "scheduler")
    assert not importers_of("torch.accelerator", "scheduler")


# ---- how much there is -------------------------------------------------------------------

# The most that there may be; lower them when less is reached, never the other way.
MOST = {
    "files": 75,
    "lines": 25_878,
    "files in a folder": 20,
    "files in a chain of imports": 12,
    "protocols": 0,
    "lines of tests": 28_520,
    "lines of benchmarks": 4_946,
    "words of documentation": 42_000,
}
# Short files that one other file imports: they belong into that one.
SHORT = 60


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """The longest path along imports, from the top down; packages' `__init__` aside. A cycle is an
    error."""
    best: dict[str, list[str]] = {}
    for module in TopologicalSorter(graph).static_order():
        below = (best[m] for m in graph.get(module, ()) if MODULES[m].name != "__init__.py")
        best[module] = [module, *max(below, key=len, default=[])]
    return max(best.values(), key=len)


def lines_in(folder: str) -> int:
    found = (REPOSITORY / folder).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in found)


def test_nothing_grows():
    folders = Counter(path.parent for path in FILES)
    chain = longest_chain(GRAPH)
    protocols = [
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.dump(b) for b in node.bases)
    ]
    now = {
        "files": len(FILES),
        "lines": sum(len(source.splitlines()) for source in SOURCES.values()),
        "files in a folder": max(folders.values()),
        "files in a chain of imports": len(chain),
        "protocols": len(protocols),
        "lines of tests": lines_in("tests"),
        "lines of benchmarks": lines_in("benchmarks"),
        "words of documentation": sum(
            len(page.read_text(encoding="utf-8").split()) for page in PAGES
        ),
    }
    exceeded = {name: (now[name], most) for name, most in MOST.items() if now[name] > most}
    assert not exceeded, (exceeded, chain, protocols)


def test_pages_name_files_and_commands_that_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    files = re.findall(r"`((?:[a-z_]+/)*[a-z_*]+\.py)`", text)
    roots = REPOSITORY, PACKAGE, REPOSITORY / "benchmarks", REPOSITORY / "tests"
    assert not [name for name in files if not any(any(root.glob(name)) for root in roots)]
    commands = re.findall(r"python -m ((?:dmuon|tests|benchmarks)\b(?:\.[a-z_]+)*)", text)
    assert not [name for name in commands if find_spec(name) is None]
    assert len(files) > 20 and len(commands) > 20


def test_no_short_file_has_one_importer():
    importers = Counter(m for found in GRAPH.values() for m in found)
    lonely = {
        module
        for module, source in SOURCES.items()
        if importers[module] == 1 and len(source.splitlines()) < SHORT and "__" not in module
    }
    assert not lonely


# ---- what no file may use ----------------------------------------------------------------


def private_torch_names(source: str) -> set[str]:
    """As written, but for the names that torch's modules and functions have here."""
    bound = {"torch": "torch"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            bound |= {a.asname: a.name for a in node.names if a.asname and "torch" in a.name}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            bound |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    code = re.sub(r"(?m)^ *from .*", "", source)
    used = re.findall(rf"(?<![.\w\"`])({'|'.join(bound)})((?:\.\w+)+)", code)
    names = {bound[first] + others for first, others in used} | set(bound.values())
    return {name for name in names if re.search(r"\._(?!_|foreach_)", name)}


# Names that have no public counterpart, each in one place.
PRIVATE_EXCEPTIONS = {
    # "When this backward is done"; FSDP2 uses the same queue.
    "dmuon.comm.reducer": {"torch.autograd.Variable._execution_engine.queue_callback"}
}


def test_no_private_name_of_torch_is_used():
    found = {module: private_torch_names(source) for module, source in SOURCES.items()}
    assert {module: names for module, names in found.items() if names} == PRIVATE_EXCEPTIONS


ENVIRONMENT = {
    "dmuon.comm.process_groups": {"WORLD_SIZE"},
    "dmuon.scheduler.costs": {"XDG_CACHE_HOME"},
    "dmuon.scheduler.topology": {"LOCAL_WORLD_SIZE"},
    "dmuon.tools.doctor": {"LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE"},  # to print them
}


def environment_variables(source: str) -> list[str]:
    """Variables that the source reads by name, and a "?" for each other use of the environment."""
    read = re.findall(r"\bos\.(?:environ\.get|getenv)\(\s*\"(\w+)\"", source)
    uses = re.findall(r"\b(?:environb?|(?:get|put|unset)envb?)\b", source)
    return sorted(read) + ["?"] * (len(uses) - len(read))


def test_no_other_environment_variable_is_read_and_none_is_set():
    found = {module: environment_variables(source) for module, source in SOURCES.items()}
    assert {module: set(names) for module, names in found.items() if names} == ENVIRONMENT
    planted = 'os.environ.get("A", "1"); os.environ["B"] = "1"; getenv("C"); os.getenv("D")'
    assert environment_variables(planted) == ["A", "D", "?", "?"]


def test_print_belongs_to_the_command_line():
    printing = {m for m, tree in TREES.items() if "Name(id='print'" in ast.dump(tree)}
    tools = {f"dmuon.tools.{name}" for name in ("check", "plan", "profile")}
    assert printing <= {"dmuon.__main__", *tools}


PROBE = """
import importlib, json, os, pkgutil, sys

import numpy, rich, rich.console, rich.table, torch, torch.distributed
import torch.distributed.checkpoint, torch.distributed.tensor, torch.nn.parallel, torch.optim
import torch.multiprocessing, torch.utils.weak
import triton, triton.language, triton.runtime

def state():
    places = [m for n, m in sys.modules.items() if n.partition(".")[0] == "torch" and m in known]
    classes = [
        torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.optim.Muon, torch.optim.AdamW,
        torch.optim.Optimizer, torch.nn.parallel.DistributedDataParallel,
        torch.distributed.tensor.DTensor,
    ]
    functions = {
        f"{label}.{name}": id(value)
        for owner, label in [(owner, repr(owner)) for owner in places + classes]
        for name, value in vars(owner).items()
        if callable(value) and not name.startswith("__")
    }
    settings = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    return functions, str(settings), dict(os.environ)

known = set(sys.modules.values())
before = state()
import dmuon
for module in pkgutil.walk_packages(dmuon.__path__, "dmuon."):
    if not module.name.endswith("__main__") and ".integrations." not in module.name:
        importlib.import_module(module.name)
after = state()
print(json.dumps({
    "functions": len(before[0]),
    "patched": [name for name, i in before[0].items() if after[0].get(name) != i],
    "others": before[1:] == after[1:],
    "group": torch.distributed.is_initialized(),
    "plotting": "matplotlib" in sys.modules,
}))
"""


def test_importing_changes_nothing():
    """As a fresh process sees it that imports every module of the package."""
    done = in_a_fresh_process(PROBE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("functions") > 1000
    assert found == {"patched": [], "others": True, "group": False, "plotting": False}


def in_a_fresh_process(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)


LOADED = """
import json, pickle, sys
import torch

def new():
    found = set(sys.modules) - known
    known.update(found)
    return sorted(found)

known = set(sys.modules)
import dmuon
alone, listed = new(), dir(dmuon)
from dmuon import Muon, PlannerOptions, dedicate_params, newton_schulz
used = new()
assert pickle.loads(pickle.dumps(PlannerOptions(max_batch=3))) == PlannerOptions(max_batch=3)
from dmuon import *
assert dedicate_params is dmuon.dedicate_params is dmuon.api.dedicate_params
print(json.dumps([alone, used, new(), listed]))
"""
HEAVY = (
    "pulp", "highspy", "rich", "sympy", "triton", "matplotlib", "multiprocessing.pool",
    "torch._dynamo", "torch._inductor", "torch.fx.experimental", "torch.distributed.tensor",
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.pipelining",
    "dmuon.catalogue", "dmuon.report.data", "dmuon.tools", "dmuon.reference",
)  # fmt: skip


def test_names_are_imported_when_they_are_used():
    done = in_a_fresh_process(LOADED)
    assert done.returncode == 0, done.stderr
    alone, used, rest, listed = json.loads(done.stdout)
    assert alone == ["dmuon"], "beside torch"
    assert "dmuon.optim" in used and not [name for name in used if name.startswith(HEAVY)]
    assert {"dmuon.report.data", "dmuon.tools.equivalence"} <= set(rest)
    assert set(dmuon.__all__) | {"__version__", "__doc__"} <= set(listed)


def test_programs_and_type_checkers_find_the_same_names():
    (checked,) = [node for node in TREES["dmuon"].body if ast.unparse(node).startswith("if TYPE_")]
    assert isinstance(checked, ast.If)
    stated = {f"dmuon.{home}.{name}" for name, home in dmuon._HOMES.items()}
    assert stated == {name for node in checked.body for name in imports(node, "dmuon")}
    assert set(dmuon._HOMES) == set(dmuon.__all__)
    for name, home in dmuon._HOMES.items():
        module = sys.modules[f"dmuon.{home}"] if getattr(dmuon, name) else None
        assert getattr(dmuon, name) is vars(module)[name]
    for name in ("Moun", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=rf"module 'dmuon' has no attribute '{name}'"):
            getattr(dmuon, name)


HELP = """
import runpy, sys
for name in ("torch", "numpy", "rich", "pulp"):
    sys.modules[name] = None  # importing it raises
sys.argv[0] = "dmuon"
runpy.run_module("dmuon", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("arguments", "status"), [(["--help"], 0), (["plan", "--help"], 0), ([], 0), (["plane"], 2)]
)
def test_the_command_line_answers_without_torch(arguments, status):
    done = in_a_fresh_process(HELP, *arguments)
    assert done.returncode == status, done.stderr
    if status:
        assert done.stderr.startswith("python -m dmuon: error: ") and done.stderr.count("\n") == 1
    else:
        named = ("--mesh", "qwen2.5-7b") if "plan" in arguments else COMMANDS
        assert all(name in done.stdout for name in named)
