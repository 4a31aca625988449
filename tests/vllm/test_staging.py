"""Host staging: the copy of a cache in host memory, and which blocks are copied when, against vLLM's own block manager
and tensors. The "device" is another part of the same memory.
"""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request, RequestStatus

from kvferry.errors import UnsupportedError
from kvferry.geometry import Fingerprint, LayerShard, Span, TokenShare
from kvferry.protocol.identity import draw
from kvferry.protocol.loads import Order
from kvferry.protocol.messages import Granted, Transfer
from kvferry.transport.reader import Outcome
from kvferry.vllm import scheduler, staging, worker
from kvferry.vllm.cache_view import shards_by_layer
from kvferry.vllm.continuation import continuation
from kvferry.vllm.metadata import StepMetadata, Written
from kvferry.vllm.scheduler import SchedulerHalf
from kvferry.vllm.settings import Settings
from kvferry.vllm.staging import Staging, mirrored, rows_of
from kvferry.vllm.worker import WorkerHalf

LAYERS = ["model.layers.3.attn", "model.layers.4.attn"]
BLOCKS, SIZE = 12, 8
NULL = 0
FULL = FullAttentionSpec(block_size=SIZE, num_kv_heads=4, head_size=16, dtype=torch.float16)
LATENT = MLAAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
FP8 = replace(FULL, dtype=torch.float8_e4m3fn)
ODD = replace(FULL, head_size=9, dtype=torch.int8)
SLIDING = SlidingWindowSpec(block_size=SIZE, sliding_window=12, num_kv_heads=4, head_size=16, dtype=torch.float16)
STATE = MambaSpec(
    SIZE,
    shapes=((3, 24), (2, 4, 4)),
    dtypes=(torch.float16, torch.float32),
    page_size_padded=FULL.page_size_bytes,
    mamba_cache_mode="align",
)


def _make_config(backend="FLASH_ATTN", layers=LAYERS):
    module = SimpleNamespace(
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), norm=SimpleNamespace(n_groups=1)
    )
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            data_parallel_index=0,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(layers, module)),
    )


