"""A cluster as files: each form says the same as `kvferry up` would do, can be read, and keeps its secrets."""

import configparser
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from kvferry.cluster.manifest import Role, parse
from kvferry.cluster.preparation import prepare
from kvferry.cluster.recipes import compose, files, just, systemd
from kvferry.cluster.recipes.processes import Recipe, recipe
from kvferry.cluster.state import StateDirectory
from kvferry.errors import SpecError

from .clusters import NO_CORES_TO_SPARE, model

JUST = shutil.which("just", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
AWKWARD = 'it\'s 50% of "$HOME" `x` {{y}} \\ #;'
NAMES = ("secret_file", "--secret-file")
needs_just = pytest.mark.skipif(JUST is None, reason="just is not installed")


@pytest.fixture
def made(tmp_path: Path) -> Recipe:
    """Two prefill instances and a decode one, with a variable and a flag that every format has to escape."""
    return _made(tmp_path)


def _made(tmp_path: Path, **more: Any) -> Recipe:
    given = {
        "model": str(model(tmp_path)),
        "name": "blue",
        "prefill": {"layout": "tp=2", "replicas": 2},
        "decode": {"layout": "pp=2,partition=1+3"},
        "environment": {"AWKWARD": AWKWARD},
        "vllm": {"override-generation-config": {"awkward": AWKWARD}},
        **more,
    }
    prepared = prepare(parse(given), StateDirectory("blue", tmp_path / "state"), NO_CORES_TO_SPARE)
    return recipe(prepared, tmp_path / "out", tmp_path / "out" / "admin-key", {})


def _write(directory: Path, texts: dict[str, str]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text)
    (directory / "secret.env").write_text("KVFERRY_SECRET=0123456789abcdef\n")
    return directory


def _just(directory: Path, *arguments: str) -> str:
    done = subprocess.run([str(JUST), *arguments], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_processes_are_those_of_the_cluster_and_inherit_nothing_of_this_shell(made: Recipe) -> None:
    assert [one.name for one in made.processes] == ["prefill-0", "prefill-1", "decode-0", "gateway"]
    assert [len(made.of(role)) for role in Role] == [2, 1]
    prefill, decode = made.instances[0], made.instances[2]
    assert prefill.title == "tp=2,pp=1,dp=1, on all cores"
    assert "PATH" not in prefill.environment
    assert prefill.without == ("VLLM_PP_LAYER_PARTITION",)
    assert decode.without == ()
    assert decode.environment["VLLM_PP_LAYER_PARTITION"] == "1,3"
    for one in made.instances:
        assert one.ready_url.removesuffix("/health") in made.front.command


def test_the_secret_is_named_only_where_there_is_a_file_for_it(tmp_path: Path, made: Recipe) -> None:
    assert not any(name in word for name in NAMES for one in made.processes for word in one.command)
    secret = tmp_path / "key"
    secret.write_text("0123456789abcdef")
    named = _made(tmp_path, secret_file=str(secret))
    assert all(any(str(secret) in word for word in one.command) for one in named.processes)
    assert not any("secret.env" in text for kind in files.FORMATS.values() for text in kind(named).values())


def test_vllm_router_is_kept_from_proxies_and_has_no_key(tmp_path: Path) -> None:
    pytest.importorskip("vllm_router", reason="vllm-router is not installed")
    made = _made(tmp_path, router="vllm-router")
    assert made.admin_key is None
    assert made.front.name == "vllm-router"
    assert "https_proxy" in made.front.without
    for kind in files.FORMATS.values():
        assert not any("admin-key" in text for text in kind(made).values())


# just


@needs_just
def test_a_justfile_lists_a_recipe_for_each_instance_each_side_and_all(tmp_path: Path, made: Recipe) -> None:
    listed = _just(_write(tmp_path / "out", just.render(made)), "--list", "--unsorted").splitlines()[1:]
    assert [line.split()[0] for line in listed] == [
        *("prefill-0", "prefill-1", "decode-0", "gateway"),
        *("prefill", "decode", "all", "ready", "ask"),
    ]
    assert "# tp=2,pp=1,dp=1, on all cores" in listed[0]


@needs_just
def test_a_recipe_of_a_justfile_runs_the_command_in_its_environment(tmp_path: Path, made: Recipe) -> None:
    directory = _write(tmp_path / "out", just.render(made))
    for one in made.processes:
        assert _environment_and_command(_just(directory, "--dry-run", one.name)) == (one.environment, [*one.command])
    assert _just(directory, "--dry-run", "all").count(" -m ") == 4
    assert "0123456789abcdef" not in _just(directory, "--dry-run", "all")


def _environment_and_command(line: str) -> tuple[dict[str, str], list[str]]:
    """Of what a shell would run, as the shell understands it."""
    words = shlex.split(line)
    assert words.pop(0) == "exec"
    environment: dict[str, str] = {}
    if words[0] == "env":
        words.pop(0)
        while words[0] == "-u":
            del words[:2]
        while words[0] != sys.executable:
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
    return environment, words


@needs_just
def test_a_justfile_asks_what_it_is_asked_to(tmp_path: Path, made: Recipe) -> None:
    line = _just(_write(tmp_path / "out", just.render(made)), "--dry-run", "ask", "any")
    program = line.partition(" | curl")[0]
    asked = {**os.environ, "question": AWKWARD}
    body = json.loads(subprocess.run(["sh", "-c", program], env=asked, capture_output=True, check=True).stdout)
    assert body["messages"] == [{"role": "user", "content": AWKWARD}]


def test_a_justfile_cannot_hold_several_lines_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="prefill-0: a justfile cannot hold"):
        just.render(_made(tmp_path, environment={"TEXT": "a\nb"}))


# systemd


class _Unit:
    """A unit file as systemd reads it; keys may be there several times."""

    def __init__(self, text: str) -> None:
        lines = [line for line in text.replace(" \\\n", " ").splitlines() if line and line[0] not in "#["]
        self.settings = [(key, value) for key, _, value in (line.partition("=") for line in lines)]
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(text)
        self.sections = parser.sections()

    def all(self, key: str) -> list[str]:
        return [value for name, value in self.settings if name == key]

    def one(self, key: str) -> str:
        [value] = self.all(key)
        return value


def test_every_process_is_a_unit_that_stops_with_its_target(made: Recipe) -> None:
    texts = systemd.render(made)
    services = [f"kvferry-blue-{one.name}.service" for one in made.processes]
    assert list(texts) == ["kvferry-blue.target", *services]
    assert _Unit(texts["kvferry-blue.target"]).one("Wants").split() == services
    for one, name in zip(made.processes, services, strict=True):
        unit = _Unit(texts[name])
        assert unit.sections == ["Unit", "Service", "Install"]
        assert unit.one("PartOf") == unit.one("WantedBy") == "kvferry-blue.target"
        assert unit.one("KillMode") == "mixed"
        assert float(unit.one("TimeoutStopSec")) == one.stop_s
        assert unit.one("EnvironmentFile") == str(made.directory / "secret.env")
        assert _unquoted(unit.one("ExecStart"), "$") == [*one.command]
        assert dict(_unquoted(value)[0].split("=", 1) for value in unit.all("Environment")) == one.environment


def test_the_gateway_is_stopped_first_and_has_time_for_requests_under_way(made: Recipe) -> None:
    gateway = _Unit(systemd.render(made)["kvferry-blue-gateway.service"])
    assert set(gateway.one("After").split()) >= {f"kvferry-blue-{one.name}.service" for one in made.instances}
    assert float(gateway.one("TimeoutStopSec")) > 30  # what the gateway gives them


def _unquoted(text: str, *doubled: str) -> list[str]:
    """Words as systemd.service(5) takes them apart; its double quotes and backslashes are those of a shell's."""
    words = shlex.split(text, posix=True)
    for sign in ("%", *doubled):
        assert all(sign not in word.replace(sign * 2, "") for word in words)
        words = [word.replace(sign * 2, sign) for word in words]
    return words


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units(tmp_path: Path, made: Recipe) -> None:
    directory = _write(tmp_path / "out", texts := systemd.render(made))
    units = [str(directory / name) for name in texts]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# docker compose


def test_every_process_is_a_service_and_the_gateway_waits_for_the_others(made: Recipe) -> None:
    whole = yaml.safe_load(compose.render(made)["compose.yaml"])
    assert whole["name"] == "kvferry-blue"
    assert list(whole["services"]) == [one.name for one in made.processes]
    for one in made.processes:
        service = whole["services"][one.name]
        assert [*service["entrypoint"], *_split(service["command"])] == ["python3", *one.command[1:]]
        assert {name: _undoubled(value) for name, value in service.get("environment", {}).items()} == one.environment
        assert (service["network_mode"], service["ipc"], service["pid"]) == ("host", "host", "host")
        assert service["env_file"] == ["secret.env"]
        assert service["healthcheck"]["test"][-3:] == _parts(one.ready_url)
        assert service["healthcheck"]["start_period"] == f"{one.start_s:.0f}s"
        assert "deploy" not in service  # no GPUs here
    waits = {name: service.get("depends_on", {}) for name, service in whole["services"].items()}
    assert waits["gateway"] == {one.name: {"condition": "service_healthy"} for one in made.instances}
    assert not any(waits[one.name] for one in made.instances)


def _undoubled(text: str) -> str:
    """As compose reads it; a single dollar sign would name a variable."""
    assert "$" not in text.replace("$$", "")
    return text.replace("$$", "$")


def _parts(url: str) -> list[str]:
    parts = urlsplit(url)
    return [str(parts.hostname), str(parts.port), parts.path]


def _split(words: list[str]) -> list[str]:
    """Without the equals signs that join a flag and its value."""
    parts = [word.split("=", 1) if word.startswith("--") else [word] for word in map(_undoubled, words)]
    return [part for pair in parts for part in pair]


def test_a_service_sees_the_model_and_the_gateway_its_key(made: Recipe) -> None:
    services = yaml.safe_load(compose.render(made)["compose.yaml"])["services"]
    assert services["prefill-0"]["volumes"] == [f"{made.model}:{made.model}:ro"]
    assert services["gateway"]["volumes"] == [f"{made.admin_key}:{made.admin_key}:ro"]


def test_gpus_are_all_seen_and_told_apart_by_the_variable(tmp_path: Path) -> None:
    from kvferry.cluster.machine import Machine

    state = StateDirectory("blue", tmp_path / "state")
    prepared = prepare(parse({"model": str(model(tmp_path))}), state, Machine(False, ("0", "1")))
    text = compose.render(recipe(prepared, tmp_path, tmp_path / "admin-key", {}))["compose.yaml"]
    decode = yaml.safe_load(text)["services"]["decode-0"]
    assert decode["environment"]["CUDA_VISIBLE_DEVICES"] == "1"
    [gpus] = decode["deploy"]["resources"]["reservations"]["devices"]
    assert gpus == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert "deploy" not in yaml.safe_load(text)["services"]["gateway"]


def test_a_health_check_tells_well_from_unwell() -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        for path, code in (("/health", 0), ("/ready", 1)):
            arguments = [sys.executable, "-c", compose.HEALTHY, "127.0.0.1", str(server.server_port), path]
            assert subprocess.run(arguments, timeout=30, check=False).returncode == code
        server.shutdown()


def _compose_client() -> bool:
    if shutil.which("docker") is None:
        return False
    return (
        subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30, check=False).returncode == 0
    )


