"""A cluster as a justfile: a recipe for each instance, for each side, for the gateway, and for all of them."""

import shlex
import sys

from kvferry.cluster.manifest import Role
from kvferry.cluster.recipes.keys import SECRET_ENV
from kvferry.cluster.recipes.processes import Process, Recipe
from kvferry.cluster.recipes.shell import shell_command
from kvferry.errors import SpecError

FILE = "justfile"
HEAD = """\
# The cluster {cluster}, which serves {model} on {url}.
# Written by `kvferry render just`; edit it as you like. It needs just 1.42 or newer.
#
#   just prefill-0         starts one instance, in a shell of its own; so for each of them, then `just {front}`,
#   just all               or starts all of them in this shell.
#   just ready             waits until requests can be answered.
#   just ask "A question"  asks.
#
# Ctrl-C ends what a shell runs. To let requests under way finish, end the {front} before the instances.
"""
SECRET = """
# The secret that all instances share, in a file for its owner alone.
set dotenv-path := "{file}"
set dotenv-required
"""
LIST = """
[private]
default:
    @just --justfile {{ quote(justfile()) }} --list --unsorted
"""
ASKING = """
# Wait until requests can be answered
ready:
    @until curl --silent --fail --output /dev/null {ready}; do sleep 1; done

# Ask
ask $question="What is the capital of France?":
    @{body} | curl --silent --show-error -H 'Content-Type: application/json' --data @- {url}/v1/chat/completions
"""
BODY = (
    "import json, os, sys; messages = [{'role': 'user', 'content': os.environ['question']}]; "
    "print(json.dumps({'model': sys.argv[1], 'messages': messages}))"
)


def render(recipe: Recipe) -> dict[str, str]:
    """Texts by file name.

    Raises:
        SpecError: an argument or a variable that a justfile cannot hold.
    """
    front = recipe.front.name
    parts = [HEAD.format(cluster=recipe.cluster, model=recipe.served_name, url=recipe.url, front=front)]
    if recipe.secret_file is None:
        parts.append(SECRET.format(file=SECRET_ENV))
    parts.append(LIST)
    parts += map(_recipe, recipe.processes)
    for role in Role:
        parts.append(_together(f"All {role} instances", role, [one.name for one in recipe.of(role)]))
    parts.append(_together("Everything", "all", [*Role, front]))
    body = _escaped(shlex.join([sys.executable, "-c", BODY, recipe.served_name]))
    parts.append(ASKING.format(ready=recipe.front.ready_url, body=body, url=recipe.url))
    return {FILE: "".join(parts)}


def _recipe(process: Process) -> str:
    command = shell_command(process.command, process.environment, dict.fromkeys(process.without, ""))
    if "\n" in command.replace(" \\\n", ""):
        raise SpecError(f"{process.name}: a justfile cannot hold a flag or variable of several lines")
    lines = _escaped(f"exec {command}").replace("\n", "\n    ")
    title = process.title if process.role else f"Serves {process.title}"
    return f"\n# {title}\n{process.name}:\n    {lines}\n"


def _together(title: str, name: str, needed: list[str]) -> str:
    return f"\n# {title}\n[parallel]\n{name}: {' '.join(needed)}\n"


def _escaped(text: str) -> str:
    """As it stands in the body of a recipe."""
    return text.replace("{{", "{{{{")