def _noise(size, seed=1):
    return torch.randint(1, 100, (size,), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def _make_caches(*specs, layout=KVCacheLayout.LBHNC, kernel_block_size=None, blocks=BLOCKS):
    """A cache full of noise; the groups lie over each other in one storage, as vLLM puts them, two layers in each."""
    layers = [[f"model.layers.{2 * group + number}.attn" for number in (0, 1)] for group in range(len(specs))]
    if len(specs) == 1:
        layers = [LAYERS]
    raw = _noise(max(spec.page_size_bytes for spec in specs) * blocks * 2)
    caches, tensors = {}, []
    for spec, names in zip(specs, layers, strict=True):
        layer_stride, block_stride, *_ = compute_layout_strides(spec, blocks, 2, layout)
        tensors.append(KVCacheTensor(spec.page_size_bytes * blocks * 2, names, layer_stride, block_stride))
        split = kernel_block_size if not isinstance(spec, MambaSpec) else None
        caches |= zip(names, create_kv_cache_views(raw, spec, blocks, layout, tensors[-1], split), strict=True)
    groups = [KVCacheGroupSpec(names, spec) for spec, names in zip(specs, layers, strict=True)]
    return caches, KVCacheConfig(blocks, tensors, groups)


def _make_staging(caches, kv_cache_config, **config):
    host = mirrored(caches)
    layers = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    shards = shards_by_layer(host, kv_cache_config, _make_config(layers=layers, **config), 0)
    return Staging(caches, host, shards), host


def _bytes(cache):
    return cache.view(torch.uint8)


LAYOUTS = pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
SPLIT = [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC]
"""The layouts in which vLLM can split a block of any number of heads."""
SPECS = pytest.mark.parametrize("spec", [FULL, LATENT, FP8, ODD], ids=["full", "latent", "fp8", "odd"])
KERNEL = pytest.mark.parametrize("kernel_block_size", [None, 4], ids=["whole", "kernel blocks"])
SHAPES = pytest.mark.parametrize(
    ("layout", "kernel_block_size"),
    [*((layout, None) for layout in KVCacheLayout), *((layout, 4) for layout in SPLIT)],
    ids=lambda value: getattr(value, "name", value),
)


# The copy


@SHAPES
@SPECS
def test_the_copy_has_the_sizes_and_strides_of_the_cache_and_shares_storages_as_it_does(
    layout, spec, kernel_block_size
):
    caches, _ = _make_caches(spec, layout=layout, kernel_block_size=kernel_block_size)
    host = mirrored(caches)
    for layer, cache in caches.items():
        copy = host[layer]
        assert (copy.dtype, copy.shape, copy.stride()) == (cache.dtype, cache.shape, cache.stride())
        assert not _bytes(copy).any()
    apart = {host[layer].data_ptr() - cache.data_ptr() for layer, cache in caches.items()}
    assert len(apart) == 1
    assert len({copy.untyped_storage().data_ptr() for copy in host.values()}) == 1
    assert not {copy.untyped_storage().data_ptr() for copy in host.values()} & {
        cache.untyped_storage().data_ptr() for cache in caches.values()
    }


def test_what_lies_in_storages_of_its_own_does_so_in_the_copy():
    caches = {"a": torch.ones(6, 4), "b": torch.ones(2, 3)}
    host = mirrored(caches | {"c": caches["a"][2:]})
    assert [copy.untyped_storage().nbytes() for copy in host.values()] == [96, 24, 96]
    assert host["c"].data_ptr() - host["a"].data_ptr() == 32


@pytest.mark.parametrize(
    ("spec", "words"), [(FULL, torch.int64), (FP8, torch.int64), (ODD, torch.uint8)], ids=["full", "fp8", "odd"]
)
def test_copies_are_made_in_the_widest_integers_that_the_cache_consists_of(spec, words):
    caches, kv_cache_config = _make_caches(spec)
    both, _ = _make_staging(caches, kv_cache_config)
    assert {layer.device.dtype for layers in both._families.values() for layer in layers} == {words}


@LAYOUTS
def test_its_shards_are_those_of_the_cache_elsewhere(layout):
    caches, kv_cache_config = _make_caches(FULL, layout=layout)
    real, copied = (
        [shard for shards in shards_by_layer(some, kv_cache_config, _make_config(), 0).values() for shard in shards]
        for some in (caches, mirrored(caches))
    )
    apart = copied[0].address - real[0].address
    assert copied == [replace(shard, address=shard.address + apart) for shard in real]


def test_what_it_takes_is_said_and_more_than_there_is_is_refused(monkeypatch, caplog):
    caches = {"a": torch.empty(3 << 28, dtype=torch.uint8)}
    monkeypatch.setattr(staging.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 29))
    with caplog.at_level(logging.INFO, "kvferry"), pytest.raises(UnsupportedError) as refused:
        mirrored(caches)
    assert "this worker takes 0.8 GiB" in caplog.text
    assert "0.8 GiB on this worker, and 0.5 GiB are available; make the cache smaller" in str(refused.value)


