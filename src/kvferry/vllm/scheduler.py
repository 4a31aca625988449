"""The scheduler half: one per engine core, called on the engine's thread, which must never wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.utils.network_utils import get_ip

from kvferry.errors import ParamsError
from kvferry.geometry import EngineLayout, Span, compatibility, layout_label
from kvferry.protocol.authentication import SECRET_VARIABLE, Seal
from kvferry.protocol.grants import Grants
from kvferry.protocol.identity import draw, token_identity
from kvferry.protocol.loads import Expected, Loads, Order
from kvferry.protocol.messages import (
    PARAMS_KEY,
    WAIT_S,
    Address,
    Claim,
    Gone,
    Granted,
    Hello,
    Offer,
    Release,
    Renewed,
    Reply,
    Request,
    Transfer,
    Waiting,
    Welcome,
    encode,
    engine_identity,
)
from kvferry.protocol.subject import Subject
from kvferry.sidechannel.client import Client
from kvferry.sidechannel.server import Listener, Respond
from kvferry.vllm.adapters import adapter_identity
from kvferry.vllm.compat import fingerprint
from kvferry.vllm.continuation import PLAIN, Continuation
from kvferry.vllm.metadata import Executed, Handshake, StepMetadata, Written
from kvferry.vllm.metrics import Tally, TransferStats
from kvferry.vllm.progress import News, Progress
from kvferry.vllm.settings import Settings, read_seal
from kvferry.vllm.tracing import Headers, spans

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request as EngineRequest

logger = logging.getLogger(__name__)

STARTING = Gone("the engine is still starting")

MOST_SIGHTED = 1 << 12
"""Incarnations of producers that the workers were told of, so as to tell them once."""


def worker_name(pp_rank: int, tp_rank: int) -> str:
    """How a reader names itself in claims and acknowledgements."""
    return f"pp{pp_rank}tp{tp_rank}"


def identity_of(request: EngineRequest, tokens: int) -> str | None:
    """Identity of the first ``tokens`` of a prompt; None for a prompt without token ids.

    Beside the tokens: the adapter (its weights, whatever it is called or numbered here), the tenant's salt, and what
    the placeholders of a multimodal prompt stand for.
    """
    prompt = request.prompt_token_ids
    if prompt is None or len(prompt) < tokens:
        return None
    extras = []
    if request.lora_request is not None:
        extras.append(f"lora:{adapter_identity(request.lora_request)}")
    if request.cache_salt:
        extras.append(f"salt:{request.cache_salt}")
    for feature in request.mm_features or ():
        place = feature.mm_position
        if place.offset < tokens:
            extras.append(f"mm:{feature.identifier}:{place.offset}:{place.length}")
    return token_identity(prompt[:tokens], extras)


@dataclass(frozen=True)
class Edges:
    """What the scheduler half touches of the world outside vLLM; a simulation puts its own clock and network here."""

    clock: Callable[[], float] = time.monotonic
    listen: Callable[..., Listener] = Listener
    connect: Callable[..., Client] = Client


def layout_of(config: VllmConfig) -> str:
    """The label of this engine core's layout."""
    parallel = config.parallel_config
    return layout_label(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_index)


