"""The producer's side: which prefills are held for whom, and until when.

An ordinary grant is made when its prefill has finished. In a transfer that streams it is OPEN from the request's
arrival on: it can be claimed and followed, and what is ready be read, while vLLM itself keeps the blocks. From the end
of the prefill on both are alike and live in one of two states. OFFERED: the parameters are on their way to some
consumer. HELD: one consumer claimed it, and its workers read. A grant ends when every expected reader has acknowledged,
when the consumer releases it, or when its lease runs out; from then on nothing is ever answered with ``Held``. What has
ended is not remembered: to an ended, a forged and a never-made grant the answer is the same ``Gone``.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.geometry import NULL_BLOCK
from kvferry.protocol.identity import draw
from kvferry.protocol.messages import (
    WAIT_S,
    Ack,
    Claim,
    Follow,
    Gone,
    Granted,
    Held,
    Hello,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    Transfer,
    Waiting,
)

MAX_CLAIMS = 1 << 14
"""On one grant: more requests than vLLM makes of one with ``n > 1``, and a bound for who makes up claims."""

MAX_GIVEN_UP = 1 << 12
"""Releases of what is not known, which are remembered because a prefill may be on its way that nobody will load."""

MAX_GIVEN_UP_CLAIMS = 64
"""Remembered of one such name."""

MAX_KEPT = 1 << 14
MAX_KEPT_BYTES = 1 << 14
"""Messages that wait for news, and the names of readers in one; what is beyond is answered at once. Together they bound
what somebody can have kept who makes up claims; a thousand workers' names take 12 KiB."""

GONE = Gone("not held: already released, expired, or never granted by this engine")
ANOTHER_PROMPT = Gone("the KV cache held under this name was computed from another prompt")

Later = Callable[[Reply], object]
"""Sends the reply to a message that was kept. Called by whoever brings the news: it must not wait."""


