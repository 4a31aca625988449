"""First contact with a large producer: real agents, and caches larger than any memory, of which only promises exist."""

import msgspec

from kvferry.bench.transfer.pair import started
from kvferry.bench.transfer.question import Pair, Transport
from kvferry.cluster.blueprint import Blocks, CacheShape, blueprint
from kvferry.cluster.spec import Layout

PRODUCER = Layout(tp=8, pp=8)
CONSUMER_BLOCKS = 64
PROCESSES = 4
"""Which share the producer's workers: one process for each would be more than small machines can start."""
SHAPE = CacheShape("attention", 64, 8, 512, "bfloat16")


class FirstContact(msgspec.Struct, frozen=True):
    """One reader's first load, of one block, from a producer that it has not heard of.

    Attributes:
        seconds: hello, check, plan, connections, reads and acknowledgement.
        bytes_per_peer: by which the reader grew, for each producer worker.
    """

    ranks: int
    blocks: int
    seconds: float
    bytes_per_peer: float


async def first_contact(
    blocks: int, transport: Transport, producer: Layout = PRODUCER, shape: CacheShape = SHAPE
) -> FirstContact:
    """Meet a producer of so many blocks once.

    Raises:
        TransferError: something did not work.
    """
    pair = Pair(producer, Layout())
    engines = (
        blueprint(shape, pair.producer, Blocks(16, blocks)),
        blueprint(shape, pair.consumer, Blocks(16, CONSUMER_BLOCKS)),
    )
    async with started(*engines, transport, processes=min(PROCESSES, producer.workers), reserve=True) as there:
        contact = await there.first_contact()
    return FirstContact(contact.peers, blocks, contact.seconds, contact.bytes_per_peer)
