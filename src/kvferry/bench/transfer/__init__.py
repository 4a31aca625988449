"""Transfers between pairs of layouts without engines: processes hold KV caches, others read them."""
