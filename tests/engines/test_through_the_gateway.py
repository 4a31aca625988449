"""Through the gateway, prefill and decode answer every kind of request as one plain engine does, field for field."""

import json
import math
import random
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.cluster.launch import start_gateway
from kvferry.cluster.ports import free_ports
from kvferry.cluster.supervisor import Supervisor
from kvferry.cluster.transfers import await_transfers, read_transfers

from .conftest import Fleet, Instance
from .waiting import await_that

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ANSWER_S = 60.0
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
LIKELIEST = {"temperature": 1.0, "top_k": 1}  # what vLLM wants for several answers that are to be the same
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": {**PARAMETERS, "additionalProperties": False}},
}
SHAPES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, STREAM),
    (COMPLETIONS, USAGE),
    (COMPLETIONS, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (COMPLETIONS, {"prompt": "ids"}),
    (COMPLETIONS, {"prompt": "one in a list"}),
    (COMPLETIONS, {"prompt": "three"}),
    (COMPLETIONS, {"prompt": "three", **USAGE}),
    (COMPLETIONS, {"prompt": "three of ids", "n": 2, **LIKELIEST}),
    (COMPLETIONS, {"n": 3, **LIKELIEST}),
    (COMPLETIONS, {"n": 3, **LIKELIEST, **USAGE}),
    (COMPLETIONS, {"temperature": 0.9, "seed": 11}),
    (COMPLETIONS, {"temperature": 0.9, "seed": 11, "top_p": 0.8, "presence_penalty": 0.5, "logit_bias": {"40": 2.5}}),
    (COMPLETIONS, {"echo": True}),
    (COMPLETIONS, {"echo": True, "logprobs": 1}),
    (COMPLETIONS, {"logprobs": 2, "min_tokens": 3}),
    (COMPLETIONS, {"logprobs": 2, **STREAM}),
    (COMPLETIONS, {"prompt_logprobs": 1}),
    (COMPLETIONS, {"max_tokens": 1}),
    (COMPLETIONS, {"max_tokens": 1, **USAGE}),
    (COMPLETIONS, {"max_tokens": 40, "stop": ["a", "e"], "include_stop_str_in_output": True}),
    (COMPLETIONS, {"return_token_ids": True}),
    (COMPLETIONS, {"structured_outputs": {"choice": ["first", "second"]}}),
    (COMPLETIONS, {"max_tokens": 0, "echo": True}),
    (COMPLETIONS, {"use_beam_search": True, "n": 2}),
    (CHAT, {}),
    (CHAT, STREAM),
    (CHAT, USAGE),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 5}),
    (CHAT, {"n": 2, **LIKELIEST}),
    (CHAT, {"n": 2, **LIKELIEST, **USAGE}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (CHAT, {"tools": [TOOL], "tool_choice": "none"}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 40}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60, **STREAM}),
    (CHAT, {"response_format": SCHEMA, "max_tokens": 40}),
    (CHAT, {"response_format": {"type": "json_object"}, "max_tokens": 30}),
    (CHAT, {"echo": True, "add_generation_prompt": False}),
    (RESPONSES, {}),
    (RESPONSES, STREAM),
    (RESPONSES, {"instructions": "Be brief.", "temperature": 0.9, "seed": 3}),
    # What vLLM refuses.
    (COMPLETIONS, {"model": "another"}),
    (COMPLETIONS, {"temperature": -1}),
    (COMPLETIONS, {"max_tokens": 100_000}),
    (COMPLETIONS, {"n": 2}),
    (CHAT, {"messages": "none"}),
    (CHAT, {"tools": [TOOL], "tool_choice": "auto"}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}}),
    (RESPONSES, {"input": 5}),
]
WORDS = ["ferry", "river", "bank", "bridge", "stone", "iron", "keeper", "lock", "hour", "people", "car", "time"]


def _words(source: random.Random, number: int = 60) -> str:
    return " ".join(source.choice(WORDS) for _ in range(number))


