"""Hooks of the documentation site (mkdocs.yml): README and other pages beside docs/, files of the
repository as pages, lists of pages in the navigation, and docstrings as Markdown.

Pages are written for the repository and link to its files. On the site, a link to a file outside of
docs/ leads to a page that shows the file; a link to a file that does not exist is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from griffe import Extension
from mkdocs.structure.files import File

REPOSITORY = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")
QUOTED = re.compile(r"^> (?=`)", re.MULTILINE)
SHOWN = "files"  # the folder of pages that show files
BESIDE = {  # pages of the repository outside of docs/, and their names on the site
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
UNSEARCHED = "---\nsearch: { exclude: true }\n---\n"  # what files hold would bury what pages say
PLACES = {page: path for path, page in BESIDE.items()}


def on_config(config: Any) -> Any:
    """Replace ``folder/*.md`` in the navigation by the pages of the folder that are not listed."""
    named = set(_pages(config.nav))
    for section in (s for entry in config.nav for s in entry.values() if isinstance(s, list)):
        for pattern in [s for s in section if isinstance(s, str) and "*" in s]:
            folder = Path(config.docs_dir)
            found = sorted(p.relative_to(folder).as_posix() for p in folder.glob(pattern))
            place = section.index(pattern)
            section[place : place + 1] = [page for page in found if page not in named]
            named.update(found)
    return config


def _pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for e in entries for page in _pages(e)]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages beside docs/, and one for each file of the repository that pages link to."""
    for path, page in BESIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / path)))
    for page in files.documentation_pages():
        for target, _ in LINK.findall(page.content_string):
            path = _in_repository(page.src_uri, target)
            shown = _shown(path)
            if shown is None or files.get_file_from_path(shown):
                continue
            if (REPOSITORY / path).is_file():
                files.append(File.generated(config, shown, content=_listing(path)))
            elif (REPOSITORY / path).is_dir():
                files.append(File.generated(config, shown, content=_folder(path)))
    for file in files:
        if file.src_uri.startswith(SHOWN + "/"):
            file.inclusion = file.inclusion.NOT_IN_NAV
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files of the repository at their pages. Quoted errors become headings, because
    the search shows headings, and ranks them first."""

    def moved(match: re.Match[str]) -> str:
        path = _in_repository(page.file.src_uri, match[1])
        target = _shown(path)
        if target is None:
            target = BESIDE.get(path, path.removeprefix("docs/"))
            if (REPOSITORY / path).is_dir():
                target += "/README.md"
        here = posixpath.dirname(page.file.src_uri)
        return posixpath.relpath(target, here or ".") + (match[2] or "")

    if page.file.src_uri.startswith(SHOWN + "/"):
        return markdown
    if page.file.src_uri == "errors.md":
        markdown = QUOTED.sub("### ", markdown)
        page.meta |= {"hide": ["toc"], "search": {"boost": 3}}  # long headings count for little
    return LINK.sub(moved, markdown)


def _in_repository(page: str, target: str) -> str:
    """The path in the repository that a link on a page of the site means."""
    folder = "" if page in PLACES else posixpath.join("docs", posixpath.dirname(page))
    return posixpath.normpath(posixpath.join(folder, target))


def _shown(path: str) -> str | None:
    """The page that shows a path of the repository; None if the path is a page itself."""
    return None if path.startswith("docs/") or path in BESIDE else f"{SHOWN}/{path}.md"


def _listing(path: str) -> str:
    text = (REPOSITORY / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    if len(lines) > 2000:
        text = "\n".join([*lines[:2000], f"... ({len(lines) - 2000} more lines)"])
    language = {".py": "python", ".json": "json"}.get(Path(path).suffix, "text")
    return f"{UNSEARCHED}# {path}\n\n`````{language}\n{text}\n`````\n"


def _folder(path: str) -> str:
    names = sorted(
        p.name for p in (REPOSITORY / path).iterdir() if not p.name.startswith(("_", "."))
    )
    return f"{UNSEARCHED}# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"


class LiteralBlocks(Extension):
    """Turns ``::`` before an indented block, as in reStructuredText, into ``:`` for Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"::(?=\n\n? {4})", ":\n", obj.docstring.value)
