"""Pieces of HTML that the report is put together from. What is not HTML already gets escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["figure_html", "legend_html", "section_html", "table_html"]


def section_html(heading: str, *parts: str) -> str:
    """A heading with what belongs to it; ``parts`` are HTML already."""
    return f"<section><h2>{escape(heading)}</h2>{''.join(parts)}</section>"


def figure_html(picture: str, caption: str, legend: str = "") -> str:
    """A picture with its caption below and its legend above."""
    return f"<figure>{legend}{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def legend_html(entries: Iterable[tuple[str, str]]) -> str:
    """Names with the colours they stand for."""
    keys = (f'<span><i style="background:{c}"></i>{escape(name)}</span>' for name, c in entries)
    return f'<div class="legend">{"".join(keys)}</div>'


def table_html(
    headings: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]
) -> str:
    """An HTML table; ``numbers`` are the columns to align right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        css = [' class="n"' if i in numbers else "" for i in range(len(cells))]
        made = (f"<{tag}{c}>{escape(cell)}</{tag}>" for c, cell in zip(css, cells, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", row) for row in rows)
    head = line("th", headings)
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'
