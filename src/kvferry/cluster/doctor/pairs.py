"""Which pairs of running instances can work, and which have, from what their ``/metrics`` say."""

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

import httpx
import msgspec

from kvferry.cluster import control
from kvferry.cluster.doctor.findings import Finding, ok, problem, warning
from kvferry.cluster.manifest import Role, instance_name
from kvferry.cluster.metrics import total
from kvferry.cluster.state import StateDirectory
from kvferry.errors import SpecError

TIMEOUT_S = 10.0
MOST_METRICS = 32 << 20
AT_ONCE = 16
_LAYOUT = re.compile(r'^kvferry:layout_info\{[^}]*\bfingerprint="([^"]*)"[^}]*\} (\S+)', re.MULTILINE)


class Instance(msgspec.Struct, frozen=True):
    """Where one answers; `layout` is empty where only its URL was given."""

    name: str
    role: Role
    url: str
    layout: str = ""


def given(role: Role, index: int, url: str) -> Instance:
    """One whose URL somebody has typed.

    Raises:
        SpecError: it is no URL.
    """
    try:
        parsed = httpx.URL(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.host) and (parsed.port or 80) < 1 << 16
    except (httpx.InvalidURL, ValueError) as error:
        raise SpecError(f"--{role} {url} is not a URL: {error}") from error
    if not usable:
        raise SpecError(f"--{role} {url} is not a URL such as http://10.0.0.7:8000")
    return Instance(instance_name(role, index), role, url.rstrip("/"))


def of_cluster(name: str) -> list[Instance]:
    """Those of a cluster that `kvferry up` runs on this machine.

    Raises:
        ClusterError: no such cluster runs.
    """
    found = control.status(StateDirectory(name)).instances
    return [Instance(one.name, Role(one.role), one.url, one.layout) for one in found if one.role in list(Role)]


class Seen(msgspec.Struct, frozen=True):
    """What an instance says of itself.

    Attributes:
        error: why it says nothing; None where it does.
        fingerprints: of what its KV cache is compatible with; none until it has started wholly.
        loads, bytes: what its workers have read and were told to be good.
        failed: loads that were not.
    """

    instance: Instance
    error: str | None = None
    fingerprints: tuple[str, ...] = ()
    loads: int = 0
    bytes: int = 0
    failed: int = 0


class Works(StrEnum):
    """Whether the decode side can load from the prefill side."""

    YES = "can work"
    NO = "cannot work"
    UNKNOWN = "not known yet"


class Connected(StrEnum):
    """Whether it has. Counters say how much was read, and not from whom."""

    YES = "connected"
    NO = "not connected yet"
    PERHAPS = "perhaps connected"


class Pair(msgspec.Struct, frozen=True):
    """One prefill and one decode instance."""

    prefill: str
    decode: str
    works: Works
    connected: Connected


def parse(instance: Instance, text: str) -> Seen:
    """From the text of ``/metrics``."""
    # A gauge that an instance no longer sets stays there with its last value, so only 1 counts.
    prints = {name for name, value in _LAYOUT.findall(text) if value in ("1", "1.0")}
    return Seen(
        instance,
        None,
        tuple(sorted(prints)),
        total(text, "vllm:nixl_xfer_time_seconds_count"),
        total(text, "vllm:nixl_bytes_transferred_sum"),
        total(text, "vllm:nixl_num_failed_transfers"),
    )


def look(client: httpx.Client, instance: Instance) -> Seen:
    try:
        with client.stream("GET", f"{instance.url}/metrics") as answer:
            answer.raise_for_status()
            received = bytearray()
            for piece in answer.iter_bytes():
                received += piece
                if len(received) > MOST_METRICS:
                    return Seen(instance, f"more than {MOST_METRICS} bytes of metrics")
        return parse(instance, received.decode(errors="replace"))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OverflowError) as error:
        return Seen(instance, str(error).partition("\n")[0] or type(error).__name__)


def ask(instances: Sequence[Instance]) -> list[Seen]:
    """All at the same time; proxies of the environment are not asked for them."""
    if not instances:
        return []
    with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda instance: look(client, instance), instances))


def pairs(seen: Iterable[Seen]) -> list[Pair]:
    """Every prefill instance with every decode instance."""
    all_seen = list(seen)
    prefill = [one for one in all_seen if one.instance.role is Role.PREFILL]
    decode = [one for one in all_seen if one.instance.role is Role.DECODE]
    found = []
    for reader in decode:
        possible = [one for one in prefill if _works(one, reader) is not Works.NO]
        for producer in prefill:
            works = _works(producer, reader)
            connected = _connected(reader, works, len(possible))
            found.append(Pair(producer.instance.name, reader.instance.name, works, connected))
    return found


def _works(producer: Seen, reader: Seen) -> Works:
    if not producer.fingerprints or not reader.fingerprints:
        return Works.UNKNOWN
    return Works.YES if producer.fingerprints == reader.fingerprints else Works.NO


def _connected(reader: Seen, works: Works, possible: int) -> Connected:
    """`possible` is from how many the reader may have read what it has."""
    if not reader.loads or works is Works.NO:
        return Connected.NO
    return Connected.YES if possible == 1 else Connected.PERHAPS


def instance_finding(seen: Seen) -> Finding:
    one = seen.instance
    text = " ".join(filter(None, (one.role, one.layout, "at", one.url)))
    if seen.error is not None:
        return problem(one.name, f"{text} does not answer: {seen.error}", "start it, or correct its URL")
    if not seen.fingerprints:
        fix = "wait until it has started; else start it with KVFerryConnector (kv_connector), and look at its log"
        return warning(one.name, f"{text} does not say its layout", fix)
    text += f", layout {'+'.join(seen.fingerprints)}, {seen.loads} loads of {seen.bytes:,} bytes"
    if seen.failed:
        fix = "look for `kvferry` in its log: it says why each one failed; those prompts were computed anew"
        return warning(one.name, f"{text}, {seen.failed} failed", fix)
    return ok(one.name, text)


def pair_finding(pair: Pair) -> Finding:
    name = f"{pair.prefill} -> {pair.decode}"
    if pair.works is Works.NO:
        fix = "use one model, dtype, cache dtype, attention backend and vLLM version on both sides"
        return problem(name, f"{pair.works}: the layouts of their KV caches differ", fix)
    text = f"{pair.works}, {pair.connected}"
    if pair.works is Works.UNKNOWN:
        return warning(name, text, "see what is said of the two instances")
    if pair.connected is Connected.PERHAPS:
        text += ": it has read from one of several that it can read from"
    return ok(name, text)


def examine(instances: Sequence[Instance]) -> tuple[list[Finding], list[Pair]]:
    """Ask all instances, and say what that means for each pair."""
    seen = ask(instances)
    found = pairs(seen)
    lines = [*map(instance_finding, seen), *map(pair_finding, found)]
    for role in Role:
        if not any(one.role is role for one in instances):
            lines.append(problem("cluster", f"there is no {role} instance", f"start one, or name it with --{role} URL"))
    return lines, found
