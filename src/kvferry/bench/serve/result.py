"""What a run leaves behind: the schema of its JSON file. Times are in seconds unless a name says ``ms``.

A run is a list of turns. A turn is one contender in one round: its engines were started, asked under every load and
stopped before the next contender's turn. ``Turn.loads[i].answers`` holds every request, so that all figures can be made
again. ``SCHEMA`` grows when a reader of the old form would misunderstand the new one.
"""

from enum import StrEnum

import msgspec

SCHEMA = 1


class Load(msgspec.Struct, frozen=True):
    """How requests arrive.

    Attributes:
        rate: requests per second of a Poisson process (open loop); None sends as soon as is allowed.
        concurrency: at most so many at a time (closed loop); None for no bound.
    """

    rate: float | None = None
    concurrency: int | None = None

    @property
    def label(self) -> str:
        parts = [] if self.rate is None else [f"{self.rate:g} requests/s"]
        parts += [] if self.concurrency is None else [f"concurrency {self.concurrency}"]
        return ", ".join(parts) or "all at once"


class Prompts(msgspec.Struct, frozen=True):
    """Random prompts: the same for all contenders, others in each round and under each load.

    Attributes:
        count: of requests under each load.
        prefix_len: tokens that all prompts begin with, beside ``input_len`` of each one's own.
        burstiness: 1 is a Poisson process; see ``arrival.offsets``.
        seed: of prompts and arrivals.
    """

    count: int
    input_len: int
    output_len: int
    prefix_len: int
    burstiness: float
    seed: int


class Stall(msgspec.Struct, frozen=True):
    """A running request is watched while nothing else happens, and while long prompts come one after another.

    Attributes:
        input_len: tokens of such a prompt.
        seconds: of watching, each of quiet and not.
        turns: how often, quiet and not in turn.
    """

    input_len: int
    seconds: float
    turns: int


class Answer(msgspec.Struct, frozen=True):
    """One request. Latencies are as ``vllm bench serve`` takes them (vllm/benchmarks/lib/endpoint_request_func.py).

    Attributes:
        number: of its prompt, the same for all contenders.
        start_s: when it was sent, since the load began.
        ttft_s: from sending to the first piece with a choice.
        itl_s: between two such pieces.
        latency_s: from sending to the last such piece.
        output_tokens: by the answer's own usage; where it has none, the number of pieces.
        digest: of the text, to tell whether two contenders say the same.
        error: empty where it was answered.
    """

    number: int
    start_s: float
    prompt_tokens: int
    ttft_s: float = 0.0
    itl_s: tuple[float, ...] = ()
    latency_s: float = 0.0
    output_tokens: int = 0
    digest: str = ""
    error: str = ""


class Figures(msgspec.Struct, frozen=True):
    """Of a latency over all answered requests, in milliseconds; ``percentiles`` by their number, as ``"99"``."""

    mean: float
    median: float
    std: float
    percentiles: dict[str, float]


class Summary(msgspec.Struct, frozen=True):
    """As ``vllm bench serve`` computes it; see ``statistics.summary``. Throughputs are per second."""

    completed: int
    failed: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    ttft_ms: Figures
    tpot_ms: Figures
    itl_ms: Figures
    e2el_ms: Figures


class Mean(msgspec.Struct, frozen=True):
    """Of a histogram that an engine or the gateway exports, over one load."""

    count: int
    seconds: float


class LoadRun(msgspec.Struct, frozen=True):
    """One load of a turn.

    Attributes:
        cpu_s: processor time of each process, the program that asks (``client``) included.
        legs: parts of requests, by who measured them and what: see ``meters.LEGS``.
        moved_tokens: prompt tokens that came through the decode engine's connector, by its own count; None where there
            is no connector, and where an engine has died and can say nothing.
        load_average: of the machine, at the end.
        complete: all requests were sent and answered, or failed.
    """

    load: Load
    duration_s: float
    answers: tuple[Answer, ...]
    summary: Summary
    cpu_s: dict[str, float]
    legs: dict[str, Mean]
    moved_tokens: int | None
    load_average: float
    complete: bool


class Watched(msgspec.Struct, frozen=True):
    """The running request's latencies between tokens, while it was quiet and while prompts came; see ``Stall``.

    Attributes:
        between_itl_s: of ``busy_itl_s``, without those of the steps that computed a long prompt's own token. Whoever
            moved the prompt, that step looks at its whole KV cache.
        pulls_s: from sending each long prompt to its only token.
        failed: long prompts that were not answered.
    """

    quiet_itl_s: tuple[float, ...]
    busy_itl_s: tuple[float, ...]
    pulls_s: tuple[float, ...]
    failed: int
    between_itl_s: tuple[float, ...] = ()


class Outcome(StrEnum):
    MEASURED = "measured"
    NOT_INSTALLED = "not installed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    RUNNING = "running"


class Turn(msgspec.Struct):
    """One contender in one round.

    Attributes:
        reason: why it was not measured.
        began: seconds since the run began.
        started_s: how long its processes took until they answered.
        idle_cpu: processor seconds per second of each process while nobody asked anything.
    """

    contender: str
    round: int
    began: float
    outcome: Outcome = Outcome.RUNNING
    reason: str = ""
    started_s: float = 0.0
    idle_cpu: dict[str, float] = {}
    loads: list[LoadRun] = []
    stalls: list[Watched] = []


class Machine(msgspec.Struct, frozen=True):
    """What absolute figures depend on; load averages are over a minute."""

    cores: int
    processor: str
    memory_bytes: int
    accelerators: int
    load_before: float
    load_after: float


class Model(msgspec.Struct, frozen=True):
    """``config`` is a digest of its config.json, ``dtype`` what engines were started with, empty for its own."""

    name: str
    config: str
    dtype: str
    kv_bytes_per_token: int


class Described(msgspec.Struct, frozen=True):
    """A contender: what is in front of its engines, and what to know about it."""

    name: str
    front: str
    note: str


class Result(msgspec.Struct, frozen=True):
    """A whole run.

    Attributes:
        command: what was typed.
        made: when, as ISO 8601.
        versions: of the packages that matter.
        interleaving: in words.
        goodput_ms: bounds of a good request.
        complete: nobody interrupted it.
        pinned: each engine had an equal share of the cores to itself.
    """

    schema: int
    command: str
    made: str
    complete: bool
    interleaving: str
    model: Model
    prefill: str
    decode: str
    prompts: Prompts
    loads: tuple[Load, ...]
    stall: Stall | None
    goodput_ms: dict[str, float]
    rounds: int
    machine: Machine
    versions: dict[str, str]
    contenders: tuple[Described, ...]
    turns: tuple[Turn, ...]
    pinned: bool = False
