"""What the CPU build of vLLM refuses by itself, so that no engine of it can show what KVFerry does there."""

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.worker import mamba_utils

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="about the CPU build")


def test_vllms_tier_in_host_memory_wants_a_gpu() -> None:
    spec = object.__new__(CPUOffloadingSpec)
    spec._worker = None
    with pytest.raises(Exception, match="only supported on CUDA-alike and XPU GPUs"):
        spec.get_worker(None)


def test_the_simple_offloading_connector_wants_cuda_streams() -> None:
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        torch.cuda.Stream.priority_range()


def test_blocks_are_multiples_of_32_tokens() -> None:
    [size] = CPUAttentionBackend.get_supported_kernel_block_sizes()
    assert isinstance(size, MultipleOf)
    assert size.base == 32


@pytest.mark.parametrize("backend", [CPUAttentionBackend, CPUMLABackend, AMXMLABackend])
def test_no_backend_returns_what_context_parallelism_asks_for(backend: type[AttentionBackend]) -> None:
    assert not backend.get_impl_cls().can_return_lse_for_decode


def test_states_of_guesses_are_copied_between_blocks_by_triton() -> None:
    """Without it a kernel is a function, and there is no other one in its place."""
    with pytest.raises(TypeError, match="'function' object is not subscriptable"):
        mamba_utils.postprocess_mamba_fused_kernel[(1,)]


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="the kernel wants AVX-512 with bfloat16")
def test_a_convolution_takes_every_step_for_one_of_all_guesses() -> None:
    """After a step of fewer, the next one starts at inputs that are not the last."""
    guesses, width, channels = 3, 4, 64
    weight, inputs = torch.ones(channels, width).bfloat16(), torch.arange(12.0)[:, None].repeat(1, channels).bfloat16()
    packed = ops.causal_conv1d_weight_pack(weight)

    def sums(*steps: int) -> list[float]:
        """Of the last ``width`` inputs; in each step all guesses are right."""
        state = torch.zeros(2, width - 1 + guesses, channels).bfloat16()
        state[1, : width - 1] = inputs[: width - 1]
        got, at, accepted = [], width - 1, 1
        for count in steps:
            got += ops.causal_conv1d_update_cpu(
                x=inputs[at : at + count][None].contiguous(),
                conv_states=state.transpose(1, 2),
                weight=packed,
                bias=None,
                silu_activation=False,
                conv_state_indices=torch.tensor([1], dtype=torch.int32),
                is_weight_packed=True,
                num_accepted_tokens=torch.tensor([accepted], dtype=torch.int32),
            )[0, :, 0].tolist()
            at, accepted = at + count, count
        return got

    assert sums(4, 4) == [6, 10, 14, 18, 22, 26, 30, 34]
    assert sums(1, 4) != [6, 10, 14, 18, 22]


def test_latent_caches_are_not_quantised() -> None:
    assert CPUMLABackend.supported_kv_cache_dtypes == ["auto"]
    with pytest.raises(AssertionError, match="fp8 KV cache for CPU MLA is not yet implemented"):
        object.__new__(AMXMLAImpl).do_kv_cache_update(None, None, torch.zeros(1), None, "fp8", None)
