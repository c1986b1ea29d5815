"""What no single file can show: who imports whom, the size of the house, what importing does."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "dmuon"
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


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


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def package_of(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).parts[:-1])


ALL_IMPORTS = {name: list(imports(parse(path), package_of(path))) for name, path in MODULES.items()}
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
    "tensors": {"devices"},
    "kernels": {"types", "config", "devices", "tensors"},
    "rule": {"types", "config", "devices", "tensors", "kernels"},
    "step": {
        "types", "config", "devices", "tensors", "dtensors", "scheduler", "period",
        "kernels", "rule", "adamw", "comm",
    },
    "dtensors": {"types", "config", "devices", "scheduler"},
    "scheduler": {"types", "config"},
    "report": {"types", "config", "scheduler"},
    "catalogue": {"types", "config", "scheduler"},
    "comm": {"types", "config", "devices", "scheduler", "dtensors"},
}  # fmt: skip


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_the_graph_is_not_empty():
    assert {"dmuon.optim", "dmuon.comm.transport", "dmuon.scheduler.plan"} <= MODULES.keys()
    assert "dmuon.types" in GRAPH["dmuon.config"]
    assert "dmuon.scheduler.plan" in GRAPH["dmuon.api"]


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in MAY_IMPORT])
def test_imports_go_one_way(module):
    allowed = MAY_IMPORT[room(module)] | {room(module)}
    assert {m for m in GRAPH[module] if room(m) not in allowed} == set()


def test_api_is_imported_at_the_top_only():
    importers = {m for m, found in GRAPH.items() if "dmuon.api" in found}
    assert importers <= {"dmuon", "dmuon.__main__", "dmuon.optim", "dmuon.tools.equivalence"}


def test_nothing_imports_the_package_root():
    assert {m for m, found in GRAPH.items() if "dmuon" in found} <= {"dmuon.__main__"}


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_are_no_cycles():
    assert cycle_in(GRAPH) == []
    back = GRAPH["dmuon.types"] | {"dmuon.scheduler.plan"}
    assert "dmuon.types" in cycle_in(GRAPH | {"dmuon.types": back}), "a planted one is found"


def importers_of(prefix: str) -> set[str]:
    return {
        module
        for module, found in ALL_IMPORTS.items()
        if any(name == prefix or name.startswith(prefix + ".") for name in found)
    }


def test_only_one_file_reads_dtensors():
    # `parallel_models` makes them, for the built-in models of the `check` command.
    allowed = {"dmuon.dtensors", "dmuon.tools.parallel_models"}
    assert importers_of("torch.distributed.tensor") <= allowed


def test_planning_and_kernels_never_touch_process_groups_or_devices():
    pure = {m for m in MODULES if room(m) in ("scheduler", "kernels", "rule", "tensors")}
    assert pure & importers_of("torch.distributed") == set()
    planning = {m for m in MODULES if room(m) == "scheduler"}
    assert planning & (importers_of("torch.cuda") | importers_of("torch.accelerator")) == set()


# ---- the size of the house ---------------------------------------------------------------

# The most that there may be; lower them when less is reached, never the other way.
MOST = {
    "files": 76,
    "lines": 26_829,
    "files in a folder": 20,
    "files in a chain of imports": 14,
    "protocols": 2,
}
# Short files that one other file imports: they belong into that one.
SHORT = 60


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """The longest path along imports, from the top down; packages' `__init__` aside."""
    best: dict[str, list[str]] = {}
    for module in TopologicalSorter(graph).static_order():
        below = (best[m] for m in graph.get(module, ()) if MODULES[m].name != "__init__.py")
        best[module] = [module, *max(below, key=len, default=[])]
    return max(best.values(), key=len)


def protocols() -> list[str]:
    return [
        node.name
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.dump(b) for b in node.bases)
    ]


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_house_is_small():
    folders = Counter(path.parent for path in FILES)
    chain, found = longest_chain(GRAPH), protocols()
    now = {
        "files": len(FILES),
        "lines": sum(map(length, FILES)),
        "files in a folder": max(folders.values()),
        "files in a chain of imports": len(chain),
        "protocols": len(found),
    }
    exceeded = {name: (now[name], most) for name, most in MOST.items() if now[name] > most}
    assert not exceeded, (exceeded, chain, found)