def test_memory_that_the_system_does_not_give_is_refused_as_well(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    caches = {"a": torch.empty(8, dtype=torch.uint8)}
    monkeypatch.setattr(staging.torch, "zeros", refuse)
    with pytest.raises(UnsupportedError, match="as much host memory as the KV cache"):
        mirrored(caches)


# What is copied


def _assert_only(rows, target, source, before):
    """Of a cache, exactly these (kernel) blocks are now those of another."""
    expected = _bytes(before).clone()
    for row in rows:
        expected[row] = _bytes(source)[row]
    assert torch.equal(_bytes(target), expected)


@SHAPES
@SPECS
@pytest.mark.parametrize("inside", [False, True], ids=["whole tensors", "pieces"])
def test_exactly_the_blocks_of_the_tokens_are_copied_either_way(monkeypatch, layout, spec, kernel_block_size, inside):
    if inside:
        monkeypatch.setattr(staging, "PIECE_BYTES", 1)
    caches, kv_cache_config = _make_caches(spec, layout=layout, kernel_block_size=kernel_block_size)
    both, host = _make_staging(caches, kv_cache_config)
    split = 2 if kernel_block_size else 1
    rows = [block * split + part for block in (7, 2) for part in range(split)]
    before = {layer: cache.clone() for layer, cache in host.items()}
    both.to_host([[5, 7, 2, 9]], Span(SIZE, 2 * SIZE + 3))
    for layer in LAYERS:
        _assert_only(rows, host[layer], caches[layer], before[layer])
    next(iter(host.values())).untyped_storage().fill_(77)
    before = {layer: cache.clone() for layer, cache in caches.items()}
    both.to_device([[5, 7, 2, 9]], Span(SIZE, 2 * SIZE + 3))
    for layer in LAYERS:
        _assert_only(rows, caches[layer], host[layer], before[layer])


def test_a_null_block_is_never_copied():
    caches, kv_cache_config = _make_caches(FULL)
    both, host = _make_staging(caches, kv_cache_config)
    both.to_host([[NULL, NULL, 4]], Span(0, 3 * SIZE))
    for layer in LAYERS:
        _assert_only([4], host[layer], caches[layer], torch.zeros_like(caches[layer]))


@KERNEL
def test_a_load_that_begins_inside_a_block_leaves_what_is_there(kernel_block_size):
    """As after a hit in the prefix cache that is finer than blocks."""
    caches, kv_cache_config = _make_caches(FULL, kernel_block_size=kernel_block_size)
    both, host = _make_staging(caches, kv_cache_config)
    before = {layer: cache.clone() for layer, cache in caches.items()}
    both.to_device([[5, 7, 2]], Span(SIZE + 3, 3 * SIZE))
    for layer in LAYERS:
        first = 7 if kernel_block_size is None else 14
        expected = before[layer]
        expected[first, :, 3:] = 0
        expected[[2] if kernel_block_size is None else [15, 4, 5]] = 0
        assert torch.equal(caches[layer], expected)
    both.to_host([[5, 7, 2]], Span(SIZE + 3, 2 * SIZE))
    for layer in LAYERS:
        assert torch.equal(host[layer][first], caches[layer][first]), "a step's copy is of whole blocks"


def test_a_state_is_the_block_of_its_last_token_and_blocks_of_one_group_are_no_other_groups():
    caches, kv_cache_config = _make_caches(FULL, STATE)
    both, host = _make_staging(caches, kv_cache_config)
    attention, state = (group.layer_names for group in kv_cache_config.kv_cache_groups)
    both.to_host([[5, 7, 2], [8, 9, 10]], Span(0, 2 * SIZE + 1))
    expected = mirrored(caches)  # the groups lie over each other, so what is expected does too
    for layers, rows in ((attention, [5, 7, 2]), (state, [10])):
        for layer in layers:
            _bytes(expected[layer])[rows] = _bytes(caches[layer])[rows]
    for layer, cache in expected.items():
        assert torch.equal(_bytes(host[layer]), _bytes(cache))


def test_layers_that_were_left_out_of_a_load_keep_what_they_have():
    caches, kv_cache_config = _make_caches(FULL)
    both, _ = _make_staging(caches, kv_cache_config)
    before = {layer: cache.clone() for layer, cache in caches.items()}
    both.to_device([[5]], Span(0, SIZE), [LAYERS[1]])
    assert not caches[LAYERS[0]][5].any()
    assert torch.equal(caches[LAYERS[1]], before[LAYERS[1]])


def test_a_context_parallel_ranks_blocks_hold_its_share():
    """Of two ranks with 4 tokens each in turn, a block is 16 tokens of the request, and 8 of the rank's."""
    for rank in (0, 1):
        shard = LayerShard(
            *("a", "latent", Span(0, 1), 1, 4, 24, 8, "int8", "X", False, 0, 0, 32, 32, 8),
            split=2,
            share=TokenShare(2, rank, 4),
        )
        rows, inside = rows_of(shard, [[3, 5]], Span(20, 30))
        assert (rows.tolist(), inside) == ([11] if rank == 0 else [10, 11], 0)
        rows, inside = rows_of(shard, [[3, 5]], Span(22, 23))
        assert (rows.tolist(), inside) == ([11], 0) if rank == 0 else ([10, 11], 2)
        assert rows_of(shard, [[3, 5]], Span(16, 17))[0].tolist() == [10, 11], "loaded to its end, also past a share"


# What a prefill's steps copy


class _Producer:
    """An engine core with host staging, its block manager vLLM's, and one worker whose cache is told by its bytes."""

    def __init__(self, *specs, blocks=200, caching=False):
        self.specs = specs
        self.caches, self.config = _make_caches(*specs, blocks=blocks)
        self.staging, self.host = _make_staging(self.caches, self.config)
        self.manager = KVCacheManager(self.config, 4096, SIZE, SIZE, enable_caching=caching)
        config = _make_config()
        config.kv_transfer_config = SimpleNamespace(
            is_kv_producer=True, is_kv_consumer=False, engine_id="engine", kv_load_failure_policy="fail"
        )
        rule = continuation(SimpleNamespace(), self.config)
        self.half = SchedulerHalf(config, Settings(), continuation=rule, staged=True)
        self.tables = {}
        self.told = []

    def arrive(self, name, tokens, params=None, **sampling):
        extra = {"kv_transfer_params": {"do_remote_decode": True} if params is None else params}
        sampling = SamplingParams(**{"max_tokens": 1, "extra_args": extra, **sampling})
        hasher = get_request_block_hasher(SIZE, sha256)
        request = Request(name, list(tokens), sampling, None, block_hasher=hasher)
        self.half.on_new_request(request)
        return request

    def step(self, *work):
        """Schedule (request, tokens), execute it as a worker does, and copy what the scheduler half says."""
        new, cached, resumed, counts = [], [], set(), {}
        self.manager.new_step_starts()
        for request, count in work:
            name, hit = request.request_id, 0
            known = self.tables.get(name)
            if request.num_computed_tokens == 0:
                found, hit, _ = self.manager.get_computed_blocks(request)
                assert self.manager.allocate_slots(request, count - hit, hit, found) is not None
                blocks = self.manager.get_blocks(name)
                request.num_computed_tokens = hit
            else:
                blocks = self.manager.allocate_slots(request, count)
            assert blocks is not None
            counts[name] = count - hit
            ids = [list(group) for group in blocks.get_block_ids()]
            if known is None:
                self.tables[name] = ids
                new.append(SimpleNamespace(req_id=name, block_ids=tuple(ids), num_computed_tokens=hit))
                continue
            if known == []:
                self.tables[name] = ids
                request.status = RequestStatus.RUNNING
                resumed.add(name)
            else:
                self.tables[name] = [a + b for a, b in zip(self.tables[name], ids, strict=True)]
            cached.append((name, tuple(ids) if any(ids) else None, request.num_computed_tokens))
        names, blocks, computed = map(list, zip(*cached, strict=True)) if cached else ([], [], [])
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=names, new_block_ids=blocks, num_computed_tokens=computed, resumed_req_ids=resumed
            ),
            num_scheduled_tokens=counts,
        )
        metadata = self.half.build_connector_meta(output)
        for request, _ in work:
            self._compute(
                request, Span(request.num_computed_tokens, request.num_computed_tokens + counts[request.request_id])
            )
            request.num_computed_tokens += counts[request.request_id]
        for written in metadata.written:
            self.staging.to_host(written.blocks, written.tokens)
        self.told = metadata.written
        return metadata

    def _compute(self, request, tokens):
        for group, (spec, members) in enumerate(zip(self.specs, self.config.kv_cache_groups, strict=True)):
            table = self.tables[request.request_id][group]
            for layer in members.layer_names:
                cells = _bytes(self.caches[layer])
                for token in [tokens.stop - 1] if isinstance(spec, MambaSpec) else range(*tokens):
                    value = hash((request.request_id, layer, token)) % 251 + 1
                    at = (
                        (table[token // SIZE],)
                        if isinstance(spec, MambaSpec)
                        else (table[token // SIZE], slice(None), token % SIZE)
                    )
                    cells[at] = value

    def preempt(self, request):
        self.manager.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.tables[request.request_id] = []

    def finish(self, request):
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        blocks = tuple(self.manager.get_block_ids(request.request_id))
        return self.half.request_finished(request, blocks), blocks

    def assert_copied(self, blocks, tokens):
        """Whatever a consumer may read of a request with these blocks is in host memory."""
        compared = 0
        for ids, spec, members in zip(blocks, self.specs, self.config.kv_cache_groups, strict=True):
            for layer in members.layer_names:
                here, there = _bytes(self.caches[layer]), _bytes(self.host[layer])
                for token in [tokens - 1] if isinstance(spec, MambaSpec) else range(tokens):
                    block = ids[token // SIZE]
                    if block != NULL:
                        at = (block,) if isinstance(spec, MambaSpec) else (block, slice(None), token % SIZE)
                        assert torch.equal(here[at], there[at]), (layer, token)
                        compared += 1
        assert compared


@pytest.fixture
def make_producer(monkeypatch):
    monkeypatch.setattr(scheduler, "get_ip", lambda: "127.0.0.1")
    init_none_hash(sha256)
    made = []

    def make(*specs, **more):
        made.append(_Producer(*specs, **more))
        return made[-1]

    yield make
    for producer in made:
        producer.half.shutdown()


KINDS = pytest.mark.parametrize("specs", [(FULL,), (FULL, SLIDING), (FULL, STATE)], ids=["full", "windows", "states"])


@KINDS
@pytest.mark.parametrize("chunk", [5, 8, 19, 64])
def test_all_of_a_prefill_is_copied_step_by_step(make_producer, specs, chunk):
    producer = make_producer(*specs)
    request = producer.arrive("p", range(61))
    others = [producer.arrive(f"o-{number}", range(100, 117), {}) for number in range(2)]
    producer.step(*((other, 17) for other in others))  # so that the blocks do not count from 1
    producer.manager.free(others[0])
    while (left := request.num_prompt_tokens - request.num_computed_tokens) > 0:
        producer.step((request, min(chunk, left)))
    (held, _), blocks = producer.finish(request)
    assert held
    producer.assert_copied(blocks, request.num_prompt_tokens)


def test_each_step_copies_from_the_first_block_that_was_not_full(make_producer):
    producer = make_producer(FULL)
    request = producer.arrive("p", range(60))
    tokens = []
    for count in (20, 20, 20):
        producer.step((request, count))
        tokens += [written.tokens for written in producer.told]
    assert tokens == [Span(0, 20), Span(20, 40), Span(40, 60)]
    shard = next(iter(producer.staging._families.values()))[0].shard
    assert len(rows_of(shard, producer.told[0].blocks, Span(20, 40))[0]) == 3


@KINDS
def test_a_prefix_that_was_cached_for_a_request_that_nobody_reads_is_copied_too(make_producer, specs):
    producer = make_producer(*specs, caching=True)
    first = producer.arrive("o", range(40), {})
    producer.step((first, 40))
    assert producer.told == []
    request = producer.arrive("p", range(61))
    producer.step((request, request.num_prompt_tokens))
    assert producer.tables["p"][0][:5] == producer.tables["o"][0], "it is a hit"
    assert [written.tokens for written in producer.told] == [Span(0, request.num_prompt_tokens)]
    (held, _), blocks = producer.finish(request)
    assert held
    producer.assert_copied(blocks, request.num_prompt_tokens)


@KINDS
def test_after_a_preemption_all_is_copied_anew(make_producer, specs):
    producer = make_producer(*specs)
    request = producer.arrive("p", range(61))
    producer.step((request, 30))
    producer.preempt(request)
    other = producer.arrive("o", range(100, 130), {})
    producer.step((other, 30))  # takes blocks that the first had
    producer.step((request, 40))
    assert [written.tokens for written in producer.told] == [Span(0, 40)]
    producer.step((request, request.num_prompt_tokens - 40))
    (held, _), blocks = producer.finish(request)
    assert held
    producer.assert_copied(blocks, request.num_prompt_tokens)


def test_after_a_preemption_a_prefix_that_others_computed_meanwhile_is_copied_too(make_producer):
    producer = make_producer(FULL, caching=True)
    request = producer.arrive("p", range(61))
    producer.step((request, SIZE))
    producer.preempt(request)
    producer.step((producer.arrive("o", range(40), {}), 40))
    producer.step((request, 61))
    assert producer.tables["p"][0][:5] == producer.tables["o"][0], "it is a hit"
    assert [written.tokens for written in producer.told] == [Span(0, 61)]
    producer.assert_copied(producer.finish(request)[1], 61)


def test_tokens_past_the_prompt_are_not_copied(make_producer):
    producer = make_producer(FULL)
    request = producer.arrive("p", range(16), max_tokens=4)
    producer.step((request, 16))
    request.append_output_token_ids(7)
    producer.step((request, 1))
    assert producer.told == []


def test_only_what_may_be_read_is_copied(make_producer):
    producer = make_producer(FULL)
    request = producer.arrive("o", range(16), {})
    producer.step((request, 16))
    assert producer.told == []


def test_a_prompt_that_streams_is_copied_before_it_is_told_to_be_ready(make_producer):
    producer = make_producer(FULL)
    request = producer.arrive("p", range(61), Transfer(draw(), draw()).to_params())
    ready = []
    producer.half._producer._told = lambda news: ready.append(news.ready)
    metadata = producer.step((request, 20))
    assert metadata.step is not None
    assert ready == [0]
    producer.assert_copied(producer.tables["p"], 20)
    producer.half.update_connector_output(None, set(), worker.Executed(metadata.step))
    assert ready == [0, 20]


def test_a_prefill_whose_steps_were_not_seen_is_not_handed_over(make_producer, caplog):
    producer = make_producer(FULL)
    request = producer.arrive("p", range(40))
    producer.step((request, 30))
    request.num_computed_tokens = 40
    (held, params), _ = producer.finish(request)
    assert (held, params) == (False, None)
    assert "was not copied to host memory" in caplog.text


def test_without_staging_nothing_is_followed_and_the_workers_are_told_nothing(make_producer):
    producer = make_producer(FULL)
    producer.half._producer._staged = False
    request = producer.arrive("p", range(40))
    assert producer.step((request, 40)) == StepMetadata()
    (held, _), _ = producer.finish(request)
    assert held
    streamed = producer.arrive("s", range(40), Transfer(draw(), draw()).to_params())
    assert producer.step((streamed, 40)) == StepMetadata(step=1)


# What a worker does


class _StandInReader:
    """Ends loads when it is told to."""

    overdue = 0

    def __init__(self, **settings):
        self.layout, self.on_outcome = settings["layout"], settings["on_outcome"]

    def start(self):
        return b"agent"

    def close(self):
        pass


GRANT = Granted([[1, 2, 3]], 3 * SIZE, 30.0, 3 * SIZE, 0)
ORDER = Order("d", "p", ("127.0.0.1", 1), "0" * 32, "c", GRANT, [[5, 7, 2]], SIZE, 3 * SIZE)


@pytest.fixture
def make_worker(monkeypatch):
    monkeypatch.setattr(worker, "Reader", _StandInReader)
    monkeypatch.setattr(worker, "Client", lambda *_, **__: SimpleNamespace(send=None, close=lambda: None))
    monkeypatch.setattr(worker, "fingerprint", lambda *_: Fingerprint("model", 2, "0.32"))

    def make(caches, kv_cache_config, staged=True, last=True):
        for group in ("pp", "pcp", "tp", "dcp"):
            made = SimpleNamespace(rank_in_group=0, world_size=1, is_last_rank=last)
            monkeypatch.setattr(worker, f"get_{group}_group", lambda made=made: made)
        half = WorkerHalf(_make_config(), Settings(), kv_cache_config, staged)
        half.register_kv_caches(caches)
        return half

    return make


def _end(half, failure=None):
    layout = half._reader.layout
    half._reader.on_outcome(Outcome(ORDER, failure, 0.1, producer=layout, phases={"ack": 0.1}))


def test_a_worker_describes_the_copy_and_without_staging_the_cache(make_worker):
    caches, kv_cache_config = _make_caches(FULL)
    shard = make_worker(caches, kv_cache_config, staged=False).get_handshake_metadata().worker.shards[0]
    assert shard.address == caches[LAYERS[0]].data_ptr()
    half = make_worker(caches, kv_cache_config)
    copied = half.get_handshake_metadata().worker.shards[0]
    assert copied.address == half._staging._families.popitem()[1][0].host.data_ptr() != shard.address
    assert copied.memory == "DRAM"


def test_what_a_load_brought_is_on_the_device_before_it_is_reported_and_a_local_hit_is_left_alone(make_worker):
    """The first block is shared with others; what the copy has of it is of another time."""
    caches, kv_cache_config = _make_caches(FULL)
    before = {layer: cache.clone() for layer, cache in caches.items()}
    half = make_worker(caches, kv_cache_config)
    _end(half)
    assert half._outcomes.qsize() == 1
    for layer in LAYERS:
        _assert_only([7, 2], caches[layer], torch.zeros_like(caches[layer]), before[layer])
    results = half.get_transfer_results()
    assert (results.finished_recving, results.failed_recving) == ({"d"}, set())
    assert set(half.take_stats().data["phase"]) == {"ack", "stage"}


def test_a_load_that_failed_copies_nothing(make_worker):
    caches, kv_cache_config = _make_caches(FULL)
    before = {layer: cache.clone() for layer, cache in caches.items()}
    half = make_worker(caches, kv_cache_config)
    _end(half, "the producer does not vouch for what was read")
    assert half.get_transfer_results().failed_recving == {"d"}
    for layer in LAYERS:
        assert torch.equal(caches[layer], before[layer])


def test_a_copy_that_fails_is_a_load_that_failed(make_worker, monkeypatch):
    half = make_worker(*_make_caches(FULL))

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(half._staging, "to_device", fail)
    _end(half)
    results = half.get_transfer_results()
    assert (results.finished_recving, results.failed_recving) == ({"d"}, {"d"})


def test_layers_that_the_producer_does_not_have_are_not_copied(make_worker):
    caches, kv_cache_config = _make_caches(FULL)
    before = caches[LAYERS[1]].clone()
    half = make_worker(caches, kv_cache_config)
    here = half._reader.layout
    [mine] = here.workers
    there = replace(here, workers=(replace(mine, shards=mine.shards[:1]),))
    half._reader.on_outcome(Outcome(ORDER, None, 0.1, producer=there))
    assert not caches[LAYERS[0]][7].any()
    assert torch.equal(caches[LAYERS[1]], before)


def _copies(half):
    """How often something was copied to host memory."""
    made = []
    half._staging.to_host = lambda *arguments: made.append(arguments)
    return made


@pytest.mark.parametrize(("last", "at_once"), [(True, 0), (False, 1)], ids=["last stage", "earlier stage"])
def test_each_step_is_copied_once_where_vllm_asks_for_it_and_where_it_does_not(make_worker, last, at_once):
    """With a drafter, vLLM asks the last stage alone, and after it has collected what was transferred."""
    half = make_worker(*_make_caches(FULL), last=last)
    made = _copies(half)
    half.start_load_kv(StepMetadata(written=[Written([[5]], Span(0, SIZE))]))
    half.get_transfer_results()
    assert len(made) == at_once
    if last:
        half.stage_written()
    half.stage_written()
    half.get_transfer_results()
    assert made == [([[5]], Span(0, SIZE))]


def test_a_worker_without_staging_copies_nothing(make_worker):
    half = make_worker(*_make_caches(FULL), staged=False)
    half.start_load_kv(StepMetadata())
    half.stage_written()
    _end(half)
    assert set(half.get_transfer_results().finished_recving) == {"d"}
    assert set(half.take_stats().data["phase"]) == {"ack"}


def test_a_cache_that_is_registered_again_is_copied_anew(make_worker):
    caches, kv_cache_config = _make_caches(FULL)
    half = make_worker(caches, kv_cache_config)
    again, _ = _make_caches(FULL)
    half.register_kv_caches(again)
    before = {layer: cache.clone() for layer, cache in caches.items()}
    _end(half)
    assert all(torch.equal(caches[layer], before[layer]) for layer in LAYERS)
    assert not again[LAYERS[0]][7].any()
