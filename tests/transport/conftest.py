"""Lets spawned processes import the helpers beside the tests, by the names pytest gives them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
