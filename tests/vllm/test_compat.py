"""Which engines are refused at the start, and which two count as having the same model."""

import inspect
import shutil
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.errors import UnsupportedError
from kvferry.vllm.compat import GUESSED_KINDS, fingerprint, require_supported, staged


def _make_config(model, dtype="float32", **hf):
    hf_config = SimpleNamespace(to_dict=lambda: {"layers": 4, "_commit_hash": "x", **hf})
    return SimpleNamespace(model_config=SimpleNamespace(model=str(model), dtype=dtype, hf_config=hf_config))


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * 512)
    return directory


def test_a_copy_of_a_model_under_another_path_is_the_same_model(model, tmp_path):
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(model, copy)
    assert fingerprint(_make_config(model), None) == fingerprint(_make_config(copy), None)


def test_another_fine_tune_of_equal_shape_is_another_model(model):
    before = fingerprint(_make_config(model), None)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    assert fingerprint(_make_config(model), None) != before


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"rope_theta": 5e5}, {"layers": 5}], ids=str)
def test_another_configuration_is_another_model(model, change):
    assert fingerprint(_make_config(model, **change), None) != fingerprint(_make_config(model), None)


def test_how_a_model_was_fetched_does_not_matter(model):
    change = {"_commit_hash": "y", "_name_or_path": "z", "transformers_version": "9"}
    assert fingerprint(_make_config(model, **change), None) == fingerprint(_make_config(model), None)


def test_a_model_id_stands_for_name_and_weights(model):
    named = fingerprint(_make_config("org/name"), "same")
    assert named == fingerprint(_make_config(model), "same")
    assert named != fingerprint(_make_config(model), "other")


def _make_engine(buffer="cpu", encoder=False, scales=False, sleep=False, **parallel):
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, **parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        kv_transfer_config=SimpleNamespace(kv_buffer_device=buffer),
        cache_config=SimpleNamespace(calculate_kv_scales=scales),
        model_config=SimpleNamespace(is_encoder_decoder=encoder, enable_sleep_mode=sleep),
    )


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    monkeypatch.setattr(vllm.platforms.current_platform, "device_type", "cpu")


def _groups(**group):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(**{"kv_cache_spec": SimpleNamespace(), **group})])


def test_the_installed_vllm_is_supported():
    require_supported(_make_engine(), _groups(host_resident=False, enable_kv_transfer=True))


CONTEXT = [{"decode_context_parallel_size": 2}, {"prefill_context_parallel_size": 2}]


@pytest.mark.parametrize("sizes", CONTEXT, ids=str)
def test_context_parallelism_is_refused_where_specs_do_not_say_what_it_shares_out(monkeypatch, sizes):
    monkeypatch.setattr(vllm, "__version__", "0.30.2")
    require_supported(_make_engine())
    with pytest.raises(UnsupportedError, match=r"context parallelism from vLLM 0\.31 on"):
        require_supported(_make_engine(**sizes))


@pytest.mark.parametrize("sizes", CONTEXT, ids=str)
@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.33.1"])
def test_context_parallelism_is_served_from_then_on(monkeypatch, version, sizes):
    monkeypatch.setattr(vllm, "__version__", version)
    require_supported(_make_engine(**sizes))


@pytest.mark.parametrize(
    ("device", "buffer", "by_way_of_host_memory"),
    [("cuda", "cuda", False), ("cuda", "cpu", True), ("xpu", "cpu", True), ("cpu", "cpu", False)],
)
def test_a_cache_moves_from_where_it_is_or_by_way_of_host_memory(monkeypatch, device, buffer, by_way_of_host_memory):
    monkeypatch.setattr(vllm.platforms.current_platform, "device_type", device)
    require_supported(_make_engine(buffer))
    assert staged(_make_engine(buffer)) is by_way_of_host_memory


