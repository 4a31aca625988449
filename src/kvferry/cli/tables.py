"""Tables that fit their terminal: columns where there is room for them, else a paragraph for each row."""

from collections.abc import Collection, Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

ANY_WIDTH = 10_000


class Rows:
    """A table of texts, of which none is ever cut off; without frames, which take room and attention.

    Args:
        numbers: columns that are aligned at their right.
    """

    def __init__(self, title: str, columns: Sequence[str], numbers: Collection[str] = ()) -> None:
        self._title = title
        self._columns = columns
        self._numbers = numbers
        self._rows: list[list[Text]] = []

    def add(self, *cells: str | Text) -> None:
        self._rows.append([cell if isinstance(cell, Text) else Text(cell) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        for column in self._columns:
            table.add_column(column, justify="right" if column in self._numbers else "left", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        needed = Measurement.get(console, options.update(width=ANY_WIDTH), table).maximum
        yield Text(self._title, style="bold")
        if needed <= options.max_width:
            yield table
        else:
            yield from map(self._paragraph, self._rows)

    def _paragraph(self, row: Sequence[Text]) -> Text:
        first, *others = [
            Text.assemble((f"{column} ", "dim"), cell) for column, cell in zip(self._columns, row, strict=True) if cell
        ]
        return Text.assemble("- ", Text(", ").join([first, *others]))