@dataclass(slots=True)
class Grant:
    """One request's blocks, promised.

    Attributes:
        request: vLLM's id of it.
        name: what messages call it; the request's id, or in a transfer that streams the transfer's name.
        blocks: block ids by KV cache group; None until the prefill has begun.
        tokens, token_hash: whose KV cache it is.
        deadline: when the lease runs out, on the producer's own clock.
        ready, life: as in ``Granted``.
        consumer: incarnation that claimed it; None while unclaimed.
        waiting: for each claim, the readers that have not acknowledged; none for a claim that has ended, so that a late
            copy of it is known. Several requests of one consumer may share a grant (n > 1), each under a claim of its
            own.
    """

    request: str
    name: str
    nonce: str
    blocks: list[list[int]] | None
    tokens: int
    token_hash: str
    deadline: float = 0.0
    ready: int = 0
    life: int = 0
    consumer: str | None = None
    waiting: dict[str, set[str]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Blocks that are held, null blocks not counted."""
        return sum(len(group) - group.count(NULL_BLOCK) for group in self.blocks or ())


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A message that is answered later: with news, or at ``until`` without any."""

    message: Claim | Follow
    later: Later
    until: float

    @property
    def asker(self) -> tuple[str, str]:
        message = self.message
        return message.claim, message.reader if isinstance(message, Follow) else ""


class Grants:
    """All grants of one engine core. Not thread-safe: the caller holds a lock.

    Args:
        incarnation: of this engine core.
        lease: seconds that an unclaimed or unrenewed grant lives.
        clock: monotonic seconds; only differences of it ever leave the process.
        on_end: called for every grant that has ended, with the seconds that were left of its lease; None when it ended
            with its lease.

    Attributes:
        held_blocks: in all grants together; a block that two of them share counts twice.
    """

    def __init__(
        self,
        incarnation: str,
        lease: float,
        clock: Callable[[], float],
        on_end: Callable[[float | None], None] = lambda left: None,  # noqa: ARG005
    ) -> None:
        self.incarnation = incarnation
        self.lease = lease
        self.held_blocks = 0
        self._clock = clock
        self._on_end = on_end
        # Always in the order of their deadlines: a lease is as long as any other, so the one prolonged last ends last.
        self._grants: dict[str, Grant] = {}
        self._open: dict[str, Grant] = {}
        self._names: dict[str, str] = {}  # of open grants, by vLLM's request id
        self._ended: list[str] = []
        self._given_up: OrderedDict[tuple[str, str], set[str]] = OrderedDict()  # claims by name and nonce
        # By name and asker; who asks again replaces what was kept. The deque is in the order of time, and what has been
        # answered before its time stays in it until then.
        self._kept: dict[str, dict[tuple[str, str], _Kept]] = {}
        self._until: deque[_Kept] = deque()

    def __len__(self) -> int:
        return len(self._grants)

    def open(self, request: str, transfer: Transfer, tokens: int, token_hash: str) -> bool:
        """A prefill has arrived whose blocks can be claimed from now on; False when the name is taken."""
        if self._find(transfer.name) is not None:
            return False
        grant = Grant(request, transfer.name, transfer.nonce, None, tokens, token_hash)
        grant.waiting = {claim: set() for claim in self._given_up.pop((grant.name, grant.nonce), ())}
        self._open[grant.name], self._names[request] = grant, grant.name
        self._tell(grant.name)
        return True

    def progress(self, request: str, life: int, blocks: Sequence[Sequence[int]], ready: int) -> None:
        """An open prefill lies in these blocks, and so many of its tokens are computed.

        The last token is ready when the request has ended. What is told of an earlier life, or of a request that is not
        open, changes nothing.
        """
        grant = self._open.get(self._names.get(request, ""))
        if grant is not None and life >= grant.life:
            grant.life, grant.blocks = life, [list(group) for group in blocks]
            grant.ready = min(ready, grant.tokens - 1)
            self._tell(grant.name)

    def close(self, request: str) -> None:
        """A prefill ended without anything to hand over."""
        name = self._names.pop(request, None)
        if name is not None:
            del self._open[name]
            self._tell(name)

    def offer(self, request: str, blocks: Sequence[Sequence[int]], tokens: int, token_hash: str) -> Grant:
        """Hold the blocks of a finished request from now on."""
        name = self._names.pop(request, None)
        grant = self._open.pop(name) if name else Grant(request, request, draw(), None, tokens, token_hash)
        if (grant.tokens, grant.token_hash) != (tokens, token_hash):
            grant.waiting = {claim: set() for claim in grant.waiting}  # they were promised something else
        grant.tokens, grant.token_hash = tokens, token_hash
        grant.blocks, grant.ready = [list(group) for group in blocks], tokens
        grant.deadline = self._clock() + self.lease
        self._grants[grant.name] = grant
        self.held_blocks += grant.size
        if grant.waiting:
            self._end_unless_awaited(grant)
        self._tell(grant.name)
        return grant

    def expire(self) -> float | None:
        """End what has run out: leases, and the time that messages are kept. Returns seconds until the next one does,
        None without any.
        """
        now = self._clock()
        moments = []
        while self._grants:
            first = next(iter(self._grants.values()))
            if first.deadline > now:
                moments.append(first.deadline)
                break
            self._end(first, None)
        while self._until:
            kept = self._until[0]
            if kept.until > now:
                moments.append(kept.until)
                break
            self._until.popleft()
            if self._kept.get(kept.message.request, {}).get(kept.asker) is kept:
                self._let_go(kept, self._reply(kept.message))
        return min(moments) - now if moments else None

    def take_ended(self) -> list[str]:
        """Requests whose blocks may be freed, each named once."""
        ended, self._ended = self._ended, []
        return ended

    def answer(self, message: Request, later: Later | None = None) -> Reply | None:
        """Answer any message but ``Hello``; None when ``later`` will get the answer, within ``WAIT_S``.

        Leases are looked at first, so an answer is never too late to be true.
        """
        self.expire()
        reply = self._reply(message)
        if later is None or not _says_nothing(message, reply) or len(self._until) >= MAX_KEPT:
            return reply
        if isinstance(message, Claim) and sum(map(len, message.readers)) > MAX_KEPT_BYTES:
            return reply
        assert isinstance(message, Claim | Follow)
        kept = _Kept(message, later, self._clock() + WAIT_S)
        earlier = self._kept.setdefault(message.request, {}).get(kept.asker)
        self._kept[message.request][kept.asker] = kept
        self._until.append(kept)
        if earlier is not None:
            earlier.later(reply)
        return None

    def _tell(self, name: str) -> None:
        """Answer who waits for news of a grant, where there are any."""
        for kept in list(self._kept.get(name, {}).values()):
            reply = self._reply(kept.message)
            if not _says_nothing(kept.message, reply):
                self._let_go(kept, reply)

    def _let_go(self, kept: _Kept, reply: Reply) -> None:
        askers = self._kept[kept.message.request]
        del askers[kept.asker]
        if not askers:
            del self._kept[kept.message.request]
        kept.later(reply)

    def _find(self, name: str) -> Grant | None:
        return self._grants.get(name) or self._open.get(name)

    def _reply(self, message: Request) -> Reply:
        # Who releases may not have heard that the prefill came to another incarnation than it was meant for. The nonce
        # says which transfer it is.
        if message.incarnation != self.incarnation and not isinstance(message, Release):
            return Gone("this address now belongs to another incarnation")
        match message:
            case Claim():
                return self._claim(message)
            case Follow():
                return self._follow(message)
            case Ack():
                return self._ack(message)
            case Renew():
                return self._renew(message)
            case Release():
                return self._release(message)
            case Hello():
                return GONE

    def _claim(self, message: Claim) -> Reply:
        grant = self._find(message.request)
        if grant is None:
            return Waiting(known=False) if message.ahead else GONE
        if grant.nonce != message.nonce or grant.consumer not in (None, message.consumer):
            return GONE
        if (grant.tokens, grant.token_hash) != (message.tokens, message.token_hash):
            return ANOTHER_PROMPT
        if grant.waiting.get(message.claim) == set() or not self._has_room(grant, message.claim):
            return GONE
        if grant.blocks is None:
            return Waiting(known=True)
        grant.waiting.setdefault(message.claim, set(message.readers))
        grant.consumer = message.consumer
        self._prolong(grant)
        return self._granted(grant, grant.blocks)

    def _follow(self, message: Follow) -> Reply:
        grant = self._find(message.request)
        if grant is None or grant.blocks is None or message.reader not in grant.waiting.get(message.claim, ()):
            return GONE
        return self._granted(grant, grant.blocks)

    def _granted(self, grant: Grant, blocks: list[list[int]]) -> Granted:
        return Granted(blocks, grant.tokens, self.lease, grant.ready, grant.life)

    def _ack(self, message: Ack) -> Reply:
        grant = self._find(message.request)
        if grant is None or message.reader not in grant.waiting.get(message.claim, ()):
            return GONE
        grant.waiting[message.claim].remove(message.reader)
        if grant.name in self._open:
            return Released()  # it gave up: nothing has been read whole yet
        self._end_unless_awaited(grant)
        return Held()

    def _renew(self, message: Renew) -> Reply:
        gone = []
        for name, claim in message.claims:
            grant = self._find(name)
            if grant is None or not grant.waiting.get(claim):
                gone.append(claim)
            else:
                self._prolong(grant)
        return Renewed(gone)

    def _release(self, message: Release) -> Reply:
        grant = self._find(message.request)
        if grant is not None and grant.nonce == message.nonce and self._has_room(grant, message.claim):
            # Claims of others go on. Of this one nothing is heard any more, also if it is still on its way.
            grant.waiting[message.claim] = set()
            self._tell(grant.name)
            self._end_unless_awaited(grant)
        elif grant is None:
            claims = self._given_up.setdefault((message.request, message.nonce), set())
            if len(claims) < MAX_GIVEN_UP_CLAIMS:
                claims.add(message.claim)
            if len(self._given_up) > MAX_GIVEN_UP:
                self._given_up.popitem(last=False)
        return Released()

    @staticmethod
    def _has_room(grant: Grant, claim: str) -> bool:
        return claim in grant.waiting or len(grant.waiting) < MAX_CLAIMS

    def _prolong(self, grant: Grant) -> None:
        """The lease begins anew. An open grant has none: the engine itself keeps the blocks."""
        if grant.name in self._grants:
            grant.deadline = self._clock() + self.lease
            self._grants[grant.name] = self._grants.pop(grant.name)

    def _end_unless_awaited(self, grant: Grant) -> None:
        if grant.name in self._grants and not any(grant.waiting.values()):
            self._end(grant, grant.deadline - self._clock())

    def _end(self, grant: Grant, left: float | None) -> None:
        del self._grants[grant.name]
        self._ended.append(grant.request)
        self.held_blocks -= grant.size
        self._on_end(left)
        self._tell(grant.name)


def _says_nothing(message: Request, reply: Reply) -> bool:
    """Whether an answer is worth waiting for a better one."""
    if isinstance(message, Follow) and isinstance(reply, Granted):
        return (reply.life, reply.ready) == (message.life, message.ready)
    return isinstance(reply, Waiting)
