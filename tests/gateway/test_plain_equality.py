"""Through prefill and decode the client sees, field for field, what one plain engine would have answered."""

import json

import pytest

from .stage import BODIES, run, stage
from .standin import StandIn

TEXT, CHAT, RESPONSES = BODIES
STREAM = {"stream": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
SHAPES = [
    (TEXT, {}),
    (TEXT, STREAM),
    (TEXT, USAGE),
    (TEXT, {"prompt": [1, 2, 3, 4, 5, 6]}),
    (TEXT, {"prompt": ["only one"]}),
    (TEXT, {"prompt": ["a first", "a second one", "third"]}),
    (TEXT, {"prompt": [[1, 2, 3], [4, 5]], "n": 2}),
    (TEXT, {"prompt": ["a first", "a second one"], "n": 2, "temperature": 0.70}),
    (TEXT, {"n": 3, "seed": 7}),
    (TEXT, {"n": 3, **USAGE}),
    (TEXT, {"echo": True}),
    (TEXT, {"echo": True, "logprobs": 1}),
    (TEXT, {"logprobs": 2, "min_tokens": 3}),
    (TEXT, {"max_tokens": 1}),
    (TEXT, {"temperature": 0.1000000000000000055511151231257827}),
    (CHAT, {}),
    (CHAT, STREAM),
    (CHAT, USAGE),
    (CHAT, {"max_tokens": None, "max_completion_tokens": 5}),
    (CHAT, {"n": 2}),
    (CHAT, {"n": 2, **USAGE}),
    (CHAT, {"tools": [TOOL], "tool_choice": "auto"}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"response_format": SCHEMA}),
    (CHAT, {"logprobs": True, "top_logprobs": 2}),
    (RESPONSES, {}),
    (RESPONSES, STREAM),
    (RESPONSES, {"previous_response_id": "resp_0"}),
]


@pytest.mark.parametrize(
    ("path", "change"), SHAPES, ids=lambda value: value if isinstance(value, str) else json.dumps(value)
)
def test_the_client_sees_what_one_plain_engine_would_have_answered(path, change):
    async def scenario():
        async with stage() as s, StandIn() as plain:
            body = {**BODIES[path], **change}
            through = await s.post(path, body)
            direct = await s.post(path, body, url=plain.url)
            assert (through.status, direct.status) == (200, 200)
            assert through.headers["content-type"].split(";")[0] == direct.headers["content-type"].split(";")[0]
            if change.get("stream"):
                assert through.events == direct.events
            else:
                assert through.json == direct.json
            assert s.grants == 0

    run(scenario())


@pytest.mark.parametrize("n", [1, 2])
def test_streams_of_several_prompts_hold_what_a_plain_engine_streams_for_each(n):
    """The choices' events mix as they come, as they do in vLLM; each choice's own are in order."""

    async def scenario():
        async with stage() as s, StandIn() as plain:
            body = {**BODIES[TEXT], "prompt": ["a first", "a second one", "third"], "n": n, **USAGE}
            through, direct = await s.post(TEXT, body), await s.post(TEXT, body, url=plain.url)
            for index in range(3 * n):
                of_choice = [
                    [event for event in answer.events[:-2] if event["choices"][0]["index"] == index]
                    for answer in (through, direct)
                ]
                assert of_choice[0] == of_choice[1]
            assert through.events[-2:] == direct.events[-2:]

    run(scenario())


@pytest.mark.parametrize("path", BODIES)
def test_both_legs_are_used_and_get_the_clients_values_untouched(path):
    async def scenario():
        async with stage() as s:
            raw = (
                json.dumps(BODIES[path])[:-1].encode()
                + b', "temperature": 0.70, "seed": 18446744073709551615, "new": 1e0}'
            )
            assert (await s.post(path, raw)).status == 200
            (prefill,), (decode,) = s.prefill[0].seen, s.decode[0].seen
            for leg in (prefill, decode):
                assert b'"temperature":0.70,"seed":18446744073709551615,"new":1e0' in leg.raw
            assert s.decode[0].fetched == 1

    run(scenario())
