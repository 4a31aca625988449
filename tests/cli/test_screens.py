"""What commands show on narrow terminals and on ones without colour; the screens are those of the site's pictures."""

import importlib.util
import io
import re
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from rich.text import Text

from kvferry.cli import console, tables

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("screens", ROOT / "docs" / "screens.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


screens = _load()
PLAIN = ({"TERM": "dumb"}, {"TERM": "xterm-256color", "NO_COLOR": "1"}, {"TERM": "xterm-256color"})


def _shown(name: str, width: int, environment: dict[str, str], terminal: bool = True) -> str:
    file = io.StringIO()
    made = Console(file=file, width=width, highlight=False, force_terminal=terminal, _environ=environment)
    made.print(screens.SCREENS[name](width))
    return file.getvalue()


@pytest.mark.parametrize("width", [30, 50, 80, 120])
@pytest.mark.parametrize("name", screens.SCREENS)
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut_off(name: str, width: int) -> None:
    text = Text.from_ansi(_shown(name, width, PLAIN[2])).plain
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    wide = Text.from_ansi(_shown(name, 200, PLAIN[2])).plain
    if name in ("plan", "doctor"):  # of a cluster's table columns are left out
        assert set(re.findall(r"\d[\d,.]*\d", wide)) <= set(re.findall(r"\d[\d,.]*\d", text.replace("\n", "")))


@pytest.mark.parametrize("environment", PLAIN[:2], ids=["dumb", "NO_COLOR"])
@pytest.mark.parametrize("name", screens.SCREENS)
def test_without_colour_there_is_none_and_words_say_the_same(name: str, environment: dict[str, str]) -> None:
    text = _shown(name, 80, environment)
    assert not re.search(r"\x1b\[[\d;]*(3[0-7]|38|9[0-7])[;m]", text)
    if environment["TERM"] == "dumb":
        assert "\x1b" not in text
    assert Text.from_ansi(text).plain == Text.from_ansi(_shown(name, 80, PLAIN[2])).plain


@pytest.mark.parametrize("name", screens.SCREENS)
def test_what_is_read_by_a_program_has_no_escape_codes(name: str) -> None:
    assert "\x1b" not in _shown(name, 80, PLAIN[2], terminal=False)


@pytest.mark.parametrize("name", screens.SCREENS)
def test_a_picture_of_a_screen_needs_nothing_from_elsewhere(name: str) -> None:
    drawn = re.sub(r"<!--.*?-->", "", screens.svg(name, 80), flags=re.DOTALL).replace("http://127.0.0.1:8080", "")
    assert re.findall(r"https?://[^\s\"')<]+", drawn) == ["http://www.w3.org/2000/svg"]


def test_a_row_that_does_not_fit_is_a_paragraph_that_names_its_columns() -> None:
    rows = tables.Rows("Title", ("name", "bytes", "empty"), ("bytes",))
    rows.add("a", "12,345", "")
    file = io.StringIO()
    for width in (40, 15):
        Console(file=file, width=width).print(rows)
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        "Title",
        "name   bytes  empty",
        "─" * 19,
        "a     12,345",
        "Title",
        "- name a, bytes",
        "12,345",
    ]


def test_a_page_is_as_wide_as_what_it_goes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console.page().width == console.WIDE  # this is no terminal
    monkeypatch.setenv("COLUMNS", "57")
    assert console.page().width == 57
