"""The official OpenAI client works against the gateway as it does against OpenAI."""

import asyncio
import json

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from .stage import run, stage

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def _with_both(work, asynchronous, **changes):
    """Runs ``work(client, stage)`` with the client of that kind; the synchronous one on a thread of its own."""

    async def scenario():
        async with stage(**changes) as s:
            settings = {"base_url": f"{s.url}/v1", "api_key": "key", "max_retries": 0}
            if asynchronous:
                async with AsyncOpenAI(**settings) as client:
                    await work(client, s)
                return

            def on_thread():
                with OpenAI(**settings) as client:
                    asyncio.run(work(_Awaitable(client), s))

            await asyncio.to_thread(on_thread)

    run(scenario())


class _Awaitable:
    """The synchronous client in the clothes of the asynchronous one, so that one test serves both."""

    def __init__(self, wrapped):
        self._wrapped = wrapped

    def __getattr__(self, name):
        return _Awaitable(getattr(self._wrapped, name))

    async def __call__(self, *args, **kwargs):
        result = self._wrapped(*args, **kwargs)
        return _Stream(result) if kwargs.get("stream") else result


class _Stream:
    def __init__(self, wrapped):
        self._wrapped = iter(wrapped)

    def __aiter__(self):
        return self

    async def __anext__(self):
        for item in self._wrapped:
            return item
        raise StopAsyncIteration


BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@BOTH
def test_completions_whole_and_streamed(asynchronous):
    async def work(client, _):
        whole = await client.completions.create(model="m", prompt="once", max_tokens=4)
        stream = await client.completions.create(model="m", prompt="once", max_tokens=4, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
        assert whole.usage.completion_tokens == 4

    _with_both(work, asynchronous)


@BOTH
def test_chats_whole_and_streamed_with_usage(asynchronous):
    async def work(client, _):
        whole = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=4)
        stream = await client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage

    _with_both(work, asynchronous)


@BOTH
def test_responses_whole_and_streamed(asynchronous):
    async def work(client, _):
        whole = await client.responses.create(model="m", input="hello", max_output_tokens=4)
        stream = await client.responses.create(model="m", input="hello", max_output_tokens=4, stream=True)
        events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type.endswith("delta")) == whole.output_text
        assert events[-1].response.usage == whole.usage

    _with_both(work, asynchronous)


@BOTH
def test_tools(asynchronous):
    async def work(client, _):
        answer = await client.chat.completions.create(
            model="m", messages=MESSAGES, tools=[TOOL], tool_choice="required"
        )
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})

    _with_both(work, asynchronous)


class Reply(BaseModel):
    answer: str


@BOTH
def test_structured_output(asynchronous):
    async def work(client, s):
        answer = await client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Reply)
        assert answer.choices[0].message.parsed == Reply(answer="yes")
        assert s.prefill[0].seen[0].body["response_format"]["type"] == "json_schema"

    _with_both(work, asynchronous)


@BOTH
def test_models(asynchronous):
    async def work(client, _):
        assert [model.id for model in (await client.models.list()).data] == ["model"]

    _with_both(work, asynchronous)


@BOTH
@pytest.mark.parametrize(
    ("fault", "kind"),
    [("400", openai.BadRequestError), ("500", openai.InternalServerError), ("429", openai.RateLimitError)],
)
def test_errors_are_the_clients_own_exceptions(asynchronous, fault, kind):
    async def work(client, s):
        s.prefill[0].faults.extend([fault] * 2)
        with pytest.raises(kind) as error:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert error.value.body["message"] == f"told to answer {fault}"

    _with_both(work, asynchronous, plain_decode=False)


@BOTH
@pytest.mark.parametrize("resource", ["completions", "chat"])
def test_a_stream_that_breaks_off_raises(asynchronous, resource):
    async def work(client, s):
        s.decode[0].faults.append("half")
        if resource == "completions":
            stream = await client.completions.create(model="m", prompt="once", stream=True)
        else:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        await anext(stream)
        with pytest.raises(openai.APIError, match="instance"):
            await _last(stream)

    _with_both(work, asynchronous)


@BOTH
def test_a_response_that_breaks_off_ends_with_an_error_event(asynchronous):
    async def work(client, s):
        s.decode[0].faults.append("half")
        last = await _last(await client.responses.create(model="m", input="hello", stream=True))
        assert (last.type, last.code) == ("error", "502")

    _with_both(work, asynchronous)


async def _last(stream):
    last = None
    async for item in stream:
        last = item
    return last
