"""The two legs of a request: sending them, trying again, and giving up honestly.

Nothing of an answer reaches the client before ``Dispatcher.open`` has returned, so until then everything may be tried
again; after it nothing is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import aiohttp
from msgspec import Raw

from kvferry.gateway import bodies
from kvferry.gateway.answers import BrokenAnswerError, answer_object, cached_tokens, error_in, whole_events
from kvferry.gateway.balance import Balancer, SeenPrompts
from kvferry.gateway.bodies import Body, Endpoint
from kvferry.gateway.errors import ApiError
from kvferry.gateway.health import Fleet, Rank
from kvferry.gateway.metrics import Metrics
from kvferry.gateway.settings import Role, Settings
from kvferry.protocol.authentication import Seal
from kvferry.protocol.identity import draw
from kvferry.protocol.messages import Offer, Transfer

RANK_HEADER = "X-data-parallel-rank"
RETRY_BURST = 10.0
BROKEN = (BrokenAnswerError, aiohttp.ClientError, OSError)
"""What reading an instance's answer may raise: it is not what it must be, or did not come; a time-out is an OSError."""

T = TypeVar("T")


def failure(error: Exception, retry: bool = False) -> ApiError:
    """What the client is told when an instance's answer is ``BROKEN``."""
    if isinstance(error, BrokenAnswerError):
        said = str(error)
    elif isinstance(error, TimeoutError):
        said = "did not answer in time"
    else:
        said = "cannot be reached" if isinstance(error, aiohttp.ClientConnectorError) else "broke off its answer"
    return ApiError(504 if isinstance(error, TimeoutError) else 502, f"an instance {said}", retry)


@dataclass
class Job:
    """One prompt to be answered.

    Attributes:
        headers: for both legs.
        deadline: for the first byte of its answer, on the event loop's clock.
        resources: what must be closed when the answer has ended, or has lost its client.
        plain: why it goes to decode alone; None for both legs.
        prefill, decode, alone, retries, prefill_s: what became of it.
        tried: ranks that failed it.
    """

    endpoint: Endpoint
    body: Body
    headers: dict[str, str]
    deadline: float
    resources: contextlib.ExitStack
    plain: str | None = None
    prefill: str = "-"
    decode: str = "-"
    alone: str = "-"
    retries: int = 0
    prefill_s: float = 0.0
    tried: set[Rank] = field(default_factory=set)

    def __str__(self) -> str:
        """For the access log."""
        legs = f"prefill={self.prefill} decode={self.decode} plain={self.alone} retries={self.retries}"
        return f"{legs} prefill_ms={1e3 * self.prefill_s:.1f}"

    @property
    def prompt(self) -> bytes:
        return bytes(self.body.get(self.endpoint.prompt, b""))


@dataclass(frozen=True)
class Grant:
    """A prefilled prompt that waits at ``rank``; ``parameters`` go to decode as they came."""

    rank: Rank
    parameters: Raw
    cached: Raw | None


@dataclass(frozen=True)
class Opened:
    """A decode answer whose status is good and whose first piece is here.

    Attributes:
        cached: see ``answers.corrected``.
        whole: the answer, taken apart; None where it is a stream.
        first, rest: a stream's whole events, as ``answers.whole_events`` gives them; any of ``BROKEN`` when it does not
            end as it should.
    """

    cached: Raw | None
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
        grant = await legs.prefill(job)
        return await legs.decode(job, grant)


