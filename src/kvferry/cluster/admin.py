"""The gateway's own interface for adding and draining instances, as a running cluster uses it."""

import time
from typing import Any

import httpx

from kvferry.errors import DispatchError

DEADLINE_S = 30.0
TIMEOUT_S = 5.0
POLL_S = 0.2


class Admin:
    """One gateway, and the key that it wants to see.

    Raises, from every method:
        DispatchError: the gateway refused, or did not answer within `DEADLINE_S`; one that was just started anew is
            waited for.
    """

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}

    def add(self, url: str, role: str, ranks: int) -> None:
        self._post("add", {"url": url, "role": role, "dp": ranks})

    def drain(self, url: str) -> None:
        """Give it no further request."""
        self._post("drain", {"url": url})

    def remove(self, url: str) -> None:
        self._post("remove", {"url": url})

    def check(self) -> None:
        """That it is the gateway that knows the key."""
        self._send("GET", "instances", None)

    def requests(self) -> dict[str, int]:
        """Requests under way, by the instance's URL; of one of the gateway's workers, if there are several."""
        return {one["url"]: int(one["requests"]) for one in self._send("GET", "instances", None)}

    def _post(self, action: str, body: dict[str, Any]) -> None:
        self._send("POST", action, body)

    def _send(self, method: str, action: str, body: dict[str, Any] | None) -> Any:
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                url = f"{self._url}/admin/{action}"
                answer = httpx.request(
                    method, url, json=body, headers=self._headers, timeout=TIMEOUT_S, trust_env=False
                )
            except httpx.TransportError as error:
                if time.monotonic() > end:
                    raise DispatchError(f"the gateway does not answer: {error}") from error
                time.sleep(POLL_S)
                continue
            if answer.status_code == httpx.codes.NOT_FOUND and body is not None and action != "add":
                return None  # there is no such instance, so nothing is left to drain or to remove
            if answer.status_code != httpx.codes.OK:
                raise DispatchError(f"the gateway refused to {action}: {answer.status_code} {answer.text[:200]}")
            return answer.json()
