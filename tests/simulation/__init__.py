"""Both sides of the protocol under a simulated clock, network, transport and vLLM; every seed replays exactly.

``python -m tests.simulation --help`` says how to run it.
"""
