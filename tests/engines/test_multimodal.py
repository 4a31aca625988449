"""Two images behind the same placeholder tokens are two prompts: what was computed of one never answers for another."""

import base64
import io
import random
from typing import Any

import httpx
import pytest
from PIL import Image

from kvferry.cluster.dispatch import PREFILL_PARAMETERS
from kvferry.cluster.metrics import total
from kvferry.cluster.transfers import await_transfers, read_transfers

from .conftest import Fleet, Instance, Key
from .waiting import assert_nothing_is_held

pytestmark = [pytest.mark.engines, pytest.mark.heavy, pytest.mark.timeout(900)]

KIND = "idefics3"


def _image(seed: int) -> str:
    source = random.Random(seed)
    file = io.BytesIO()
    Image.frombytes("RGB", (56, 56), source.randbytes(56 * 56 * 3)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _ask(instance: Instance, image: str, params: Any = None, tokens: int = 8) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": "What is the capital of France? " * 8},
    ]
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "min_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }
    answer = httpx.post(f"{instance.url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _tokens(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def _of_another_prompt(instance: Instance) -> int:
    text = httpx.get(f"{instance.url}/metrics", timeout=10, trust_env=False).text
    lines = [line for line in text.splitlines() if line.startswith("kvferry:recomputed") and 'reason="prompt"' in line]
    return total("\n".join(lines), "kvferry:recomputed")


def test_a_prompt_with_another_image_is_never_loaded(fleet: Fleet) -> None:
    plain = fleet.plain(KIND)
    one, other = _image(1), _image(2)
    expected, different = (_ask(plain, image) for image in (one, other))
    assert expected["prompt_token_ids"] == different["prompt_token_ids"], "only the images are to be different"
    assert _tokens(expected) != _tokens(different), "the answer does not depend on the image: the test proves nothing"
    producer, consumer = fleet.instances(Key(KIND, "tp=2", "kv_producer"), Key(KIND, "tp=1", "kv_consumer"))

    params = _ask(producer, one, dict(PREFILL_PARAMETERS), tokens=1)["kv_transfer_params"]
    assert _tokens(_ask(consumer, one, params)) == _tokens(expected)
    moved = await_transfers(consumer.transfer_log, lambda _: True, 1, deadline_s=5).transfers
    assert [transfer.used for transfer in moved] == [True]

    params = _ask(producer, one, dict(PREFILL_PARAMETERS), tokens=1)["kv_transfer_params"]
    before = _of_another_prompt(consumer)
    assert _tokens(_ask(consumer, other, params)) == _tokens(different)
    assert _of_another_prompt(consumer) == before + 1
    assert len(read_transfers(consumer.transfer_log)) == 1
    assert_nothing_is_held(producer, consumer, within_s=30)
