"""What each leg is sent: everything the client wrote, but for what must change."""

import json

import pytest
from msgspec import Raw

from kvferry.gateway import bodies
from kvferry.gateway.bodies import CHAT, COMPLETIONS, ENDPOINTS, RESPONSES
from kvferry.gateway.errors import ApiError

ODD = (
    b'{"model":"m","prompt":"caf\\u00e9 \xc3\xa9","temperature":0.70,"top_p":1e0,"seed":18446744073709551615,'
    b'"logit_bias":{"5":-1.50,"5":2},"unknown":[1.0, {"deep":0.1000000000000000055511151231257827}]}'
)


def _leg(endpoint, body, prefill=True):
    parsed = bodies.parse(json.dumps(body).encode())
    return json.loads(
        bodies.prefill_body(endpoint, parsed) if prefill else bodies.decode_body(parsed, Raw(b'{"some":1}'))
    )


def test_values_keep_the_clients_own_bytes():
    leg = bodies.decode_body(bodies.parse(ODD), None)
    for value in (
        b"0.70",
        b"1e0",
        b"18446744073709551615",
        b'{"5":-1.50,"5":2}',
        b"0.1000000000000000055511151231257827",
    ):
        assert value in leg
    assert b'"caf\\u00e9 \xc3\xa9"' in leg


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: one.path)
def test_decode_gets_every_key_in_its_place_and_the_parameters_verbatim(endpoint):
    parameters = Raw(b'{"kvferry":{"mac":"ab", "n":1.50},"x":18446744073709551615}')
    leg = bodies.decode_body(bodies.parse(ODD), parameters)
    assert list(json.loads(leg)) == [*json.loads(ODD), "kv_transfer_params"]
    assert bytes(parameters) in leg


def test_a_key_given_twice_counts_once_the_last_time():
    body = bodies.parse(b'{"prompt":"a","prompt":"b","kv_transfer_params":1,"kv_transfer_params":2}')
    assert json.loads(bodies.decode_body(body, None)) == {"prompt": "b"}


@pytest.mark.parametrize(
    "written",
    [b"kv_transfer_params", b"kv_transfer_param\\u0073", b"ec_transfer_params"],
    ids=["plain", "escaped", "encoder cache"],
)
def test_client_sent_transfer_parameters_are_removed(written):
    body = b'{"prompt":"a","' + written + b'":{"remote_host":"10.0.0.1"}}'
    assert json.loads(bodies.decode_body(bodies.parse(body), None)) == {"prompt": "a"}


def test_transfer_parameters_among_the_extra_arguments_are_removed():
    """vLLM puts ``vllm_xargs`` where it puts ``kv_transfer_params``, under the same names."""
    body = {"prompt": "a", "vllm_xargs": {"kv_transfer_params": "x", "ec_transfer_params": "y", "mine": 0.5}}
    assert _leg(COMPLETIONS, body)["vllm_xargs"] == {"mine": 0.5}
    assert _leg(COMPLETIONS, {"prompt": "a", "vllm_xargs": 3})["vllm_xargs"] == 3


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"{", b'{"a":1}x', b'{"a":NaN}', b'{"a":01}', b'{"a":"\xff"}', b'{"a":' + b"[" * 9999],
    ids=lambda raw: repr(raw[:12]),
)
def test_what_is_no_json_object_is_refused(raw):
    with pytest.raises(ApiError) as error:
        bodies.parse(raw)
    assert error.value.status == 400


def test_prefill_makes_one_token_and_does_not_stream():
    options = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5, "n": 3, "logprobs": 2}
    leg = _leg(COMPLETIONS, {"prompt": "a", "max_tokens": 100, "echo": True, "temperature": 0.5, **options})
    assert leg["kv_transfer_params"] == json.loads(bytes(bodies.PREFILL_PARAMETERS))
    del leg["kv_transfer_params"]
    assert leg == {"prompt": "a", "max_tokens": 1, "temperature": 0.5, "stream": False, "n": 1}


def test_prefill_of_a_chat_limits_both_names_of_the_limit():
    body = {"messages": [], "max_tokens": 9, "logprobs": True, "top_logprobs": 3, "min_tokens": 2}
    leg = _leg(CHAT, body)
    assert (leg["max_tokens"], leg["max_completion_tokens"]) == (1, 1)
    assert not {"logprobs", "top_logprobs", "min_tokens"} & leg.keys()


def test_prefill_of_a_response_is_not_stored():
    leg = _leg(RESPONSES, {"input": "a", "max_output_tokens": 50, "store": True})
    assert (leg["max_output_tokens"], leg["store"]) == (1, False)


def test_what_the_prompt_is_made_of_reaches_prefill():
    """A chat template sees tools, their choice and the format of the answer; another prompt is another KV cache."""
    made_of = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "cache_salt": "salt",
        "continue_final_message": True,
    }
    leg = _leg(CHAT, {"messages": [{"role": "user", "content": "a"}], **made_of})
    assert {key: leg[key] for key in made_of} == made_of
    assert _leg(COMPLETIONS, {"prompt": "a", "suffix": "b"})["suffix"] == "b"


@pytest.mark.parametrize(
    ("endpoint", "body", "why"),
    [
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0}, "prompt_only"),
        (COMPLETIONS, {"prompt": "a", "prompt_embeds": "AAAA"}, "prompt_only"),
        (COMPLETIONS, {"prompt": ["a"] * 257}, "many_prompts"),
        (CHAT, {"messages": [], "prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"messages": [], "use_beam_search": True}, "beam_search"),
        (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, "stored_response"),
        (RESPONSES, {"input": "a", "background": True}, "stored_response"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "prompt_logprobs": None, "use_beam_search": False}, None),
        (CHAT, {"messages": [], "echo": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": ["a"] * 256}, None),
    ],
)
def test_what_two_legs_cannot_answer_is_left_to_one_instance(endpoint, body, why):
    assert bodies.whole_on_decode(endpoint, bodies.parse(json.dumps(body).encode())) == why


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("text", []),
        ([1, 2, 3], []),
        (["text"], []),
        (["a", "b"], ["a", "b"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([], []),
    ],
)
def test_a_list_of_prompts_is_told_from_a_list_of_tokens(prompt, parts):
    body = bodies.parse(json.dumps({"prompt": prompt}).encode())
    assert [json.loads(bytes(part)) for part in bodies.prompts(COMPLETIONS, body)] == parts


@pytest.mark.parametrize(
    ("written", "read"), [("2", 2), ("2.0", 2), ('"2"', 2), ("null", None), ("2.5", None), ("[]", None)]
)
def test_whole_numbers_are_read_as_the_engines_read_them(written, read):
    assert bodies.integer(Raw(written.encode())) == read


def test_token_ids_are_counted_and_text_is_estimated():
    assert bodies.prompt_tokens(COMPLETIONS, bodies.parse(b'{"prompt":[1,2,3]}')) == 3
    assert bodies.prompt_tokens(COMPLETIONS, bodies.parse(b'{"prompt":"' + b"x" * 4000 + b'"}')) == 1001
    assert bodies.prompt_tokens(CHAT, bodies.parse(b"{}")) == 1


def test_prompts_with_an_equal_beginning_have_an_equal_affinity():
    def key(prompt):
        return bodies.affinity_key(COMPLETIONS, bodies.parse(json.dumps({"prompt": prompt}).encode()))

    beginning = "b" * bodies.AFFINITY_BYTES
    assert key(beginning + "one") == key(beginning + "another")
    assert key("c" + beginning) != key(beginning)
