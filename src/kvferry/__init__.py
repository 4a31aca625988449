"""KVFerry: a vLLM KV connector that moves KV caches between any two parallel layouts."""

__version__ = "0.1.0"
