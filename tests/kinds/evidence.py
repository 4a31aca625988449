"""What is known of each kind of cache, from the tests: `python -m tests.kinds.evidence` writes the document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.engines import test_cache_types, test_host_staging, test_pairs, test_states, test_streaming
from tests.versions.overlays import RELEASES, installed
from tests.versions.test_overlays import PAIR

from kvferry.vllm.versions import minor_version

from .caches import Kind, Side
from .kinds import KINDS
from .test_kinds import EVERYDAY, STAGED_KINDS, TOKENS, Pair, pairs

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"

RUN_AS = {
    "qwen2": "Full attention, grouped query",
    "qwen2-6heads": "Full attention, grouped query",
    "mimo": "Full attention, grouped query",
    "qwen3": "Full attention, grouped query",
    "idefics3": "Full attention, grouped query",
    "llama": "Full attention, one KV head on several ranks",
    "deepseek-v2": "MLA (latent)",
    "gemma3": "Full attention and sliding windows in KV cache groups",
    "lfm2": "Short convolution",
    "qwen3-next": "Gated delta net",
    "granite4": "Mamba 2, one group",
}
"""The kind that each tiny model's cache is of."""

OTHER = [
    (
        "Layers that share another layer's cache",
        "a shared layer has no cache of its own, and the one it uses moves",
        ["test_a_layer_that_shares_anothers_cache_is_not_described_twice"],
    ),
    (
        "Layers of a drafter (draft model, EAGLE, MTP) on both sides",
        "they move like any layer; engines run with all three",
        [
            "test_layers_of_a_drafter_that_both_have_move_and_those_of_the_producer_alone_are_not_asked_for",
            "test_the_layers_of_a_drafter_that_both_sides_have_move",
        ],
    ),
    (
        "Layers of a drafter on the decode side only",
        "the model's own layers move; a log line and `kvferry:layers_left_out` say what did not; engines run with all "
        "three",
        [
            "test_a_drafter_on_the_decode_side_only_is_left_out_and_said",
            "test_layers_of_a_drafter_that_only_the_consumer_has_are_left_out",
            "test_what_a_producer_does_not_have_is_said_and_counted",
        ],
    ),
    (
        'Host staging (`kv_buffer_device: "cpu"` on a device that is not a CPU)',
        "a copy of the cache in host memory moves, where either side or both ask for it. It has not run on a GPU",
        [
            "test_by_way_of_host_memory_every_byte_is_right_and_no_other_is_touched",
            "test_all_of_a_prefill_is_copied_step_by_step",
            "test_what_a_load_brought_is_on_the_device_before_it_is_reported_and_a_local_hit_is_left_alone",
            "test_prompts_stream_between_engines_with_few_blocks",
        ],
    ),
    (
        "Recurrent states with speculative decoding on either side or both",
        "the prompt's state moves and those of guesses do not, however many each side makes; engines run a gated delta "
        "net with MTP and n-grams at prefill and MTP at decode, in cache mode `none`",
        [
            "test_a_state_lies_in_the_block_of_its_last_token_on_both_sides",
            "test_the_first_step_after_a_load_goes_on_from_the_state_that_was_loaded",
            "test_a_prefill_whose_made_up_guesses_moved_its_state_offers_nothing",
            "test_a_prompt_is_not_shortened_to_one_token_where_vllm_makes_up_guesses",
            "test_a_state_goes_on_before_the_guesses_of_either_side",
        ],
    ),
    (
        "Multimodal prompts",
        "an image and its place are part of a prompt's identity; engines run",
        ["test_placeholders_stand_for_their_image_at_their_place", "test_a_prompt_with_another_image_is_never_loaded"],
    ),
    (
        "LoRA adapters",
        "an adapter is told by its weights; a cache computed with another one is never loaded",
        [
            "test_two_adapters_of_one_name_are_two",
            "test_files_that_changed_since_the_engine_read_them_stand_for_nothing",
        ],
    ),
    (
        "A child of MultiConnector beside one that offloads, or that keeps files (ExampleConnector)",
        "either child may be the one that loads; engines run, in either order",
        [
            "test_what_both_children_have_is_loaded_by_the_first",
            "test_beside_a_child_that_keeps_files_either_may_load",
            "test_a_request_that_this_child_is_chosen_for_is_loaded",
            "test_a_request_that_the_other_child_is_chosen_for_gives_the_grant_back",
        ],
    ),
]

