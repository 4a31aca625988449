"""What a prompt's KV cache depends on beside its tokens: adapter, tenant, and what its placeholders stand for."""

import os
import shutil

import pytest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvferry.vllm.scheduler import identity_of

TOKENS = 300


def _identity(tokens=TOKENS, **more):
    return identity_of(Request("r", list(range(TOKENS)), SamplingParams(max_tokens=1), None, **more), tokens)


@pytest.fixture
def adapter(tmp_path):
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 512)
    return directory


def _adapted(path, name="tuned", number=1, **more):
    return _identity(lora_request=LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path), **more))


def _retrain(directory, seconds=10):
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    later = weights.stat().st_mtime_ns + seconds * 10**9
    os.utime(weights, ns=(later, later))


def test_an_adapters_cache_is_not_the_plain_models(adapter):
    assert _adapted(adapter) != _identity()


def test_two_adapters_of_one_name_are_two(adapter, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    _retrain(other)
    assert _adapted(adapter) != _adapted(other)
    assert _adapted(adapter) != _adapted(other, number=2)


def test_one_adapter_is_one_under_any_path_name_and_number(adapter, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    assert _adapted(adapter) == _adapted(copy, name="alias", number=7)


def test_adapters_that_are_no_directories_are_told_by_name_and_path():
    assert _adapted("org/one") == _adapted("org/one", number=2)
    assert len({_adapted("org/one"), _adapted("org/two"), _adapted("org/one", name="other")}) == 3


def test_files_that_changed_since_the_engine_read_them_stand_for_nothing(adapter):
    """The engine goes on with the weights it read, and who reads them now has others."""
    before = _adapted(adapter)
    _retrain(adapter)
    assert len({before, _adapted(adapter), _adapted(adapter)}) == 3


def test_an_adapter_read_anew_is_told_by_its_new_files(adapter):
    before = _adapted(adapter)
    _retrain(adapter)
    after = _adapted(adapter, load_inplace=True)
    assert after != before
    assert _adapted(adapter) == after


def test_another_tenants_cache_is_another():
    assert len({_identity(cache_salt="a"), _identity(cache_salt="b"), _identity()}) == 3


def _image(identifier, offset=10, length=50):
    place = PlaceholderRange(offset=offset, length=length)
    return [MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)]


@pytest.mark.parametrize(
    "image", [_image("two"), _image("one", offset=11), _image("one", length=51)], ids=["image", "place", "length"]
)
def test_placeholders_stand_for_their_image_at_their_place(image):
    """The tokens are the same for any image."""
    assert len({_identity(mm_features=image), _identity(mm_features=_image("one")), _identity()}) == 3


def test_an_image_behind_the_tokens_does_not_matter():
    assert _identity(tokens=10, mm_features=_image("one")) == _identity(tokens=10)
