"""What the scheduler half's hooks cost the engine's thread, with many requests in flight.

    python benches/connector_hooks.py [--requests 500] [--tokens 1000] [--rounds 5] [--pause-us 1000]

The producer's half is in a process of its own, as in life. Every hook is timed on the calling thread, with a pause
between requests as an engine's step makes one; the client's thread answers meanwhile in the same process, as it does
beside vLLM's engine loop. Without a pause the two threads fight for the interpreter, whose turns are of 5 ms.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.request import Request, RequestStatus

from kvferry.protocol.messages import encode
from kvferry.vllm import scheduler
from kvferry.vllm.scheduler import SchedulerHalf
from kvferry.vllm.settings import Settings

LIMIT_US = 100
MATCHED = "get_num_new_matched_tokens"
DEADLINE_S = 60.0
NOTHING = "(nothing, for comparison)"
NUMBERS = 5000
"""To add up, which takes as long as a hook and lets go of nothing: what the machine itself adds."""
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def make_half(role: str) -> SchedulerHalf:
    parallel = SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, prefill_context_parallel_size=1, data_parallel_index=0
    )
    transfer = SimpleNamespace(
        is_kv_producer=role == "kv_producer",
        is_kv_consumer=role == "kv_consumer",
        engine_id="engine",
        kv_load_failure_policy="recompute",
    )
    scheduler.get_ip = lambda: "127.0.0.1"
    config: Any = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
    return SchedulerHalf(config, Settings(kv_lease_duration=600.0))


def make_request(name: str, prompt: list[int], params: dict[str, Any]) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}), None)


@dataclass
class Calls:
    """Of one hook.

    Attributes:
        seconds, cpu: of each call, on the clock and of this thread's processor time.
        waits: how often the thread gave up its core by itself: it waited for the interpreter or a lock.
        turns: how often it was taken from it.
        swept: the calls, by number, in which Python collected garbage: what the engine made since, prompts among it.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    waits: int = 0
    turns: int = 0
    swept: list[int] = field(default_factory=list)


class Timed:
    """Calls of each hook, by its name."""

    def __init__(self) -> None:
        self.hooks: dict[str, Calls] = defaultdict(Calls)
        self._sweeps = 0
        gc.callbacks.append(self._swept)

    def _swept(self, phase: str, _: dict[str, int]) -> None:
        self._sweeps += phase == "start"

    def __call__(self, name: str, hook: Callable[..., Any], *args: Any) -> Any:
        sweeps = self._sweeps
        before, cpu, began = resource.getrusage(resource.RUSAGE_THREAD), time.thread_time(), time.perf_counter()
        result = hook(*args)
        ended, used, after = time.perf_counter(), time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD)
        calls = self.hooks[name]
        if self._sweeps > sweeps:
            calls.swept.append(len(calls.seconds))
        calls.seconds.append(ended - began)
        calls.cpu.append(used - cpu)
        calls.waits += after.ru_nvcsw - before.ru_nvcsw
        calls.turns += after.ru_nivcsw - before.ru_nivcsw
        return result

    def show(self) -> None:
        heads = ("p50 us", "p99 us", "max us", "CPU p99", "waits %", "taken %", "swept %", "else p99")
        print(f"{'hook':32}{'calls':>7}" + "".join(f"{head:>9}" for head in heads))
        for name, calls in self.hooks.items():
            p50, p99, most = np.percentile(calls.seconds, [50, 99, 100]) * 1e6
            cpu, number = np.percentile(calls.cpu, 99) * 1e6, len(calls.seconds)
            others = np.percentile(np.delete(calls.seconds, calls.swept), 99) * 1e6
            shares = [100 * count / number for count in (calls.waits, calls.turns, len(calls.swept))]
            figures = [p50, p99, most, cpu, *shares, others]
            row = "".join(f"{figure:9.1f}" for figure in figures)
            print(f"{name:32}{number:7}{row}{'' if p99 < LIMIT_US else '  over'}")


def prompt_of(number: int, tokens: int) -> list[int]:
    return [number % 1000, *range(1, tokens)]


def produce(requests: int, tokens: int) -> None:
    """The producer's process: prefills, says where they are, and serves claims until its input ends."""
    half, timed = make_half("kv_producer"), Timed()
    freeze_gc_heap()
    for number in range(requests):
        request = make_request(f"p-{number}", prompt_of(number, tokens), dict(PREFILL))
        timed("on_new_request (prefill)", half.on_new_request, request)
        request.num_computed_tokens, request.status = tokens, RequestStatus.FINISHED_LENGTH_CAPPED
        blocks = (list(range(1, tokens // 16 + 2)),)
        _, params = timed("request_finished (prefill)", half.request_finished, request, blocks)
        sys.stdout.buffer.write(encode(params).hex().encode() + b"\n")
    sys.stdout.flush()
    timed.hooks.pop("on_new_request (prefill)")
    sys.stdin.read()
    for _ in range(requests):
        timed("build_connector_meta (prefill)", half.build_connector_meta, None)
    sys.stdout = sys.stderr
    timed.show()


def consume(tokens: int, pause_s: float, params: list[dict[str, Any]], timed: Timed) -> None:
    half = make_half("kv_consumer")
    arrived = []
    for number, one in enumerate(params):
        arrived.append(make_request(f"d-{number}", prompt_of(number, tokens), one))
        timed(NOTHING, sum, range(NUMBERS))
        timed("on_new_request", half.on_new_request, arrived[-1])
        timed("build_connector_meta", half.build_connector_meta, None)
        time.sleep(pause_s)
    until = time.monotonic() + DEADLINE_S
    waiting = list(arrived)
    while waiting:
        assert time.monotonic() < until, "claims were not answered"
        waiting = [one for one in waiting if timed(MATCHED, half.get_num_new_matched_tokens, one, 0)[0] is None]
        time.sleep(pause_s)
    blocks = SimpleNamespace(get_block_ids=lambda: (list(range(1, tokens // 16 + 2)),))
    for one in arrived:
        timed(MATCHED, half.get_num_new_matched_tokens, one, 0)
        timed("update_state_after_alloc", half.update_state_after_alloc, one, blocks, tokens)
        timed("build_connector_meta", half.build_connector_meta, None)
        time.sleep(pause_s)
    for one in arrived:
        timed("update_connector_output", half.update_connector_output, {one.request_id}, set())
    half.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause-us", type=float, default=1000)
    parser.add_argument("--produce", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.produce:
        produce(options.requests, options.tokens)
        return
    import msgspec

    freeze_gc_heap()  # as an engine core does when it has started
    timed = Timed()
    for _ in range(options.rounds):
        command = [
            sys.executable,
            __file__,
            "--produce",
            f"--requests={options.requests}",
            f"--tokens={options.tokens}",
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as producer:
            assert producer.stdout is not None
            lines = [producer.stdout.readline() for _ in range(options.requests)]
            params = [msgspec.msgpack.decode(bytes.fromhex(line.decode())) for line in lines]
            consume(options.tokens, options.pause_us / 1e6, params, timed)
            assert producer.stdin is not None
            producer.stdin.close()
            producer.wait(DEADLINE_S)
    load = os.getloadavg()[0]
    print(f"{options.requests} of {options.tokens} tokens in flight, {options.rounds} rounds, load {load:.1f}")
    timed.show()


if __name__ == "__main__":
    main()
