"""The versions of vLLM that this is written for; here to be read where vLLM is not to be imported."""

OLDEST, NEWEST = (0, 30), (0, 33)
"""Minor versions between which the connector API is the one this is written for. 0.30 brought the failure report that
works with any number of KV cache groups and the cache views this reads."""
