"""The documentation site: it builds without a warning, and opens from a disk without a network."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_errors import FOUND

REPOSITORY = Path(__file__).parents[2]
FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:)?//[^\s>]+")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=quiet, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr  # every warning is an error
    return folder


def test_nothing_is_fetched_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    found = {m[0] for page in pages for m in FETCHED.finditer(page.read_text(encoding="utf-8"))}
    assert not {text for text in found if 'rel="canonical"' not in text}
    styles = "".join(p.read_text(encoding="utf-8") for p in site.rglob("*.css"))
    assert "@import" not in styles and not re.search(r"url\(\"?https?:", styles)


def test_the_search_works_from_a_disk(site):
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = {") and "MuonBP" in index
    for name in ("index.html", "frameworks/fsdp2.html"):
        page = (site / name).read_text(encoding="utf-8")
        assert re.search(r'<script src="(\.\./)?site/iframe-worker\.js">', page), name
    assert (site / "site" / "iframe-worker.js").is_file()


def test_the_search_finds_every_error_by_its_text(site):
    docs = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    titles = {e["title"] for e in docs if e["location"].startswith("errors.html#")}
    assert {message for _, message in FOUND} <= {
        html.unescape(re.sub("<.*?>", "", title)) for title in titles
    }


def test_pages_beside_docs_are_on_it_and_colours_can_be_chosen(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    for name in ("changelog", "contributing", "security", "api"):
        assert f'href="{name}.html"' in home
        assert (site / f"{name}.html").is_file()
    assert (site / "decisions" / "0003-one-pipeline.html").is_file()
    assert "decisions/0003" not in home and "md-tabs" in home
    assert "Use the dark colours" in home and "Use the light colours" in home