@pytest.mark.skipif(not _compose_client(), reason="docker compose is not installed")
def test_docker_compose_takes_the_file(tmp_path: Path, made: Recipe) -> None:
    directory = _write(tmp_path / "out", compose.render(made))
    command = ["docker", "compose", "--file", str(directory / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# Files


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KVFERRY_STATE", str(tmp_path / "state"))
    return parse({"model": str(model(tmp_path))})


@pytest.mark.parametrize("kind", files.FORMATS)
def test_the_secret_is_in_one_file_for_its_owner_alone(tmp_path: Path, manifest: Any, kind: str) -> None:
    before = os.umask(0)
    try:
        written = files.write(manifest, kind, tmp_path / "out", replace=False)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o600}
    [name, secret] = (tmp_path / "out" / "secret.env").read_text().strip().split("=")
    assert (name, len(secret)) == ("KVFERRY_SECRET", 64)
    assert [path.name for path in written if secret in path.read_text()] == ["secret.env"]


def test_written_anew_the_keys_stay(tmp_path: Path, manifest: Any) -> None:
    files.write(manifest, "just", tmp_path / "out", replace=False)
    secret = tmp_path / "out" / "secret.env"
    kept, _ = secret.read_text(), secret.chmod(0o644)
    with pytest.raises(SpecError, match=r"justfile is there already; --force replaces it"):
        files.write(manifest, "just", tmp_path / "out", replace=False)
    files.write(manifest, "just", tmp_path / "out", replace=True)
    assert secret.read_text() == kept
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_secret_among_the_variables_is_refused(tmp_path: Path) -> None:
    given = {"model": str(model(tmp_path)), "decode": {"environment": {"KVFERRY_SECRET": "0123456789abcdef"}}}
    with pytest.raises(SpecError, match=r"decode\.environment: KVFERRY_SECRET belongs in a file"):
        files.write(parse(given), "compose", tmp_path / "out", replace=False)
    assert not (tmp_path / "out").exists()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, manifest: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match=r"out cannot be written: Not a directory"):
        files.write(manifest, "just", tmp_path / "file" / "out", replace=False)


def test_a_model_of_the_hugging_face_cache_is_seen_with_what_its_links_point_to(tmp_path: Path) -> None:
    snapshot = Path("/hub/models--a--b/snapshots/123")
    assert compose._whole(snapshot) == Path("/hub/models--a--b")
    assert compose._whole(tmp_path) == tmp_path
