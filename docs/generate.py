"""Makes what the site takes from the code: a hook of mkdocs, named in mkdocs.yml.

- `reference/`: every option of every command, every setting, every metric;
- `pictures/`: screens, and what `kvferry plan` draws;
- what `kvferry plan` answers to the arguments in a block of `plan`.

A name or a text is changed in the code, never here.
"""

import ast
import contextlib
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import msgspec
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.models import ArgumentInfo
from typer.testing import CliRunner

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src"
README_FILE = HERE.parent / "README.md"
sys.path[:0] = [str(SOURCE), str(HERE)]

import screens  # noqa: E402

from kvferry.cli import app  # noqa: E402
from kvferry.cluster import manifest  # noqa: E402
from kvferry.gateway import metrics as gateway_metrics  # noqa: E402
from kvferry.gateway import settings as gateway_settings  # noqa: E402
from kvferry.vllm import settings as connector_settings  # noqa: E402

SHOWN = ("up-serving", "doctor")
PLANS = {
    "reads-pp2-tp4": ["llama-3.1-70b", "--prefill", "tp=2,pp=2", "--decode", "tp=4"],
    "reads-tp8-tp4dp2": ["llama-3.1-70b", "--prefill", "tp=8", "--decode", "tp=4,dp=2"],
}
VARIABLES = {
    "KVFERRY_SECRET": "the secret of all instances, for the connector and the gateway; a secret file wins over it",
    "KVFERRY_STATE": "where `kvferry up` keeps the files of its clusters; else `$XDG_STATE_HOME/kvferry`",
    "KVFERRY_CACHE": "where `demo`, `verify` and `up --demo` keep models; else `$XDG_CACHE_HOME/kvferry`",
    "KVFERRY_TRANSFER_LOG": "a file to which every worker appends a line of JSON for each load; for measuring",
    "KVFERRY_IMAGE": "the image that a rendered compose file runs; `kvferry` if not set",
    "KVFERRY_CPU_YIELD_SLEEP_US": "on CPU: microseconds that a waiting tensor parallel rank sleeps instead of spinning",
}
# Between processes of KVFerry; nothing to set.
INTERNAL = {"KVFERRY_GATEWAY", "KVFERRY_GUARD_GRACE_S", "KVFERRY_PEER_NIXL_DELAY_US"}
README = re.compile(r"^<!-- README: (.*) -->$", re.MULTILINE)
PLAN = re.compile(r"^```plan\n(.*)\n```$", re.MULTILINE)
Row = tuple[str, ...]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and pictures that are made from code."""
    made: dict[str, str | bytes] = {
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "reference/metrics.md": metrics(),
        **{f"pictures/{name}.svg": screens.svg(name, screens.SITE_WIDTH) for name in SHOWN},
        **{f"pictures/{name}.svg": drawn(arguments) for name, arguments in PLANS.items()},
    }
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put a command and its answer in place of its arguments, and a section of the README where it is asked for."""
    markdown = README.sub(lambda found: section(found[1]), markdown)
    return PLAN.sub(lambda found: f"```console\n$ kvferry plan {found[1]}\n{plan(found[1].split())}```", markdown)


def section(title: str) -> str:
    """Of the README, up to the next title of its level."""
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^## )", README_FILE.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise RuntimeError(f"README.md has no section {title!r}")
    return found[0].rstrip()


def plan(arguments: list[str]) -> str:
    """What `kvferry plan` prints in a terminal of 96 columns; models are those of `docs/models`."""
    with contextlib.chdir(screens.MODELS):
        done = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "96"})
    if done.exit_code not in (0, 2):
        raise RuntimeError(f"kvferry plan {' '.join(arguments)}: {done.output}")
    return "".join(f"{line.rstrip()}\n" for line in done.output.splitlines())


