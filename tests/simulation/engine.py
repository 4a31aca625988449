"""A model of vLLM's engine core around the real scheduler half and the real readers.

It follows vLLM's own order of calls, reuses the block freed last first, and fails where vLLM would fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.v1.request import RequestStatus

from kvferry.geometry import Span
from kvferry.protocol.grants import Grant
from kvferry.protocol.loads import Expected, Load, State
from kvferry.protocol.messages import (
    Claim,
    Gone,
    Granted,
    Hello,
    Renew,
    Renewed,
    Reply,
    Request,
    Waiting,
    decode_reply,
)
from kvferry.vllm.metadata import Executed
from kvferry.vllm.scheduler import Edges, SchedulerHalf

from . import invariants
from .invariants import require
from .network import Client, Listener
from .place import Place, Shape
from .requests import Pool, SimulatedRequest
from .worker import Step, Work, Worker, kind_of

Respond = Callable[[bytes], None]
Answer = Callable[[Request, Respond], bytes | None]
Tick = Callable[[], float | None]

PORT = 5600
MAX_RUNNING = 4


class Core:
    """One life of an engine core, from its start until it is killed.

    Attributes:
        requests: all that vLLM knows, finished ones whose blocks stay included.
    """

    def __init__(self, place: Place, host: str, shape: Shape) -> None:
        self.place, self.world, self.host, self.shape = place, place.world, host, shape
        self.alive = True
        self.requests: dict[str, SimulatedRequest] = {}
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: list[SimulatedRequest] = []
        self.pool = Pool(shape.blocks, shape.block_tokens)
        self.preempt_next = False
        self._client: Client | None = None
        self._steps: deque[Step] = deque()
        self._deferred: list[tuple[Step, list[int]]] = []
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._failing: set[str] = set()
        self._reports: dict[tuple[str, str], int] = {}
        self._heard: dict[str, float] = {}  # when a producer last said that it has a request
        self._unchecked: list[tuple[Request, Reply]] = []
        self._cleanup = self._awake = self._busy = False
        settings = msgspec.structs.replace(place.settings, side_channel_host=host, side_channel_port=PORT)
        edges = Edges(place.clock(), self._listen, self._connect)
        self.half = SchedulerHalf(_config(shape), settings, edges)
        self.incarnation = self.half._incarnation
        self.workers = [Worker(self, (pp, tp)) for pp in range(shape.pp) for tp in range(shape.tp)]
        place.cores.append(self)
        self.half.set_workers({(w.cache.pp_rank, w.cache.tp_rank): w.handshake for w in self.workers})

    @property
    def grants(self) -> dict[str, Grant]:
        """Of prefills that have finished, by name."""
        return self.half._producer._grants._grants if self.half._producer else {}

    @property
    def open_grants(self) -> dict[str, Grant]:
        """Of prefills that go on, by name."""
        return self.half._producer._grants._open if self.half._producer else {}

    @property
    def loads(self) -> dict[str, Load]:
        return self.half._consumer._loads._loads if self.half._consumer else {}

    @property
    def expected(self) -> dict[str, Expected]:
        return self.half._consumer._loads._expected if self.half._consumer else {}

    def load_state(self, request: str) -> str:
        if request in self.expected:
            return "load:expected"
        load = self.loads.get(request)
        return f"load:{load.state.name.lower()}" if load else "load:none"

    def cover(self, request: str, event: str) -> None:
        """Something happens to a request, wherever its load is."""
        self.world.cover(self.load_state(request), event)
        for worker in self.workers:
            self.world.cover(f"reader:{worker.where(request)}", event)

    # The side channel

    def _listen(self, host: str, port: int, answer: Answer, tick: Tick) -> Listener:
        return Listener(self.place.network, self, (host, port), partial(self._answer, answer), tick)

    def _connect(self, name: str, tick: Tick) -> Client:
        self._client = Client(self.place.network, self.host, self, tick, self._answered)
        return self._client

    def _answer(self, answer: Answer, message: Request, respond: Respond) -> bytes | None:
        before = invariants.picture(self)

        def later(body: bytes) -> None:
            self._unchecked.append((message, decode_reply(body)))
            if not self._busy:
                self._check_answers()
            respond(body)

        with self._before_checks():
            body = answer(message, later)
            if body is None:
                self.world.tell("{} keeps {}", self.host, message)
                return None
            reply = decode_reply(body)
            self._unchecked.insert(0, (message, reply))
        if isinstance(reply, Gone):
            after = invariants.picture(self)
            changed = [name for name, grant in after.items() if grant != before[name]]
            require(not changed, "I5", "{} was refused and changed {}", message, changed)
        return body

    @contextmanager
    def _before_checks(self) -> Iterator[None]:
        """What is answered to kept messages meanwhile is checked when the ledger knows what was the news."""
        self._busy, before = True, self._busy
        yield
        self._busy = before
        if not before:
            self._check_answers()

    def _check_answers(self) -> None:
        while self._unchecked:
            self._check_answer(*self._unchecked.pop(0))

    def _check_answer(self, message: Request, reply: Reply) -> None:
        self.world.tell("{} answers {} to {}", self.host, reply, message)
        ours = message.incarnation == self.incarnation
        ledger = self.place.ledger
        states = [ledger.state(self.incarnation, name) if ours else "foreign" for name in _subjects(message)]
        ledger.answered(self.incarnation, message, reply)
        if isinstance(reply, Granted):
            invariants.readable(self, message.request, reply)
        for state in states:
            self.world.cover(f"grant:{state}", f"{type(message).__name__} {kind_of(reply)}")

    def _answered(self, message: Request, reply: Reply | None) -> None:
        claims = [message.claim] if isinstance(message, Claim) else []
        claims += [claim for _, claim in message.claims] if isinstance(message, Renew) else []
        for claim in claims:
            name = next((name for name, load in self.loads.items() if load.claim == claim), "")
            if isinstance(reply, Waiting) and reply.known:
                self._heard[name] = self.world.now
            gone = isinstance(reply, Renewed) and claim in reply.gone
            self.world.cover(self.load_state(name), f"{type(message).__name__} {'Gone' if gone else kind_of(reply)}")

    # Requests come and go

    def add(self, request: SimulatedRequest) -> None:
        source = (request.kv_transfer_params or {}).get("remote_request_id")
        self.world.tell("{} gets {}, prefilled as {}", self.host, request.request_id, source)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        opened = set(self.open_grants)
        self.half.on_new_request(request)
        for name in set(self.open_grants) - opened:
            request.transfer = name
            self.place.ledger.opened(self.incarnation, name, self.open_grants[name].nonce)
        self._wake()

    def abort(self, request: SimulatedRequest) -> None:
        if request.finished:
            return
        name = request.request_id
        self.world.tell("{} aborts {} in {}", self.host, name, request.status.name)
        self.cover(name, "abort")
        loading = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and name not in self._received
        self._received.discard(name)
        self._failed.discard(name)
        self._finish(request, RequestStatus.FINISHED_ABORTED, stay=loading)

    def kill(self) -> None:
        """The process dies, with whatever it holds."""
        self.world.tell("{} is killed", self.host)
        self.alive = False
        for name in (*self.grants, *self.open_grants):
            self.world.cover(f"grant:{self.place.ledger.state(self.incarnation, name)}", "kill")
        for name in (*self.loads, *self.expected):
            self.cover(name, "kill")
        for request in self.requests.values():
            if request.ended is None:
                self._end(request, "lost", None)

    def unrest(self) -> dict[str, Any]:
        """What is left of requests anywhere in this engine, by where it is."""
        left: dict[str, Any] = {
            "requests": {name: request.status.name for name, request in self.requests.items()},
            "grants": [*self.grants, *self.open_grants],
            "loads": [*self.loads, *self.expected],
            "claims": list(self._client.pending) if self._client else [],
            "blocks": set(self.pool.users) - set(self.pool.free),
            **{worker.name: worker.unrest() for worker in self.workers},
        }
        return {where: what for where, what in left.items() if what}

    def _finish(self, request: SimulatedRequest, status: RequestStatus, stay: bool = False) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        request.status = status
        blocks = request.blocks[: -(-request.num_computed_tokens // self.shape.block_tokens)]
        name = request.name
        with self._before_checks():
            held, params = self.half.request_finished(request, (blocks,))
            if held:
                require(params["remote_request_id"] == name, "I5", "{} is offered as {}", name, params)
                self.place.ledger.offered(self.incarnation, name, params["kvferry"]["nonce"], [blocks])
            else:
                self.place.ledger.closed(self.incarnation, name)
        if not held and not stay:
            self._free(request)
        self._cleanup = True
        self._wake()
        self._end(request, status.name, params)

    @staticmethod
    def _end(request: SimulatedRequest, how: str, params: dict[str, Any] | None) -> None:
        require(request.ended is None, "I3", "{} ends twice", request.request_id)
        request.ended = how
        request.on_end(how, params)

    def _free(self, request: SimulatedRequest) -> None:
        require(request.finished, "I3", "{} is freed before it has ended", request.request_id)
        self._give_back(request)
        del self.requests[request.request_id]

    def _give_back(self, request: SimulatedRequest) -> None:
        """Blocks return to the pool once no step under way can touch them."""
        blocks, request.blocks = request.blocks[::-1], []
        if self._steps:
            self._deferred.append((self._steps[-1], blocks))
        else:
            self.pool.release(blocks)

    # Steps

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            self.world.at(self.world.soon(self.shape.pause), self._turn, self)

    def _turn(self) -> None:
        """vLLM's loop: without a request it sleeps, and no hook is called."""
        self._awake = False
        if not self.requests and not self._cleanup:
            return
        if len(self._steps) < self.shape.depth:
            self._cleanup = False
            self._dispatch(self._schedule())
        self._wake()

    def _dispatch(self, step: Step) -> None:
        """Every worker executes every step, in order, each in its own time."""
        self._steps.append(step)
        now = self.world.now
        for worker in self.workers:
            worker.free_at = max(now, worker.free_at) + self.world.soon(self.shape.pause)
            self.world.at(worker.free_at - now, partial(self._execute, worker, step), self)

    def _execute(self, worker: Worker, step: Step) -> None:
        worker.execute(step)
        if len(step.sent) == len(self.workers):
            self._update(step)

    def _schedule(self) -> Step:
        work: list[Work] = []
        if self._run_on(work):
            self._admit(work)
        metadata = self.half.build_connector_meta(_output(work))
        for order in metadata.loads:
            self.requests[order.request].order = order
        return Step(metadata, work)

    def _run_on(self, work: list[Work]) -> bool:
        """Schedule what runs; False when something was preempted, and nothing may be admitted."""
        preempted = self.preempt_next and self._preempt()
        self.preempt_next = False
        for request in list(self.running):
            while request in self.running and not request.busy:
                if self.pool.take(request, [], self._stop(request)):
                    self._run(request, work)
                else:
                    preempted = self._preempt()
        return not preempted

    def _preempt(self) -> bool:
        idle = [request for request in self.running if not request.busy]
        if not idle:
            return False
        followed = [request for request in idle if request.name in self.open_grants]
        victim = (followed or idle)[-1]
        self.world.tell("{} preempts {}", self.host, victim.request_id)
        self.world.cover("run:remote" if victim.order else "run:local", "preempt")
        self.running.remove(victim)
        self._give_back(victim)
        victim.num_computed_tokens, victim.status = 0, RequestStatus.PREEMPTED
        victim.told = 0 if victim.told is not None else None
        if victim.name in self.open_grants:
            self.world.cover(f"grant:{self.place.ledger.state(self.incarnation, victim.name)}", "preempt")
        self.waiting.appendleft(victim)
        return True

    def _stop(self, request: SimulatedRequest) -> int:
        return min(request.known, request.num_computed_tokens + self.shape.chunk)

    def _run(self, request: SimulatedRequest, work: list[Work]) -> None:
        span = Span(request.num_computed_tokens, self._stop(request))
        work.append(Work(request, list(request.blocks), span))
        request.num_computed_tokens, request.busy = span.stop, True

    def _admit(self, work: list[Work]) -> None:
        # Whoever holds blocks goes first, or nobody might ever get any.
        for request in sorted(self.waiting, key=lambda request: not request.blocks):
            if len(self.running) == MAX_RUNNING:
                break
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                if request.request_id not in self._received:
                    continue
                self._promote(request)
            hit, remote = self._find(request)
            if remote is None:
                continue
            self._other_threads()
            if not self._allocate(request, hit, remote):
                break
            if not remote:
                self.waiting.remove(request)
                self.running.append(request)
                request.status = RequestStatus.RUNNING
                self._run(request, work)

    def _allocate(self, request: SimulatedRequest, hit: list[int], remote: int) -> bool:
        """Blocks for the next step, or for all there is of a request that loads; False where there are too few."""
        computed = request.num_computed_tokens or len(hit) * self.shape.block_tokens
        if not self.pool.take(
            request, hit, request.known if remote else min(request.known, computed + self.shape.chunk)
        ):
            return False
        request.num_computed_tokens = computed + remote
        blocks = SimpleNamespace(get_block_ids=lambda: (list(request.blocks),))
        self.half.update_state_after_alloc(request, blocks, remote)
        if remote:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        return True

    def _find(self, request: SimulatedRequest) -> tuple[list[int], int | None]:
        """Blocks found here, and how many tokens more can be loaded; None while that is not known."""
        if request.num_computed_tokens:
            return [], 0
        hit = self.pool.hit(request)
        remote, _ = self.half.get_num_new_matched_tokens(request, len(hit) * self.shape.block_tokens)
        if remote is None:
            waited = self.world.now - max(request.arrived, self._heard.get(request.request_id, 0.0))
            require(waited <= self.place.settings.claim_timeout, "I8", "{} still waits", request.request_id)
        elif load := self.loads.get(request.request_id):
            late = load.state is State.CLAIMING or load.lost
            how = "is too late" if late else "adds to local blocks" if hit and remote else "is not needed"
            self.world.cover(self.load_state(request.request_id), "loads" if remote and not hit else how)
        elif request.request_id in self.expected:
            self.world.cover("load:expected", "is too late")
        return hit, remote

    def _other_threads(self) -> None:
        """Between two hooks, the client's and the listener's thread may have had their turns."""
        if self.world.chance(0.2):
            self.world.interleave(self.host)

    def _promote(self, request: SimulatedRequest) -> None:
        """The load of a request has ended on every worker."""
        name = request.request_id
        self._received.remove(name)
        self.world.cover("run:loaded", "failed" if name in self._failed else "held")
        if name in self._failed:
            self._failed.remove(name)
            self._give_back(request)
        else:
            invariants.runnable(self, request)
            self.pool.cache(request)
            request.num_computed_tokens = min(request.num_computed_tokens, request.known - 1)
        request.status = RequestStatus.WAITING

    def _update(self, step: Step) -> None:
        require(self._steps.popleft() is step, "model", "steps end in order")
        received, sent = self._aggregate("received", step.received), self._aggregate("sent", step.sent)
        self._failing |= step.failed
        failed = self._failing & set(received)
        self._handle_failed(failed)
        for work in step.work:
            work.request.busy = False
            if not work.request.finished:
                self._computed(work.request)
        self._transfers(received, sent, failed, step.metadata.step)
        if self.shape.policy == "fail":
            for name in sorted(self._failed & self._received):
                self._failed.remove(name)
                self._received.remove(name)
                self._finish(self.requests[name], RequestStatus.FINISHED_ERROR)
        for last, blocks in self._deferred:
            if last is step:
                self.pool.release(blocks)
        self._deferred = [entry for entry in self._deferred if entry[0] is not step]

    def _computed(self, request: SimulatedRequest) -> None:
        self.pool.cache(request)
        if request.num_computed_tokens == request.known:
            request.known += 1
            if request.known == len(request.tokens):
                self._finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)

    def _handle_failed(self, failed: set[str]) -> None:
        """Requests that every worker has reported, and some as failed."""
        self._failing -= failed
        for name in failed:
            request = self.requests.get(name)
            if request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._failed.add(name)
                request.num_computed_tokens = 0

    def _aggregate(self, what: str, reports: list[set[str]]) -> list[str]:
        """Requests that every worker has reported by now."""
        complete = []
        for name in sorted(name for report in reports for name in report):
            left = self._reports.pop((what, name), len(self.workers)) - 1
            if left:
                self._reports[what, name] = left
            else:
                complete.append(name)
        return complete

    def _transfers(self, received: list[str], sent: list[str], failed: set[str], executed: int | None) -> None:
        told = None if executed is None else Executed(executed)
        self.half.update_connector_output(set(received), failed, told)
        for name in (*received, *sent):
            require(name in self.requests, "I3", "{} is reported to {}, which does not know it", name, self.host)
        for name in received:
            request = self.requests[name]
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._received.add(name)
            else:
                self._free(request)
        for name in sent:
            for claim in self.place.ledger.freed(self.incarnation, self.requests[name].name):
                self.place.lose(claim)
            self.world.tell("{} frees the blocks of {}", self.host, name)
            self._free(self.requests[name])


