"""The linear and integer programs, and the solvers that take them: HiGHS, else CBC, through PuLP.

No answer is believed here or elsewhere: callers check what it says by their own arithmetic.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Answer", "EngineError", "LinearProgram", "Row", "available_engines", "minimize"]

PREFERRED = ("HiGHS", "PULP_CBC_CMD")  # in PuLP's names
_TOLERANCE = 1e-5


class EngineError(Exception):
    """A solver raised, is not there, or gave no solution."""


@dataclass(frozen=True, slots=True)
class Row:
    """``sum coefficient * x[index]  (<=, >=, ==)  bound``."""

    terms: Sequence[tuple[int, float]]
    sense: str
    bound: float


@dataclass(frozen=True, slots=True)
class LinearProgram:
    """Minimize ``cost . x`` for x >= 0; ``whole`` marks the integer variables."""

    cost: Sequence[float]
    rows: Sequence[Row]
    whole: Sequence[bool] = ()
    most: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Values of the variables, and the dual of each row (of a program without integers)."""

    values: npt.NDArray[np.float64]
    duals: npt.NDArray[np.float64]


def _import_pulp() -> None:
    """Import PuLP on a stack of its own.

    It keeps an exception of its import, and an exception keeps the frames of all callers: with
    them the model that is being planned for would never be freed.
    """

    def run() -> None:
        with suppress(ImportError):
            importlib.import_module("pulp")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def available_engines() -> tuple[str, ...]:
    """The solvers that PuLP finds here, in order of preference."""
    _import_pulp()
    try:
        import pulp
    except ImportError:
        return ()
    found = set(pulp.listSolvers(onlyAvailable=True))
    return tuple(name for name in PREFERRED if name in found)


def minimize(
    program: LinearProgram, engine: str, *, time_limit_s: float, most_nodes: int = 20_000
) -> Answer:
    """Solve with one engine and one thread, so that equal input gives an equal answer.

    Raises:
        EngineError: whatever went wrong, a time limit without a solution included.
    """
    import pulp

    try:
        model, x, rows = _build(pulp, program)
        accepted = _run(pulp, model, _solver(pulp, engine, program, time_limit_s, most_nodes))
    except Exception as error:  # a solver may raise anything; planning must go on
        raise EngineError(f"{engine} failed: {type(error).__name__}: {error}") from error
    if not accepted:
        raise EngineError(f"{engine} found no solution: {pulp.LpSolution[model.sol_status]}")
    values = np.array([v.varValue if v.varValue is not None else np.nan for v in x])
    duals = np.array([0.0 if r.pi is None else r.pi for r in rows])
    if not np.isfinite(values).all() or not np.isfinite(duals).all():
        raise EngineError(f"{engine} gave values that are no numbers")
    _check(program, values, engine)
    return Answer(values, duals)


def _check(program: LinearProgram, values: npt.NDArray[np.float64], engine: str) -> None:
    """Raise EngineError unless the values satisfy the program, up to a solver's own tolerance."""
    if (values < -_TOLERANCE).any():
        raise EngineError(f"{engine} gave a negative value, whatever its status says")
    if any(program.whole):
        parts = values[np.array(program.whole)]
        if (np.abs(parts - np.rint(parts)) > 10 * _TOLERANCE).any():
            raise EngineError(f"{engine} gave a fraction for an integer, whatever its status says")
    for i, row in enumerate(program.rows):
        index, factors = [j for j, _ in row.terms], np.array([a for _, a in row.terms])
        terms = factors * values[index]
        slack = float(terms.sum()) - row.bound
        wrong = {"<=": slack, ">=": -slack, "==": abs(slack)}[row.sense]
        if wrong > _TOLERANCE * max(1.0, abs(row.bound), float(np.abs(terms).sum())):
            raise EngineError(f"{engine} breaks row {i} of the program, whatever its status says")


def _run(pulp: Any, model: Any, solver: Any) -> bool:
    """Whether there is a solution, be it optimal or not."""
    try:
        model.solve(solver)
    except KeyError:
        # PuLP 3.3 has no name for HiGHS's node limit; the best solution is in the variables then.
        return all(v.varValue is not None for v in model.variables())
    return model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)


def _build(pulp: Any, program: LinearProgram) -> tuple[Any, list[Any], list[Any]]:
    model = pulp.LpProblem("plan", pulp.LpMinimize)
    x = []
    for i in range(len(program.cost)):
        category = "Integer" if program.whole and program.whole[i] else "Continuous"
        most = program.most[i] if program.most else None
        x.append(model.add_variable(f"x{i:06d}", 0, most, category))
    model += pulp.LpAffineExpression(list(zip(x, program.cost, strict=True)))
    rows = []
    for i, row in enumerate(program.rows):
        left = pulp.LpAffineExpression([(x[j], value) for j, value in row.terms])
        if row.sense == "<=":
            constraint = left <= row.bound
        else:
            constraint = left >= row.bound if row.sense == ">=" else left == row.bound
        model += constraint, f"r{i:06d}"
        rows.append(model.get_constraint_by_name(f"r{i:06d}"))
    return model, x, rows


def _solver(
    pulp: Any, engine: str, program: LinearProgram, time_limit_s: float, most_nodes: int
) -> Any:
    integer = any(program.whole)
    if engine == "HiGHS":
        options: dict[str, Any] = {"mip_max_nodes": most_nodes} if integer else {}
        return pulp.HiGHS(
            msg=False, timeLimit=time_limit_s, threads=1, gapRel=0.0, mip=integer, **options
        )
    return pulp.PULP_CBC_CMD(
        msg=False,
        timeLimit=time_limit_s,
        threads=None,  # one, unless told otherwise
        gapRel=0.0,
        mip=integer,
        maxNodes=most_nodes if integer else None,
    )
