"""What a producer's listener costs while readers acknowledge."""

import asyncio
import time
from functools import partial

import msgspec

from kvferry.bench.transfer.core import Core, Held, Identity
from kvferry.bench.transfer.remote import Usage, made
from kvferry.errors import TransferError
from kvferry.protocol.authentication import Seal
from kvferry.protocol.identity import draw
from kvferry.protocol.messages import Ack, Reply
from kvferry.protocol.messages import Held as HeldReply
from kvferry.sidechannel.client import Client

READERS = 4
CLIENTS = 8
"""Connections that the acknowledgements come over, as from as many workers."""
BATCH_S = 0.002
ANSWER_S = 10.0


class Acks(msgspec.Struct, frozen=True):
    """A listener under load.

    Attributes:
        per_s: acknowledgements in a second that came, and were answered.
        core: of one core, how much the listener's process took.
        p99_s: of the time until the answer, at the client.
    """

    per_s: float
    core: float
    p99_s: float
    count: int


async def acks(per_s: int, seconds: float) -> Acks:
    """Acknowledge at an even rate, signed, each request by as many readers as an instance of TP 4 has.

    Raises:
        TransferError: not all were answered with ``Held``.
    """
    secret, names = draw(), [f"pp0tp{rank}" for rank in range(READERS)]
    requests = max(1, round(per_s * seconds / READERS))
    async with made(Core, secret=secret) as core:
        identity = await core.call("identity", Identity)
        held = await core.call("hold", list[Held], blocks=[1], tokens=1, readers=names, count=requests)
        clients = [Client(f"kvferry-bench-{index}", seal=Seal(secret.encode())) for index in range(CLIENTS)]
        try:
            await _pace(clients, identity, [(one, name) for one in held[:1] for name in names], per_s)
            before, began = await core.call("usage", Usage), time.monotonic()
            waits = await _pace(clients, identity, [(one, name) for one in held[1:] for name in names], per_s)
            after, ended = await core.call("usage", Usage), time.monotonic()
            if left := await core.call("held", int):
                raise TransferError(f"{left} requests are still held after all acknowledgements")
        finally:
            for client in clients:
                client.close()
    took = ended - began
    waits.sort()
    return Acks(len(waits) / took, (after.cpu_s - before.cpu_s) / took, waits[len(waits) * 99 // 100], len(waits))


async def _pace(clients: list[Client], identity: Identity, due: list[tuple[Held, str]], per_s: int) -> list[float]:
    """Send all, evenly; seconds until each answer."""
    loop, waits, wrong = asyncio.get_running_loop(), [], []
    answered = asyncio.Event()

    def heard(sent: float, reply: Reply | None) -> None:
        waits.append(time.monotonic() - sent)
        if not isinstance(reply, HeldReply):
            wrong.append(reply)
        if len(waits) == len(due):
            loop.call_soon_threadsafe(answered.set)

    began = time.monotonic()
    for index, (held, reader) in enumerate(due):
        if (early := began + index / per_s - time.monotonic()) > 0:
            await asyncio.sleep(max(early, BATCH_S))
        ack = Ack(identity.incarnation, held.request, held.claim, reader)
        sent = time.monotonic()
        client = clients[index % len(clients)]
        client.send(identity.address, ack, ANSWER_S, partial(heard, sent))
    await asyncio.wait_for(answered.wait(), ANSWER_S + 1)
    if wrong:
        raise TransferError(f"{len(wrong)} of {len(due)} acknowledgements were not answered with Held: {wrong[0]}")
    return waits
