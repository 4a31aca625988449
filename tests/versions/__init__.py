"""KVFerry against every vLLM of its window: the signatures of all, and a run beside each that can be installed."""
