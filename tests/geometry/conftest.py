"""Hypothesis without per-example time limits, which a busy machine breaks; a failure prints what replays it."""

from hypothesis import settings

settings.register_profile("geometry", deadline=None, print_blob=True)
settings.load_profile("geometry")
