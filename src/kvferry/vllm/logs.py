"""Log lines of this package through vLLM's own handlers, in its format and at its level."""

import logging


def join_vllm_logging() -> None:
    """Give the ``kvferry`` logger the handlers of vLLM's; nothing happens if vLLM configured none."""
    import vllm.logger  # noqa: F401  (configures the "vllm" logger)

    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
