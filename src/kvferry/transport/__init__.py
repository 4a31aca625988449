"""The data path: one NIXL agent per worker."""
