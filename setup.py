"""The long description of the package; everything else is in pyproject.toml.

It is the README, where links lead to other files of the repository. Package indexes show only this
text, so there such links become plain text, and pictures become their descriptions.
"""

import re
from pathlib import Path

from setuptools import setup

INSIDE = re.compile(r"!?\[([^\]]+)\]\((?!\w+:|#)[^)]+\)")

readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
setup(long_description=INSIDE.sub(r"\1", readme), long_description_content_type="text/markdown")
