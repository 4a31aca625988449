"""The vLLM edge: the only package that imports vllm."""
