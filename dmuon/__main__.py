"""The command line: ``dmuon``, or ``python -m dmuon``, ``{plan,profile,simulate,check,doctor}``."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from dmuon.types import DmuonError

CRASHED = 3  # our own defect; Python's status for that, 1, has another meaning here
CLOSED_PIPE = 141  # a shell's status for a program that a closed pipe has ended


class _Parser(argparse.ArgumentParser):
    """Answers a mistake with one line and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


COMMANDS = {  # modules of `dmuon.tools`, whose docstrings are the descriptions
    "plan": "balance the matrices of a model over a mesh, without either of them",
    "profile": "measure what Newton-Schulz costs here",
    "simulate": "say what a training step with Muon takes, beside AdamW, without running it",
    "check": "compare dmuon on several processes with Muon in one",
    "doctor": "say what is installed here, and what dmuon would use",
}


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Import only the modules that the command line names, because torch takes a second."""
    parser = _Parser(prog="python -m dmuon", description="Tools of dmuon.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in argv:
            module = import_module(f"dmuon.tools.{name}")
            command.description = module.__doc__
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    given = sys.argv[1:] if argv is None else argv
    try:
        try:
            args = _parser(given).parse_args(given or ["--help"])
            status: int = args.run(args)
        finally:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader is gone (`| head`). Buffered output must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except DmuonError as error:  # a user's mistake, or a file that is not a plan
        message = " ".join(str(error).split())
        sys.stderr.write(f"python -m dmuon {args.command}: error: {message}\n")
        return 2
    except Exception:  # a verdict must never look like a crash, nor a crash like a verdict
        traceback.print_exc()
        sys.stderr.write("python -m dmuon: crashed; please report what is above\n")
        return CRASHED


if __name__ == "__main__":
    sys.exit(main())
