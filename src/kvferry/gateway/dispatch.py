"""The two legs of a request: sending them, trying again, and giving up honestly.

Nothing of an answer reaches the client before ``Dispatcher.open`` has returned, so until then everything may be tried
again; after it nothing is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
from msgspec import Raw

from kvferry.gateway.answers import BrokenStreamError, answer_object, cached_tokens, error_in, whole_events
from kvferry.gateway.balance import Balancer, SeenPrompts
from kvferry.gateway.bodies import Body, Endpoint, decode_body, prefill_body
from kvferry.gateway.errors import ApiError
from kvferry.gateway.health import Fleet, Rank
from kvferry.gateway.metrics import Metrics
from kvferry.gateway.settings import Role, Settings

RANK_HEADER = "X-data-parallel-rank"
RETRY_BURST = 10.0
MAX_ERROR_BYTES = 1 << 20


@dataclass
class Trail:
    """What became of a request, for its line in the access log."""

    prefill: str = "-"
    decode: str = "-"
    prefill_s: float = 0.0
    retries: int = 0
    plain: str = "-"


@dataclass
class Job:
    """One prompt to be answered.

    Attributes:
        headers: for both legs.
        deadline: for the first byte of its answer, on the event loop's clock.
        plain: why it goes to decode alone; None for both legs.
        tried: ranks that failed it.
    """

    endpoint: Endpoint
    body: Body
    headers: dict[str, str]
    deadline: float
    prompt_tokens: int
    answer_tokens: int
    key: bytes
    plain: str | None = None
    trail: Trail = field(default_factory=Trail)
    tried: set[Rank] = field(default_factory=set)


@dataclass(frozen=True)
class Grant:
    """A prefilled prompt that waits at ``rank``; ``parameters`` go to decode as they came."""

    rank: Rank
    parameters: Raw
    cached: Raw


class Opened:
    """A decode answer whose status is good and whose first piece is here; ``close`` it in any case.

    Attributes:
        whole: the answer, taken apart; None where it is a stream.
        cached: see ``answers.corrected``.
    """

    def __init__(self, cached: Raw | None, working: contextlib.ExitStack) -> None:
        self.cached = cached
        self.whole: Body | None = None
        self.first = b""
        self.rest: AsyncIterator[bytes] | None = None
        self._working = working

    async def events(self) -> AsyncIterator[bytes]:
        """A stream's whole events. Raises ``BrokenStreamError`` when it does not end as it should."""
        yield self.first
        if self.rest is not None:
            async for events in self.rest:
                yield events

    def close(self) -> None:
        """An instance that was still answering sees the connection end."""
        self._working.close()


