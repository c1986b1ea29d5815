"""The short form of `python -m tests.faults`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu_only("its processes use gloo")

REPOSITORY = Path(__file__).parents[2]


def test_ranks_die_and_the_job_goes_on_from_its_last_checkpoint():
    # A process of its own: it forks, which one with the threads of other tests cannot do safely.
    command = [sys.executable, "-m", "tests.faults", "--short"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
