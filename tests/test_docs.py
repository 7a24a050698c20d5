"""The documentation is true: its code runs, its configuration is accepted, its messages exist, and the site builds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trtl_rl.config import validate_config
from trtl_rl.config_parts import Part

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
SHOWN = {"text"}  # output, formulas, and what needs another machine
COMMAND = [sys.executable, "-c", "from trtl_rl.cli.main import app; app()"]


def blocks(page: Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text())


def name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_has_a_language_that_is_checked(page: Path) -> None:
    assert {language for language, _ in blocks(page)} <= SHOWN | {"python", "bash", "yaml"}


@pytest.mark.parametrize("page", [page for page in PAGES if "yaml" in dict(blocks(page))], ids=name)
def test_configurations_in_the_text_are_accepted(page: Path) -> None:
    for language, text in blocks(page):
        if language == "yaml":
            validate_config(yaml.safe_load(text), name(page))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in PAGES if {"python", "bash"} & set(dict(blocks(page)))], ids=name)
def test_code_in_the_text_runs(page: Path, tmp_path: Path) -> None:
    """The Python of a page as one script, then its commands, all in one directory."""
    script = "".join(text for language, text in blocks(page) if language == "python")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, stdin=subprocess.DEVNULL)
    for language, text in blocks(page):
        for line in text.splitlines() if language == "bash" else []:
            words = shlex.split(line, comments=True)
            if words:
                assert words[0] == "trtl-rl", f"only the project's own command is run here: {line}"
                subprocess.run([*COMMAND, *words[1:]], cwd=tmp_path, check=True, stdin=subprocess.DEVNULL)


def test_the_configuration_page_is_that_of_the_models() -> None:
    made = subprocess.run(
        [sys.executable, DOCS / "configuration.py"], capture_output=True, text=True, check=True
    ).stdout
    assert made == (DOCS / "configuration.md").read_text(), "python docs/configuration.py > docs/configuration.md"


def test_every_key_says_what_it_is() -> None:
    silent = [
        f"{part.__name__}.{key}"
        for part in Part.__subclasses__()
        if part.__module__.startswith("trtl_rl.config")
        for key, field in part.model_fields.items()
        if not field.description and not (isinstance(field.annotation, type) and issubclass(field.annotation, Part))
    ]
    assert not silent


def test_quoted_messages_are_those_of_the_program() -> None:
    source = "".join(
        path.read_text() for part in ("trtl_rl", "engines", "trainer", "cli") for path in (ROOT / part).rglob("*.py")
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", source)  # neighbouring literals
    for line in (DOCS / "troubleshooting.md").read_text().splitlines():
        if line.startswith("| `"):
            message = line.split("`")[1]
            assert message in joined, message


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        check=True,
    )
    assert "SamplingConfig" not in (tmp_path / "site" / "index.html").read_text()
    assert "ASymPO" in (tmp_path / "site" / "concepts" / "asynchrony" / "index.html").read_text()
