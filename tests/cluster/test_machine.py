"""What the machine has, and where a model lies."""

from pathlib import Path

import pytest

from kvferry.cluster import machine
from kvferry.cluster.machine import model_directory, this_machine
from kvferry.errors import SpecError


def test_a_cpu_build_runs_on_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_build_installed", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 1})
    assert this_machine({}).devices == ("1", "3")


def test_visible_gpus_bound_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_build_installed", lambda: False)
    assert this_machine({"CUDA_VISIBLE_DEVICES": "2, 5"}).devices == ("2", "5")
    assert this_machine({"CUDA_VISIBLE_DEVICES": ""}).devices == ()


def test_gpus_are_those_that_nvidia_smi_lists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "cpu_build_installed", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert this_machine({}).devices == ()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0\necho 1\n")
    tool.chmod(0o755)
    assert this_machine({}).devices == ("0", "1")


def test_a_model_is_a_directory_or_a_name_in_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("abc\n")
    assert model_directory("org/name", {"HF_HUB_CACHE": str(tmp_path)}) == snapshot
    assert model_directory(str(snapshot), {}) == snapshot


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/nowhere", "there is no model directory /nowhere"),
        ("./nowhere", "there is no model directory ./nowhere"),
        ("org/nowhere", "fetch it first, for example with `hf download org/nowhere`"),
        (".", "it has no config.json"),
    ],
)
def test_a_missing_model_is_refused(model: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        model_directory(model, {"HF_HOME": str(tmp_path)})
    assert said in str(caught.value)
