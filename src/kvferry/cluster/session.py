"""A cluster from its start to its end: starts it, proves that its pairs work, watches it, resizes and drains it."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, Protocol

import httpx

from kvferry.cluster import pulse
from kvferry.cluster.admin import Admin
from kvferry.cluster.allocation import Allocator, Front, Member
from kvferry.cluster.commands import engine_command, engine_environment, gateway_command, router_command
from kvferry.cluster.control import ClusterStatus, ControlServer, InstanceStatus, Request
from kvferry.cluster.dispatch import Dispatcher
from kvferry.cluster.keeper import Job, Keeper, State, stop_all
from kvferry.cluster.launch import GATEWAY, ROUTER, ROUTER_DEADLINE_S, router_binary, router_environment
from kvferry.cluster.manifest import Role, Router, gateway_arguments
from kvferry.cluster.ports import require_free
from kvferry.cluster.state import Record, StateDirectory, one_at_a_time
from kvferry.cluster.supervisor import Supervisor
from kvferry.errors import ClusterError, KVFerryError, StartError

REFRESH_S = 0.25
POLL_S = 0.2
ENGINE_GRACE_S = 20.0
FRONT_GRACE_S = 35.0  # the gateway lets requests finish for 30 s once it is asked to end
MOST_REPLICAS = 1024


class View(Protocol):
    """Shows a cluster as it goes."""

    def show(self, status: ClusterStatus) -> None: ...


class Kept:
    """A member of the cluster and its keeper."""

    def __init__(self, member: Member, keeper: Keeper) -> None:
        self.member = member
        self.keeper = keeper
        self.probing = threading.Lock()

    @property
    def role(self) -> Role:
        return self.member.role


def front_command(
    allocator: Allocator, front: Front, state: StateDirectory, members: Sequence[Member], router: str = ROUTER
) -> list[str]:
    """What serves the one URL in front of these members."""
    prefill, decode = ([member.spec.url for member in members if member.role is role] for role in Role)
    manifest = allocator.manifest
    if manifest.router is Router.VLLM_ROUTER:
        return router_command(prefill, decode, front.port, front.metrics_port, router, front.host)
    keys = ["--secret-file", str(allocator.secret), "--admin-key-file", str(state.admin_key)]
    return gateway_command(
        prefill, decode, front.port, ["--host", front.host, *keys, *gateway_arguments(manifest.gateway)]
    )


class Session:
    """Runs in the main thread of a process that holds the state directory's lock."""

    def __init__(
        self, allocator: Allocator, members: Sequence[Member], front: Front, state: StateDirectory, view: View
    ) -> None:
        self._allocator = allocator
        self._manifest = allocator.manifest
        self._members = members
        self._front = front
        self._state = state
        self._view = view
        self._phase = "starting"
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._wake = threading.Event()
        self._scaling = threading.Lock()
        self._kept: dict[str, Kept] = {}
        self._front_keeper: Keeper | None = None
        self._router = router_binary() if self._manifest.router is Router.VLLM_ROUTER else ROUTER

    def run(self, serving: Callable[[], None] = lambda: None) -> bool:
        """Returns when everything has stopped; whether it ever served. `serving` is called once it does.

        Raises:
            StartError: an instance or the gateway did not start, or two instances do not work together.
        """
        with (
            self._signals(),
            Supervisor(self._state.logs) as self._supervisor,
            Dispatcher(self._manifest.served_name) as self._dispatcher,
            ControlServer(self._state, self._answer),
        ):
            try:
                if self._begin():
                    self._phase = "serving"
                    serving()
                    self._until(lambda: False)
                    self._drain()
                    return True
                return False
            finally:
                self._phase = "draining"
                self._stop_everything()

    def request_stop(self) -> None:
        """Drain and end; asked again, end without draining."""
        (self._hurry if self._stop.is_set() else self._stop).set()
        self._wake.set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGHUP drain, unless somebody has a handler of his own or had them ignored (nohup)."""

        def handle(_: int, __: FrameType | None) -> None:
            # Elsewhere: this thread may be interrupted while it holds the lock of the very event that is to be set.
            threading.Thread(target=self.request_stop, name="signal").start()

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = (signal.SIG_DFL, signal.default_int_handler)
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) in usual]
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # Starting.

    def _begin(self) -> bool:
        """Whether it came to serve before it was asked to stop."""
        for member in self._members:
            self._keep(member)
        self._require_ports()
        self._record()
        kept = list(self._kept.values())
        for one in kept:
            one.keeper.start()
        if not self._await_first([one.keeper for one in kept]):
            return False
        self._front_keeper = self._keep_front()
        self._front_keeper.start()
        return self._await_first([self._front_keeper])

    def _require_ports(self) -> None:
        for member in self._members:
            for port in member.ports:
                require_free(port)

    def _keep(self, member: Member) -> Kept:
        spec, cpu = member.spec, self._allocator.machine.cpu
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
        kept = Kept(member, Keeper(job, self._supervisor, self._wake.set))
        self._kept[spec.name] = kept
        return kept

    def _keep_front(self) -> Keeper:
        router = self._manifest.router is Router.VLLM_ROUTER
        job = Job(
            ROUTER if router else GATEWAY,
            lambda: front_command(self._allocator, self._front, self._state, self._serving(), self._router),
            router_environment(os.environ) if router else os.environ,
            f"{self._front.url}/{'health' if router else 'ready'}",
            ROUTER_DEADLINE_S,
            FRONT_GRACE_S,
        )
        return Keeper(job, self._supervisor, self._wake.set)

    def _serving(self) -> list[Member]:
        """Members that requests may go to; one that is being restarted is one of them."""
        return [
            one.member
            for one in list(self._kept.values())
            if one.keeper.state not in (State.DRAINING, State.STOPPING, State.FAILED) and one.keeper.settled
        ]

    def _await_first(self, keepers: Sequence[Keeper]) -> bool:
        """Until each was ready once; False when the cluster is to stop instead. Raises what one of them failed with."""

        def failed() -> KVFerryError | None:
            return next((keeper.failure for keeper in keepers if keeper.failure), None)

        self._until(lambda: bool(failed()) or all(keeper.settled for keeper in keepers))
        if self._stop.is_set():
            return False
        if (failure := failed()) is not None:
            raise failure
        return True

    def _until(self, condition: Callable[[], bool]) -> None:
        """Show the cluster until the condition holds or it is to stop."""
        while not (self._stop.is_set() or condition()):
            self._show()
            self._wake.wait(REFRESH_S)
            self._wake.clear()
        self._show()

    def _show(self) -> None:
        with contextlib.suppress(OSError):  # a terminal that was closed is no reason to leave requests unfinished
            self._view.show(self.status())

    def _connect(self, new: Kept) -> None:
        """Move a prompt between an instance that has begun to answer and every one opposite that does so already.

        Of each pair the later one comes here and finds the other. Raises ``StartError`` where nothing was moved.
        """
        opposite = [one for one in list(self._kept.values()) if one.role is not new.role and one.keeper.answering]
        for other in opposite:
            prefill, decode = (new, other) if new.role is Role.PREFILL else (other, new)
            # The counters of a decode instance are read, so it is probed by one at a time.
            with decode.probing:
                if self._stop.is_set():
                    raise StartError("the cluster is to stop")
                try:
                    pulse.connect(self._dispatcher, prefill.member, decode.member, self._allocator.config)
                except StartError:
                    if other.keeper.answering:  # one that ended meanwhile comes here itself when it is back
                        raise

    def _record(self) -> None:
        members = [one.member for one in self._kept.values()]
        ports = {self._front.port, self._front.metrics_port}.union(*(member.ports for member in members))
        devices = tuple(device for member in members for device in member.devices)
        self._state.write_record(Record(os.getpid(), tuple(sorted(ports - {0})), devices))

    # Being asked.

    def _answer(self, request: Request) -> Any:
        if request.do == "status":
            return self.status()
        if request.do == "down":
            self.request_stop()
            return "stopping"
        if request.do == "scale":
            return self._scale({Role.PREFILL: request.prefill, Role.DECODE: request.decode})
        raise ClusterError(f"a cluster cannot {request.do!r}")

    def status(self) -> ClusterStatus:
        """The cluster as it is now."""
        rows = [self._row(one.keeper, one.member) for one in self._ordered()]
        if self._front_keeper is not None:
            rows.append(self._row(self._front_keeper, None))
        return ClusterStatus(
            self._state.name,
            self._phase,
            self._front.url,
            self._manifest.served_name,
            os.getpid(),
            str(self._state.logs),
            tuple(rows),
        )

    def _ordered(self) -> list[Kept]:
        return sorted(self._kept.copy().values(), key=lambda one: (one.role is Role.DECODE, one.member.index))

    def _row(self, keeper: Keeper, member: Member | None) -> InstanceStatus:
        load = keeper.load
        return InstanceStatus(
            name=keeper.job.name,
            role=member.role if member else keeper.job.name,
            layout=str(member.spec.layout) if member else "",
            devices=member.devices if member else (),
            url=member.spec.url if member else self._front.url,
            log=str(keeper.log),
            state=keeper.state,
            since_s=keeper.since_s,
            detail=keeper.detail,
            restarts=keeper.restarts,
            running=load.running if load else None,
            waiting=load.waiting if load else None,
            kv_usage=load.kv_usage if load else None,
        )

    # Resizing.

    def _scale(self, wanted: Mapping[Role, int | None]) -> str:
        """Add replicas first, then drain. Raises ``ClusterError`` where that cannot be, ``StartError`` where one that
        was to be added did not start; then none is added."""
        if self._manifest.router is not Router.GATEWAY:
            raise ClusterError(
                "vllm-router cannot add or drain instances; only a cluster with the gateway can be scaled"
            )
        if not self._scaling.acquire(blocking=False):
            raise ClusterError("the cluster is being scaled already; try again when that is done")
        try:
            if self._phase != "serving":
                raise ClusterError(f"the cluster is {self._phase}; only one that is serving can be scaled")
            added, removed = self._changes(wanted)
            self._grow(added)
            self._shrink(removed)
            return self._counted()
        finally:
            self._scaling.release()

    def _changes(self, wanted: Mapping[Role, int | None]) -> tuple[list[tuple[Role, int]], list[Kept]]:
        added: list[tuple[Role, int]] = []
        removed: list[Kept] = []
        for role, number in wanted.items():
            if number is None:
                continue
            if not 1 <= number <= MOST_REPLICAS:
                raise ClusterError(f"{role}={number} must be between 1 and {MOST_REPLICAS}")
            present = [one for one in self._ordered() if one.role is role]
            taken = {one.member.index for one in present}
            unused = (index for index in range(len(taken) + number) if index not in taken)
            added += [(role, next(unused)) for _ in range(number - len(present))]
            removed += present[number:]
        return added, removed

    def _grow(self, added: Sequence[tuple[Role, int]]) -> None:
        if not added:
            return
        new = self._allocate(added)
        for one in new:
            one.keeper.start()
        try:
            while not all(one.keeper.settled for one in new):
                if self._stop.wait(POLL_S):
                    raise ClusterError("the cluster is to stop")
            for one in new:
                if one.keeper.failure:
                    raise one.keeper.failure
            for one in new:
                self._admin().add(one.member.spec.url, one.role, one.member.spec.layout.dp)
        except KVFerryError:
            self._forget(new)
            raise

    def _allocate(self, added: Sequence[tuple[Role, int]]) -> list[Kept]:
        with one_at_a_time(self._state.root):
            running = [one.member for one in self._kept.values()]
            try:
                members = self._allocator.members(added, running)
            except KVFerryError as error:
                raise ClusterError(str(error)) from error
            new = [self._keep(member) for member in members]
            self._record()
        return new

    def _shrink(self, removed: Sequence[Kept]) -> None:
        if removed:
            with ThreadPoolExecutor(len(removed)) as pool:
                list(pool.map(self._retire, removed))
            self._forget(removed)

    def _retire(self, one: Kept) -> None:
        """Give it nothing new, and wait for what it has: its requests, and what others are still to read from it."""
        one.keeper.drain()
        self._admin().drain(one.member.spec.url)
        self._await_idle([one])
        self._admin().remove(one.member.spec.url)

    def _forget(self, gone: Sequence[Kept]) -> None:
        stop_all([one.keeper for one in gone], self._hurry)
        for one in gone:
            self._kept.pop(one.member.name, None)
        self._record()

    def _admin(self) -> Admin:
        return Admin(self._front.url, self._state.admin_key.read_text().strip())

    def _counted(self) -> str:
        present = [one.role for one in self._ordered()]
        return ", ".join(f"{role}={present.count(role)}" for role in Role)

    def _await_idle(self, members: Sequence[Kept], through_gateway: bool = True) -> bool:
        """Whether they became idle: nothing under way at the gateway, nothing computed, nothing held for a reader."""
        end = time.monotonic() + self._manifest.drain_timeout
        calm = 0
        with httpx.Client(timeout=pulse.TIMEOUT_S, trust_env=False) as client:
            # What is drained reaches all of the gateway's workers within a probe interval; so look twice, that far
            # apart, before it is believed that nothing more comes.
            while calm < 2 and time.monotonic() < end and not self._hurry.is_set():
                requests = self._admin().requests() if through_gateway else {}
                idle = all(self._idle(client, one, requests) for one in members)
                calm = calm + 1 if idle else 0
                self._hurry.wait(self._settling_s if calm else POLL_S)
        return calm >= 2

    @property
    def _settling_s(self) -> float:
        several = int(self._manifest.gateway.get("workers", 1)) > 1
        return 1.5 * float(self._manifest.gateway.get("probe-interval", 1.0)) if several else POLL_S

    def _idle(self, client: httpx.Client, one: Kept, requests: Mapping[str, int]) -> bool:
        if requests.get(one.member.spec.url):
            return False
        seen = pulse.look(client, one.member.spec.url)
        one.keeper.load = seen.load or one.keeper.load
        # What does not answer has nothing left to wait for, unless it only takes its time.
        return seen.load.idle if seen.load else one.keeper.state is not State.DRAINING

    # Ending.

    def _drain(self) -> None:
        """No new work; what is under way ends; what prefill holds is read or given back."""
        self._phase = "draining"
        members = list(self._kept.values())
        for one in members:
            one.keeper.drain()
        waiting = threading.Thread(target=self._drain_members, args=(members,), name="drain", daemon=True)
        waiting.start()
        while waiting.is_alive() and not self._hurry.is_set():
            self._show()
            waiting.join(REFRESH_S)

    def _drain_members(self, members: Sequence[Kept]) -> None:
        gateway = self._manifest.router is Router.GATEWAY
        with contextlib.suppress(KVFerryError):  # a gateway that is gone gives nobody any work
            if gateway:
                for one in members:
                    self._admin().drain(one.member.spec.url)
                self._await_idle(members)
        if self._front_keeper is not None:
            stop_all([self._front_keeper], self._hurry)
        self._await_idle(members, through_gateway=False)

    def _stop_everything(self) -> None:
        self._stop.set()
        front = [self._front_keeper] if self._front_keeper else []
        keepers = [one.keeper for one in self._kept.values()]
        stop_all([*front, *keepers], self._hurry)
        self._show()