REFUSED = [
    (
        "vLLM before 0.30 or after 0.33",
        "start",
        "the connector's interface is another",
        "test_a_vllm_outside_the_window_is_refused_with_the_window",
    ),
    (
        "Context parallelism (DCP, PCP) before vLLM 0.31",
        "start",
        "the specs do not say which caches it shares out",
        "test_context_parallelism_is_refused_where_specs_do_not_say_what_it_shares_out",
    ),
    (
        "An interleave of DCP that does not divide the block size",
        "start",
        "vLLM's own formula does not say then where a token is",
        "test_an_interleave_that_does_not_divide_the_block_is_refused",
    ),
    (
        "`kv_buffer_device` that is neither the device nor `cpu`",
        "start",
        "caches move from where they are, or by way of host memory",
        "test_a_buffer_on_any_other_device_is_refused",
    ),
    (
        "Scales of a quantised cache that each engine calculates",
        "start",
        "they differ between engines",
        "test_scales_that_each_engine_calculates_are_refused",
    ),
    (
        "Sleep mode",
        "start",
        "it moves the cache in memory, which peers are not told of",
        "test_sleep_mode_is_refused",
    ),
    (
        "Encoder-decoder models",
        "start",
        "cross attention is cached by the encoder's tokens",
        "test_cross_attention_is_refused",
    ),
    (
        "HiSparse",
        "start",
        "part of the cache lies in host memory",
        "test_replicas_of_a_cache_in_host_memory_are_refused",
    ),
    (
        "Sink attention, and any spec nobody has looked at",
        "start",
        "its block lists may not go by position",
        "test_a_spec_nobody_has_looked_at_is_refused",
    ),
    (
        "Compressed caches (several tokens in a state), K and V of all heads in one cell",
        "start",
        "a cell is not one head and one token",
        "test_cells_that_are_not_one_of_a_head_and_a_token_are_refused",
    ),
    (
        "Linear attention, KDA, replayed states",
        "start",
        "how they are cut or counted has not been looked at",
        "test_recurrent_layers_that_are_not_known_are_refused",
    ),
    (
        "Mamba 1 with speculative decoding",
        "start",
        "vLLM keeps no place in its convolution for the inputs of guesses, and so cannot take back a wrong one",
        "test_guesses_that_a_convolution_has_no_place_for_are_refused",
    ),
    (
        "Recurrent states with speculative decoding in `--mamba-cache-mode all` (vLLM before 0.32)",
        "start",
        "a state may lie behind blocks of guesses",
        "test_guesses_in_a_cache_mode_nobody_has_looked_at_are_refused",
    ),
    (
        "MultiConnector over several pipeline stages, beside a child that knows of one only (OffloadingConnector, "
        "ExampleConnector)",
        "start, by vLLM",
        "it hands the descriptions of our workers to every child",
        "test_stages_beside_a_child_that_knows_none_are_refused_by_vllm",
    ),
    (
        "DCP of layers with a sliding window or chunks, unless the hybrid KV cache manager is disabled",
        "start, by vLLM",
        "it shares out full attention only; recurrent states beside it stay whole",
        "test_windows_are_not_shared_out_by_vllm",
    ),
    (
        "Tokens before heads (NHD) under a packing that is opaque",
        "start",
        "a head's part of a block is not contiguous",
        "test_a_packing_that_is_not_contiguous_in_a_head_is_refused",
    ),
    (
        "Unequal block sizes under a packing that is opaque (CPU attention, nvfp4 and other packed quantisations)",
        "pairing",
        "tokens inside a block cannot be told apart",
        "test_unequal_blocks_are_refused_where_tokens_are_not_separable",
    ),
    (
        "Unequal DCP under a packing that is opaque, unless each side takes a block (or several) at a time",
        "pairing",
        "the blocks hold other tokens",
        "test_opaque_blocks_pair_where_they_hold_the_same_tokens",
    ),
    (
        "Unequal block sizes (over all DCP ranks) of the attention beside recurrent states, or in caches of several "
        "precisions",
        "pairing",
        "what a prompt leaves of its last block would keep what is no number",
        "test_blocks_that_are_loaded_to_their_end_must_be_of_one_size",
    ),
    (
        "Different models, vLLM versions or protocol versions",
        "pairing",
        "the bytes mean something else",
        "test_engines_of_different_kind_are_refused",
    ),
    (
        "Different cache types, attention backends, instruction sets (CPU) or layouts of a convolution",
        "pairing",
        "the bytes mean something else",
        "test_shards_of_different_make_are_refused",
    ),
]

