"""Pictures of a plan: every box labelled, every band drawn, no two labels over each other."""

import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cli import picture
from kvferry.cli.figures import picture_format
from kvferry.cli.picture import MOST_BOXES, Column, save_picture
from kvferry.cluster.layer_reads import Link, Question
from kvferry.cluster.pairing import Place, Plan, report
from kvferry.cluster.spec import Layout
from kvferry.errors import SpecError

CONFIG: dict[str, Any] = {
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "hidden_size": 16384,
}
PAIRS = [("tp=2", "pp=2"), ("tp=2,pp=2", "tp=2,pp=2"), ("tp=8,pp=4", "tp=8,pp=3"), ("tp=64,pp=16", "tp=16,pp=15")]


def _plan(prefill: str, decode: str) -> Plan:
    question = Question(6000, 16, "bfloat16", Link(100.0, "given"))
    answer = report(CONFIG, Layout.parse(prefill), Layout.parse(decode), question)
    assert answer.plan
    return answer.plan


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_files_are_written(tmp_path: Path, prefill: str, decode: str) -> None:
    """The SVG is well formed and has a shape for each band; the PNG is large enough to read."""
    pytest.importorskip("matplotlib")
    planned = _plan(prefill, decode)
    svg, png = tmp_path / "reads.svg", tmp_path / "reads.png"
    for path in (svg, png):
        save_picture(planned, "model", path)
    paths = [element for element in ElementTree.parse(svg).iter() if element.tag.endswith("}path")]
    assert len(paths) > len({(read.producer.pp, read.reader.pp) for read in planned.reads})
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    assert width > 1000
    assert height > 400


def test_a_picture_is_the_same_the_next_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    for path in (first, second):
        save_picture(_plan("tp=2", "pp=2"), "model", path)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_labels_do_not_overlap(prefill: str, decode: str) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    canvas = FigureCanvasAgg(figure)
    picture._draw(figure, _plan(prefill, decode), "model")
    canvas.draw()
    labels = [text for text in figure.axes[0].texts if text.get_text().startswith("pp")]
    for align in ("left", "right"):
        boxes = sorted((text.get_window_extent() for text in labels if text.get_ha() == align), key=lambda box: box.y0)
        assert all(lower.y1 <= upper.y0 for lower, upper in pairwise(boxes))
        assert all(0 <= box.x0 <= box.x1 <= figure.bbox.width for box in boxes)


@pytest.mark.parametrize("layout", ["tp=64,pp=16", "tp=1024", "pp=126", "tp=3,pp=40"])
def test_few_enough_boxes_for_any_layout(layout: str) -> None:
    """Every rank is in a box, neighbours together."""
    parsed = Layout.parse(layout)
    side = msgspec.structs.replace(_plan("tp=1", f"pp={parsed.pp}").decode, tp=parsed.tp)
    column = Column(side, kv_heads=8)
    assert len(column.boxes) <= MOST_BOXES
    assert {column.key(Place(pp, tp)) for pp in range(parsed.pp) for tp in range(parsed.tp)} == set(column.boxes)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.cli.figures.find_spec", lambda _: None)
    with pytest.raises(SpecError, match=r"kvferry\[plot\]"):
        picture_format(Path("reads.svg"), "--picture")


def test_a_place_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SpecError, match="cannot be written"):
        save_picture(_plan("tp=1", "tp=1"), "model", tmp_path / "nowhere" / "reads.png")


def test_planning_does_not_load_matplotlib() -> None:
    """Only a picture that is asked for pays for it."""
    probe = "import sys, kvferry.cli; print('matplotlib' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "False"