class Producer:
    """Grants finished prefills, and answers whoever claims them.

    Raises:
        SideChannelError: the listener's address cannot be bound.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: Settings,
        continuation: Continuation,
        seal: Seal,
        incarnation: str,
        edges: Edges,
        tally: Tally,
        staged: bool = False,
    ) -> None:
        parallel = config.parallel_config
        self._config = config
        self._staged = staged
        self._continuation = continuation
        self._settings = settings
        self._tally = tally
        self._layout = layout_of(config)
        self._welcome = encode(STARTING)
        self._grants = Grants(incarnation, settings.kv_lease_duration, edges.clock, self._ended)
        self._progress = Progress()
        self._lock = threading.Lock()
        bind = settings.side_channel_host or get_ip()
        port = settings.side_channel_port and settings.side_channel_port + parallel.data_parallel_index
        self._listener = edges.listen(bind, port, self._answer, self._tick)
        self.address: Address = (get_ip() if bind in ("0.0.0.0", "::", "*") else bind, self._listener.port)
        self._engine_id = str(config.kv_transfer_config.engine_id)
        if settings.streaming:
            self._engine_id = engine_identity(self.address, incarnation, seal)
        logger.info("KVFerry listens on %s:%d as incarnation %s, %s", *self.address, incarnation, self._layout)

    def describe(self, layout: EngineLayout) -> None:
        """From now on ``Hello`` is answered with this, and it is said where."""
        self._tally.add("side_channel", 1, "{}@{}:{}".format(self._grants.incarnation, *self.address))
        self._welcome = encode(Welcome(layout))

    def _answer(self, message: Request, respond: Respond) -> bytes | None:
        if isinstance(message, Hello) and message.incarnation == self._grants.incarnation:
            return self._welcome
        with self._lock:
            reply = self._grants.answer(message, lambda reply: respond(self._counted(message, reply)))
        return None if reply is None else self._counted(message, reply)

    def _counted(self, message: Request, reply: Reply) -> bytes:
        """An answer as it is sent; refusals are counted."""
        refused = len(reply.gone) if isinstance(reply, Renewed) else isinstance(reply, Gone)
        if refused:
            self._tally.add("gone", refused, type(message).__name__.lower())
        return encode(reply)

    def _ended(self, left: float | None) -> None:
        if left is None:
            self._tally.add("num_kv_expired_reqs")
        else:
            self._tally.add("lease_left", left)
        self._tally.add("held_blocks", self._grants.held_blocks)

    def _tick(self) -> float | None:
        with self._lock:
            return self._grants.expire()

    def arrived(self, request: EngineRequest) -> None:
        """A request with ``do_remote_decode``: in a transfer that streams it can be claimed from now on."""
        self._continuation.shorten(request)
        if self._opened(request) or self._staged:
            self._progress.follow(request)

    def _opened(self, request: EngineRequest) -> bool:
        try:
            transfer = Transfer.from_params(request.kv_transfer_params or {})
            if transfer is None and self._settings.streaming:
                transfer = Transfer.of_request(request.request_id)
        except ParamsError as error:
            logger.warning("request %s does not stream: %s", request.request_id, error)
            return False
        tokens = request.num_prompt_tokens
        token_hash = identity_of(request, tokens) if transfer else None
        if transfer is None or token_hash is None:
            return False
        with self._lock:
            return self._grants.open(request.request_id, transfer, tokens, token_hash)

    def scheduled(self, output: SchedulerOutput) -> int | None:
        """A step was put together; its number, if what it computes is to be told when it has been executed."""
        step, begun = self._progress.scheduled(output)
        for news in begun:
            self._told(news)
        return step

    def take_written(self) -> list[Written]:
        """What the step that was put together last will have computed, where workers have to copy it."""
        return self._progress.written if self._staged else []

    def executed(self, step: int) -> None:
        for news in self._progress.executed(step):
            self._told(news)

    def _told(self, news: News) -> None:
        with self._lock:
            self._grants.progress(news.request, news.life, news.blocks, news.ready)

    def ended(self, request: EngineRequest) -> None:
        """It ended without anything to hand over."""
        self._progress.forget(request.request_id)
        with self._lock:
            self._grants.close(request.request_id)

    def finished(self, request: EngineRequest, blocks: tuple[list[int], ...]) -> Offer | None:
        """Hold the blocks of a finished prefill; None when there is nothing to hand over."""
        tokens = self._continuation.offers(request.num_computed_tokens, request.num_prompt_tokens, blocks)
        token_hash = identity_of(request, tokens) if tokens > 0 and any(blocks) else None
        if token_hash is None:
            return None
        if self._progress.forget(request.request_id) < tokens and self._staged:
            logger.warning("request %s is not handed over: its cache was not copied to host memory", request.request_id)
            return None
        with self._lock:
            grant = self._grants.offer(request.request_id, blocks, tokens, token_hash)
            self._tally.add("held_blocks", self._grants.held_blocks)
        host, port = self.address
        return Offer(
            host=host,
            port=port,
            engine_id=self._engine_id,
            request=grant.name,
            incarnation=self._grants.incarnation,
            nonce=grant.nonce,
            tokens=tokens,
            token_hash=token_hash,
            layout=self._layout,
        )

    def take_released(self) -> list[str]:
        with self._lock:
            return self._grants.take_ended()

    def close(self) -> None:
        self._listener.close()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A claim under way: what it is about, where it goes, since when, and the headers of its request's trace."""

    subject: Subject
    address: Address
    claim: Claim
    since: float
    trace: Headers | None


