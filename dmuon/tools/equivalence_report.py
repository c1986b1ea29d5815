"""What `check_step_equivalence` found: rows of plain data, and a table of them."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["EquivalenceReport", "EquivalenceRow"]

WIDTH = 200  # characters, room for the widest table; it takes no more than it needs


@dataclass(frozen=True, slots=True)
class EquivalenceRow:
    """The outcome of one comparison, the same on every rank.

    ``max_abs_diff`` is the largest difference of any weight element after any step,
    ``max_loss_diff`` of any loss; ``max_update_diff`` the largest relative Frobenius difference of
    one matrix's update. ``difference`` is what decides, ``criterion`` says of what it is,
    ``yardstick`` how far moving gradients by a rounding carries the same quantity (of a loss: the
    weights), and ``tolerance`` what is allowed. ``worst`` says which parameter at which step on
    which rank. ``case`` names the model and ``seed`` its data where a report has several.
    """

    layout: str
    mesh: str
    dtype: str
    ns_dtype: str
    steps: int
    max_abs_diff: float
    max_loss_diff: float
    max_update_diff: float
    criterion: str
    difference: float
    yardstick: float
    tolerance: float
    worst: str
    passed: bool
    case: str = ""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EquivalenceReport:
    """Rows of comparisons; true when all passed."""

    rows: tuple[EquivalenceRow, ...]

    @property
    def passed(self) -> bool:
        """Whether every row did."""
        return all(row.passed for row in self.rows)

    def __bool__(self) -> bool:
        return self.passed

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the verdict and a dict a row."""
        return {"passed": self.passed, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        named = any(row.case for row in self.rows)
        seeded = any(row.seed for row in self.rows)
        for heading in (
            "layout", *["case"] * named, "ranks", "dtype", "NS", "steps", *["seed"] * seeded,
            "max abs diff", "update diff", "decides", "yardstick", "tolerance", "verdict",
        ):  # fmt: skip
            table.add_column(heading, no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.layout,
                *[row.case] * named,
                row.mesh,
                row.dtype,
                row.ns_dtype,
                str(row.steps),
                *[str(row.seed)] * seeded,
                f"{max(row.max_abs_diff, row.max_loss_diff):.1e}",
                f"{row.max_update_diff:.1e}",
                f"{row.difference:.1e}",
                f"{row.yardstick:.1e}",
                f"{row.tolerance:.1e} {row.criterion}",
                "equal" if row.passed else "DIFFERS",
            )
        out = io.StringIO()
        console = Console(file=out, width=WIDTH, color_system=None, highlight=False, markup=False)
        console.print(table)
        for row in self.rows:
            if not row.passed:
                what = ", ".join(filter(None, (row.layout, row.case, row.mesh)))
                console.print(f"{what}, NS {row.ns_dtype}: worst at {row.worst}")
        return out.getvalue().rstrip()
