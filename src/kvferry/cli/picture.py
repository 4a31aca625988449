"""A plan as a picture: prefill ranks left, decode ranks right, a band for every read, as wide as its bytes."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.cli.figures import drawing
from kvferry.cli.grouping import inclusive, numbered
from kvferry.cli.units import amount
from kvferry.cluster.pairing import Place, Plan, Side
from kvferry.geometry import Span, heads_of_rank

MOST_BOXES = 32
LIGHT = 0.6
"""Place among the layers from which on colours are too light for white letters."""

# Heights are in lines of text, widths in inches.
LINE_INCHES = 0.2
BOX_LINES, GAP_LINES, LEAST_LINES = 1.0, 0.5, 14.0
TOP_LINES, BOTTOM_LINES = 5.0, 3.5
LABEL_WIDTH, FLOW_WIDTH, BOX_WIDTH = 3.4, 5.2, 0.12

Key = tuple[int, int]


@dataclass
class Box:
    """Ranks drawn as one: heights in lines from the top, `used` what bands have taken of it."""

    label: str
    bytes: int = 0
    top: float = 0.0
    height: float = 0.0
    used: float = 0.0


class Band(NamedTuple):
    """All reads between two boxes in one range of layers."""

    producer: Key
    reader: Key
    layers: Span
    heads: Span
    bytes: int


@dataclass
class Column:
    """One side's boxes; ranks are put together until there are few enough to label."""

    side: Side
    kv_heads: int
    boxes: dict[Key, Box] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stages = -(-self.side.pp // MOST_BOXES)
        rows = -(-self.side.pp // self._stages)
        self._ranks = -(-self.side.ranks // max(1, MOST_BOXES // rows))
        for pp in range(0, self.side.pp, self._stages):
            for tp in range(0, self.side.ranks, self._ranks):
                self.boxes[self.key(Place(pp, tp))] = Box(self._label(pp, tp))

    def key(self, place: Place) -> Key:
        """The box that a worker is in."""
        return place.pp // self._stages, place.tp // self._ranks

    def _label(self, pp: int, tp: int) -> str:
        last_pp, last_tp = min(pp + self._stages, self.side.pp), min(tp + self._ranks, self.side.ranks)
        layers = Span(self.side.stages[pp].layers.start, self.side.stages[last_pp - 1].layers.stop)
        held = [heads_of_rank(self.kv_heads, self.side.tp, rank % self.side.tp) for rank in range(tp, last_tp)]
        heads = Span(min(span.start for span in held), max(span.stop for span in held))
        name = f"{numbered('pp', pp, last_pp)} {numbered('tp', tp, last_tp)}"
        return f"{name}  ·  {_counted('layer', layers)}  ·  {_counted('head', heads)}"


def save_picture(planned: Plan, name: str, path: Path) -> None:
    """Draw a plan that works into `path`; `name` is the model's.

    Raises:
        SpecError: `path` cannot be written.
    """
    with drawing(path) as figure:
        _draw(figure, planned, name)


def _draw(figure: Any, planned: Plan, name: str) -> None:
    left, right = Column(planned.prefill, planned.kv_heads), Column(planned.decode, planned.kv_heads)
    bands = _bands(planned, left, right)
    scale = max(LEAST_LINES, 1.4 * len(left.boxes), 1.4 * len(right.boxes)) / planned.totals.moved_bytes
    height = _arrange(left.boxes, right.boxes, scale)
    axes = _axes(figure, height)
    layers = planned.prefill.stages[-1].layers.stop
    for band in bands:
        depth = (band.layers.start + band.layers.stop) / 2 / layers
        _draw_band(axes, left.boxes[band.producer], right.boxes[band.reader], band, scale, depth)
    for box in left.boxes.values():
        _draw_box(axes, box, -BOX_WIDTH, -BOX_WIDTH - 0.1, "right")
    for box in right.boxes.values():
        _draw_box(axes, box, FLOW_WIDTH, FLOW_WIDTH + BOX_WIDTH + 0.1, "left")
    _draw_captions(axes, planned, name, height)


def _bands(planned: Plan, left: Column, right: Column) -> list[Band]:
    """Bands from top to bottom, and the bytes of the boxes they join."""
    sums: dict[tuple[Key, Key, Span], int] = defaultdict(int)
    heads: dict[tuple[Key, Key, Span], Span] = {}
    for read in planned.reads:
        key = (left.key(read.producer), right.key(read.reader), read.layers)
        sums[key] += read.bytes
        seen = heads.get(key, read.heads)
        heads[key] = Span(min(seen.start, read.heads.start), max(seen.stop, read.heads.stop))
    bands = [Band(*key, heads[key], count) for key, count in sorted(sums.items())]
    for band in bands:
        left.boxes[band.producer].bytes += band.bytes
        right.boxes[band.reader].bytes += band.bytes
    return bands


def _arrange(left: dict[Key, Box], right: dict[Key, Box], scale: float) -> float:
    """Stack both sides at `scale` lines per byte, the lower one centred; returns the height of the higher one."""
    heights = [_stack(boxes, scale) for boxes in (left, right)]
    for boxes, height in zip((left, right), heights, strict=True):
        for box in boxes.values():
            box.top += (max(heights) - height) / 2
    return max(heights)


def _stack(boxes: dict[Key, Box], scale: float) -> float:
    at = 0.0
    for box in boxes.values():
        box.height = max(box.bytes * scale, 0.1)
        slot = max(box.height, BOX_LINES)
        box.top = at + (slot - box.height) / 2
        at += slot + GAP_LINES
    return at - GAP_LINES


def _axes(figure: Any, height: float) -> Any:
    """Axes over the whole figure, in inches across and lines down."""
    lines = height + TOP_LINES + BOTTOM_LINES
    figure.set_size_inches(2 * LABEL_WIDTH + FLOW_WIDTH, lines * LINE_INCHES)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(-LABEL_WIDTH, FLOW_WIDTH + LABEL_WIDTH)
    axes.set_ylim(height + BOTTOM_LINES, -TOP_LINES)
    return axes


def _draw_band(axes: Any, producer: Box, reader: Box, band: Band, scale: float, depth: float) -> None:
    """`depth` is the band's place among the layers, from 0 to 1."""
    from matplotlib import colormaps
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    thick, middle = band.bytes * scale, FLOW_WIDTH / 2
    start, end = producer.top + producer.used, reader.top + reader.used
    producer.used += thick
    reader.used += thick
    points = [(0, start), (middle, start), (middle, end), (FLOW_WIDTH, end)]
    back = [(x, y + thick) for x, y in reversed(points)]
    codes = [Curve.MOVETO, *[Curve.CURVE4] * 3, Curve.LINETO, *[Curve.CURVE4] * 3, Curve.CLOSEPOLY]
    outline = Curve([*points, *back, points[0]], codes)
    axes.add_patch(
        PathPatch(
            outline, facecolor=colormaps["viridis"](0.05 + 0.8 * depth), edgecolor="white", linewidth=0.4, alpha=0.75
        )
    )
    if thick >= BOX_LINES:
        text = f"{_counted('layer', band.layers)}, {_counted('head', band.heads)}"
        ink = "white" if depth < LIGHT else "#222222"
        axes.text(0.08, start + thick / 2, text, va="center", ha="left", fontsize=7, color=ink)


def _draw_box(axes: Any, box: Box, x: float, label_x: float, align: str) -> None:
    from matplotlib.patches import Rectangle

    colour = "#333333" if box.bytes else "#bbbbbb"
    axes.add_patch(Rectangle((x, box.top), BOX_WIDTH, box.height, facecolor=colour, linewidth=0))
    text = box.label if box.bytes else f"{box.label}  ·  idle"
    axes.text(label_x, box.top + box.height / 2, text, va="center", ha=align, fontsize=8, color=colour)


def _counted(what: str, span: Span) -> str:
    return f"{what} {inclusive(span)}" if span.size == 1 else f"{what}s {inclusive(span)}"


def _draw_captions(axes: Any, planned: Plan, name: str, height: float) -> None:
    middle = FLOW_WIDTH / 2
    axes.text(middle, -4.1, f"{name}: who reads what from whom", ha="center", va="center", fontsize=12, weight="bold")
    facts = (
        f"{amount(planned.totals.moved_bytes)} for a prompt of {planned.tokens:,} tokens, "
        f"{planned.kv_bytes_per_token:,} bytes of KV cache per token"
    )
    axes.text(middle, -2.8, facts, ha="center", va="center", color="#555555")
    for x, align, role, side in (
        (-BOX_WIDTH, "right", "prefill", planned.prefill),
        (FLOW_WIDTH + BOX_WIDTH, "left", "decode", planned.decode),
    ):
        axes.text(x, -1.2, f"{role}  {side.layout}", ha=align, va="center", fontsize=10, weight="bold")
    legend = "a band is as wide as its bytes; its colour is its place among the layers, dark for the first"
    axes.text(middle, height + 2.0, legend, ha="center", va="center", fontsize=8, color="#555555")