CPU_BUILD = [
    (
        "OffloadingConnector's own tier in host memory",
        "it copies with CUDA streams only; engines run with vLLM's connector and a worker that copies",
        "test_vllms_tier_in_host_memory_wants_a_gpu",
    ),
    (
        "SimpleCPUOffloadConnector",
        "it makes CUDA streams when it registers a cache",
        "test_the_simple_offloading_connector_wants_cuda_streams",
    ),
    (
        "Blocks of 16 tokens, and any size that 32 does not divide, in attention that is not MLA",
        "its kernel takes multiples of 32; unequal ones are refused anyway, since it packs tokens",
        "test_blocks_are_multiples_of_32_tokens",
    ),
    (
        "Decode context parallelism (`kvferry up` refuses it on processors)",
        "no attention backend returns the log-sum-exp that it asks for",
        "test_no_backend_returns_what_context_parallelism_asks_for",
    ),
    (
        "Recurrent states with speculative decoding in cache mode `align`",
        "the kernel that copies states between blocks is Triton's; engines run in mode `none`",
        "test_states_of_guesses_are_copied_between_blocks_by_triton",
    ),
    (
        "Gated delta nets at decode with steps of fewer guesses than there may be (n-grams)",
        "its convolution takes every step for one of all guesses, so a plain engine's tokens are wrong; MTP always "
        "makes all",
        "test_a_convolution_takes_every_step_for_one_of_all_guesses",
    ),
    (
        "Quantised latent caches (MLA)",
        "neither of its two backends stores them",
        "test_latent_caches_are_not_quantised",
    ),
]

INTRODUCTION = """\
# What is moved

This page is written by `python -m tests.kinds.evidence` from the tests, and a test holds it to them.

Prefill and decode may differ in tensor, pipeline and data parallel size in every row, and in block size, layout and
context parallelism unless a row of the last table says otherwise. A data parallel replica is an engine of its own here,
so that no kind of cache depends on their number. What cannot be moved is refused with every reason at once: when the
engine starts, or when a pair first meets; then the prompt is computed by the decode instance, or fails, as
`kv_load_failure_policy` says.

- **Engine run**: tiny models of that kind, on real engines of the CPU build, give the tokens of a plain engine.
- **Geometry checked, engine not run**: vLLM's own spec and layout code shapes the caches, in CPU memory; the
  connector's own reader loads them through real NIXL; every byte on both sides is checked. What a GPU kernel does with
  them is not.
- **Host staging** has not run on a GPU: in its rows, a cache in CPU memory stands for a device's.

No engine of vLLM's CPU build runs context parallelism: of its attention backends none returns the log-sum-exp that DCP
asks for, and PCP is for a model runner that needs Triton. Which token such a rank puts where is asked of the kernel of
vLLM's GPU workers that decides it, run by Triton's interpreter.
"""

VERSIONS = """\
## Versions of vLLM

The connector's classes are held to the signatures of vLLM's own, which are recorded from the sources of each version.
Beside the version that the environment has, each other one is installed into a directory of its own and run with the
same torch and everything else (`make test-all`).
"""


