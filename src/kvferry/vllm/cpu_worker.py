"""The worker class that CPU engines with several pipeline stages are started with (``--worker-cls``)."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineCPUWorker(CPUWorker):
    """A CPU worker whose pipeline stages past the first survive ``--enforce-eager``.

    vLLM's CPU worker skips its warm-up when nothing is compiled, and that warm-up was the only place that allocated
    the buffer a later stage receives its input in, so such a stage dies on its first forward.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._allocate_stage_input()

    def _allocate_stage_input(self) -> None:
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
            return
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