@pytest.mark.parametrize(("device", "buffer"), [("cuda", "xpu"), ("cuda", "disk"), ("cpu", "cuda")])
def test_a_buffer_on_any_other_device_is_refused(monkeypatch, device, buffer):
    monkeypatch.setattr(vllm.platforms.current_platform, "device_type", device)
    with pytest.raises(
        UnsupportedError, match=rf"from where it is \('{device}'\).*kv_buffer_device '{buffer}' is neither"
    ):
        require_supported(_make_engine(buffer))


def test_scales_that_each_engine_calculates_are_refused():
    with pytest.raises(UnsupportedError, match="--calculate-kv-scales"):
        require_supported(_make_engine(scales=True))


def test_sleep_mode_is_refused():
    with pytest.raises(UnsupportedError, match="--enable-sleep-mode"):
        require_supported(_make_engine(sleep=True))


def test_cross_attention_is_refused():
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        require_supported(_make_engine(encoder=True))


@pytest.mark.parametrize("group", [{"host_resident": True}, {"enable_kv_transfer": False}], ids=str)
def test_replicas_of_a_cache_in_host_memory_are_refused(group):
    with pytest.raises(UnsupportedError, match=r"group 0 .* HiSparse"):
        require_supported(_make_engine(), _groups(**group))


def _make_state(guesses, kind="GDN_ATTN", mode="align"):
    shape = {"shapes": ((3, 24),), "dtypes": (torch.float32,), "mamba_type": MambaAttentionBackendEnum[kind]}
    return MambaSpec(16, num_speculative_blocks=guesses, mamba_cache_mode=mode, **shape)


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("kind", ["GDN_ATTN", "MAMBA2", "SHORT_CONV"])
def test_recurrent_states_beside_those_of_guesses_are_served(kind, mode):
    require_supported(_make_engine(), _groups(kv_cache_spec=_make_state(3, kind, mode)))


def test_guesses_that_a_convolution_has_no_place_for_are_refused():
    plain, guessed = _make_state(0, "MAMBA1"), _make_state(3, "MAMBA1")
    require_supported(_make_engine(), _groups(kv_cache_spec=plain))
    for spec in (guessed, SimpleNamespace(kv_cache_specs={"a": plain, "b": guessed})):
        with pytest.raises(UnsupportedError, match=r"convolution of MAMBA1.*remove --speculative-config"):
            require_supported(_make_engine(), _groups(kv_cache_spec=spec))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("MAMBA1", Shapes.mamba1_state_shape),
        ("MAMBA2", Shapes.mamba2_state_shape),
        ("GDN_ATTN", Shapes.gated_delta_net_state_shape),
        ("SHORT_CONV", Shapes.short_conv_state_shape),
    ],
)
def test_the_kinds_that_may_guess_are_those_whose_convolution_vllm_widens_for_it(kind, shape):
    assert ("num_spec" in inspect.signature(shape).parameters) == (kind in GUESSED_KINDS)


def test_guesses_in_a_cache_mode_nobody_has_looked_at_are_refused():
    """Of vLLM before 0.32: every block that a step computes has a state of its own."""
    require_supported(_make_engine(), _groups(kv_cache_spec=_make_state(0, mode="all")))
    with pytest.raises(UnsupportedError, match=r"--mamba-cache-mode all .*set --mamba-cache-mode align"):
        require_supported(_make_engine(), _groups(kv_cache_spec=_make_state(3, mode="all")))


def test_every_reason_is_given_at_once(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.30.2")
    sizes = {"decode_context_parallel_size": 2, "prefill_context_parallel_size": 2}
    with pytest.raises(UnsupportedError) as refused:
        require_supported(
            _make_engine("disk", scales=True, encoder=True, sleep=True, **sizes), _groups(host_resident=True)
        )
    assert str(refused.value).count(";") >= 6
    for word in ("decode_context", "prefill_context", "disk", "calculate-kv-scales", "sleep", "encoder", "HiSparse"):
        assert word in str(refused.value)
