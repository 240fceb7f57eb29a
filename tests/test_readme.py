"""The documentation's commands, flags, variables and links exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from adapters.cli import app as adapters_app
from engine.settings import EngineSettings, parse_args, variable_of
from gateway.cli import app as loraplex_app
from gateway.settings import GatewaySettings, environment_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOTS: dict[str, Any] = {
    "loraplex": typer.main.get_command(loraplex_app),
    "adapters": typer.main.get_command(adapters_app),
}
# Variables that no settings class holds: the clients' own, compose's, and other programs'.
OTHER_VARIABLES = {"LORAPLEX_URL", "LORAPLEX_API_KEY"}


def engine_table() -> str:
    """The engine's settings as a table; the README holds exactly this text."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in EngineSettings.model_fields.items():
        default = "" if field.is_required() or field.default is None else f"`{field.default}`"
        rows.append(f"| `{variable_of(name)}` | {default} | {field.description} |")
    return "\n".join(rows) + "\n"


def shell_lines(page: Path) -> Iterator[str]:
    """The commands of a page's `sh` blocks, continued lines joined."""
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.split(" #")[0].strip()


def our_commands() -> Iterator[tuple[str, list[str]]]:
    """Every call of one of our commands in a page's `sh` blocks, with its arguments."""
    for page in PAGES:
        for line in shell_lines(page):
            for call in re.findall(r"(?:^|[ (/])((?:loraplex|adapters) [a-z].*?)(?:\)|;|&&|\||$)", line):
                yield line, shlex.split(call)


def resolve(arguments: list[str]) -> tuple[Any, list[str]]:
    """The subcommand that a call names, and the arguments after it."""
    command = ROOTS[arguments[0]]
    rest = arguments[1:]
    while isinstance(command, TyperGroup):
        assert rest and rest[0] in command.commands, f"no such command: {' '.join(arguments)}"
        command = command.commands[rest.pop(0)]
    return command, rest


@pytest.mark.parametrize(("line", "arguments"), list(our_commands()))
def test_commands_and_their_flags_exist(line: str, arguments: list[str]) -> None:
    command, rest = resolve(arguments)
    # `loraplex engine` passes everything on, `loraplex up` what follows "--".
    split = 0 if command.name == "engine" else rest.index("--") if "--" in rest else len(rest)
    known = {"--help"}
    for parameter in command.params:
        known.update(parameter.opts, parameter.secondary_opts)
    assert flags(rest[:split]) <= known, line
    assert flags(rest[split:]) <= {"--" + name.replace("_", "-") for name in EngineSettings.model_fields}, (
        line
    )


def flags(arguments: list[str]) -> set[str]:
    return {argument.split("=")[0] for argument in arguments if argument.startswith("-") and argument != "--"}


def test_the_readme_begins_with_the_two_commands() -> None:
    lines = list(shell_lines(PAGES[0]))
    assert lines[:2] == ["make demo", "make test"]
    assert len(list(our_commands())) > 8


def test_every_command_is_in_the_readme() -> None:
    text = PAGES[0].read_text()
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    for name, root in ROOTS.items():
        assert isinstance(root, TyperGroup)
        for sub, command in root.commands.items():
            if isinstance(command, TyperGroup):
                group_row = next(line for line in rows.splitlines() if f"`{name} {sub} " in line)
                assert all(f"{verb}`" in group_row for verb in command.commands), group_row
            else:
                assert f"`{name} {sub}`" in rows or f"`{sub}`" in rows


def every_command(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The words of a command and of all below it."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from every_command(below, (*words, name))


@pytest.mark.parametrize(
    "words", [words for name, root in ROOTS.items() for words in every_command(root, (name,))]
)
def test_each_command_says_what_its_exit_codes_mean(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        if words == ("loraplex", "engine"):
            parse_args(["--help"])  # which that command runs
        ROOTS[words[0]].main([*words[1:], "--help"])
    assert "Exit codes: 0 " in capsys.readouterr().out


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        used = {match for line in shell_lines(page) for match in re.findall(r"\bmake ([a-z-]+)", line)}
        used |= set(re.findall(r"`(?:[A-Z]+=\S+ )?make ([a-z-]+)`", page.read_text()))
        assert used <= targets, page.name


def test_the_variables_are_those_of_the_settings() -> None:
    text = PAGES[0].read_text()
    assert environment_table() in text
    assert engine_table() in text


def test_no_page_names_a_variable_that_nothing_reads() -> None:
    known = {f"LORAPLEX_{name.upper()}" for name in GatewaySettings.model_fields}
    known |= {variable_of(name) for name in EngineSettings.model_fields} | OTHER_VARIABLES
    for page in PAGES:
        assert set(re.findall(r"\bLORAPLEX_[A-Z_]+[A-Z]", page.read_text())) <= known, page.name


def test_links_resolve() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_paths_in_the_tree_exist() -> None:
    tree = PAGES[0].read_text().partition("## Where things are")[2].partition("```\n")[2].partition("```")[0]
    for line in tree.splitlines():
        assert (ROOT / line.split()[0]).is_dir(), line
