"""Starts engines and a router on one machine, and checks them against each other. Imports no vllm."""
