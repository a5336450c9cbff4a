"""What the documentation says is so: its sessions print what it shows, its files exist, its tables are current."""

from __future__ import annotations

import difflib
import itertools
import pathlib
import re
import runpy
import shlex
import sys
import warnings

import click
import pytest
import yaml

from analysis.__main__ import main as analysis_cli
from scenarios.__main__ import cli as scenarios_cli
from scenarios.load import parse
from tests.docs.generated import SECTIONS, faults_page, with_sections
from tests.docs.pages import DOCS, PAGES, ROOT, Block, blocks, commands, play, without_wall_times

REMAKE = "python -m tests.docs writes it anew; read the difference before you commit it"
BLOCKS = [block for page in PAGES for block in blocks(page)]
SESSIONS = [page for page in PAGES if any(block.language == "console" for block in blocks(page))]
SHOWN = [block for block in BLOCKS if block.file]
PARTS = [block for block in BLOCKS if block.language == "yaml" and not block.file]
CLIS: dict[str, click.Group] = {"scenarios": scenarios_cli, "analysis": analysis_cli}


def name(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.parametrize("page", SESSIONS)
def test_sessions_print_what_the_page_shows(page: str, tmp_path: pathlib.Path) -> None:
    wrong = []
    for block, text in play(page, tmp_path):
        shown, printed = (without_wall_times(one).splitlines() for one in (block.text, text))
        wrong += difflib.unified_diff(shown, printed, name(block), "printed now", lineterm="")
    assert not wrong, REMAKE + "\n" + "\n".join(wrong)


@pytest.mark.parametrize("block", SHOWN, ids=name)
def test_a_file_is_shown_as_it_is(block: Block) -> None:
    assert block.text == (ROOT / block.file).read_text(encoding="utf-8"), f"{name(block)} is not {block.file}"


def test_every_example_is_shown() -> None:
    examples = {f"docs/examples/{path.name}" for path in (DOCS / "examples").iterdir() if path.is_file()}
    assert examples == {block.file for block in SHOWN}


@pytest.mark.parametrize("block", PARTS, ids=name)
def test_a_part_of_a_scenario_is_valid(block: Block) -> None:
    """What a block leaves out is taken from the worked example; services are named as the block names them."""
    whole = yaml.safe_load((DOCS / "examples" / "kill_one.yaml").read_text(encoding="utf-8"))
    given = yaml.safe_load(block.text)
    if "workload" in given:
        whole["topology"]["services"] = {given["workload"]["service"]: whole["topology"]["services"]["chat"]}
        whole["steps"] = []
    parse(yaml.safe_dump({**whole, **given}), name(block), DOCS / "examples", ())


def test_the_table_of_faults_is_current() -> None:
    assert (DOCS / "faults.md").read_text(encoding="utf-8") == faults_page(), REMAKE


@pytest.mark.parametrize("page", PAGES)
def test_made_sections_are_current(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == with_sections(text), REMAKE


def test_every_made_section_is_on_a_page() -> None:
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert [section for section in SECTIONS if f"<!-- made: {section} -->" not in pages] == []


def _documented() -> list[tuple[str, str]]:
    """Every command of ours that a page names, in a block or in a line."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        found += [(page, line) for block in blocks(page) for line in commands(block)]
        found += [(page, line) for line in re.findall(r"`([^`\n]*python -m (?:scenarios|analysis) [^`\n]+)`", text)]
        found += [(page, line) for block in blocks(page) if not block.language for line in block.text.splitlines()]
    return [(page, line.replace("\\\n", " ")) for page, line in found if re.search(r"-m (scenarios|analysis) ", line)]


def test_options_that_the_pages_name_exist() -> None:
    documented = _documented()
    assert len(documented) > 20
    wrong = []
    for page, line in documented:
        for part in re.split(r" && | \| ", line):
            words = shlex.split(part.partition(" > ")[0])
            if words[:2] != ["python", "-m"] or words[2] not in CLIS:
                continue
            command = CLIS[words[2]].commands.get(words[3])
            if isinstance(command, click.Group):
                command = command.commands.get(words[4])
            if command is None:
                wrong.append(f"{page}: {part}: no such command")
                continue
            known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
            wrong += [f"{page}: {part}: no option {word}" for word in words if word[:2] == "--" and word not in known]
    assert wrong == []


def _servers() -> list[tuple[str, str, list[str]]]:
    """Every command of ``real`` that a page names, in a block, a table or a line: page, module, words."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
        for module, words in re.findall(r"python3? -m (real(?:\.\w+)+)((?: +[^\s&|;`>)]+)*)", text):
            found.append((page, module, [word.strip("[],.") for word in words.split()]))
    return found


def test_options_of_servers_and_engines_that_the_pages_name_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aiohttp")
    documented = _servers()
    assert {module for _, module, _ in documented} >= {"real.serve", "real.serve_sessions", "real.emulated"}
    wrong = []
    for page, module, words in documented:
        command = list(itertools.takewhile(lambda word: word[:2] != "--", words))  # and what it is to be done with
        monkeypatch.setattr(sys, "argv", [module, *command, "--help"])
        with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # it may have been imported already
            runpy.run_module(module, run_name="__main__", alter_sys=False)
        told = capsys.readouterr()
        if ended.value.code:
            wrong.append(f"{page}: {module} {command}: {told.err}")
        known = set(re.findall(r"--[a-z][\w-]*", told.out))
        options = [word.partition("=")[0] for word in words if word[:2] == "--"]
        wrong += [f"{page}: {module}: no option {option}" for option in options if option not in known]
    assert wrong == []
