"""Where a decode instance goes on, against vLLM's own block manager: it must have every block that it attends to."""

from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request
from vllm.v1.worker import mamba_utils

from kvferry.vllm.continuation import PLAIN, Continuation, continuation

SIZE = 4
WINDOW = 8
SHAPE = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
FULL = FullAttentionSpec(block_size=SIZE, **SHAPE)
SLIDING = SlidingWindowSpec(block_size=SIZE, sliding_window=WINDOW, **SHAPE)
CHUNKED = ChunkedLocalAttentionSpec(block_size=SIZE, attention_chunk_size=WINDOW, **SHAPE)
STATE = MambaSpec(block_size=SIZE, shapes=((8, 3),), dtypes=(torch.float16,), mamba_cache_mode="align")
NULL = 0


def _make_config(*specs):
    return KVCacheConfig(200, [], [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)])


def _continuation(*specs):
    return continuation(SimpleNamespace(), _make_config(*specs))


def _make_manager(*specs):
    largest = max(spec.block_size for spec in specs)
    return KVCacheManager(_make_config(*specs), 4096, largest, SIZE, enable_caching=False)


def _make_request(name, tokens):
    return Request(name, list(range(tokens)), SamplingParams(max_tokens=7), None)


def _held(spec, rule, prompt, chunk):
    """Blocks of a prefill that has finished, as vLLM hands them over, and how many tokens they are of."""
    manager, request = _make_manager(FULL, spec), _make_request("p", prompt)
    rule.shorten(request)
    while request.num_computed_tokens < request.num_prompt_tokens:
        step = min(chunk, request.num_prompt_tokens - request.num_computed_tokens)
        assert manager.allocate_slots(request, step)
        request.num_computed_tokens += step
    manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
    return manager.get_block_ids(request.request_id), request.num_computed_tokens


def _wanted(spec, tokens, prompt):
    """Blocks that a load of ``tokens`` is given."""
    manager, request = _make_manager(FULL, spec), _make_request("d", prompt)
    assert manager.allocate_slots(request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True)
    return manager.get_block_ids(request.request_id)


