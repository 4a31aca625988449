"""Real engines behind a router, the same prompts for every way to serve them, in one interleaved run."""
