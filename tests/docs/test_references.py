"""Everything that the pages name is there: commands, options, files, links, versions."""

from __future__ import annotations

import os
import re
import tomllib
from typing import TYPE_CHECKING, Final

import pytest
import typer
from typer.testing import CliRunner

from coordinator import __version__
from coordinator.cli import app
from tests.docs.markdown import ROOT, anchors, blocks, links, readme, section, ticked

if TYPE_CHECKING:
    from pathlib import Path

    import click

PAGES: Final = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
COMMANDS: Final = sorted(
    set(re.findall(r"kv-coordinator ([a-z]+)\b(?! =)", "\n".join([*ticked(readme()), *blocks(readme())])))
)
SCRIPTS: Final = sorted(set(re.findall(r"\bscripts/([a-z]+)\b", readme())))


def options(command: str) -> set[str]:
    """Every option that a command of ``kv-coordinator`` takes."""
    group = typer.main.get_command(app)
    chosen: click.Command = group.commands[command]  # type: ignore[attr-defined] # it is a group
    return {name for parameter in chosen.params for name in parameter.opts}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_helps(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0, done.output


def test_the_commands_were_found() -> None:
    assert {"serve", "check", "demo"} <= set(COMMANDS)
    assert {"run", "test", "check", "bench", "diagram"} <= set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_there_and_can_be_run(name: str) -> None:
    assert os.access(ROOT / "scripts" / name, os.X_OK)


def test_the_options_of_the_demo_exist() -> None:
    named = {option for word in ticked(section("Try it")) for option in re.findall(r"--[a-z-]+", word)}
    assert named == options("demo") - {"--help"}


def test_the_options_of_the_other_commands_exist() -> None:
    lines = [line for code in blocks(readme()) for line in code.splitlines()]
    used = [
        (match[1], option)
        for line in lines
        if (match := re.search(r"kv-coordinator ([a-z]+) (?:-|$)", line))
        for option in re.findall(r" (--[a-z-]+)", line)
    ]
    assert ("serve", "--config") in used
    assert [(command, option) for command, option in used if option not in options(command)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    broken = []
    for target in links(text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path) if path else page
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            broken.append(target)
    assert broken == []


def test_the_tree_shows_every_package_and_nothing_that_is_not_there() -> None:
    (tree,) = [code for code in blocks(section("Where the code is")) if code.startswith("backends/")]
    shown = [line.split()[0] for line in tree.splitlines()]
    assert [name for name in shown if not (ROOT / name).is_dir()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    places = {
        name: setuptools["package-dir"].get(name, name.replace(".", "/")) for name in setuptools["packages"]
    }
    packages = {place + "/" for place in places.values()}
    assert packages <= set(shown)
    modules = re.search(r"^coordinator/ .*: (.*)$", tree, re.MULTILINE)
    assert modules is not None
    assert [name for name in modules[1].split(", ") if not (ROOT / f"coordinator/{name}.py").is_file()] == []


def test_the_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {name for extras in re.findall(r"'\.\[([a-z,-]+)\]'", readme()) for name in extras.split(",")}
    assert named
    assert named <= set(project["optional-dependencies"])


def test_the_first_version_of_the_changelog_is_the_one_of_the_package() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings
    assert headings[0][0] == __version__


def test_the_pages_are_plain() -> None:
    """Whatever is not on every keyboard is only the frame of a table that a program has drawn."""
    frames = set("┌┬┐│├┼┤└┴┘─━┏┳┓┃┡╇┩")
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md"):
        strange = {letter for letter in page.read_text() if not letter.isascii()} - frames
        assert strange == set(), page
