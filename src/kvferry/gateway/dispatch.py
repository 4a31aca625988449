"""The two legs of a request: sending them, trying again, and giving up honestly.

Nothing of an answer reaches the client before ``Dispatcher.open`` has returned, so until then everything may be tried
again; after it nothing is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
from msgspec import Raw

from kvferry.gateway import bodies
from kvferry.gateway.answers import BrokenAnswerError, answer_object, cached_tokens, error_in, whole_events
from kvferry.gateway.balance import Balancer, SeenPrompts
from kvferry.gateway.bodies import Body, Endpoint
from kvferry.gateway.errors import ApiError
from kvferry.gateway.health import Fleet, Instance, Rank
from kvferry.gateway.metrics import Metrics
from kvferry.gateway.settings import Role, Settings
from kvferry.protocol.authentication import Seal
from kvferry.protocol.identity import draw
from kvferry.protocol.messages import Offer, Transfer

RANK_HEADER = "X-data-parallel-rank"
RETRY_BURST = 10.0
PREFILL_PATIENCE_S = 1.0
BROKEN = (BrokenAnswerError, aiohttp.ClientError, OSError)
"""What reading an instance's answer may raise: it is not what it must be, or did not come; a time-out is an OSError."""


def failure(error: Exception, retry: bool = False) -> ApiError:
    """What the client is told when an instance's answer is ``BROKEN``."""
    if isinstance(error, TimeoutError):
        return ApiError(504, "an instance did not answer in time", retry)
    if isinstance(error, BrokenAnswerError):
        return ApiError(502, f"an instance {error}", retry)
    said = "cannot be reached" if isinstance(error, aiohttp.ClientConnectorError) else "broke off its answer"
    return ApiError(502, f"an instance {said}", retry)


@dataclass
class Job:
    """One prompt to be answered.

    Attributes:
        headers: for both legs.
        resources: what must be closed when the answer has ended, or has lost its client.
        alone: why decode computes the prompt itself; None while both legs are to be sent.
        cached: what prefill says of it, see ``answers.corrected``.
        prefilling: ends with prefill's answer, where decode's began before it.
        prefill, decode, retries, prefill_s: what became of it.
        tried: ranks that failed it.
    """

    endpoint: Endpoint
    body: Body
    headers: dict[str, str]
    resources: contextlib.ExitStack
    alone: str | None = None
    cached: Raw | None = None
    prefilling: asyncio.Task[None] | None = None
    prefill: str = "-"
    decode: str = "-"
    retries: Counter[Role] = field(default_factory=Counter)
    prefill_s: float = 0.0
    tried: set[Rank] = field(default_factory=set)

    def __str__(self) -> str:
        """For the access log."""
        legs = f"prefill={self.prefill} decode={self.decode} plain={self.alone or '-'} retries={self.retries.total()}"
        return f"{legs} prefill_ms={1e3 * self.prefill_s:.1f}"

    @property
    def prompt(self) -> bytes:
        return bytes(self.body.get(self.endpoint.prompt, b""))

    def tokens(self, role: Role) -> int:
        """What a leg is estimated to occupy."""
        answer = bodies.answer_tokens(self.body) if role is Role.DECODE else 0
        return bodies.prompt_tokens(self.endpoint, self.body) + answer


@dataclass(frozen=True)
class Grant:
    """A prefilled prompt that waits at ``rank``; ``parameters`` go to decode as they came."""

    rank: Rank
    parameters: Raw


@dataclass(frozen=True)
class Opened:
    """A decode answer whose status is good and whose first piece is here.

    Attributes:
        whole: the answer, taken apart; None where it is a stream.
        first, rest: a stream's whole events, as ``answers.whole_events`` gives them; any of ``BROKEN`` when it does not
            end as it should.
    """

    whole: Body | None
    first: bytes
    rest: AsyncIterator[bytes]


class Strategy(Protocol):
    """In which order the legs of a job are sent.

    Retries, deadlines, accounting and the client's side are the same for all.
    """

    async def open(self, legs: Dispatcher, job: Job) -> Opened:
        """Both legs up to the first piece of decode's answer.

        Raises:
            ApiError: a leg failed; nothing is left at any instance. ``retry`` says whether to call again.
        """


class PrefillFirst:
    """Decode is asked when prefill has answered, with the parameters of that answer."""

    async def open(self, legs: Dispatcher, job: Job) -> Opened:
        if job.alone:
            return await legs.decode(job, None)
        rank = legs.choose(Role.PREFILL, job)
        return await legs.decode(job, await legs.prefill(job, rank, bodies.PREFILL_PARAMETERS))


