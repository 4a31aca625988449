"""Run as a process: loads torch and then vLLM's compiled extension, which shows whether their ABIs fit.

It prints one line of JSON. Loading may end the process; that is for whoever started it to see.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any


def extension(avx512: bool, bf16: bool) -> Path | None:
    """vLLM's main extension, found without importing vLLM; of several CPU builds, the one vLLM takes on such a CPU."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    directory = Path(next(iter(found.submodule_search_locations)))
    return chosen(sorted(directory.glob("_C*.so")), avx512, bf16)


def chosen(files: list[Path], avx512: bool, bf16: bool) -> Path | None:
    """`bf16` is AVX-512 with it. GPU builds have only ``_C``."""
    names = {path.name.partition(".")[0]: path for path in files}
    if "_C_AVX2" in names and not (avx512 and bf16):
        return names.get("_C_AVX512" if avx512 else "_C_AVX2")
    return names.get("_C")


def look() -> dict[str, Any]:
    import torch

    said: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cxx11": torch.compiled_with_cxx11_abi(),
    }
    path = extension(torch.cpu._is_avx512_supported(), torch.cpu._is_avx512_bf16_supported())
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
