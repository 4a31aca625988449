"""What was changed through /admin, shared by the worker processes of one gateway through a file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from kvferry.gateway.health import Fleet
from kvferry.gateway.settings import InstanceSpec

logger = logging.getLogger(__name__)


class Member(msgspec.Struct, frozen=True):
    spec: InstanceSpec
    draining: bool


class Membership:
    """Writes the fleet's instances to ``file`` and takes over what another process wrote; without a file, neither."""

    def __init__(self, fleet: Fleet, file: str | None) -> None:
        self._fleet = fleet
        self._file = Path(file) if file else None
        self._read_at = 0

    def save(self) -> None:
        if self._file is None:
            return
        members = [Member(instance.spec, instance.draining) for instance in self._fleet.instances.values()]
        scratch = self._file.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(members))
        scratch.replace(self._file)

    def load(self) -> None:
        """Take over what was written since the last time."""
        if self._file is None or not self._file.exists():
            return
        try:
            written_at = self._file.stat().st_mtime_ns
            if written_at != self._read_at:
                self._take(msgspec.json.decode(self._file.read_bytes(), type=list[Member]))
                self._read_at = written_at
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("the instances in %s cannot be read: %s", self._file, error)

    def _take(self, members: list[Member]) -> None:
        for url in self._fleet.instances.keys() - {member.spec.url for member in members}:
            self._fleet.remove(url)
        for member in members:
            self._fleet.add(member.spec).draining = member.draining
