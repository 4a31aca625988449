"""A cluster from its start to its end: starts it, puts one URL in front, answers questions, drains and stops it."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from kvferry.cluster.allocation import Allocator, Front, Member
from kvferry.cluster.commands import gateway_command, router_command
from kvferry.cluster.control import ClusterStatus, ControlServer, InstanceStatus, Request
from kvferry.cluster.dispatch import Dispatcher
from kvferry.cluster.fleet import Ending, Fleet, Kept
from kvferry.cluster.keeper import Job, Keeper, stop_all
from kvferry.cluster.launch import GATEWAY, ROUTER, ROUTER_DEADLINE_S, router_binary, router_environment
from kvferry.cluster.manifest import Role, Router, gateway_arguments
from kvferry.cluster.ports import is_free
from kvferry.cluster.scaling import Scaler
from kvferry.cluster.state import StateDirectory
from kvferry.cluster.supervisor import Supervisor
from kvferry.errors import ClusterError, KVFerryError

REFRESH_S = 0.25
FRONT_ATTEMPTS = 3
FRONT_GRACE_S = 35.0  # the gateway lets requests finish for 30 s once it is asked to end


class View(Protocol):
    """Shows a cluster as it goes."""

    def show(self, status: ClusterStatus) -> None: ...


def front_command(
    allocator: Allocator, front: Front, admin_key: Path, members: Sequence[Member], router: str = ROUTER
) -> list[str]:
    """What serves the one URL in front of these members."""
    prefill, decode = ([member.spec.url for member in members if member.role is role] for role in Role)
    manifest = allocator.manifest
    if manifest.router is Router.VLLM_ROUTER:
        return router_command(prefill, decode, front.port, front.metrics_port, router, front.host)
    secret = [] if allocator.secret is None else ["--secret-file", str(allocator.secret)]
    own = ["--host", front.host, *secret, "--admin-key-file", str(admin_key)]
    return gateway_command(prefill, decode, front.port, [*own, *gateway_arguments(manifest.gateway)])


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
        self._ending = Ending()
        self._wake = threading.Event()
        self._front_keeper: Keeper | None = None
        self._router = router_binary() if self._manifest.router is Router.VLLM_ROUTER else ROUTER

    def run(self, serving: Callable[[str], None] = lambda _: None) -> bool:
        """Returns when everything has stopped; whether it ever served. `serving` is called with its URL once it does.

        Raises:
            StartError: an instance or the gateway did not start, or two instances do not work together.
        """
        with (
            self._signals(),
            Supervisor(self._state.logs) as self._supervisor,
            Dispatcher(self._manifest.served_name) as dispatcher,
        ):
            everything = (self._allocator, self._front, self._state, self._supervisor, dispatcher, self._ending)
            self._fleet = Fleet(*everything, self._wake.set)
            self._scaler = Scaler(self._fleet, self._state)
            with ControlServer(self._state, self._answer):
                try:
                    return self._serve(serving)
                finally:
                    self._phase = "draining"
                    self._stop_everything()

    def _serve(self, serving: Callable[[str], None]) -> bool:
        if not self._begin():
            return False
        self._phase = "serving"
        serving(self._fleet.front.url)
        self._until(lambda: False)
        self._drain()
        return True

    def request_stop(self) -> None:
        """Drain and end; asked again, end without draining."""
        self._ending.ask()
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

    def _begin(self) -> bool:
        """Whether it came to serve before it was asked to stop."""
        kept = [self._fleet.keep(member) for member in self._members]
        self._fleet.record()
        for one in kept:
            one.keeper.start()
        if not self._await_first([one.keeper for one in kept]):
            return False
        return self._begin_front()

    def _begin_front(self) -> bool:
        """Whether it came to serve. Where nobody asked for a port another one is taken when somebody of whom nothing is
        recorded takes the chosen one meanwhile."""
        for left in reversed(range(FRONT_ATTEMPTS)):
            front = self._fleet.front
            if self._manifest.port is None and not is_free(front.port, front.host):
                self._fleet.front = replace(front, port=self._allocator.ports.run())
                self._fleet.record()
            self._front_keeper = self._keep_front()
            self._front_keeper.start()
            try:
                return self._await_first([self._front_keeper])
            except KVFerryError:
                stop_all([self._front_keeper], self._ending.hurry)
                front = self._fleet.front
                if not left or self._manifest.port is not None or is_free(front.port, front.host):
                    raise
        return False

    def _keep_front(self) -> Keeper:
        router, fleet = self._manifest.router is Router.VLLM_ROUTER, self._fleet
        job = Job(
            ROUTER if router else GATEWAY,
            lambda: front_command(self._allocator, fleet.front, self._state.admin_key, fleet.serving(), self._router),
            router_environment(os.environ) if router else os.environ,
            f"{fleet.front.url}/{'health' if router else 'ready'}",
            ROUTER_DEADLINE_S,
            FRONT_GRACE_S,
            # Only this cluster's own gateway knows its key; that somebody answers on the port is not enough.
            settle=(lambda: None) if router else (lambda: fleet.admin().check()),
        )
        return Keeper(job, self._supervisor, self._wake.set)

    def _await_first(self, keepers: Sequence[Keeper]) -> bool:
        """Until each was ready once; False when the cluster is to stop instead. Raises what one of them failed with."""

        def failed() -> KVFerryError | None:
            return next((keeper.failure for keeper in keepers if keeper.failure), None)

        self._until(lambda: bool(failed()) or all(keeper.settled for keeper in keepers))
        if self._ending.stop.is_set():
            return False
        if (failure := failed()) is not None:
            raise failure
        return True

    def _until(self, condition: Callable[[], bool]) -> None:
        """Show the cluster until the condition holds or it is to stop."""
        while not (self._ending.stop.is_set() or condition()):
            self._show()
            self._wake.wait(REFRESH_S)
            self._wake.clear()
        self._show()

    def _show(self) -> None:
        with contextlib.suppress(OSError):  # a terminal that was closed is no reason to leave requests unfinished
            self._view.show(self.status())

    def _answer(self, request: Request) -> Any:
        """To what was asked over the control socket."""
        if request.do == "status":
            return self.status()
        if request.do == "down":
            self.request_stop()
            return "stopping"
        if request.do == "scale":
            if self._phase != "serving":
                raise ClusterError(f"the cluster is {self._phase}; only one that is serving can be scaled")
            return self._scaler.scale({Role.PREFILL: request.prefill, Role.DECODE: request.decode})
        raise ClusterError(f"a cluster cannot {request.do!r}")

    def status(self) -> ClusterStatus:
        """The cluster as it is now."""
        rows = [self._row(one.keeper, one.member) for one in self._fleet.ordered()]
        if self._front_keeper is not None:
            rows.append(self._row(self._front_keeper, None))
        return ClusterStatus(
            self._state.name,
            self._phase,
            self._fleet.front.url,
            self._manifest.served_name,
            os.getpid(),
            str(self._state.logs),
            tuple(rows),
        )

    def _row(self, keeper: Keeper, member: Member | None) -> InstanceStatus:
        load = keeper.load
        return InstanceStatus(
            name=keeper.job.name,
            role=member.role if member else keeper.job.name,
            layout=str(member.spec.layout) if member else "",
            devices=member.devices if member else (),
            url=member.spec.url if member else self._fleet.front.url,
            log=str(keeper.log),
            state=keeper.state,
            since_s=keeper.since_s,
            detail=keeper.detail,
            restarts=keeper.restarts,
            running=load.running if load else None,
            waiting=load.waiting if load else None,
            kv_usage=load.kv_usage if load else None,
        )

    def _drain(self) -> None:
        """No new work; what is under way ends; what prefill holds is read or given back."""
        self._phase = "draining"
        instances = self._fleet.ordered()
        for one in instances:
            one.keeper.drain()
        waiting = threading.Thread(target=self._drain_instances, args=(instances,), name="drain", daemon=True)
        waiting.start()
        while waiting.is_alive() and not self._ending.hurry.is_set():
            self._show()
            waiting.join(REFRESH_S)

    def _drain_instances(self, instances: Sequence[Kept]) -> None:
        if self._manifest.router is Router.GATEWAY:
            with contextlib.suppress(KVFerryError):  # a gateway that is gone gives nobody any work
                admin = self._fleet.admin()
                for one in instances:
                    admin.drain(one.member.spec.url)
                self._fleet.await_idle(instances)
        if self._front_keeper is not None:
            stop_all([self._front_keeper], self._ending.hurry)
        self._fleet.await_idle(instances, through_gateway=False)

    def _stop_everything(self) -> None:
        self._ending.stop.set()
        front = [self._front_keeper] if self._front_keeper else []
        stop_all([*front, *(one.keeper for one in self._fleet.ordered())], self._ending.hurry)
        self._show()
