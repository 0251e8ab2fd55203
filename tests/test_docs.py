"""The documentation is run, not only read."""

from __future__ import annotations

import re
from pathlib import Path

import headfold
import pytest

ROOT = Path(headfold.__file__).parent
PAGES = sorted(ROOT.glob("docs/*.md")) + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


def test_the_examples_of_the_python_page_run(tmp_path, monkeypatch):
    """All blocks in order, as one program in an empty folder."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 4
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_fit_a_screen(page):
    """Tables, addresses and printed output cannot be broken."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [
        line
        for line in prose.splitlines()
        if len(line) > 120 and not line.lstrip().startswith("|") and "http" not in line
    ]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    named = re.findall(
        r"`((?:convert|uptrain|eval|checkpoint|recipes|tests|benchmarks|libraries)/[\w/.-]+\.\w+)`", page.read_text()
    )
    links = re.findall(r"\]\(((?!http|#)[^)#]+)", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [link for link in links if not (page.parent / link).exists()] == []
