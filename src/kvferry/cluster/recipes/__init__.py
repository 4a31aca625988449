"""A cluster as text for others to run: shells, just, systemd, docker compose. Pure; only `files` writes anything."""