@dataclass(frozen=True)
class BothAtOnce:
    """Decode is asked together with prefill, and loads what prefill has ready while the rest is computed.

    The gateway makes the offer itself: it draws the transfer's name and knows where the prefill rank answers claims.
    Every second try is done one leg after the other.
    """

    seal: Seal

    async def open(self, legs: Dispatcher, job: Job) -> Opened:
        rank = None if job.alone or job.retries else legs.choose(Role.PREFILL, job)
        if rank is None or rank.side_channel is None:
            return await PrefillFirst().open(legs, job)
        host, port, incarnation = rank.side_channel
        transfer = Transfer(draw(), draw())
        offer = Offer.ahead((host, port), incarnation, transfer)
        grant = Grant(rank, Raw(bodies.encode(offer.to_params(self.seal))))

        async def prefill() -> None:
            held = await legs.prefill(job, rank, Raw(bodies.encode(transfer.to_params())))
            if held is not None and incarnation.encode() not in bytes(held.parameters):
                # Prefill was started anew in between, and decode looked for it in vain.
                legs.release(held.parameters)
                legs.leave_to_decode(job, "restarted")

        tasks = prefilling, decoding = asyncio.create_task(prefill()), asyncio.create_task(legs.decode(job, grant))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not decoding.done() and prefilling.exception() is None:
                await asyncio.wait([decoding])
            if not prefilling.done() and decoding.exception() is None:
                legs.leave_prefilling(job, prefilling, grant)
                return decoding.result()
        finally:
            if job.prefilling is None:
                for task in tasks:
                    task.cancel()
                failed, opened = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(opened, Opened):
            if failed:
                legs.leave_to_decode(job, "prefill_failed")
            return opened
        raise failed if failed and isinstance(opened, asyncio.CancelledError) else opened