def document() -> str:
    return "\n".join(
        [
            INTRODUCTION,
            *_table(("kind", "(TP, PP, DP)", "evidence"), [*_engines(), *_geometry()]),
            "",
            "## Beside the kinds",
            "",
            *_table(("what", "what happens", "held by"), [(what, how, _named(tests)) for what, how, tests in OTHER]),
            "",
            VERSIONS,
            *_table(("vLLM", "connector interface", "halves and caches, in CPU memory", "engines"), [*_versions()]),
            "",
            "## Refused",
            "",
            *_table(
                ("what", "when", "why", "held by"),
                [(what, when, why, _named([test])) for what, when, why, test in REFUSED],
            ),
            "",
            "## What the CPU build of vLLM 0.32 does not run",
            "",
            "Geometry, where there is any, is checked without it.",
            "",
            *_table(("what", "why", "held by"), [(what, why, _named([test])) for what, why, test in CPU_BUILD]),
            "",
        ]
    )


def _engines() -> Iterator[tuple[str, str, str]]:
    """Rows of the pairs that engines are started for."""
    run = defaultdict(list)
    for kind, prefill, decode, *_ in (*test_pairs.EVERYDAY, *test_pairs.HEAVY, *test_states.PAIRS):
        run[RUN_AS[kind]].append(f"{prefill} → {decode}")
    for name, layouts in run.items():
        shown = ", ".join(f"`{layout}`" for layout in layouts[:6])
        yield name, shown + (f" and {len(layouts) - 6} more" if len(layouts) > 6 else ""), "engine run"
    for name, _, (prefill, _), (decode, _) in test_cache_types.PAIRS:
        yield name, f"`{prefill} → {decode}`", "engine run"
    for kind, prefill, at_prefill, decode, at_decode in test_states.GUESSING:
        guessing = " → ".join(test_states.GUESSERS[side] for side in (at_prefill, at_decode))
        yield f"{RUN_AS[kind]}, speculative decoding: {guessing}", f"`{prefill} → {decode}`", "engine run"
    for kind, prefill, decode, _ in test_streaming.OTHER_KINDS:
        yield f"{RUN_AS[kind]}, streamed", f"`{prefill} → {decode}`", "engine run"
    for kind, prefill, decode, *sides, _ in test_host_staging.PAIRS:
        which = {("staged", "staged"): "both sides", ("staged", ""): "prefill", ("", "staged"): "decode"}[tuple(sides)]
        yield f"{RUN_AS[kind]}, host staging at {which}", f"`{prefill} → {decode}`", "engine run"


def _geometry() -> Iterator[tuple[str, str, str]]:
    for kind in KINDS:
        made = pairs(kind)
        tp = ", ".join(str(size) for size in sorted({side[0] for pair in made for side in pair}))
        pp = ", ".join(str(size) for size in sorted({side[1] for pair in made for side in pair}))
        layouts = f"TP {tp}; PP {pp}{_context(kind, made)}: {len(made)} pairs, {EVERYDAY} of them every day"
        yield kind.name, layouts, "geometry checked, engine not run"
    for kind in KINDS:
        if kind.name in STAGED_KINDS:
            [pair] = pairs(kind)[1:2]
            shown = " → ".join(f"tp={tp},pp={pp}" for tp, pp in pair)
            yield f"{kind.name}, host staging at either side or both", f"`{shown}`", "geometry checked, engine not run"


def _versions() -> Iterator[tuple[str, str, str, str]]:
    run = "{} `{} → {}`".format(*PAIR)
    for release in RELEASES:
        engines = f"not run: {release.no_engines}" if release.no_engines else run
        if minor_version(release.version) == minor_version(installed()):
            engines = "all of this page"
        yield release.version, "checked", "run", engines


def _context(kind: Kind, made: list[Pair]) -> str:
    """Sizes of context parallelism, where there is any."""
    sides = [Side(kind, side == 0, *pair[side], TOKENS) for pair in made for side in (0, 1)]
    sizes = {"DCP": {side.dcp for side in sides}, "PCP": {side.pcp for side in sides}}
    return "".join(f"; {name} {', '.join(map(str, sorted(found)))}" for name, found in sizes.items() if found != {1})


def _named(tests: list[str]) -> str:
    return ", ".join(f"`{test}`" for test in tests)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


if __name__ == "__main__":
    DOCUMENT.write_text(document())