def _body(path: str, change: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """A request of more than one block, with a prompt that no other test has used."""
    common: dict[str, Any] = {"model": "model", "temperature": 0.0}
    if path == COMPLETIONS:
        ids = [[source.randint(10, 370) for _ in range(200)] for _ in range(3)]
        texts = [_words(source) for _ in range(3)]
        prompts = {"ids": ids[0], "one in a list": texts[:1], "three": texts, "three of ids": ids}
        prompt = prompts.get(change.get("prompt", ""), texts[0])
        return {**common, "max_tokens": 8, **change, "prompt": prompt}
    if path == CHAT:
        return {**common, "max_tokens": 8, "messages": [{"role": "user", "content": _words(source)}], **change}
    return {**common, "max_output_tokens": 8, "input": _words(source), **change}


@pytest.fixture(scope="module")
def pair(fleet: Fleet) -> tuple[Instance, Instance]:
    return fleet.pair("qwen2", "pp=2", "dp=2")


@pytest.fixture(scope="module", params=["--no-streaming", "--streaming"])
def gateway(
    pair: tuple[Instance, Instance], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[str]:
    producer, consumer = pair
    with Supervisor(tmp_path_factory.mktemp("gateway")) as supervisor:
        [port] = free_ports(1)
        yield start_gateway(supervisor, [producer.spec], [consumer.spec], port, lambda *_: None, [request.param])


@pytest.mark.parametrize(
    ("path", "change"), SHAPES, ids=lambda value: value if isinstance(value, str) else json.dumps(value)
)
def test_a_request_is_answered_as_by_one_plain_engine(
    fleet: Fleet, gateway: str, path: str, change: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    body = _body(path, change, random.Random(request.node.name))
    plain = fleet.plain("qwen2").url
    # Several answers to one prompt take turns at the prefix cache, and the ranks that answer without prefill do.
    taking_turns = bool(body.get("n")) or body.get("max_tokens") == 0
    for _ in range(2):  # the second time the prompt is cached, and usage says so
        ours, theirs = _post(gateway + path, body), _post(plain + path, body)
        assert ours.status_code == theirs.status_code, (ours.text, theirs.text)
        kinds = [answer.headers["content-type"].partition(";")[0] for answer in (ours, theirs)]
        assert kinds[0] == kinds[1]
        found = _differences(_content(ours), _content(theirs), taking_turns)
        assert not found, "\n".join(found)


def test_prompts_are_moved_and_both_ranks_decode(pair: tuple[Instance, Instance], gateway: str) -> None:
    log, source = pair[1].transfer_log, random.Random(5)
    earlier = len(read_transfers(log))
    for _ in range(4):
        assert _post(gateway + CHAT, _body(CHAT, {}, source)).status_code == 200
    moved = await_transfers(log, lambda _: True, earlier + 4, deadline_s=5.0).transfers[earlier:]
    assert [transfer.used for transfer in moved] == [True] * 4
    assert {transfer.consumer.dp for transfer in moved} == {0, 1}


def test_the_engines_tell_the_gateway_that_they_fit(pair: tuple[Instance, Instance]) -> None:
    texts = [httpx.get(f"{instance.url}/metrics", trust_env=False).text for instance in pair]
    lines = [[line for line in text.splitlines() if line.startswith("kvferry:layout_info{")] for text in texts]
    assert [len(found) for found in lines] == [1, 2]
    assert len({line.partition('fingerprint="')[2] for found in lines for line in found}) == 1


def _metrics(url: str) -> dict[str, float]:
    """Every sample by its name and what is after the equals sign of its labels, summed over the rest."""
    text = httpx.get(f"{url}/metrics", timeout=ANSWER_S, trust_env=False).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [value for name, value in sample.labels.items() if name in ("outcome", "reason", "phase", "message")]
            key = " ".join([sample.name, *own])
            found[key] = found.get(key, 0) + sample.value
    return found


def test_transfers_show_in_the_metrics_of_both_sides(pair: tuple[Instance, Instance], gateway: str) -> None:
    source, before = random.Random(17), [_metrics(instance.url) for instance in pair]
    for _ in range(4):
        assert _post(gateway + CHAT, _body(CHAT, {}, source)).status_code == 200
    expected = [
        {"kvferry:lease_left_seconds_count": 4},
        {f"kvferry:phase_seconds_count {phase}": 4 for phase in ("claim", "connect", "read", "ack")}
        | {"kvferry:claims_total granted": 4, "vllm:nixl_xfer_time_seconds_count": 4},
    ]

    def risen() -> list[dict[str, float]]:
        after = [_metrics(instance.url) for instance in pair]
        return [
            {name: now[name] - was[name] for name in names}
            for now, was, names in zip(after, before, expected, strict=True)
        ]

    await_that(lambda: risen() == expected, 10, f"risen by {expected}")
    producer, consumer = (_metrics(instance.url) for instance in pair)
    assert producer["kvferry:held_blocks"] == 0
    assert producer["kvferry:lease_left_seconds_sum"] - before[0]["kvferry:lease_left_seconds_sum"] > 4 * 20
    assert consumer["kvferry:first_contact_seconds_count"] >= 2  # each rank has met the producer
    recomputed = {name for name in consumer if name.startswith("kvferry:recomputed_total")}
    assert len(recomputed) == 8
    assert all(consumer[name] == before[1][name] for name in recomputed)


def test_held_blocks_are_told_until_they_are_given_back(fleet: Fleet, pair: tuple[Instance, Instance]) -> None:
    """Nobody else asks anything of the engine meanwhile, which would let it sleep if it held nothing."""
    producer, consumer = pair
    prompt = [random.Random(23).randint(10, 370) for _ in range(300)]
    params = fleet.dispatcher.prefill(producer.url, prompt, uuid.uuid4().hex).kv_transfer_params
    await_that(lambda: _metrics(producer.url)["kvferry:held_blocks"] == 3, 10, "three blocks of 128 tokens are held")
    fleet.dispatcher.decode(consumer.url, prompt, uuid.uuid4().hex, params)
    await_that(lambda: _metrics(producer.url)["kvferry:held_blocks"] == 0, 10, "none is held")


def test_the_dashboard_finds_all_it_asks_for(pair: tuple[Instance, Instance], gateway: str) -> None:
    dashboard = (Path(__file__).parents[2] / "dashboards" / "kvferry.json").read_text()
    asked = set(re.findall(r"\b(?:vllm:|kvferry:|kvferry_gateway_)\w+", dashboard))
    texts = [httpx.get(f"{url}/metrics", trust_env=False).text for url in (gateway, *(one.url for one in pair))]
    told = set(re.findall(r"^# TYPE (\S+) ", "\n".join(texts), re.MULTILINE))
    assert {name for name in asked if not {name, re.sub("_(bucket|sum|count)$", "", name)} & told} == set()


def _post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url, json=body, timeout=ANSWER_S, trust_env=False)


def _content(answer: httpx.Response) -> Any:
    """The answer as JSON; of a stream, all its events folded into one, since pieces may be cut in other places."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    folded: Any = None
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    for line in lines:
        folded = _fold(folded, {"done": True} if line == "[DONE]" else json.loads(line))
    return folded


def _fold(into: Any, piece: Any, key: str = "") -> Any:
    if isinstance(piece, dict):
        folded = dict(into or {})
        return {**folded, **{name: _fold(folded.get(name), value, name) for name, value in piece.items()}}
    if isinstance(piece, list):
        if all(isinstance(item, dict) and "index" in item for item in piece):
            return _fold(into, {str(item["index"]): item for item in piece})
        return (into or []) + piece if key in ("content", "token_ids", "tokens", "token_logprobs") else piece
    if isinstance(piece, str) and key in ("text", "content", "arguments", "delta"):
        return (into or "") + piece
    return into if piece is None else piece


OWN = {"id", "created", "created_at", "item_id", "sequence_number", "completed_at", "system_fingerprint"}
"""Of each answer its own; the last one names the layout of the engine that decodes."""
CACHED = {"cached_tokens", "created_cache_tokens"}


def _differences(ours: Any, theirs: Any, taking_turns: bool, at: str = "") -> list[str]:
    """Where two answers differ; how many tokens were cached does not count where that is a matter of chance."""
    name = at.rpartition(".")[2]
    if name in OWN or (taking_turns and name in CACHED):
        return [] if type(ours) is type(theirs) else [f"{at}: {ours!r} instead of {theirs!r}"]
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = list(dict.fromkeys([*ours, *theirs]))
        missing = "(missing)"
        return [
            text
            for key in keys
            for text in _differences(ours.get(key, missing), theirs.get(key, missing), taking_turns, f"{at}.{key}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [text for at_, (a, b) in pairs for text in _differences(a, b, taking_turns, f"{at}[{at_}]")]
    if isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, abs_tol=1e-3):
        return []
    return [] if ours == theirs else [f"{at}: {ours!r} instead of {theirs!r}"]
