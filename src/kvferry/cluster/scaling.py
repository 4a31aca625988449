"""Adding and draining replicas of a running cluster, while requests are served."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvferry.cluster.fleet import POLL_S, Fleet, Kept
from kvferry.cluster.manifest import Role, Router
from kvferry.cluster.state import StateDirectory, one_at_a_time
from kvferry.errors import ClusterError, DispatchError, KVFerryError

MOST_REPLICAS = 1024


class Scaler:
    """Resizes a fleet behind a gateway, one request at a time."""

    def __init__(self, fleet: Fleet, state: StateDirectory) -> None:
        self._fleet = fleet
        self._state = state
        self._scaling = threading.Lock()

    def scale(self, wanted: Mapping[Role, int | None]) -> str:
        """Add replicas first, then drain; says how many there are.

        Raises:
            ClusterError: it cannot be asked for.
            KVFerryError: a replica that was to be added did not start; none is added then.
        """
        if self._fleet.allocator.manifest.router is not Router.GATEWAY:
            raise ClusterError("vllm-router can neither add nor drain instances; only the gateway can be scaled behind")
        if not self._scaling.acquire(blocking=False):
            raise ClusterError("the cluster is being scaled already; try again when that is done")
        try:
            added, removed = self._changes(wanted)
            self._grow(added)
            self._shrink(removed)
        finally:
            self._scaling.release()
        present = [one.role for one in self._fleet.ordered()]
        return ", ".join(f"{role}={present.count(role)}" for role in Role)

    def _changes(self, wanted: Mapping[Role, int | None]) -> tuple[list[tuple[Role, int]], list[Kept]]:
        added: list[tuple[Role, int]] = []
        removed: list[Kept] = []
        for role, number in wanted.items():
            if number is None:
                continue
            if not 1 <= number <= MOST_REPLICAS:
                raise ClusterError(f"{role}={number} must be between 1 and {MOST_REPLICAS}")
            present = [one for one in self._fleet.ordered() if one.role is role]
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
            self._await_ready(new)
            admin = self._fleet.admin()
            for one in new:
                admin.add(one.member.spec.url, one.role, one.member.spec.layout.dp)
        except KVFerryError:
            self._fleet.forget(new)
            raise

    def _allocate(self, added: Sequence[tuple[Role, int]]) -> list[Kept]:
        fleet = self._fleet
        with one_at_a_time(self._state.root):
            try:
                members = fleet.allocator.members(added, [one.member for one in fleet.ordered()])
            except KVFerryError as error:
                raise ClusterError(str(error)) from error
            new = [fleet.keep(member) for member in members]
            fleet.record()
        return new

    def _await_ready(self, new: Sequence[Kept]) -> None:
        while not all(one.keeper.settled for one in new):
            if self._fleet.ending.stop.wait(POLL_S):
                raise ClusterError("the cluster is to stop")
        for one in new:
            if one.keeper.failure:
                raise one.keeper.failure

    def _shrink(self, removed: Sequence[Kept]) -> None:
        if removed:
            with ThreadPoolExecutor(len(removed)) as pool:
                list(pool.map(self._retire, removed))
            self._fleet.forget(removed)

    def _retire(self, one: Kept) -> None:
        """Give it nothing new, and wait for what it has: its requests, and what others are still to read from it."""
        admin, url = self._fleet.admin(), one.member.spec.url
        one.keeper.drain()
        try:
            admin.drain(url)
            self._fleet.await_idle([one])
            admin.remove(url)
        except DispatchError:
            # A gateway that is down gives it nothing, and one that is started anew is not told of it.
            self._fleet.await_idle([one], through_gateway=False)