class RetryBudget:
    """Lets through so many retries for each request that they cannot multiply the load of a failing fleet."""

    def __init__(self, ratio: float, burst: float = RETRY_BURST) -> None:
        self._ratio, self._burst, self._left = ratio, burst, burst

    def earn(self) -> None:
        self._left = min(self._burst, self._left + self._ratio)

    def spend(self) -> bool:
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass
class Dispatcher:
    """Sends the legs of jobs.

    Attributes:
        release: gives back the grant of these parameters; must not wait.
    """

    settings: Settings
    fleet: Fleet
    session: aiohttp.ClientSession
    metrics: Metrics
    release: Callable[[Raw], None]
    strategy: Strategy

    def __post_init__(self) -> None:
        policies = {Role.PREFILL: self.settings.prefill_policy, Role.DECODE: self.settings.decode_policy}
        self._balancers = {role: Balancer(policy) for role, policy in policies.items()}
        self._budget = RetryBudget(self.settings.retry_ratio)
        self._seen = SeenPrompts()

    async def open(self, job: Job) -> Opened:
        """Both legs, until the first piece of the answer is here. What fails is tried again where another rank may do
        better and the bounds allow it; when prefill cannot do it, decode does, if it may.

        Raises:
            ApiError: an instance refused the request, or all tries failed.
        """
        self._budget.earn()
        if job.alone or self._is_short(job):
            self.leave_to_decode(job, job.alone or "short_prompt")
        while True:
            try:
                return await self.strategy.open(self, job)
            except ApiError as error:
                if self._may_retry(job, error):
                    await self._retry(job, error.leg)
                elif error.retry and error.leg is Role.PREFILL and error.status != 429 and self.settings.plain_decode:
                    self.leave_to_decode(job, "prefill_failed")
                else:
                    raise

    def _may_retry(self, job: Job, error: ApiError) -> bool:
        usable = self.fleet.usable(error.leg)
        if error.status in (429, 503):  # those that said so asked to be left alone
            usable = [rank for rank in usable if rank not in job.tried]
        bounded = job.retries[error.leg] + 1 < self.settings.attempts
        return bool(error.retry and usable and bounded and self._budget.spend())

    async def _retry(self, job: Job, leg: Role) -> None:
        self.metrics.retries(leg).inc()
        pause = self.settings.backoff * 2 ** job.retries[leg] * random.uniform(0.5, 1.0)
        job.retries[leg] += 1
        await asyncio.sleep(pause)

    def leave_prefilling(self, job: Job, prefilling: asyncio.Task[None], grant: Grant) -> None:
        """Decode has begun to answer; that prefill has not ends with the job at the latest, and is no failure of it."""

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                self.release(grant.parameters)  # its answer may be on its way, and decode may not have loaded anything
            elif task.exception() is not None:
                self.leave_to_decode(job, "prefill_failed")

        job.prefilling = prefilling
        prefilling.add_done_callback(ended)
        job.resources.callback(prefilling.cancel)

    async def cached(self, job: Job) -> Raw | None:
        """What prefill says was cached, once it has answered. What decode took from prefill was computed by then, so
        only an answer that is not needed is waited for in vain, and not for long.
        """
        if job.prefilling is not None and not job.prefilling.done():
            await asyncio.wait([job.prefilling], timeout=PREFILL_PATIENCE_S)
            if not job.prefilling.done():
                job.prefilling.cancel()
                self.leave_to_decode(job, "prefill_late")
        return job.cached

    def leave_to_decode(self, job: Job, reason: str) -> None:
        """Decode has to prefill this prompt; never silently."""
        job.alone, job.cached = reason, None
        self.metrics.plain(reason).inc()

    def _is_short(self, job: Job) -> bool:
        """Whether so little of the prompt is left to compute on some decode rank that prefill is not worth it."""
        limit = self.settings.skip_prefill_below
        if not limit:
            return False
        seen = max((self._seen.fraction(rank.name, job.prompt) for rank in self.fleet.usable(Role.DECODE)), default=0.0)
        return job.tokens(Role.PREFILL) * (1 - seen) < limit

    def choose(self, role: Role, job: Job, partner: Instance | None = None) -> Rank:
        """A rank for a leg that goes with ``partner``: one that has not failed this job, else one that has.

        Raises:
            ApiError: there is none.
        """
        usable = self.fleet.usable(role, partner)
        if not usable:
            raise ApiError(503, f"no {role} instance is available", True, role, headers={"retry-after": "1"})
        candidates = [rank for rank in usable if rank not in job.tried] or usable
        key = bodies.affinity_key(job.endpoint, job.body)
        return self._balancers[role].choose(candidates, key, candidates[0].cost(job.tokens(role)))

    @contextlib.contextmanager
    def _leg(self, role: Role, job: Job, rank: Rank) -> Iterator[None]:
        """Whatever goes wrong with a leg inside is an ``ApiError``, and counts against the rank unless the instance
        only refused the request.
        """
        setattr(job, role, rank.name)
        url = rank.instance.spec.url
        try:
            yield
        except (ApiError, *BROKEN) as error:
            told = error if isinstance(error, ApiError) else failure(error, retry=True)
            told.leg = role
            job.tried.add(rank)
            self.metrics.legs(role, url, str(told.status) if told is error else "failed").inc()
            if told.status < 500:
                rank.breaker.reset()
            else:
                rank.breaker.failed()
            if isinstance(getattr(error, "os_error", None), ConnectionRefusedError):
                rank.instance.missed()
            raise told from None
        self.metrics.legs(role, url, "200").inc()
        rank.breaker.reset()
        rank.instance.answered()

    async def _post(self, rank: Rank, job: Job, body: bytes, **limits: float) -> aiohttp.ClientResponse:
        """A leg's answer, from its head on. Raises ``ApiError`` where it is not 200, and what is in ``BROKEN``."""
        headers = job.headers if rank.header is None else {**job.headers, RANK_HEADER: rank.header}
        url = rank.instance.spec.url + job.endpoint.path
        timeout = aiohttp.ClientTimeout(sock_connect=self.settings.connect_timeout, **limits)
        response = await self.session.post(url, data=body, headers=headers, timeout=timeout, allow_redirects=False)
        if response.status == 200:
            return response
        status = response.status if response.status >= 400 else 502
        raise ApiError.of_instance(status, await response.read(), response.headers)

    async def prefill(self, job: Job, rank: Rank, parameters: Raw) -> Grant | None:
        """A prompt prefilled on ``rank``; None where it holds nothing. Raises ``ApiError``."""
        started = time.perf_counter()
        with self._leg(Role.PREFILL, job, rank), rank.working(job.tokens(Role.PREFILL)):
            body = bodies.prefill_body(job.endpoint, job.body, parameters)
            response = await self._post(rank, job, body, total=self.settings.prefill_timeout)
            answer = answer_object(await response.read())
        job.prefill_s = time.perf_counter() - started
        self.metrics.prefill.observe(job.prefill_s)
        held = answer.get("kv_transfer_params")
        if held is None or bytes(held)[:1] != b"{":
            self.leave_to_decode(job, "no_parameters")
            return None
        job.cached = cached_tokens(job.endpoint, answer)
        return Grant(rank, held)

    async def decode(self, job: Job, grant: Grant | None) -> Opened:
        """The answer to a job, from its first piece on; on any failure the grant is given back.

        Raises:
            ApiError: the request was refused, or this try failed.
        """
        with contextlib.ExitStack() as unread, contextlib.ExitStack() as used:
            if grant is not None:
                unread.callback(self.release, grant.parameters)
            rank = self.choose(Role.DECODE, job, grant.rank.instance if grant else None)
            with self._leg(Role.DECODE, job, rank):
                used.enter_context(rank.working(job.tokens(Role.DECODE)))
                body = bodies.decode_body(job.body, grant.parameters if grant else None)
                limits = {"sock_read": self.settings.idle_timeout} if bodies.given(job.body, "stream") else {}
                response = await self._post(rank, job, body, **limits)
                used.callback(response.close)
                opened = await _opened(job.endpoint, response)
            job.resources.push(used.pop_all())
            unread.pop_all()
        if self.settings.skip_prefill_below:
            self._seen.add(rank.name, job.prompt)
        return opened


async def _opened(endpoint: Endpoint, response: aiohttp.ClientResponse) -> Opened:
    rest = whole_events(endpoint, response.content.iter_any())
    if response.content_type != "text/event-stream":
        try:
            return Opened(answer_object(await response.read()), b"", rest)
        except BROKEN as error:
            raise failure(error) from None  # it was computed, and may have had effects elsewhere
    opened = Opened(None, await anext(rest), rest)
    if (said := error_in(opened.first)) is not None:
        code = said.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 502
        raise ApiError(status, str(said.get("message", "the decode instance failed")), status >= 500)
    return opened
