"""Files with pictures in them. matplotlib is loaded only when one is asked for."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvferry.errors import SpecError

FORMATS = (".svg", ".png")
STYLE = {"font.size": 9, "svg.hashsalt": "kvferry", "font.family": "DejaVu Sans"}


def picture_format(path: Path, option: str) -> str:
    """``svg`` or ``png``, by the file's name; `option` is what named it.

    Raises:
        SpecError: another ending, or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise SpecError(f"{option} {path} must end in {' or '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise SpecError(f"{option} needs matplotlib: pip install 'kvferry[plot]'")
    return path.suffix.lower()[1:]


@contextlib.contextmanager
def drawing(path: Path) -> Iterator[Any]:
    """An empty figure, which is in `path` afterwards; the same picture gives the same file.

    Raises:
        SpecError: `path` cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kind = path.suffix.lower()[1:]
    with mpl.rc_context(STYLE):
        figure = Figure()
        FigureCanvasAgg(figure)
        yield figure
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        try:
            figure.savefig(path, format=kind, dpi=120, metadata=metadata)
        except OSError as error:
            raise SpecError(f"{path} cannot be written: {error.strerror}") from error
