"""Maps of a mesh's slots, nodes by ranks, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dmuon.report import svg as draw

__all__ = ["READABLE", "Cell", "Grid", "slot_map"]

NODE_LABEL = 66.0  # left of a row
READABLE = 26.0  # width of a cell from which on its text fits


@dataclass(frozen=True, slots=True)
class Cell:
    """The picture of one rank: its colours side by side, a tooltip and a short text."""

    colours: tuple[str, ...]
    title: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """Where the slots of a ``nodes x columns`` mesh are drawn; large meshes are folded.

    ::

        few nodes      a row a node
        many nodes     a column a node, in bands of `BAND` nodes
        wide nodes     a node takes several lines of `LINE` ranks
    """

    nodes: int
    columns: int

    LINE = 64
    BAND = 128
    ROWS = 32

    @property
    def turned(self) -> bool:
        return self.columns <= self.LINE and self.nodes > self.ROWS

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in cells."""
        if self.turned:
            bands = -(-self.nodes // self.BAND)
            return min(self.nodes, self.BAND), bands * (self.columns + 1) - 1
        lines = -(-self.columns // self.LINE)
        return min(self.columns, self.LINE), self.nodes * (lines + (lines > 1)) - (lines > 1)

    def place(self, node: int, column: int) -> tuple[int, int]:
        """(x, y) in cells."""
        if self.turned:
            return node % self.BAND, node // self.BAND * (self.columns + 1) + column
        lines = -(-self.columns // self.LINE)
        return column % self.LINE, node * (lines + (lines > 1)) + column // self.LINE

    def pitch(self, width: float) -> float:
        """The width of a cell in a picture of this width."""
        margin = 0.0 if self.turned else NODE_LABEL
        return min((width - margin) / self.size[0], 64.0)

    def caption(self) -> str:
        """What a row and a column are."""
        if self.turned:
            return (
                f"Each column is one of the {self.nodes} nodes"
                + (f", {self.BAND} nodes a band" if self.nodes > self.BAND else "")
                + "; from top to bottom the ranks of a node."
            )
        folded = self.columns > self.LINE
        fold = f", {self.LINE} ranks a line" if folded else ""
        return f"Each row is a node{fold}; from left to right its ranks."


def slot_map(
    slots: Sequence[Sequence[int]], cells: Sequence[Cell], *, label: str, width: float = draw.WIDTH
) -> str:
    """The mesh as a grid of cells; ``slots`` holds the ranks of each node."""
    grid = Grid(len(slots), max(map(len, slots)))
    margin = 0.0 if grid.turned else NODE_LABEL
    pitch = grid.pitch(width)
    tall = min(pitch, 34.0)
    gap = 2.0 if pitch > 12 else 0.6 if pitch > 4 else 0.0
    parts = []
    for node, ranks in enumerate(slots):
        if not grid.turned:
            y = grid.place(node, 0)[1] * tall
            if tall > 11:
                parts.append(draw.text(0, y + tall / 2 + 4, f"node {node}", "dim"))
        for column, rank in enumerate(ranks):
            x, y = grid.place(node, column)
            box = (margin + x * pitch, y * tall, pitch - gap, tall - gap)
            parts.append(_cell(cells[rank], box))
    return draw.picture(grid.size[1] * tall + 2, label, parts, width)


def _cell(cell: Cell, box: tuple[float, float, float, float]) -> str:
    x, y, width, height = box
    single = len(cell.colours) == 1
    title = cell.title if single else ""
    share = width / len(cell.colours)
    inside = [
        draw.rect(x + i * share, y, share, height, colour, title)
        for i, colour in enumerate(cell.colours)
    ]
    if cell.text and width >= READABLE and height >= 14:
        css = draw.ink_on(cell.colours[0]) if single else "outlined"
        inside.append(draw.text(x + width / 2, y + height / 2 + 4, cell.text, css, "middle"))
    if single or not cell.title:
        return "".join(inside)
    return f"<g>{''.join(inside)}<title>{escape(cell.title)}</title></g>"
