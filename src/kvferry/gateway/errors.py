"""Every refusal and failure as the client sees it: a status and an OpenAI error object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import responses

import msgspec
from starlette.responses import Response

from kvferry.errors import GatewayError
from kvferry.gateway.settings import Role

PASSED_ON = ("retry-after", "www-authenticate")


@dataclass(eq=False)
class ApiError(GatewayError):
    """An answer that is an error.

    Attributes:
        status: what the client gets.
        message: what was wrong; never a key, a prompt or an address of an instance.
        retry: another instance might answer better.
        leg: the one that failed, where one did.
        body: an instance's own error body, passed on as it is.
        headers: to send with it.
    """

    status: int
    message: str
    retry: bool = False
    leg: Role = Role.DECODE
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @classmethod
    def of_instance(cls, status: int, body: bytes, headers: Mapping[str, str]) -> ApiError:
        """What an instance answered, for the client; ``headers`` are found in any case of letters."""
        names = (*PASSED_ON, "content-type") if body else PASSED_ON
        kept = {name: headers[name] for name in names if name in headers}
        return cls(status, f"an instance answered {status}", status == 429 or status >= 500, body=body, headers=kept)

    def response(self) -> Response:
        body = self.body or error_body(self.status, self.message)
        return Response(body, self.status, {"content-type": "application/json", **self.headers})


def error_body(status: int, message: str) -> bytes:
    kind = responses.get(status, "Unknown Error").replace(" ", "").removesuffix("Error") + "Error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def error_event(message: str, status: int, named: bool) -> bytes:
    """A server-sent event that ends a stream; ``named`` in the form that the Responses API has for it."""
    if not named:
        return b"data: " + error_body(status, message) + b"\n\n"
    event = {"type": "error", "code": str(status), "message": message, "param": None, "sequence_number": 0}
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
