"""Every refusal and failure as the client sees it: a status and an OpenAI error object."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvferry.errors import GatewayError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
PASSED_ON = ("retry-after", "www-authenticate")


class ApiError(GatewayError):
    """An answer that is an error.

    Args:
        status: what the client gets.
        message: what was wrong; never a key, a prompt or an address of an instance.
        body: an instance's own error body, passed on as it is.
        headers: to send with it.
        retry: another instance might answer better.
        elsewhere: and only another one; this one asked to be left alone.
    """

    def __init__(
        self,
        status: int,
        message: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        retry: bool = False,
        elsewhere: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message) if body is None else body
        self.headers = {"content-type": "application/json", **(headers or {})}
        self.retry = retry
        self.elsewhere = elsewhere

    @classmethod
    def of_instance(cls, status: int, body: bytes, headers: Mapping[str, str]) -> ApiError:
        """What an instance answered, for the client."""
        kept = {name: headers[name] for name in PASSED_ON if name in headers}
        if body:
            kept["content-type"] = headers.get("content-type", "application/json")
        refused = status in (429, 503)
        return cls(
            status,
            f"an instance answered {status}",
            body or None,
            kept,
            retry=refused or status >= 500,
            elsewhere=refused,
        )


def error_body(status: int, message: str) -> bytes:
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def error_event(message: str, status: int, named: bool) -> bytes:
    """A server-sent event that ends a stream; ``named`` in the form that the Responses API has for it."""
    if named:
        event = {"type": "error", "code": str(status), "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return b"data: " + error_body(status, message) + b"\n\n"
