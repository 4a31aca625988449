"""What vLLM carries between the connector's halves: orders to the workers, and their description at the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.geometry import Span, WorkerShards
from kvferry.protocol.loads import Order
from kvferry.protocol.messages import Address
from kvferry.vllm.tracing import Headers


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """From each worker to the scheduler half, once."""

    worker: WorkerShards


@dataclass(frozen=True, slots=True)
class Written:
    """What has been computed of a prefill once a step has been executed, and was not before, or not by it.

    Attributes:
        blocks: of the request, by KV cache group, from token 0 on.
        tokens: those of the prompt that are new.
    """

    blocks: list[list[int]]
    tokens: Span


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler half to each worker, with every step.

    Attributes:
        loads: orders given in this step.
        released: producer requests whose blocks may be freed.
        sighted: producers heard of for the first time, as (address, incarnation).
        step: its number, where the scheduler half wants to know when it has been executed.
        traces: headers of those loads that are traced.
        written: with host staging, what prefills that may be read compute in this step.
    """

    loads: list[Order] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    sighted: list[tuple[Address, str]] = field(default_factory=list)
    traces: dict[str, Headers] = field(default_factory=dict)
    step: int | None = None
    written: list[Written] = field(default_factory=list)


@dataclass
class Executed(KVConnectorWorkerMetadata):
    """From each worker to the scheduler half: the step with this number has been executed."""

    step: int

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Executed:  # noqa: ARG002
        """Of all workers of one step, which tell the same."""
        return self
