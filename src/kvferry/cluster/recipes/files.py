"""Writes a recipe into a directory, with the keys that it needs."""

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from kvferry.cluster.manifest import Manifest, Settings
from kvferry.cluster.preparation import prepare
from kvferry.cluster.recipes import compose, just, systemd
from kvferry.cluster.recipes.keys import ADMIN_KEY, SECRET_ENV
from kvferry.cluster.recipes.processes import Recipe, recipe
from kvferry.cluster.state import SECRET_BYTES, StateDirectory
from kvferry.errors import SpecError
from kvferry.protocol.authentication import SECRET_VARIABLE

FORMATS: Mapping[str, Callable[[Recipe], dict[str, str]]] = {
    "just": just.render,
    "systemd": systemd.render,
    "compose": compose.render,
}


def write(manifest: Manifest, kind: str, directory: Path, replace: bool) -> list[Path]:
    """The files that were written, keys included. Keys that are there already are kept.

    Raises:
        SpecError: what `prepare` refuses, a file that is there and not to be replaced, or one that cannot be written.
        PortInUseError: as of `prepare`.
    """
    directory = directory.absolute()
    _require_no_secret(manifest)
    prepared = prepare(manifest, StateDirectory(manifest.name))
    # What this shell happens to have set is no part of the files: they are to mean the same wherever they are run.
    made = recipe(prepared, directory, directory / ADMIN_KEY, {})
    texts = {directory / name: text for name, text in FORMATS[kind](made).items()}
    if not replace and (there := [path for path in texts if path.exists()]):
        raise SpecError(f"{there[0]} is there already; --force replaces it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        keys = [_key(made.admin_key, "")] if made.admin_key else []
        if made.secret_file is None:
            keys.append(_key(directory / SECRET_ENV, f"{SECRET_VARIABLE}="))
        for path, text in texts.items():
            _write(path, text)
    except OSError as error:
        raise SpecError(f"{error.filename or directory} cannot be written: {error.strerror}") from error
    return [*texts, *keys]


def _key(path: Path, before: str) -> Path:
    """A random key that nobody but its owner may read; one that is there is kept, so that what runs with it goes on."""
    if path.exists():
        path.chmod(0o600)
    else:
        _write(path, f"{before}{secrets.token_hex(SECRET_BYTES)}\n")
    return path


def _write(path: Path, text: str) -> None:
    """For its owner alone: variables in a recipe may be keys too."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as output:
        output.write(text)


def _require_no_secret(manifest: Manifest) -> None:
    """Raises ``SpecError`` where the secret would stand in a recipe, and not in a file of its own."""
    levels: list[tuple[str, Settings]] = [("", manifest), ("prefill.", manifest.prefill), ("decode.", manifest.decode)]
    levels += [(f"instances.{name}.", own) for name, own in manifest.instances.items()]
    for where, level in levels:
        if SECRET_VARIABLE in level.environment:
            raise SpecError(f"{where}environment: {SECRET_VARIABLE} belongs in a file; name it with secret_file")