def drawn(arguments: list[str]) -> str:
    """The picture that `kvferry plan` draws."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "plan.svg")
        plan([*arguments, "--picture", str(file)])
        return file.read_text()


# Commands


def commands() -> str:
    """Every command with its arguments and options, in the order of the help."""
    parts = ["# Commands\n", "`kvferry COMMAND --help` shows the same.\n"]
    for name, command, epilog in registered(app, "kvferry"):
        parameters = [_parameter(one) for one in inspect.signature(command, eval_str=True).parameters.values()]
        examples = epilog.partition(":\n")[2].splitlines()
        parts += [f"## {name}\n", f"{inspect.getdoc(command)}\n"]
        parts += [table(("", "", "if not given"), parameters)]
        parts += ["```console", *(f"$ {line.strip()}" for line in examples), "```\n"]
    return "\n".join(parts)


def registered(group: typer.Typer, name: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Full name, function and epilogue of every command, those of groups too."""
    for info in group.registered_commands:
        assert info.callback
        yield f"{name} {info.name or info.callback.__name__.replace('_', '-')}", info.callback, info.epilog or ""
    for inner in group.registered_groups:
        assert inner.typer_instance
        yield from registered(inner.typer_instance, f"{name} {inner.name}")


def _parameter(parameter: inspect.Parameter) -> Row:
    """Names, meaning and default, as typer takes them from an annotation."""
    kind, info = get_args(parameter.annotation)
    default = parameter.default
    # Names come first in an annotation, where typer would take a default.
    names = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
    if isinstance(info, ArgumentInfo):
        names = [info.metavar or parameter.name]
    elif not names:
        option = parameter.name.replace("_", "-")
        names = [f"--{option}", f"--no-{option}"] if kind is bool else [f"--{option}"]
    text = info.help
    choices = next((one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, Enum)), None)
    if choices and info.metavar is None:
        text += f" One of {', '.join(f'`{choice.value}`' for choice in choices)}."
    if default is inspect.Parameter.empty:
        shown = "needed"
    elif kind is bool and any(name.startswith("--no-") for name in names):
        shown = f"`{names[not default]}`"
    else:
        shown = "" if default in (None, False) or info.show_default is False else f"`{_plain(default)}`"
    return ", ".join(f"`{name}`" for name in names), text, shown


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


# Settings


def settings() -> str:
    """cluster.yaml, the connector, the gateway and the environment."""
    own = [name for name in manifest.Side.__struct_fields__ if name not in manifest.Settings.__struct_fields__]
    levels = (
        ("The top", manifest.Manifest, set(manifest.Manifest.__struct_fields__) - {"prefill", "decode", "instances"}),
        ("`prefill` and `decode`", manifest.Side, set(own)),
        ("One of `instances`", manifest.Override, set(manifest.Override.__struct_fields__)),
    )
    shared = set(manifest.Settings.__struct_fields__)
    parts = ["# Settings\n", "## cluster.yaml\n", "[A cluster on one machine](../up.md) shows one.\n"]
    for title, struct, names in levels:
        parts += [f"### {title}\n", table(("key", "", "if not given"), _fields(struct, names - shared))]
    parts += ["### At every level\n", table(("key", "", "if not given"), _fields(manifest.Settings, shared))]
    parts += [
        "## The connector\n",
        "Keys of `kv_connector_extra_config`, and of `connector` in a cluster.yaml.\n",
        table(("key", "", "if not given"), _fields(connector_settings.Settings)),
        "## The gateway\n",
        "Most are options of [`kvferry gateway`](commands.md#kvferry-gateway) and keys of `gateway` in a cluster.yaml; "
        "the others cannot be changed yet.\n",
        table(("setting", "", "default"), _fields(gateway_settings.Settings)),
        "## Environment variables\n",
        table(("variable", ""), [(f"`{name}`", text) for name, text in variables().items()]),
    ]
    return "\n".join(parts)


def _fields(struct: type[msgspec.Struct], names: set[str] | None = None) -> list[Row]:
    """Name, meaning and default of each field; meanings are those of the docstring."""
    meanings = attributes(struct)
    rows = []
    for field in msgspec.structs.fields(struct):
        if names is None or field.name in names:
            if field.name not in meanings:
                raise RuntimeError(f"{struct.__name__}.{field.name} is not described in its docstring")
            rows.append((f"`{field.name}`", meanings[field.name], _field_default(field)))
    return rows


def _field_default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "needed"
    default = field.default
    if field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    return "" if default in (None, {}, [], ()) else f"`{_plain(default)}`"


