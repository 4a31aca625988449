"""The commands of a cluster as text for a shell: what ``kvferry up --dry-run`` prints."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.cluster.recipes.processes import Recipe

INDENT = "  "


def shell_command(command: Sequence[str], environment: Mapping[str, str], inherited: Mapping[str, str]) -> str:
    """A command that sets what differs from what a shell already has; continued over lines, one flag on each."""
    changed = [f"{name}={value}" for name, value in sorted(environment.items()) if inherited.get(name) != value]
    removed = [part for name in sorted(set(inherited) - set(environment)) for part in ("-u", name)]
    parts = ["env", *removed] if changed or removed else []
    lines = [" ".join(map(shlex.quote, parts))] if parts else []
    lines += [INDENT + shlex.quote(assignment) for assignment in changed]
    lines += [INDENT * bool(parts) + line for line in _lines(command)]
    return " \\\n".join(lines)


def _lines(command: Sequence[str]) -> list[str]:
    """The program with what is no flag, then each flag with its values."""
    lines = [""]
    for part in command:
        if part.startswith("--"):
            lines.append(INDENT + shlex.quote(part))
        else:
            lines[-1] += " " * bool(lines[-1]) + shlex.quote(part)
    return lines


def keys_command(files: Sequence[Path]) -> str:
    """Makes files with fresh random keys, for this user only."""
    lines = ["umask 077", *(f"mkdir -p {shlex.quote(str(path))}" for path in sorted({file.parent for file in files}))]
    lines += [f"od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > {shlex.quote(str(file))}" for file in files]
    return "(" + "; ".join(lines) + ")"


def script(recipe: Recipe, inherited: Mapping[str, str]) -> str:
    """All processes, for shells whose environment is `inherited`, with a word on how to run them."""
    head = "# Each of these in a shell of its own, the first one first; the last one when all before it answer.\n"
    keys = [path for path in (recipe.secret_file, recipe.admin_key) if path and path.parent == recipe.directory]
    blocks = [_block("the secret of the instances, and the key of the gateway's /admin", keys_command(keys))]
    for one in recipe.processes:
        blocks.append(_block(f"{one.name}: {one.title}", shell_command(one.command, one.environment, inherited)))
    return "\n".join([head, *blocks])


def _block(title: str, command: str) -> str:
    return f"# {title}\n{command}\n"
