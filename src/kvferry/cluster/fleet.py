"""The instances of a running cluster and their keepers: kept alive, connected to each other, awaited, let go."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import httpx

from kvferry.cluster import pulse
from kvferry.cluster.admin import Admin
from kvferry.cluster.allocation import Allocator, Front, Member
from kvferry.cluster.commands import engine_command, engine_environment
from kvferry.cluster.dispatch import Dispatcher
from kvferry.cluster.keeper import Job, Keeper, State, stop_all
from kvferry.cluster.manifest import Role
from kvferry.cluster.state import Record, StateDirectory
from kvferry.cluster.supervisor import Supervisor
from kvferry.errors import StartError

POLL_S = 0.2
ENGINE_GRACE_S = 20.0


class Ending:
    """What was asked of a cluster: to stop, and not to wait for requests under way any more."""

    def __init__(self) -> None:
        self.stop, self.hurry = threading.Event(), threading.Event()

    def ask(self) -> None:
        """To stop; asked again, to hurry."""
        (self.hurry if self.stop.is_set() else self.stop).set()


class Kept:
    """An instance and its keeper."""

    def __init__(self, member: Member, keeper: Keeper) -> None:
        self.member = member
        self.keeper = keeper
        self.probing = threading.Lock()

    @property
    def role(self) -> Role:
        return self.member.role


class Fleet:
    """All instances that are there now.

    Args:
        changed: called when the state of one of them changes.
    """

    def __init__(
        self,
        allocator: Allocator,
        front: Front,
        state: StateDirectory,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        ending: Ending,
        changed: Callable[[], None],
    ) -> None:
        self.allocator = allocator
        self.ending = ending
        self._manifest = allocator.manifest
        self.front = front
        self._state = state
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._changed = changed
        self._kept: dict[str, Kept] = {}

    def keep(self, member: Member) -> Kept:
        """One instance more; it is for the caller to start its keeper."""
        spec, cpu = member.spec, self.allocator.machine.cpu
        job = Job(
            spec.name,
            lambda: engine_command(spec, cpu),
            engine_environment(spec, os.environ, cpu),
            f"{spec.url}/health",
            self._manifest.start_timeout,
            ENGINE_GRACE_S,
            url=spec.url,
            settle=lambda: self._connect(kept),
        )
        kept = Kept(member, Keeper(job, self._supervisor, self._changed))
        self._kept[spec.name] = kept
        return kept

    def ordered(self) -> list[Kept]:
        """All, prefill first."""
        return sorted(self._kept.copy().values(), key=lambda one: (one.role is Role.DECODE, one.member.index))

    def serving(self) -> list[Member]:
        """Members that requests may go to; one that is being restarted is one of them."""
        leaving = (State.DRAINING, State.STOPPING, State.STOPPED, State.FAILED)
        return [one.member for one in self.ordered() if one.keeper.settled and one.keeper.state not in leaving]

    def record(self) -> None:
        """Let other clusters know what this one holds."""
        members = [one.member for one in self.ordered()]
        ports = {self.front.port, self.front.metrics_port}.union(*(member.ports for member in members))
        devices = tuple(device for member in members for device in member.devices)
        self._state.write_record(Record(os.getpid(), tuple(sorted(ports - {0})), devices))

    def forget(self, gone: Sequence[Kept]) -> None:
        """Stop them and give back what they held."""
        stop_all([one.keeper for one in gone], self.ending.hurry)
        for one in gone:
            self._kept.pop(one.member.name, None)
        self.record()

    def admin(self) -> Admin:
        """The gateway's."""
        return Admin(self.front.url, self._state.admin_key.read_text().strip())

    def _connect(self, new: Kept) -> None:
        """Move a prompt between an instance that has begun to answer and every one opposite that does so already.

        Of each pair the later one comes here and finds the other. Raises ``StartError`` where nothing was moved.
        """
        opposite = [one for one in self.ordered() if one.role is not new.role and one.keeper.answering]
        unknown_to_others = new.role is Role.PREFILL and not new.keeper.was_ready
        for other in opposite:
            prefill, decode = (new, other) if new.role is Role.PREFILL else (other, new)
            # The counters of a decode instance are read, so it is probed by one at a time.
            with decode.probing:
                if self.ending.stop.is_set():
                    raise StartError("the cluster is to stop")
                try:
                    pair = prefill.member, decode.member
                    pulse.connect(self._dispatcher, *pair, self.allocator.config, unknown_to_others)
                except StartError:
                    if other.keeper.answering:  # one that ended meanwhile comes here itself when it is back
                        raise

    def await_idle(self, instances: Sequence[Kept], through_gateway: bool = True) -> None:
        """Until they are idle (nothing under way at the gateway, nothing computed, nothing held for a reader),
        or `drain_timeout` has passed, or all is to hurry."""
        end = time.monotonic() + self._manifest.drain_timeout
        calm = 0
        with httpx.Client(timeout=pulse.TIMEOUT_S, trust_env=False) as client:
            # What is drained reaches all of the gateway's workers within a probe interval; so look twice, that far
            # apart, before it is believed that nothing more comes.
            while calm < 2 and time.monotonic() < end and not self.ending.hurry.is_set():
                requests = self.admin().requests() if through_gateway else {}
                calm = calm + 1 if all(_idle(client, one, requests) for one in instances) else 0
                self.ending.hurry.wait(self._settling_s if calm else POLL_S)

    @property
    def _settling_s(self) -> float:
        several = int(self._manifest.gateway.get("workers", 1)) > 1
        return 1.5 * float(self._manifest.gateway.get("probe-interval", 1.0)) if several else POLL_S


def _idle(client: httpx.Client, one: Kept, requests: Mapping[str, int]) -> bool:
    if requests.get(one.member.spec.url):
        return False
    seen = pulse.look(client, one.member.spec.url)
    one.keeper.load = seen.load or one.keeper.load
    # What does not answer has ended and has nothing left to wait for, unless it only takes its time.
    return seen.load.idle if seen.load else one.keeper.state is not State.DRAINING