def attributes(struct: type) -> dict[str, str]:
    """The section ``Attributes`` of a docstring; two names before one colon share a text."""
    _, _, section = inspect.getdoc(struct).partition("Attributes:\n")  # type: ignore[union-attr]
    found: dict[str, str] = {}
    for entry in re.findall(r"^    (\S[^:]*): (.*(?:\n      .*)*)", section, re.MULTILINE):
        names, text = entry
        for name in names.split(", "):
            found[name] = code(" ".join(text.split()))
    return found


def code(text: str) -> str:
    """Markdown of a docstring."""
    return re.sub(r"``(.+?)``", r"`\1`", text)


def variables() -> dict[str, str]:
    """Environment variables; one that the source names and nobody describes is an error."""
    named = {name for file in SOURCE.rglob("*.py") for name in re.findall(r"\bKVFERRY_[A-Z_]+\b", file.read_text())}
    if named != VARIABLES.keys() | INTERNAL:
        raise RuntimeError(
            f"environment variables that docs/generate.py does not know, or knows in vain: "
            f"{', '.join(sorted(named ^ (VARIABLES.keys() | INTERNAL)))}"
        )
    return VARIABLES


# Metrics


def metrics() -> str:
    """What instances and the gateway count."""
    parts = [
        "# Metrics\n",
        "## Instances\n",
        "On `/metrics` of each vLLM instance, with vLLM's own labels `model_name` and `engine`. Histograms come as "
        "`_bucket`, `_sum` and `_count`.\n",
        table(("metric", "kind", "own label", ""), list(connector_metrics())),
        "## The gateway\n",
        "On `/metrics` of `kvferry gateway`; the sum over its worker processes.\n",
        table(("metric", "kind", "labels", ""), sorted(of_gateway())),
    ]
    return "\n".join(parts)


def connector_metrics() -> Iterator[Row]:
    """From the constants of kvferry/vllm/metrics.py, without loading vLLM."""
    for metric in constants(SOURCE / "kvferry" / "vllm" / "metrics.py")["METRICS"].values():
        kind = metric.kind.__name__.lower()
        yield f"`{metric.name}{'_total' if kind == 'counter' else ''}`", kind, _label(metric), metric.text


def _label(metric: Any) -> str:
    """A metric's own label, with all that it can be."""
    values = ", ".join(f"`{value}`" for value in metric.values)
    return f"`{metric.label}`{f': {values}' if values else ''}" if metric.label else ""


def constants(module: Path) -> dict[str, Any]:
    """What a module assigns in capital letters at its top: metrics, and names of metrics."""

    def wanted(node: ast.stmt) -> bool:
        if isinstance(node, ast.ImportFrom):
            return not str(node.module).startswith(("vllm", "kvferry.vllm"))
        return isinstance(node, ast.Import | ast.Assign) or (isinstance(node, ast.ClassDef) and not node.bases)

    nodes = [node for node in ast.parse(module.read_text()).body if wanted(node)]
    made = sys.modules["documented"] = ModuleType("documented")  # dataclasses look up the module that they are in
    exec(compile(ast.Module(nodes, []), str(module), "exec"), vars(made))
    public = {name: value for name, value in vars(made).items() if name.isupper() and name[0] != "_"}
    return {name: value for name, value in public.items() if not isinstance(value, str) or ":" in value}


def of_gateway() -> Iterator[Row]:
    """From a gateway's metrics without instances."""
    made = gateway_metrics.Metrics(SimpleNamespace(instances={}))  # type: ignore[arg-type]
    registry: Any = made._registry
    for collector in registry._collector_to_names:
        families = collector.collect() if collector is made else collector.describe()
        labels = ", ".join(f"`{label}`" for label in getattr(collector, "_labelnames", ()))
        for family in families:
            own = ", ".join(f"`{label}`" for label in getattr(family, "_labelnames", ())) or labels
            suffix = "_total" if family.type == "counter" else ""
            yield f"`{family.name}{suffix}`", family.type, own, family.documentation


def table(heads: Row, rows: list[Row]) -> str:
    """A table in markdown; bars in its cells stand within backquotes."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
