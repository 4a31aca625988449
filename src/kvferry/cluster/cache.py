"""The directory outside the repository where prepared models are kept."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_directory() -> Path:
    """`KVFERRY_CACHE`, else `$XDG_CACHE_HOME/kvferry`, else `~/.cache/kvferry`."""
    if chosen := os.environ.get("KVFERRY_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvferry"


def cached(name: str, build: Callable[[Path], None], directory: Path | None = None) -> Path:
    """The directory `name` in the cache, filled by `build(empty directory)` the first time.

    The name appears only once it is complete, so an interrupted build leaves nothing half done and two processes that
    build the same thing at once both end with a whole one.
    """
    root = directory or cache_directory()
    target = root / name
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=root))
    try:
        build(staging)
        staging.chmod(0o755)
        _publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _publish(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process was first, with the same content
            raise
