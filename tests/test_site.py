"""The site builds, its links lead somewhere, it needs no network, and its reference leaves nothing out."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer

from kvferry.cli import app
from kvferry.cluster.manifest import Manifest
from kvferry.gateway import settings as gateway
from kvferry.vllm import settings as connector

from .cli.test_help import walk

ROOT = Path(__file__).parent.parent
DEADLINE_S = 100.0

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")


def _build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(config), "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once; every warning, such as of a link that leads nowhere, is an error."""
    directory = tmp_path_factory.mktemp("site")
    done = _build(ROOT / "mkdocs.yml", directory)
    assert done.returncode == 0, done.stderr
    return directory


def _text(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", page.read_text()))


@pytest.mark.parametrize("broken", ["[a](nowhere.md)", "[a](page.md#nowhere)", "![a](nowhere.svg)"])
def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, broken: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Index\n")
    (tmp_path / "docs" / "page.md").write_text(f"# Page\n\n{broken}\n")
    config = tmp_path / "mkdocs.yml"
    own = f"docs_dir: {tmp_path / 'docs'}\nhooks: []\nnav: [index.md, page.md]\n"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\n{own}")
    done = _build(config, tmp_path / "site")
    assert done.returncode == 1
    assert "page.md" in done.stderr


def test_every_page_has_its_place(site: Path) -> None:
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in (ROOT / "docs").rglob("*.md")}
    made = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html"}
    assert made == pages | {"reference/commands.html", "reference/settings.html", "reference/metrics.html"}


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"?(https?:[^\" >]*)", page.read_text())
        assert not loaded, page
    for file in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not re.search(r"(?:url\(|@import|href=)[\"']?https?:", file.read_text()), file


def test_every_option_of_every_command_is_in_the_reference(site: Path) -> None:
    text = _text(site / "reference" / "commands.html")
    for words, command in walk(typer.main.get_command(app)):
        name = " ".join(words)
        _, _, section = text.partition(f"kvferry {name}¶")
        section = re.split(r"kvferry [\w ]+¶", section)[0]
        assert section, name
        for parameter in command.params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                assert not option.startswith("-") or option in section, f"{name} {option}"
        assert f"$ kvferry {name}" in section


@pytest.mark.parametrize("struct", [connector.Settings, gateway.Settings, Manifest])
def test_every_setting_is_in_the_reference(site: Path, struct: type[msgspec.Struct]) -> None:
    text = _text(site / "reference" / "settings.html")
    for field in struct.__struct_fields__:
        assert field in text


def test_every_metric_is_in_the_reference(site: Path) -> None:
    text = _text(site / "reference" / "metrics.html")
    source = (ROOT / "src" / "kvferry" / "vllm" / "metrics.py").read_text()
    names = set(re.findall(r'"((?:vllm|kvferry):\w+)"', source))
    assert len(names) >= 8
    for name in names:
        assert name in text
    for name in ("requests_total", "legs_total", "plain_decodes_total", "usable", "first_byte_seconds"):
        assert f"kvferry_gateway_{name}" in text


def test_plans_are_answered_when_the_site_is_built(site: Path) -> None:
    text = _text(site / "choosing.html")
    assert "This pair works: tp=2,pp=2  ->  tp=4" in text
    assert "64 attention heads cannot be split over tp=3" in text
