"""How long decode waits after prefill has ended, with both legs at once and one after the other, in turns.

    python benches/streaming_wait.py [--prefill tp=1] [--decode tp=1] [--tokens 6000] [--chunk 512] [--rounds 5]
                                     [--tls tcp]

Two real engines on this machine, a tiny model with 64 KiB of KV cache per token, and new prompts. Waited is
from prefill's answer to decode's, whose first token is the same work in both ways.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from kvferry.cluster.commands import cpu_build_installed
from kvferry.cluster.dispatch import Dispatcher, Sampling
from kvferry.cluster.launch import start_instances
from kvferry.cluster.ports import free_ports
from kvferry.cluster.spec import InstanceSpec, Layout
from kvferry.cluster.supervisor import Supervisor
from kvferry.cluster.tiny import tiny
from kvferry.gateway.health import Report
from kvferry.protocol.authentication import Seal
from kvferry.protocol.identity import draw
from kvferry.protocol.messages import Offer, Transfer

MODEL = "qwen3-fat"
ONE_TOKEN = Sampling(max_tokens=1)


def one_after_the_other(dispatcher: Dispatcher, prefill: str, decode: str, prompt: list[int]) -> tuple[float, float]:
    """Seconds of the prefill leg, and from its answer to decode's."""
    began, name = time.perf_counter(), uuid.uuid4().hex
    held = dispatcher.prefill(prefill, prompt, name)
    prefilled = time.perf_counter()
    dispatcher.decode(decode, prompt, name, held.kv_transfer_params, ONE_TOKEN)
    return prefilled - began, time.perf_counter() - prefilled


def both_at_once(dispatcher: Dispatcher, prefill: str, decode: str, prompt: list[int]) -> tuple[float, float]:
    """The same, of legs that are sent together."""
    [(host, port, incarnation)] = Report.parse(httpx.get(f"{prefill}/metrics", trust_env=False).content).side_channels
    transfer, name = Transfer(draw(), draw()), uuid.uuid4().hex
    offer = Offer.ahead((host, port), incarnation, transfer).to_params(Seal())

    def first() -> float:
        dispatcher.prefill(prefill, prompt, name, None, transfer.to_params())
        return time.perf_counter()

    with ThreadPoolExecutor(1) as pool:
        began = time.perf_counter()
        prefilling = pool.submit(first)
        dispatcher.decode(decode, prompt, name, offer, ONE_TOKEN)
        ended = time.perf_counter()
        prefilled = prefilling.result()
    return prefilled - began, ended - prefilled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=Layout.parse, default="tp=1")
    parser.add_argument("--decode", type=Layout.parse, default="tp=1")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", default="tcp")
    options = parser.parse_args()
    source = random.Random(7)
    environment = {"UCX_TLS": options.tls, **({"UCX_NET_DEVICES": "lo"} if options.tls == "tcp" else {})}
    ports = free_ports(2)
    specs = [
        InstanceSpec(
            *(role, tiny(MODEL), layout, port, f"kv_{kind}"),
            dtype="bfloat16",
            max_model_len=options.tokens + 256,
            kv_cache_bytes=(options.tokens + 2048) * (1 << 16),
            environment=environment,
            extra=("--max-num-batched-tokens", str(options.chunk)),
        )
        for role, layout, port, kind in zip(
            ("prefill", "decode"), (options.prefill, options.decode), ports, ("producer", "consumer"), strict=True
        )
    ]
    ways = {"one after the other": one_after_the_other, "both at once": both_at_once}
    waited: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as logs, Supervisor(Path(logs)) as supervisor, Dispatcher() as dispatcher:
        start_instances(supervisor, specs, cpu_build_installed(), lambda *_: None)
        for round_ in range(options.rounds + 1):
            for way, send in ways.items():
                prompt = [source.randint(10, 370) for _ in range(options.tokens)]
                prefill, wait = send(dispatcher, specs[0].url, specs[1].url, prompt)
                print(f"{way:20} prefill {prefill:6.2f} s, then waited {1e3 * wait:7.1f} ms", flush=True)
                if round_:  # the first of each meets and compiles
                    waited[way].append(wait)
    medians = {way: statistics.median(values) for way, values in waited.items()}
    for way, values in waited.items():
        print(f"{way:20} median {1e3 * medians[way]:.1f} ms ({1e3 * min(values):.1f} to {1e3 * max(values):.1f})")
    ratio = medians["both at once"] / medians["one after the other"]
    print(
        f"ratio {ratio:.2f}; {options.prefill} -> {options.decode}, chunks of {options.chunk}, {options.tls}, "
        f"load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