PAGES = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/*.md"))]


def test_pages_name_files_and_commands_that_exist():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    files = re.findall(r"`((?:[a-z_]+/)*[a-z_*]+\.py)`", text)
    roots = REPOSITORY, PACKAGE, REPOSITORY / "benchmarks"
    assert not [name for name in files if not any(any(root.glob(name)) for root in roots)]
    commands = re.findall(r"python -m ([a-z_.]*[a-z_])", text)
    assert not [name for name in commands if find_spec(name) is None]
    assert len(files) > 20 and len(commands) > 20


def test_no_short_file_has_one_importer():
    importers = Counter(m for found in GRAPH.values() for m in found)
    lonely = {
        module
        for module, path in MODULES.items()
        if importers[module] == 1 and length(path) < SHORT and not path.name.startswith("__")
    }
    assert not lonely


def test_a_chain_is_found():
    graph = {"dmuon.optim": {"dmuon.api"}, "dmuon.api": {"dmuon.types", "dmuon.config"}}
    graph |= {"dmuon.config": {"dmuon.types"}, "dmuon.types": set()}
    assert longest_chain(graph) == ["dmuon.optim", "dmuon.api", "dmuon.config", "dmuon.types"]


# ---- what no file may use ----------------------------------------------------------------


def attributes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names as written, such as ``torch.nn.Linear``, with their lines."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        parts, value = [node.attr], node.value
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name):
            yield ".".join([value.id, *reversed(parts)]), node.lineno


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def torch_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> what of torch it is bound to."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            bound |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return bound


def private_torch_names(tree: ast.Module) -> Iterator[str]:
    bound = torch_names(tree)
    for full in bound.values():
        if is_private(full):
            yield full
    for name, _ in attributes(tree):
        first, _, others = name.partition(".")
        if first in bound and is_private(others) and not others.startswith("_foreach_"):
            yield f"{bound[first]}.{others}"


# Names that have no public counterpart, each in one place.
PRIVATE_EXCEPTIONS = {
    # "When this backward is done"; FSDP2 uses the same queue.
    "dmuon.comm.reducer": {
        "torch.autograd.Variable._execution_engine",
        "torch.autograd.Variable._execution_engine.queue_callback",
    },
}


@pytest.mark.parametrize("module", MODULES)
def test_no_private_name_of_torch_is_used(module):
    found = set(private_torch_names(parse(MODULES[module])))
    assert found <= PRIVATE_EXCEPTIONS.get(module, set())


def test_the_exceptions_are_needed():
    users = {m for m, path in MODULES.items() if set(private_torch_names(parse(path)))}
    assert users == PRIVATE_EXCEPTIONS.keys()


ENVIRONMENT = {
    "dmuon.comm.process_groups": {"WORLD_SIZE"},
    "dmuon.scheduler.costs": {"XDG_CACHE_HOME"},
    "dmuon.scheduler.topology": {"LOCAL_WORLD_SIZE"},
}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def variable_read(node: ast.AST) -> str | None:
    """NAME of ``os.environ.get("NAME", ...)``, ``os.environ["NAME"]`` and ``os.getenv("NAME")``."""
    source, key = None, None
    if isinstance(node, ast.Call) and node.args:
        source, key = ast.unparse(node.func), node.args[0]
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        source, key = ast.unparse(node.value) + "[]", node.slice
    plain = isinstance(key, ast.Constant) and isinstance(key.value, str)
    known = source in ("os.environ.get", "os.environ[]", "os.getenv")
    return key.value if plain and known else None


def environment_variables(tree: ast.Module) -> list[str]:
    """Variables that the source reads by name, and a "?" for each other use of the environment."""
    read = [name for node in ast.walk(tree) if (name := variable_read(node)) is not None]
    uses = sum(
        getattr(node, "attr", None) in ENVIRONMENT_NAMES  # a.environ
        or getattr(node, "name", None) in ENVIRONMENT_NAMES  # from os import environ
        for node in ast.walk(tree)
    )
    return sorted(read) + ["?"] * (uses - len(read))


@pytest.mark.parametrize("module", MODULES)
def test_no_other_environment_variable_is_read_and_none_is_set(module):
    used = set(environment_variables(parse(MODULES[module])))
    assert used == ENVIRONMENT.get(module, set())


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\nos.environ.get('A', '1')", ["A"]),
        ("import os\nos.getenv('A'); os.getenv('B')", ["A", "B"]),
        ("import os\nos.environ['A'] = '1'", ["?"]),
        ("import os\nos.environ.get(name)", ["?"]),
        ("import os\n'A' in os.environ", ["?"]),
        ("import os\nx = os.environ\nx['A']", ["?"]),
        ("from os import environ, getenv as g\ng('A')", ["?", "?"]),
        ("import os\nos.path.join('A', environment)", []),
    ],
)
def test_the_search_for_environment_variables_finds_them(source, found):
    assert environment_variables(ast.parse(source)) == found


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import torch\ntorch._C.x", ["torch._C.x", "torch._C"]),
        ("import torch\ntorch._foreach_mul_(a, b)", []),
        ("from torch.optim import _muon", ["torch.optim._muon"]),
        ("from torch.distributed._tensor import DTensor", ["torch.distributed._tensor.DTensor"]),
        ("import torch.distributed as dist\ndist._x", ["torch.distributed._x"]),
        ("import torch\nself._x.torch._y\nx.__init__", []),
    ],
)
def test_the_search_for_private_names_finds_them(source, private):
    assert sorted(private_torch_names(ast.parse(source))) == sorted(private)


def test_print_belongs_to_the_command_line():
    printing = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    }
    assert printing <= {
        "dmuon.__main__",
        "dmuon.tools.check",
        "dmuon.tools.plan",
        "dmuon.tools.profile",
    }


# ---- what importing does -----------------------------------------------------------------

PROBE = """
import importlib, json, os, pkgutil, sys

import numpy, rich, rich.console, rich.table, torch, torch.distributed
import torch.distributed.checkpoint, torch.distributed.tensor, torch.nn.parallel, torch.optim
import torch.multiprocessing, torch.utils.weak
import triton, triton.language, triton.runtime

def functions():
    owners = [
        torch, torch.Tensor, torch.nn, torch.nn.functional, torch.nn.Module, torch.nn.Parameter,
        torch.nn.parallel, torch.nn.parallel.DistributedDataParallel, torch.optim, torch.optim.Muon,
        torch.optim.Optimizer, torch.optim.AdamW, torch.optim.lr_scheduler, torch.autograd,
        torch.distributed, torch.distributed.tensor, torch.distributed.tensor.DTensor,
        torch.distributed.checkpoint, torch.linalg, torch.nn.utils,
        sys.modules["torch.optim._muon"], sys.modules["torch.distributed.distributed_c10d"],
    ]
    return {
        (repr(owner), name): id(value)
        for owner in owners
        for name, value in sorted(vars(owner).items())
        if callable(value) and not name.startswith("__")
    }

before = functions()
settings = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
environment = dict(os.environ)

import dmuon
for module in pkgutil.walk_packages(dmuon.__path__, "dmuon."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

after = functions()
print(json.dumps({
    "functions": len(before),
    "patched": [f"{owner}.{name}" for (owner, name), i in before.items()
                if after.get((owner, name)) != i],
    "group": torch.distributed.is_initialized(),
    "environment": dict(os.environ) == environment,
    "settings": settings == (torch.get_default_dtype(), torch.is_grad_enabled(),
                             torch.get_num_threads()),
    "plotting": "matplotlib" in sys.modules,
}))
"""


def test_importing_changes_nothing():
    """As a fresh process sees it that imports every module of the package."""
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("functions") > 1000
    assert found == {
        "patched": [], "group": False, "environment": True, "settings": True, "plotting": False
    }  # fmt: skip
