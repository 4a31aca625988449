"""A vLLM engine in its caller's own process (VLLM_ENABLE_V1_MULTIPROCESSING=0), driven over standard input.

Each line in is a JSON list: prompt token ids, kv_transfer_params, number of tokens. Each line out that starts with
"RESULT " is the generated token ids and the kv_transfer_params that came with them.
"""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from kvferry.cluster.commands import CPU_PATIENCE


def main(model: str) -> None:
    engine = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        kv_cache_memory_bytes=32 << 20,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVFerryConnector", kv_role="kv_both", kv_connector_extra_config=dict(CPU_PATIENCE)
        ),
    )
    print("RESULT ready", flush=True)
    for line in sys.stdin:
        prompt, parameters, tokens = json.loads(line)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            min_tokens=tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": parameters} if parameters else None,
        )
        [answer] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        print("RESULT " + json.dumps([list(answer.outputs[0].token_ids), answer.kv_transfer_params]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
