"""Run as a process: loads torch and then vLLM's compiled extension, which shows whether their ABIs fit.

It prints one line of JSON. Loading may end the process; that is for whoever started it to see.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any


def extension() -> Path | None:
    """vLLM's main extension, found without importing vLLM."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    directory = Path(next(iter(found.submodule_search_locations)))
    return next(iter(sorted(directory.glob("_C.*.so"))), None)


def look() -> dict[str, Any]:
    import torch

    said: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cxx11": torch.compiled_with_cxx11_abi(),
    }
    path = extension()
    if path is not None:
        torch.ops.load_library(str(path))
        said["extension"] = f"vllm/{path.name}"
    return said


def main() -> None:
    try:
        said = look()
    except (ImportError, OSError, RuntimeError) as error:
        said = {"error": str(error).strip().partition("\n")[0]}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