@dataclass(frozen=True)
class BothAtOnce:
    """Decode is asked together with prefill, and loads what prefill has ready while the rest is computed.

    The gateway makes the offer itself: it draws the transfer's name and knows where the prefill rank answers claims.
    What goes wrong with prefill, and every second try, is done one leg after the other.
    """

    seal: Seal

    async def open(self, legs: Dispatcher, job: Job) -> Opened:
        rank = None if job.retries else legs.streaming_rank(job)
        if rank is None or rank.side_channel is None:
            return await PrefillFirst().open(legs, job)
        host, port, incarnation = rank.side_channel
        transfer = Transfer(draw(), draw())
        offer = Offer.ahead((host, port), incarnation, transfer)
        grant = Grant(rank, Raw(bodies.encode(offer.to_params(self.seal))), None)
        tasks: tuple[asyncio.Task[Grant | None], asyncio.Task[Opened]] = (
            asyncio.create_task(legs.prefill_on(job, [rank], Raw(bodies.encode(transfer.to_params())))),
            asyncio.create_task(legs.decode(job, grant)),
        )
        astray = False
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            held, opened = await asyncio.gather(*tasks, return_exceptions=True)
            if isinstance(held, Grant) and incarnation.encode() not in bytes(held.parameters):
                # Prefill was started anew in between, and decode looked for it in vain.
                astray = True
                legs.release(held.parameters)
        if isinstance(opened, Opened):
            if astray or not isinstance(held, Grant):
                legs.alone(job, "restarted" if astray else "no_parameters")
            return dataclasses.replace(opened, cached=held.cached if isinstance(held, Grant) else None)
        if not isinstance(opened, asyncio.CancelledError):
            raise opened
        if isinstance(held, ApiError) and held.retry:
            return await PrefillFirst().open(legs, job)
        assert isinstance(held, BaseException), "one of the two has failed"
        raise held


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
        settings, policies = self.settings, (self.settings.prefill_policy, self.settings.decode_policy)
        self._budget = RetryBudget(settings.retry_ratio)
        self._balancers = dict(zip((Role.PREFILL, Role.DECODE), map(Balancer, policies), strict=True))
        self._seen = SeenPrompts()
        connecting = settings.connect_timeout
        self._prefill_timeout = aiohttp.ClientTimeout(total=settings.prefill_timeout, sock_connect=connecting)
        self._stream_timeout = aiohttp.ClientTimeout(sock_read=settings.idle_timeout, sock_connect=connecting)
        self._whole_timeout = aiohttp.ClientTimeout(sock_connect=connecting)

    async def open(self, job: Job) -> Opened:
        """Both legs, until the first piece of the answer is here.

        Raises:
            ApiError: an instance refused the request, all tries failed, or the deadline has passed.
        """
        self._budget.earn()
        try:
            async with asyncio.timeout_at(job.deadline):
                return await self._tried(Role.DECODE, job, lambda: self.strategy.open(self, job))
        except TimeoutError:
            raise ApiError(504, f"there was no answer within {self.settings.deadline:g} s") from None

    async def _tried(self, role: Role, job: Job, leg: Callable[[], Awaitable[T]]) -> T:
        """What ``leg`` comes to, tried again where another rank may do better and the bounds allow it."""
        attempt = 1
        while True:
            try:
                return await leg()
            except ApiError as error:
                usable = self.fleet.usable(role)
                others = [rank for rank in usable if rank not in job.tried] if error.elsewhere else usable
                if not (error.retry and others and attempt < self.settings.attempts and self._budget.spend()):
                    raise
            job.retries += 1
            self.metrics.retries(role).inc()
            await asyncio.sleep(self.settings.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            attempt += 1

    @contextlib.contextmanager
    def _leg(self, role: Role, job: Job, usable: Sequence[Rank], tokens: int) -> Iterator[Rank]:
        """A rank for a leg: one that has not failed this job, else one that has. Whatever goes wrong with it inside is
        an ``ApiError``, and counts against the rank unless the instance only refused the request.
        """
        rank = self._choose(role, job, usable, tokens)
        job.tried.add(rank)
        setattr(job, role, rank.name)
        url = rank.instance.spec.url
        try:
            yield rank
        except (ApiError, *BROKEN) as error:
            told = error if isinstance(error, ApiError) else failure(error, retry=True)
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
        job.tried.discard(rank)

    def _choose(self, role: Role, job: Job, usable: Sequence[Rank], tokens: int) -> Rank:
        if not usable:
            raise ApiError(503, f"no {role} instance is available", True, headers={"retry-after": "1"})
        candidates = [rank for rank in usable if rank not in job.tried] or usable
        key = bodies.affinity_key(job.endpoint, job.body)
        return self._balancers[role].choose(candidates, key, candidates[0].cost(tokens))

    def streaming_rank(self, job: Job) -> Rank | None:
        """A prefill rank for both legs at once, None where there is none or decode does it all."""
        usable = [rank for rank in self.fleet.usable(Role.PREFILL) if rank.side_channel is not None]
        if not usable or job.plain or self._is_short(job):
            return None
        return self._choose(Role.PREFILL, job, usable, bodies.prompt_tokens(job.endpoint, job.body))

    async def _post(self, rank: Rank, job: Job, body: bytes, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """A leg's answer, from its head on. Raises ``ApiError`` where it is not 200, and what is in ``BROKEN``."""
        headers = job.headers if rank.header is None else {**job.headers, RANK_HEADER: rank.header}
        url = rank.instance.spec.url + job.endpoint.path
        response = await self.session.post(url, data=body, headers=headers, timeout=timeout, allow_redirects=False)
        if response.status == 200:
            return response
        status = response.status if response.status >= 400 else 502
        raise ApiError.of_instance(status, await response.read(), response.headers)

    async def prefill(self, job: Job) -> Grant | None:
        """A prefilled prompt; None where decode has to do it all, and may.

        Raises:
            ApiError: the request was refused, or no instance could do it.
        """
        reason = job.plain or ("short_prompt" if self._is_short(job) else None)
        if reason is None:
            try:
                if (grant := await self._tried(Role.PREFILL, job, lambda: self._prefill(job))) is not None:
                    return grant
                reason = "no_parameters"
            except ApiError as error:
                if not error.retry or error.status == 429 or not self.settings.plain_decode:
                    error.retry = False
                    raise
                reason = "prefill_failed"
        self.alone(job, reason)
        return None

    def alone(self, job: Job, reason: str) -> None:
        """Decode has to prefill this prompt; never silently."""
        job.alone = reason
        self.metrics.plain(reason).inc()

    def _is_short(self, job: Job) -> bool:
        """Whether so little of the prompt is left to compute on some decode rank that prefill is not worth it."""
        limit = self.settings.skip_prefill_below
        if not limit:
            return False
        seen = max((self._seen.fraction(rank.name, job.prompt) for rank in self.fleet.usable(Role.DECODE)), default=0.0)
        return bodies.prompt_tokens(job.endpoint, job.body) * (1 - seen) < limit

    async def _prefill(self, job: Job) -> Grant | None:
        return await self.prefill_on(job, self.fleet.usable(Role.PREFILL), bodies.PREFILL_PARAMETERS)

    async def prefill_on(self, job: Job, usable: Sequence[Rank], parameters: Raw) -> Grant | None:
        """A prompt prefilled on one of these ranks; None where it holds nothing. Raises ``ApiError``."""
        tokens, started = bodies.prompt_tokens(job.endpoint, job.body), time.perf_counter()
        with self._leg(Role.PREFILL, job, usable, tokens) as rank, rank.working(tokens):
            body = bodies.prefill_body(job.endpoint, job.body, parameters)
            response = await self._post(rank, job, body, self._prefill_timeout)
            answer = answer_object(await response.read())
        job.prefill_s = time.perf_counter() - started
        self.metrics.prefill.observe(job.prefill_s)
        held = answer.get("kv_transfer_params")
        if held is None or bytes(held)[:1] != b"{":
            return None
        return Grant(rank, held, cached_tokens(job.endpoint, answer))

    async def decode(self, job: Job, grant: Grant | None) -> Opened:
        """The answer to a job, from its first piece on; on any failure the grant is given back.

        Raises:
            ApiError: the request was refused, or this try failed.
        """
        usable = self.fleet.usable(Role.DECODE)
        suitable = [rank for rank in usable if grant is None or rank.instance.suits(grant.rank.instance)]
        tokens = bodies.prompt_tokens(job.endpoint, job.body) + bodies.answer_tokens(job.endpoint, job.body)
        with contextlib.ExitStack() as unread, contextlib.ExitStack() as used:
            if grant is not None:
                unread.callback(self.release, grant.parameters)
            with self._leg(Role.DECODE, job, suitable, tokens) as rank:
                used.enter_context(rank.working(tokens))
                body = bodies.decode_body(job.body, grant.parameters if grant else None)
                timeout = self._stream_timeout if bodies.streamed(job.body) else self._whole_timeout
                response = await self._post(rank, job, body, timeout)
                used.callback(response.close)
                opened = await _opened(job.endpoint, response, grant.cached if grant else None)
            job.resources.push(used.pop_all())
            unread.pop_all()
        if self.settings.skip_prefill_below:
            self._seen.add(rank.name, job.prompt)
        return opened


async def _opened(endpoint: Endpoint, response: aiohttp.ClientResponse, cached: Raw | None) -> Opened:
    rest = whole_events(endpoint, response.content.iter_any())
    if response.content_type != "text/event-stream":
        try:
            return Opened(cached, answer_object(await response.read()), b"", rest)
        except BROKEN as error:
            raise failure(error) from None  # it was computed, and may have had effects elsewhere
    opened = Opened(cached, None, await anext(rest), rest)
    if (said := error_in(opened.first)) is not None:
        code = said.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 502
        raise ApiError(status, str(said.get("message", "the decode instance failed")), status >= 500)
    return opened