def _config(shape: Shape) -> Any:
    """As much of vLLM's configuration as the scheduler half looks at."""
    parallel = SimpleNamespace(
        tensor_parallel_size=shape.tp,
        pipeline_parallel_size=shape.pp,
        prefill_context_parallel_size=1,
        data_parallel_index=0,
    )
    transfer = SimpleNamespace(
        is_kv_producer=shape.role != "kv_consumer",
        is_kv_consumer=shape.role != "kv_producer",
        engine_id="engine",
        kv_load_failure_policy=shape.policy,
    )
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)


def _output(work: list[Work]) -> Any:
    """As much of a step as the scheduler half looks at."""
    new: list[Any] = []
    cached: list[tuple[Any, ...]] = []
    resumed: set[str] = set()
    for one in work:
        request, told = one.request, one.request.told
        name, request.told = request.request_id, len(one.blocks)
        if told is None:
            new.append(SimpleNamespace(req_id=name, block_ids=(list(one.blocks),), num_computed_tokens=one.span.start))
            continue
        if told == 0:
            resumed.add(name)
        fresh = (one.blocks[told:],) if len(one.blocks) > told else None
        cached.append((name, fresh, one.span.start))
    names, blocks, computed = map(list, zip(*cached, strict=True)) if cached else ([], [], [])
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names, new_block_ids=blocks, num_computed_tokens=computed, resumed_req_ids=resumed
        ),
        num_scheduled_tokens={one.request.request_id: one.span.size for one in work},
    )


def _subjects(message: Request) -> list[str]:
    """Producer requests that a message is about."""
    if isinstance(message, Renew):
        return [name for name, _ in message.claims]
    return [] if isinstance(message, Hello) else [message.request]