class Strategy(Protocol):
    """In which order the legs of a job are sent.

    A transfer that streams (decode reads what prefill has ready while the rest is computed) is another strategy: choose
    the pair, draw a transfer id, put it into both bodies, send both at once, and cancel the other leg when one fails.
    Retries, deadlines, accounting and the client's side do not change with it.
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


class Dispatcher:
    """Sends the legs of jobs.

    Args:
        release: gives back the grant of these parameters; must not wait.
    """

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        release: Callable[[Raw], None],
        strategy: Strategy | None = None,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._session = session
        self._metrics = metrics
        self._release = release
        self._strategy = strategy or PrefillFirst()
        self._budget = RetryBudget(settings.retry_ratio)
        self._balancers = {
            Role.PREFILL: Balancer(settings.prefill_policy),
            Role.DECODE: Balancer(settings.decode_policy),
        }
        self._seen = SeenPrompts()

    async def open(self, job: Job) -> Opened:
        """Both legs, until the first piece of the answer is here.

        Raises:
            ApiError: an instance refused the request, all tries failed, or the deadline has passed.
        """
        self._budget.earn()
        try:
            async with asyncio.timeout_at(job.deadline):
                return await self._open(job)
        except TimeoutError:
            raise ApiError(504, f"there was no answer within {self._settings.deadline:g} s") from None

    async def _open(self, job: Job) -> Opened:
        attempt = 1
        while True:
            try:
                return await self._strategy.open(self, job)
            except ApiError as failure:
                if not await self._may_retry(Role.DECODE, job, attempt, failure):
                    raise
            attempt += 1

    async def _may_retry(self, role: Role, job: Job, attempt: int, failure: ApiError) -> bool:
        """After the ``attempt``-th failure; waits before it says yes."""
        usable = self._fleet.usable(role)
        others = [rank for rank in usable if rank not in job.tried]
        possible = failure.retry and (others if failure.elsewhere else usable)
        if not possible or attempt >= self._settings.attempts or not self._budget.spend():
            return False
        job.trail.retries += 1
        self._metrics.retries.labels(role).inc()
        await asyncio.sleep(self._settings.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
        return True

    async def prefill(self, job: Job) -> Grant | None:
        """A prefilled prompt; None where decode has to do it all, and may.

        Raises:
            ApiError: the request was refused, or no instance could do it.
        """
        if job.plain:
            self._alone(job, job.plain)
            return None
        if self._is_short(job):
            self._alone(job, "short_prompt")
            return None
        attempt = 1
        while True:
            try:
                return await self._prefill(job)
            except ApiError as failure:
                if await self._may_retry(Role.PREFILL, job, attempt, failure):
                    attempt += 1
                    continue
                if failure.retry and failure.status != 429 and self._settings.plain_decode:
                    self._alone(job, "prefill_failed")
                    return None
                failure.retry = False
                raise

    def _is_short(self, job: Job) -> bool:
        """Whether so little of the prompt is left to compute on some decode rank that prefill is not worth it."""
        limit = self._settings.skip_prefill_below
        if not limit:
            return False
        prompt = bytes(job.body.get(job.endpoint.prompt, b""))
        seen = max((self._seen.fraction(rank.name, prompt) for rank in self._fleet.usable(Role.DECODE)), default=0.0)
        return job.prompt_tokens * (1 - seen) < limit

    def _alone(self, job: Job, reason: str) -> None:
        """Decode has to prefill this prompt; never silently."""
        job.trail.plain = reason
        self._metrics.plain.labels(reason).inc()

    async def _prefill(self, job: Job) -> Grant | None:
        rank = self._choose(Role.PREFILL, job, self._fleet.usable(Role.PREFILL), job.prompt_tokens)
        job.trail.prefill, started = rank.name, time.perf_counter()
        with rank.working(job.prompt_tokens):
            try:
                async with asyncio.timeout(self._settings.prefill_timeout):
                    response = await self._post(Role.PREFILL, rank, job, prefill_body(job.endpoint, job.body))
                    raw = await self._whole(response, rank)
            except TimeoutError:
                raise self._failed(Role.PREFILL, rank, "a prefill instance did not answer in time", 504) from None
        job.trail.prefill_s = time.perf_counter() - started
        self._metrics.prefill.observe(job.trail.prefill_s)
        try:
            answer = answer_object(raw)
        except ApiError:
            raise self._failed(Role.PREFILL, rank, "a prefill instance's answer is not JSON", 502) from None
        parameters = answer.get("kv_transfer_params")
        if parameters is None or bytes(parameters)[:1] != b"{":
            self._alone(job, "no_parameters")
            return None
        self._succeeded(rank, job)
        return Grant(rank, parameters, cached_tokens(job.endpoint, answer))

    async def decode(self, job: Job, grant: Grant | None) -> Opened:
        """The answer to a job, from its first piece on; on any failure the grant is given back.

        Raises:
            ApiError: the request was refused, or this try failed.
        """
        with contextlib.ExitStack() as undo:
            if grant is not None:
                undo.callback(self._release, grant.parameters)
            usable = self._fleet.usable(Role.DECODE)
            suitable = [rank for rank in usable if grant is None or rank.instance.suits(grant.rank.instance)]
            tokens = job.prompt_tokens + job.answer_tokens
            rank = self._choose(Role.DECODE, job, suitable, tokens)
            job.trail.decode = rank.name
            working = undo.enter_context(contextlib.ExitStack())
            working.enter_context(rank.working(tokens))
            body = decode_body(job.body, grant.parameters if grant else None)
            response = await self._post(Role.DECODE, rank, job, body)
            working.callback(response.close)
            opened = Opened(grant.cached if grant else None, working)
            await self._first_piece(opened, response, rank, job)
            undo.pop_all()
        self._succeeded(rank, job)
        if self._settings.skip_prefill_below:
            self._seen.add(rank.name, bytes(job.body.get(job.endpoint.prompt, b"")))
        return opened

    async def _first_piece(self, opened: Opened, response: aiohttp.ClientResponse, rank: Rank, job: Job) -> None:
        if response.content_type != "text/event-stream":
            opened.whole = answer_object(await self._whole(response, rank))
            return
        opened.rest = whole_events(job.endpoint, self._pieces(response))
        try:
            opened.first = await anext(opened.rest)
        except (BrokenStreamError, StopAsyncIteration):
            raise self._failed(Role.DECODE, rank, "a decode instance ended before its first token", 502) from None
        error = error_in(opened.first)
        if error is not None:
            code = error.get("code")
            status = code if isinstance(code, int) and 400 <= code < 600 else 502
            raise ApiError(status, str(error.get("message", "the decode instance failed")), retry=status >= 500)

    async def _pieces(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(self._settings.idle_timeout):
                    piece = await response.content.readany()
            except TimeoutError:
                raise BrokenStreamError("an instance sent nothing for too long") from None
            except (aiohttp.ClientError, OSError):
                raise BrokenStreamError("the connection to an instance broke") from None
            if not piece:
                return
            yield piece

    def _choose(self, role: Role, job: Job, usable: list[Rank], tokens: int) -> Rank:
        """A rank that has not failed this job, else one that has."""
        if not usable:
            raise ApiError(503, f"no {role} instance is available", headers={"retry-after": "1"}, retry=True)
        candidates = [rank for rank in usable if rank not in job.tried] or usable
        rank = self._balancers[role].choose(candidates, job.key, candidates[0].cost(tokens))
        job.tried.add(rank)
        return rank

    @staticmethod
    def _succeeded(rank: Rank, job: Job) -> None:
        rank.breaker.reset()
        rank.instance.answered()
        job.tried.discard(rank)

    async def _post(self, role: Role, rank: Rank, job: Job, body: bytes) -> aiohttp.ClientResponse:
        headers = job.headers if rank.header is None else {**job.headers, RANK_HEADER: rank.header}
        url = rank.instance.spec.url + job.endpoint.path
        try:
            response = await self._session.post(url, data=body, headers=headers, allow_redirects=False)
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                rank.instance.lost()
            raise self._failed(role, rank, f"a {role} instance cannot be reached", 502) from None
        except (aiohttp.ClientError, OSError):
            raise self._failed(role, rank, f"a {role} instance closed the connection", 502) from None
        self._metrics.legs.labels(role, rank.instance.spec.url, str(response.status)).inc()
        if response.status != 200:
            raise await self._refusal(response, rank)
        return response

    async def _refusal(self, response: aiohttp.ClientResponse, rank: Rank) -> ApiError:
        if response.status >= 500:
            rank.breaker.failed()
        else:
            rank.breaker.reset()
        try:
            body = await response.content.read(MAX_ERROR_BYTES)
        except (aiohttp.ClientError, OSError):
            body = b""
        finally:
            response.close()
        status = response.status if response.status >= 400 else 502
        return ApiError.of_instance(status, body, {name.lower(): value for name, value in response.headers.items()})

    async def _whole(self, response: aiohttp.ClientResponse, rank: Rank) -> bytes:
        prefill = rank.instance.spec.role is Role.PREFILL
        try:
            return await response.read()
        except (aiohttp.ClientError, OSError):
            rank.breaker.failed()
            raise ApiError(502, "an instance broke off its answer", retry=prefill) from None
        finally:
            response.close()  # keeps the connection where the answer is complete

    def _failed(self, role: Role, rank: Rank, message: str, status: int) -> ApiError:
        """A failure that is the instance's, and that another one may not have."""
        rank.breaker.failed()
        self._metrics.legs.labels(role, rank.instance.spec.url, "failed").inc()
        return ApiError(status, message, retry=True)
