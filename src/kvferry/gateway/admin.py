"""What /admin shows and changes."""

from __future__ import annotations

import msgspec

from kvferry.errors import GatewayError
from kvferry.gateway.errors import ApiError
from kvferry.gateway.health import Fleet
from kvferry.gateway.settings import InstanceSpec, Role

ACTIONS = ("add", "remove", "drain", "resume")


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    url: str


def change(fleet: Fleet, action: str, body: bytes) -> None:
    """Do one of ``ACTIONS`` to what ``body`` names.

    Raises:
        ApiError: 400, the body is not what it must be; 404, there is no such instance.
    """
    try:
        named = msgspec.json.decode(body, type=InstanceSpec if action == "add" else _Named)
        url = InstanceSpec.parse(named.url, Role.DECODE).url
    except (msgspec.DecodeError, RecursionError, GatewayError) as error:
        raise ApiError(400, f"the body does not name an instance: {error}") from None
    if isinstance(named, InstanceSpec):
        fleet.add(msgspec.structs.replace(named, url=url))
    elif url not in fleet.instances:
        raise ApiError(404, "there is no such instance")
    elif action == "remove":
        fleet.remove(url)
    else:
        fleet.instances[url].draining = action == "drain"


def described(fleet: Fleet) -> list[dict[str, object]]:
    """All instances, for whoever asks."""
    found: list[dict[str, object]] = []
    for one in fleet.instances.values():
        ranks = [{"rank": rank.index, "usable": rank.usable, "requests": rank.requests} for rank in one.ranks]
        state = {"up": one.up, "draining": one.draining, "requests": sum(rank.requests for rank in one.ranks)}
        found.append({"url": one.spec.url, "role": one.spec.role, **state, "ranks": ranks})
    return found
