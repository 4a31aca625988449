"""What the CPU build of vLLM refuses by itself, so that no engine of it can show what KVFerry does there."""

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

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


def test_latent_caches_are_not_quantised() -> None:
    assert CPUMLABackend.supported_kv_cache_dtypes == ["auto"]
    with pytest.raises(AssertionError, match="fp8 KV cache for CPU MLA is not yet implemented"):
        object.__new__(AMXMLAImpl).do_kv_cache_update(None, None, torch.zeros(1), None, "fp8", None)
