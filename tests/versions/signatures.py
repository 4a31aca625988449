"""The signatures of classes, read from source without importing it.

`python -m tests.versions.signatures VERSION TREE` records those of vLLM's connector interface in `records/`, where TREE
is the directory `vllm` of any source tree or wheel of that version.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from kvferry.vllm.versions import minor_version

RECORDS = Path(__file__).parent / "records"

_V1 = "distributed/kv_transfer/kv_connector/v1"
INTERFACE = {
    f"{_V1}/base.py": (
        *("KVConnectorBase_V1", "SupportsHMA"),
        *("KVConnectorMetadata", "KVConnectorHandshakeMetadata", "KVConnectorWorkerMetadata"),
        *("KVConnectorTransferResults", "KVConnectorRole"),
    ),
    f"{_V1}/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
    "v1/outputs.py": ("KVConnectorOutput",),
}
"""Where in vLLM are the classes that the connector derives from, builds or is handed."""


class Class(TypedDict):
    """What can be seen of a class from outside.

    Attributes:
        bases: as the source names them.
        methods: name to kind and parameters without annotations, ``classmethod(cls, data=None)``.
        abstract: names of those methods that a subclass has to have.
        attributes: names assigned in the class or, in any of its methods, to ``self``.
    """

    bases: list[str]
    methods: dict[str, str]
    abstract: list[str]
    attributes: list[str]


def read(file: Path) -> dict[str, ast.ClassDef]:
    """The classes of a module, by name."""
    return {node.name: node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)}


def signatures(definition: ast.ClassDef) -> Class:
    methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {
        "bases": [ast.unparse(base) for base in definition.bases],
        "methods": {name: _signature(node) for name, node in methods.items()},
        "abstract": sorted(name for name, node in methods.items() if "abstractmethod" in _decorators(node)),
        "attributes": sorted({*_assigned(definition), *of_self(definition, ast.Store)}),
    }


def of_self(definition: ast.ClassDef, how: type[ast.expr_context]) -> set[str]:
    """Names after `self.` in a class, where they are stored or loaded."""
    return {
        node.attr
        for node in ast.walk(definition)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, how) and ast.unparse(node.value) == "self"
    }


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    parameters = node.args
    for parameter in ast.walk(parameters):
        if isinstance(parameter, ast.arg):
            parameter.annotation = None
    kinds = [name for name in _decorators(node) if name in ("classmethod", "staticmethod", "property")]
    return f"{'/'.join(kinds) or 'method'}({ast.unparse(parameters)})"


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def _assigned(definition: ast.ClassDef) -> Iterator[str]:
    """Names assigned in a class's body, also under an `if`."""
    for node in definition.body:
        for inner in [node, *(node.body if isinstance(node, ast.If) else [])]:
            for target in inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]:
                if isinstance(target, ast.Name):
                    yield target.id


def interface(tree: Path) -> dict[str, Class]:
    """The classes of `INTERFACE` in a source tree of vLLM.

    Raises:
        KeyError: it lacks one.
    """
    return {
        name: signatures(classes[name])
        for file, names in INTERFACE.items()
        for classes in [read(tree / file)]
        for name in names
    }


def record(version: str) -> Path:
    """The file of a version's minor version."""
    return RECORDS / "{}.{}.json".format(*minor_version(version))


if __name__ == "__main__":
    version, tree = sys.argv[1:]
    record(version).write_text(json.dumps(interface(Path(tree)), indent=1) + "\n")
