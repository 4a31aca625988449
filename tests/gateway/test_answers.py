"""What changes in an engine's answer, and how several become one."""

import asyncio
import json

import pytest
from msgspec import Raw

from kvferry.gateway.answers import (
    BrokenAnswerError,
    Merge,
    answer_object,
    corrected,
    error_in,
    part_id,
    whole_events,
)
from kvferry.gateway.bodies import CHAT, COMPLETIONS, RESPONSES, encode

ANSWER = (
    b'{"id":"x","choices":[{"logprob":-0.10,"text":"a"}],"usage":{"prompt_tokens":9,"prompt_tokens_details":'
    b'{"cached_tokens":9}},"kv_transfer_params":{"remote_host":"10.0.0.1"}}'
)
CACHED = Raw(b'{"cached_tokens":4}')


def _corrected_events(endpoint, events, cached=CACHED):
    return Merge(endpoint, "r", 1, [cached]).events(0, events)


def _corrected(endpoint, answer, cached):
    return json.loads(encode(corrected(endpoint, answer_object(json.dumps(answer).encode()), cached)))


def test_cached_tokens_come_from_prefill_and_parameters_reach_no_client():
    raw = encode(corrected(COMPLETIONS, answer_object(ANSWER), CACHED))
    assert b'{"logprob":-0.10,"text":"a"}' in raw
    answer = json.loads(raw)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert answer["kv_transfer_params"] is None


def test_usage_is_the_engines_own_where_there_was_no_prefill_leg():
    answer = json.loads(encode(corrected(COMPLETIONS, answer_object(ANSWER), None)))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 9}


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 1}, {"prompt_tokens": 1, "prompt_tokens_details": None}])
def test_details_that_are_not_there_are_not_invented(usage):
    assert _corrected(CHAT, {"usage": usage}, CACHED)["usage"] == usage


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"a":', b"oops", b"[" * 5000])
def test_an_answer_that_is_no_object_is_an_error(raw):
    with pytest.raises(BrokenAnswerError):
        answer_object(raw)


def test_events_without_usage_pass_as_they_are():
    events = b'data: {"choices": [ {"x": 1.0} ]}\n\ndata: [DONE]\n\n'
    assert _corrected_events(CHAT, events) is events


def test_details_are_null_only_where_the_answer_at_hand_has_nulls():
    prefill = Raw(b'{"cached_tokens":4,"multimodal_tokens":null}')
    for theirs in ({"cached_tokens": 9}, {"cached_tokens": 9, "multimodal_tokens": None}):
        usage = _corrected(CHAT, {"usage": {"prompt_tokens_details": theirs}}, prefill)["usage"]
        assert usage["prompt_tokens_details"] == {**theirs, "cached_tokens": 4}


def test_usage_in_a_stream_is_corrected_and_its_neighbours_are_not_touched():
    one = b'data: {"choices": [ {"x": 1.0} ]}\n\n'
    last = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":9}}}\n\n'
    events = _corrected_events(CHAT, one + last + b"data: [DONE]\n\n")
    assert (
        events
        == one.replace(b'{"choices": ', b'{"choices":')
        + last.replace(b'{"cached_tokens":9}', b'{"cached_tokens":4}')
        + b"data: [DONE]\n\n"
    )


def test_usage_of_a_response_is_corrected_inside_its_last_event():
    response = {"id": "r", "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 9}}}
    event = {"type": "response.completed", "response": response}
    events = _corrected_events(RESPONSES, b"event: response.completed\ndata: " + json.dumps(event).encode() + b"\n\n")
    name, _, data = events.partition(b"\ndata: ")
    assert name == b"event: response.completed"
    assert json.loads(data)["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 4}


def _cut(endpoint, pieces):
    async def source():
        for piece in pieces:
            yield piece

    async def collect():
        found = []
        try:
            async for events in whole_events(endpoint, source()):
                found.append(events)
        except BrokenAnswerError:
            found.append("broken")
        return found

    return asyncio.run(collect())


STREAM = b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("at", range(1, len(STREAM)))
def test_a_stream_is_cut_at_the_ends_of_events_wherever_the_network_cuts_it(at):
    found = _cut(CHAT, [STREAM[:at], STREAM[at:]])
    assert b"".join(found) == STREAM
    assert all(events.endswith(b"\n\n") for events in found)


@pytest.mark.parametrize("length", [0, 5, 15, 30, len(STREAM) - 1])
def test_a_stream_that_ends_early_is_broken(length):
    assert _cut(CHAT, [STREAM[:length]])[-1] == "broken"


@pytest.mark.parametrize("kind", ["completed", "incomplete", "failed"])
def test_a_response_ends_with_its_last_event(kind):
    last = f'event: response.{kind}\ndata: {{"type":"response.{kind}"}}\n\n'.encode()
    assert _cut(RESPONSES, [b'event: response.created\ndata: {"x":1}\n\n', last])[-1] == last
    assert _cut(RESPONSES, [b'event: response.created\ndata: {"x":1}\n\n'])[-1] == "broken"


def test_an_error_event_is_told_from_text_that_speaks_of_errors():
    assert error_in(b'data: {"error":{"message":"m","code":500}}\n\n') == {"message": "m", "code": 500}
    assert error_in(b'event: error\ndata: {"type":"error","message":"m"}\n\n') == {"type": "error", "message": "m"}
    assert error_in(b'data: {"choices":[{"text":"\\"error\\": {}"}]}\n\n') is None
    assert error_in(b"data: [DONE]\n\n") is None


def _answer(part: int, choices: int) -> dict:
    usage = {"prompt_tokens": 10 + part, "completion_tokens": 2, "total_tokens": 12 + part}
    found = [{"index": choice, "text": f"{part}.{choice}"} for choice in range(choices)]
    return {"id": f"cmpl-{part_id('r', part)}-0", "created": 5 + part, "choices": found, "usage": usage}


def test_answers_to_several_prompts_become_one_in_order():
    parts = [answer_object(json.dumps(_answer(part, 2)).encode()) for part in range(3)]
    answer = json.loads(Merge(COMPLETIONS, "r", 2, [None] * 3).answers(parts))
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(
        enumerate(["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"])
    )
    assert answer["usage"] == {"prompt_tokens": 33, "completion_tokens": 6, "total_tokens": 39}
    assert (answer["id"], answer["created"]) == ("cmpl-r-0", 5)


def test_streams_of_several_prompts_become_one():
    merge = Merge(COMPLETIONS, "r", 1, [None] * 2)

    def data(value) -> bytes:
        return b"data: " + json.dumps(value).encode() + b"\n\n"

    token = {"id": "cmpl-r.1", "created": 7, "choices": [{"index": 0, "text": "a"}]}
    usage = {"id": "cmpl-r.1", "created": 7, "choices": [], "usage": {"prompt_tokens": 4, "total_tokens": 5}}
    passed = merge.events(1, data(token) + data(usage) + b"data: [DONE]\n\n")
    assert json.loads(passed[6:]) == {"id": "cmpl-r", "created": 7, "choices": [{"index": 1, "text": "a"}]}
    assert merge.events(0, data({**usage, "id": "cmpl-r.0", "created": 6})) == b""
    last, done = merge.end().split(b"\n\n")[:2]
    assert json.loads(last[6:])["usage"] == {"prompt_tokens": 8, "total_tokens": 10}
    assert done == b"data: [DONE]"


def test_a_merged_stream_without_usage_only_ends():
    assert Merge(COMPLETIONS, "r", 1, [None] * 2).end() == b"data: [DONE]\n\n"