def _attended(spec, position):
    """The tokens that the one at ``position`` attends to."""
    if spec is SLIDING:
        return range(max(0, position - WINDOW + 1), position)
    return range(position // WINDOW * WINDOW, position)


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("spec", [SLIDING, CHUNKED], ids=["sliding", "chunked"])
def test_every_block_that_is_attended_to_is_wanted_and_held(spec, chunk):
    rule = _continuation(FULL, spec)
    for prompt in range(2, 40):
        held, offered = _held(spec, rule, prompt, chunk)
        tokens = rule.loads(offered, prompt)
        wanted = _wanted(spec, tokens, prompt)
        next_token = min(tokens, prompt - 1)
        assert all(wanted[1][token // SIZE] != NULL for token in _attended(spec, next_token) if token < tokens), prompt
        for group in (0, 1):
            missing = [i for i, block in enumerate(wanted[group]) if block != NULL and held[group][i] == NULL]
            assert not missing, (prompt, group)


def test_without_stopping_short_a_block_of_the_window_would_be_missing():
    """What the rule is there for: vLLM computes the last token again, one earlier than the window it kept."""
    prompt = WINDOW + SIZE - 1
    wanted = _wanted(SLIDING, prompt, prompt)
    assert any(wanted[1][token // SIZE] == NULL for token in _attended(SLIDING, prompt - 1))


def test_out_of_window_blocks_are_null_on_both_sides():
    rule = _continuation(FULL, SLIDING)
    held, tokens = _held(SLIDING, rule, 40, 64)
    assert held[1].count(NULL) == _wanted(SLIDING, tokens, 40)[1].count(NULL) == (tokens - WINDOW + 1) // SIZE
    assert NULL not in held[0]


def _make_state(mode, guesses):
    size = SIZE if mode == "align" else 4096
    shape = {"shapes": ((8, 3 + guesses),), "dtypes": (torch.float16,)}
    return MambaSpec(block_size=size, mamba_cache_mode=mode, num_speculative_blocks=guesses, **shape)


@pytest.mark.parametrize("guesses", [0, 1, 3])
@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("chunk", [4, 64])
def test_a_state_lies_in_the_block_of_its_last_token_on_both_sides(mode, chunk, guesses):
    spec = _make_state(mode, guesses)
    rule = _continuation(FULL, spec)
    for prompt in range(3, 40):
        held, computed = _held(spec, rule, prompt, chunk)
        assert rule.offers(computed, computed, held) == computed
        tokens = rule.loads(computed, prompt)
        assert tokens == prompt - 1
        at = (tokens - 1) // spec.block_size
        # Of a block list, vLLM's kernels get the block that they write the state to, and those of guesses after it.
        assert _kernels_blocks(spec, held[1], tokens)[0] == held[1][at] != NULL
        assert len(held[1]) == at + 1 + guesses
        assert _wanted(spec, tokens, prompt)[1][at] != NULL


def _kernels_blocks(spec, blocks, tokens):
    table = torch.tensor([blocks], dtype=torch.int32)
    return mamba_get_block_table_tensor(table, torch.tensor([tokens]), spec, spec.mamba_cache_mode)[0].tolist()


@pytest.mark.parametrize("guesses", [1, 3])
@pytest.mark.parametrize("made_up", [False, True], ids=["one token", "and made-up guesses"])
@pytest.mark.parametrize("mode", ["none", "align"])
def test_the_first_step_after_a_load_goes_on_from_the_state_that_was_loaded(monkeypatch, mode, made_up, guesses):
    spec, step = _make_state(mode, guesses), 1 + guesses * made_up
    for prompt in range(2, 40):
        manager, request, loaded = _make_manager(FULL, spec), _make_request("d", prompt), prompt - 1
        assert manager.allocate_slots(request, 0, num_external_computed_tokens=loaded, delay_cache_blocks=True)
        state = manager.get_block_ids("d")[1][(loaded - 1) // spec.block_size]
        request.num_computed_tokens = loaded
        assert manager.allocate_slots(request, step)
        blocks = manager.get_block_ids("d")[1]
        source = _copied_from(monkeypatch, spec, loaded, step) if mode == "align" else None
        first = blocks[source] if source is not None else _kernels_blocks(spec, blocks, loaded + step)[0]
        assert first == state != NULL


def _copied_from(monkeypatch, spec, computed, step):
    """The place in its block list from which vLLM's runner takes the state of a request that it has not met before;
    None where it is not moved. The neutral count of accepted guesses says: the state before any of them."""
    copies = []
    monkeypatch.setattr(mamba_utils, "collect_mamba_copy_meta", lambda *args: copies.append((args[4], args[6])))
    mamba_utils.preprocess_mamba(
        SimpleNamespace(
            finished_req_ids=(),
            preempted_req_ids=(),
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()),
            num_scheduled_tokens={"d": step},
        ),
        None,
        SimpleNamespace(enable_prefix_caching=True),
        {},
        SimpleNamespace(req_ids=["d"], num_accepted_tokens_cpu=[1]),
        {"d": SimpleNamespace(num_computed_tokens=computed)},
        {},
        {},
        SimpleNamespace(mamba_group_ids=[1], mamba_spec=spec),
    )
    assert all(bias == 0 for _, bias in copies)
    return copies[0][0] if copies else None


@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_prefill_whose_made_up_guesses_moved_its_state_offers_nothing(mode):
    """vLLM fills up a step of one token, as after a hit in the prefix cache of all others."""
    guesses = 3
    spec = _make_state(mode, guesses)
    rule = _continuation(FULL, spec)
    for tokens in range(2, 40):
        manager, request = _make_manager(FULL, spec), _make_request("p", tokens)
        assert manager.allocate_slots(request, tokens - 1)
        request.num_computed_tokens = tokens - 1
        assert manager.allocate_slots(request, 1 + guesses)
        blocks = manager.get_block_ids("p")
        written = _kernels_blocks(spec, blocks[1], tokens + guesses)[0]
        where_it_is_read = written == blocks[1][(tokens - 1) // spec.block_size]
        assert rule.offers(tokens, tokens, blocks) == (tokens if where_it_is_read else 0)
        assert where_it_is_read or mode == "align"


def test_a_prompt_is_not_shortened_to_one_token_where_vllm_makes_up_guesses():
    """Beside running requests it takes such a step for a decode, and a state that was never computed for its own."""
    rule = _continuation(FULL, _make_state("align", 3))
    assert [rule.held(prompt) for prompt in (1, 2, 3)] == [1, 2, 2]
    assert rule.loads(2, 2) == 0


def test_plain_attention_is_loaded_whole():
    rule = _continuation(FULL)
    assert rule == PLAIN
    request = _make_request("p", 9)
    rule.shorten(request)
    assert (request.num_prompt_tokens, request.max_tokens, rule.loads(9, 9)) == (9, 7, 9)


def test_a_prefill_stops_short_of_its_last_token_and_of_any_answer():
    request = _make_request("p", 9)
    prompt = request.prompt_token_ids
    _continuation(FULL, STATE).shorten(request)
    assert (request.num_prompt_tokens, request.num_tokens, request.max_tokens) == (8, 8, 1)
    assert list(request.all_token_ids) == request.prompt_token_ids == list(range(8))
    assert len(prompt) == 9, "the list is the caller's"


def test_a_prompt_of_one_token_is_not_shortened_and_not_loaded():
    rule, request = _continuation(FULL, STATE), _make_request("p", 1)
    rule.shorten(request)
    assert (request.num_prompt_tokens, rule.loads(1, 1)) == (1, 0)


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole():
    request = Request("p", list(range(9)), SamplingParams(prompt_logprobs=1), None)
    _continuation(FULL, STATE).shorten(request)
    assert request.num_prompt_tokens == 9


@pytest.mark.parametrize(("offered", "prompt", "loaded"), [(8, 9, 8), (8, 12, 8), (9, 9, 0), (12, 9, 0)])
def test_a_state_is_loaded_for_all_of_its_tokens_or_not_at_all(offered, prompt, loaded):
    assert Continuation(withheld=1, exact=True).loads(offered, prompt) == loaded


def test_a_state_that_went_on_past_the_prompt_is_not_offered():
    rule = Continuation(withheld=1, exact=True)
    assert (rule.offers(8, 8, []), rule.offers(9, 8, [])) == (8, 0)
    assert PLAIN.offers(9, 8, []) == 8


def test_a_state_is_loaded_although_this_sides_drafter_would_withhold_more():
    assert Continuation(withheld=2, exact=True).loads(8, 9) == 8


def test_a_drafter_that_reads_ahead_withholds_what_it_reads():
    config = SimpleNamespace(num_prefill_lookahead_tokens=3)
    assert continuation(config, _make_config(FULL)) == Continuation(withheld=2)
    assert continuation(config, _make_config(FULL, SLIDING)) == Continuation(withheld=2)