class Consumer:
    """Claims what requests are offered, and keeps it claimed until the workers have read it."""

    def __init__(
        self,
        config: VllmConfig,
        settings: Settings,
        continuation: Continuation,
        seal: Seal,
        incarnation: str,
        edges: Edges,
        tally: Tally,
    ) -> None:
        parallel = config.parallel_config
        readers = [
            worker_name(pp_rank, tp_rank)
            for pp_rank in range(parallel.pipeline_parallel_size)
            for tp_rank in range(parallel.tensor_parallel_size * parallel.prefill_context_parallel_size)
        ]
        self._settings = settings
        self._continuation = continuation
        self._seal = seal
        self._tally = tally
        self._clock = edges.clock
        self._layout = layout_of(config)
        self._recomputes = config.kv_transfer_config.kv_load_failure_policy == "recompute"
        self._loads = Loads(incarnation, readers, settings.claim_timeout, settings.hold_timeout, edges.clock)
        self._lock = threading.Lock()
        self._client = edges.connect("kvferry-claims", self._tick)
        self._arrivals: deque[tuple[EngineRequest, Expected]] = deque()
        self._sighted: set[str] = set()
        self._unsaid: deque[tuple[Address, str]] = deque()
        self._warned = False

    def arrived(self, request: EngineRequest) -> None:
        """A request with ``do_remote_prefill``: its offer is read and claimed on the client's thread, whatever the
        scheduler does with it meanwhile.
        """
        with self._lock:
            expected = self._loads.expect(request.request_id)
        # Not a function with arguments: of the objects made here, each brings Python's garbage collection nearer, which
        # would then happen here.
        self._arrivals.append((request, expected))
        self._client.call(self._claim_next)

    def _claim_next(self) -> None:
        request, expected = self._arrivals.popleft()
        subject = Subject(request.request_id, self._layout)
        try:
            self._claim(request, expected, subject)
        except ParamsError as error:
            self._refuse(expected, subject, "parameters", str(error))
        except Exception:
            logger.exception("the parameters of %s could not be read", subject)
            self._refuse(expected, subject, "parameters", "its parameters could not be read")

    def _claim(self, request: EngineRequest, expected: Expected, subject: Subject) -> None:
        """Claim what a request is offered, if it still waits for that.

        Raises:
            ParamsError: nothing that is offered can be believed.
        """
        params = request.kv_transfer_params or {}
        known = None if PARAMS_KEY in params else Offer.of_identity(params, request.request_id, self._seal)
        offer = known or Offer.from_params(params, self._seal)
        subject, name, claim = replace(subject, peer=offer), draw(), None
        if self._waits(expected):
            tokens = self._continuation.held(request.num_prompt_tokens) if offer.tokens is None else offer.tokens
            token_hash = identity_of(request, tokens)
            if token_hash is None or offer.token_hash not in (None, token_hash):
                why = "the offered KV cache was computed from another prompt"
                self._refuse(expected, subject, "prompt", why)
            else:
                with self._lock:
                    claim = self._loads.begin(expected, offer, name, tokens, token_hash)
        if claim is None:  # its producer need not wait
            self._release(offer.address, Release(offer.incarnation, offer.request, offer.nonce, name))
            return
        self._sight(offer)
        self._send(_Asked(subject, offer.address, claim, expected.since, request.trace_headers))

    def _waits(self, expected: Expected) -> bool:
        with self._lock:
            return self._loads.expects(expected)

    def _sight(self, offer: Offer) -> None:
        """Have the workers told of a producer that is new."""
        if offer.incarnation not in self._sighted:
            if len(self._sighted) == MOST_SIGHTED:
                self._sighted.clear()
            self._sighted.add(offer.incarnation)
            self._unsaid.append((offer.address, offer.incarnation))

    def take_sighted(self) -> list[tuple[Address, str]]:
        """Producers heard of for the first time since the last call."""
        return [self._unsaid.popleft() for _ in range(len(self._unsaid))]

    def _send(self, asked: _Asked) -> None:
        timeout = self._settings.claim_timeout + (WAIT_S if asked.claim.ahead else 0.0)
        self._client.send(asked.address, asked.claim, timeout, partial(self._claimed, asked))

    def _claimed(self, asked: _Asked, reply: Reply | None) -> None:
        which, seconds = (asked.subject.request, asked.claim.claim), self._clock() - asked.since
        with self._lock:
            dropped = self._loads.unanswered(*which) if reply is None else None
            why = self._loads.claimed(*which, reply) if reply is not None else None
        if isinstance(why, Claim):
            self._send(asked)
            return
        claim = asked.claim
        if dropped:
            self._release(*dropped)
            why = "no answer to the claim"
        elif why and claim.ahead:
            # The prefill may go on, and nobody else was told of it.
            self._release(asked.address, Release(claim.incarnation, claim.request, claim.nonce, claim.claim))
        outcome = self._outcome(asked, reply, seconds)
        if why:
            self._tally.add("recomputed", label=outcome)
            logger.info("%s is prefilled here: %s", asked.subject, why)
        self._tally.add("claims", label=outcome)
        if outcome == "granted":
            self._tally.add("phase", seconds, "claim")
        if asked.trace:
            spans(asked.trace, asked.subject, {"claim": seconds}, None if outcome == "granted" else outcome)

    def _outcome(self, asked: _Asked, reply: Reply | None, seconds: float) -> str:
        """What became of a claim, as a label."""
        match reply:
            case Granted(tokens=tokens) if tokens >= asked.claim.tokens:
                return "granted"
            case Gone():
                return "gone"
            case Waiting():
                return "late"
            case None:
                return "late" if seconds >= self._settings.claim_timeout else "unreachable"
            case _:
                return "invalid"

    def _tick(self) -> float | None:
        with self._lock:
            due = self._loads.due()
            wait = self._loads.next_due()
        for address, message in due:
            self._client.send(address, message, self._settings.handshake_timeout, self._renewed)
        return wait

    def _renewed(self, reply: Reply | None) -> None:
        with self._lock:
            self._loads.renewed(reply)

    def available(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Tokens to load beyond ``local_tokens``; None while the producer has not answered."""
        with self._lock:
            tokens = self._loads.available(request.request_id)
        if tokens is None:
            return None
        return max(0, self._continuation.loads(tokens, request.num_prompt_tokens) - local_tokens)

    def allocated(self, request: EngineRequest, blocks: KVCacheBlocks, tokens: int) -> Order | None:
        """Blocks for ``tokens`` more tokens are there; the order for the workers, None when nothing is to be loaded."""
        if tokens == 0:
            self._unneeded(request)
            return None
        with self._lock:
            available = self._loads.available(request.request_id) or 0
            stop = self._continuation.loads(available, request.num_prompt_tokens)
            span = Span(stop - tokens, stop)
            return self._loads.start(request.request_id, [list(ids) for ids in blocks.get_block_ids()], span)

    def dropped(self, request: EngineRequest) -> None:
        """Aborted, rejected, or nothing left to load: the producer need not wait. A load under way goes on."""
        with self._lock:
            dropped = self._loads.drop(request.request_id)
        if dropped:
            self._release(*dropped)

    def _unneeded(self, request: EngineRequest) -> None:
        """The scheduler loads nothing (more): all of the prompt is here, or the grant came too late or is gone."""
        with self._lock:
            lost = self._loads.lost(request.request_id)
        if lost:
            self._tally.add("recomputed", label=lost)
        self.dropped(request)

    def loaded(self, request_id: str, failed: bool) -> None:
        """All workers have reported, and some perhaps a failure."""
        with self._lock:
            ours = self._loads.finished(request_id)
        if ours and failed and self._recomputes:
            self._tally.add("recomputed", label="failed")

    def _release(self, address: Address, message: Release) -> None:
        self._client.send(address, message, self._settings.handshake_timeout, lambda _: None)

    def _refuse(self, expected: Expected, subject: Subject, reason: str, why: str) -> None:
        """Said of requests that still wait only, and before they go on."""
        if self._waits(expected):
            self._tally.add("recomputed", label=reason)
            log = logger.info if self._warned else logger.warning
            log("%s is prefilled here: %s", subject, why)
            self._warned = True
        with self._lock:
            self._loads.settle(expected)

    def close(self) -> None:
        self._client.close()


class SchedulerHalf:
    """Both roles of one engine core; ``kv_role`` decides which of them exist.

    Args:
        staged: with host staging, so that the workers are told what to copy.

    Raises:
        SettingsError: the secret cannot be read, or is none.
        SideChannelError: the listener's address cannot be bound.
    """

    def __init__(
        self,
        config: VllmConfig,
        settings: Settings,
        edges: Edges | None = None,
        continuation: Continuation = PLAIN,
        staged: bool = False,
    ) -> None:
        self._seal = read_seal(settings)
        if not self._seal.has_secret:
            logger.warning(
                "KVFerry runs without a secret: %s. Set %s or secret_file in kv_connector_extra_config",
                "it believes whoever can reach it" if settings.allow_public_peers else "it trusts private networks",
                SECRET_VARIABLE,
            )
        edges = edges or Edges(listen=partial(Listener, seal=self._seal), connect=partial(Client, seal=self._seal))
        self._config = config
        self._settings = settings
        self._incarnation = draw()
        self._orders: list[Order] = []
        self._traces: dict[str, Headers] = {}
        self._tally = Tally()
        transfer = config.kv_transfer_config
        parts = (config, settings, continuation, self._seal, self._incarnation, edges, self._tally)
        self._producer = Producer(*parts, staged) if transfer.is_kv_producer else None
        self._consumer = Consumer(*parts) if transfer.is_kv_consumer else None

    def set_workers(self, handshakes: dict[tuple[int, int], Any]) -> None:
        """What the workers hold. Metadata of other connectors (MultiConnector passes it on) is left alone."""
        workers = [value.worker for _, value in sorted(handshakes.items()) if isinstance(value, Handshake)]
        if not workers:
            return
        parallel = self._config.parallel_config
        layout = EngineLayout(
            incarnation=self._incarnation,
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            dp_rank=parallel.data_parallel_index,
            fingerprint=fingerprint(self._config, self._settings.model_id),
            workers=tuple(workers),
        )
        self._tally.add("layout", 1, compatibility(layout))
        if self._producer:
            self._producer.describe(layout)

    def on_new_request(self, request: EngineRequest) -> None:
        params = request.kv_transfer_params
        if self._consumer and isinstance(params, dict) and params.get("do_remote_prefill") is True:
            self._consumer.arrived(request)
        if self._producer and isinstance(params, dict) and params.get("do_remote_decode") is True:
            self._producer.arrived(request)

    def get_num_new_matched_tokens(self, request: EngineRequest, local_tokens: int) -> tuple[int | None, bool]:
        tokens = self._consumer.available(request, local_tokens) if self._consumer else 0
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: EngineRequest, blocks: KVCacheBlocks, external_tokens: int) -> None:
        order = self._consumer.allocated(request, blocks, external_tokens) if self._consumer else None
        if order:
            self._orders.append(order)
            if request.trace_headers:
                self._traces[order.request] = dict(request.trace_headers)

    def build_connector_meta(self, output: SchedulerOutput) -> StepMetadata:
        orders, self._orders = self._orders, []
        traces, self._traces = self._traces, {}
        metadata = StepMetadata(orders, traces=traces)
        if self._consumer:
            metadata.sighted = self._consumer.take_sighted()
        if self._producer:
            metadata.released, metadata.step = self._producer.take_released(), self._producer.scheduled(output)
            metadata.written = self._producer.take_written()
        return metadata

    def take_stats(self) -> TransferStats | None:
        """Statistics since the last call, None when nothing happened."""
        return self._tally.take()

    def update_connector_output(self, finished: set[str] | None, failed: set[str], executed: object = None) -> None:
        if self._producer and isinstance(executed, Executed):
            self._producer.executed(executed.step)
        for request_id in finished or ():
            if self._consumer:
                self._consumer.loaded(request_id, request_id in failed)

    def request_finished(
        self, request: EngineRequest, blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks stay, and the parameters for whoever decodes."""
        from vllm.v1.request import RequestStatus

        if self._consumer:
            self._consumer.dropped(request)
        params = request.kv_transfer_params
        wanted = self._producer and isinstance(params, dict) and params.get("do_remote_decode") is True
        complete = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        offer = self._producer.finished(request, blocks) if self._producer and wanted and complete else None
        if offer is not None:
            # Routers that know vLLM's push mode keep who the engine is, and from the second request on send both legs
            # of a request at once.
            mode = {"transfer_mode": "push"} if self._settings.streaming else {}
            return True, {**offer.to_params(self._seal), **mode}
        if self._producer:
            self._producer.ended(request)
        return False, None

    def shutdown(self) -> None:
        for role in (self._producer, self._consumer):
            if role:
                role.close()
