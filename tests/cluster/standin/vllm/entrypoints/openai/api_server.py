"""Stands in for vLLM's API server where only the life of a cluster is tested: it starts in a tenth of a second.

It is found before the real one because the manifest of a test puts its directory into PYTHONPATH. What it answers is a
function of the prompt. As decode it "reads" what `kv_transfer_params` name, and counts that as the connector does.

Environment, all optional: STANDIN_DIES, a message to die with at the start; STANDIN_READS_NOTHING; STANDIN_PACE_S,
seconds for each token; STANDIN_HOLDS_S, seconds that a prefill is held (a request's own `held_s` wins).
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ARGUMENTS = {flag: value for flag, value in zip(sys.argv[1:], [*sys.argv[2:], ""], strict=True) if flag[:2] == "--"}
CONNECTOR = json.loads(ARGUMENTS.get("--kv-transfer-config", "{}"))
RANKS = int(ARGUMENTS.get("--data-parallel-size", "1"))
PACE_S = float(os.environ.get("STANDIN_PACE_S", "0"))
HOLDS_S = float(os.environ.get("STANDIN_HOLDS_S", "0"))
STARTED = time.time()


class Counters:
    lock = threading.Lock()
    running = 0
    held_until = 0.0
    bytes = 0
    well = True


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200 if Counters.well else 503, b"")
        elif self.path == "/metrics":
            self._send(200, metrics().encode(), "text/plain")
        elif self.path == "/arguments":
            self._send(200, json.dumps({"argv": sys.argv[1:], "environment": dict(os.environ)}).encode())
        else:
            self._send(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/unwell":
            Counters.well = False
            self._send(200, b"{}")
            return
        with Counters.lock:
            Counters.running += 1
        try:
            self._answer(body)
        finally:
            with Counters.lock:
                Counters.running -= 1

    def _answer(self, body: dict[str, Any]) -> None:
        given = body.get("kv_transfer_params") or {}
        if given.get("do_remote_prefill") and not os.environ.get("STANDIN_READS_NOTHING"):
            with Counters.lock:
                Counters.bytes += 1000
        words = [f"word{number} " for number in range(body.get("max_tokens") or 4)]
        if body.get("stream"):
            self._stream(words)
            return
        time.sleep(PACE_S * len(words))
        key = {"message": {"role": "assistant", "content": "".join(words)}} if "messages" in body else {"text": ""}
        choice = {"index": 0, "finish_reason": "length", "token_ids": list(range(len(words))), **key}
        answer: dict[str, Any] = {"id": "x", "choices": [choice], "usage": {"prompt_tokens": 10, "total_tokens": 12}}
        if given.get("do_remote_decode"):
            Counters.held_until = time.monotonic() + body.get("held_s", HOLDS_S)
            answer["kv_transfer_params"] = {"do_remote_prefill": True, "remote_port": 1}
        self._send(200, json.dumps(answer).encode())

    def _stream(self, words: list[str]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number, word in enumerate(words):
            time.sleep(PACE_S)
            last = "length" if number == len(words) - 1 else None
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": last, "token_ids": [number]}
            self._chunk(f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n".encode())
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def metrics() -> str:
    used = 0.5 if Counters.running or time.monotonic() < Counters.held_until else 0.0
    lines = [f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {used}' for rank in range(RANKS)]
    lines += [
        f'vllm:num_requests_running{{engine="0"}} {Counters.running}.0',
        'vllm:num_requests_waiting{engine="0"} 0.0',
        f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {Counters.bytes}.0',
        f"process_start_time_seconds {STARTED}",
    ]
    return "\n".join(lines) + "\n"


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


if __name__ == "__main__":
    if message := os.environ.get("STANDIN_DIES"):
        print("loading the weights", flush=True)
        raise ValueError(message)
    Server((ARGUMENTS["--host"], int(ARGUMENTS["--port"])), Handler).serve_forever()
