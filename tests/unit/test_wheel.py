"""What wheel and sdist hold, and what the package says of itself; `tests/release.py` tries them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import dmuon
from tests.unit.test_imports import in_a_fresh_process

REPOSITORY = Path(__file__).parents[2]
BESIDE = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md",
          "CITATION.cff")  # fmt: skip
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])('.')"


def build(folder: Path, what: str) -> Path:
    """A file that setuptools builds from the sources in a folder."""
    command = [sys.executable, "-c", BUILD, f"build_{what}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl" if what == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), the wheel built from the sdist."""
    folder = tmp_path_factory.mktemp("sources")
    for name in BESIDE:
        shutil.copy(REPOSITORY / name, folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "dmuon", folder / "dmuon", ignore=ignored)
    sdist = build(folder, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (inside,) = (folder / "sdist").iterdir()
    return build(inside, "wheel"), sdist


def test_the_wheel_holds_the_package_and_nothing_else(made):
    wheel, _ = made
    assert wheel.name == f"dmuon-{dmuon.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    sources = {
        path.relative_to(REPOSITORY).as_posix()
        for path in (REPOSITORY / "dmuon").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {"dmuon/py.typed", "dmuon/presets.json", "dmuon/report/page.css"} < sources
    assert sources == {name for name in names if name.startswith("dmuon/")}
    others = {name.split("/")[0] for name in names} - {"dmuon"}
    assert others == {f"dmuon-{dmuon.__version__}.dist-info"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_sdist_holds_what_belongs_to_a_release(made):
    _, sdist = made
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert set(BESIDE) < names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]


def test_a_package_index_shows_a_readme_without_dead_links(made):
    wheel, _ = made
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Version"] == dmuon.__version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links and all(link.startswith("https://") for link in links)
    assert "![" not in text and "opt = dmuon.Muon(model, lr=1e-3)" in text
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    words = re.sub(r"!?\[([^\]]+)\]\([^)]+\)", r"\1", readme)
    assert re.sub(r"\]\([^)]+\)|\[", "", text).split() == words.split()  # no word is lost


def test_one_version():
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert 'version = { attr = "dmuon.__version__" }' in project
    assert not re.search(r'^version = "', project, re.M)
    cited = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", cited, re.M)[1] == dmuon.__version__
    log = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", log, re.M)[1] == dmuon.__version__


FIRST = """
import sys, time
begin = time.perf_counter()
import dmuon
dmuon.__version__
print(time.perf_counter() - begin, "torch" in sys.modules, "importlib.metadata" in sys.modules)
"""


def test_the_version_is_known_without_loading_anything():
    done = in_a_fresh_process(FIRST)
    assert done.stdout.split()[1:] == ["False", "False"], done.stderr
