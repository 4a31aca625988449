"""Everything that crosses the side channel, and the parameters that travel with a request through the router.

Requests go from a consumer to a producer's listener; each gets one reply. msgspec checks types and bounds while it
decodes, so a handler only ever sees well-formed messages.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.errors import MessageError, ParamsError
from kvferry.geometry import EngineLayout
from kvferry.protocol.authentication import Purpose, Seal

PROTOCOL_VERSION = 3

MAX_REQUEST_BYTES = 1 << 20
"""A renewal of some ten thousand claims; nothing else a consumer sends comes near."""

MAX_REPLY_BYTES = 64 << 20
"""The layout of a thousand workers with a hundred layers each, or the blocks of a prompt of ten million tokens."""

PARAMS_KEY = "kvferry"
"""The one key of this project in ``kv_transfer_params``; the others there are vLLM's own."""

NOT_SIGNED = "kv_transfer_params are not signed with this engine's secret; do all instances share it?"
IDENTITY = re.compile(r"kvferry-([0-9a-f]{16,64})-([0-9a-f]*)")
RANDOM_END = re.compile(r"-[0-9a-f]{8}\Z")

Address = tuple[str, int]
"""Host and port of a producer's side channel."""

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Host = Annotated[str, Meta(max_length=255, pattern=r"^[0-9A-Za-z_.:%-]+\Z")]
Token = Annotated[str, Meta(min_length=16, max_length=64, pattern=r"^[0-9a-f]+\Z")]
Port = Annotated[int, Meta(ge=1, le=65535)]
Label = Annotated[str, Meta(max_length=64, pattern=r"^[0-9a-z]*\Z")]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Number = Annotated[int, Meta(ge=0, le=1 << 31)]
Block = Annotated[int, Meta(ge=0, lt=1 << 31)]
Lease = Annotated[float, Meta(ge=0.01, le=1e9)]
"""Seconds. Shorter ones would have a consumer do nothing but renew."""

Names = Annotated[list[Name], Meta(min_length=1, max_length=1 << 16)]

WAIT_S = 2.0
"""How long a producer may keep a message for which there is nothing to say yet, before it says just that."""


class Offer(msgspec.Struct, frozen=True):
    """A producer's promise as the consumer hears of it: small and of constant size, without block ids.

    Attributes:
        host, port: the producer's side channel.
        engine_id: vLLM's label of the producer, for logs.
        request: the producer's id of the request.
        incarnation: which start of the producer's engine core made the promise.
        nonce: unguessable, so that nobody can claim what was not offered to them.
        tokens: how many tokens from the first on the producer holds; None in a transfer that streams, where whoever
            sends both legs at once makes the offer and only knows that both prompts are the same.
        token_hash: identity of those tokens, from ``token_identity``; None where ``tokens`` is.
        layout: ``tp2pp2dp0``, for logs.
    """

    host: Host
    port: Port
    engine_id: Annotated[str, Meta(max_length=1024)]
    request: Name
    incarnation: Token
    nonce: Token
    tokens: Count | None
    token_hash: Token | None
    layout: Label = ""

    @property
    def address(self) -> Address:
        return self.host, self.port

    @property
    def signed_text(self) -> bytes:
        """All there is in an offer, in one encoding only."""
        return encode((PROTOCOL_VERSION, *msgspec.structs.astuple(self)))

    def to_params(self, seal: Seal) -> dict[str, Any]:
        """``kv_transfer_params`` of the decode request, in the keys that vLLM's routers know."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_mode": "pull",
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_block_ids": None,
            "remote_num_tokens": self.tokens,
            PARAMS_KEY: {
                "version": PROTOCOL_VERSION,
                "incarnation": self.incarnation,
                "nonce": self.nonce,
                "token_hash": self.token_hash,
                "layout": self.layout,
                "mac": seal.sign(Purpose.PARAMETERS, self.signed_text).hex(),
            },
        }

    @classmethod
    def ahead(cls, address: Address, incarnation: str, transfer: Transfer) -> Offer:
        """Of a prefill that may not have begun, made by whoever sends its request."""
        return cls(*address, "", transfer.name, incarnation, transfer.nonce, None, None)

    @classmethod
    def of_identity(cls, params: dict[str, Any], request: str, seal: Seal) -> Offer | None:
        """Of the prefill leg of a request with the same id, at the producer that ``engine_identity`` names in
        ``kv_transfer_params``; None where it names none.

        Raises:
            ParamsError: nobody with this secret signed it, or (without a secret) its address is not private.
        """
        engine = params.get("remote_engine_id")
        found = IDENTITY.fullmatch(engine) if isinstance(engine, str) else None
        if found is None:
            return None
        try:
            host, port = msgspec.convert((params.get("remote_host"), params.get("remote_port")), tuple[Host, Port])
        except msgspec.ValidationError as error:
            raise ParamsError(f"kv_transfer_params are malformed: {error}") from error
        if not seal.accepts(_unhex(found[2]), Purpose.IDENTITY, _identity_text((host, port), found[1])):
            raise ParamsError(NOT_SIGNED)
        return cls.ahead((host, port), found[1], Transfer.of_request(request)).admitted(seal)

    def admitted(self, seal: Seal) -> Offer:
        """Itself, if its address may be spoken to. Raises ``ParamsError``."""
        if not seal.admits(self.host):
            raise ParamsError(
                f"kv_transfer_params name the host {self.host}, which is no address of a private network, and there "
                "is no secret to check them with: set KVFERRY_SECRET or secret_file, or allow_public_peers"
            )
        return self

    @classmethod
    def from_params(cls, params: dict[str, Any], seal: Seal) -> Offer:
        """Read ``kv_transfer_params`` as they came with a request, from whoever sent them.

        Raises:
            ParamsError: a key is missing, null, of another type or out of bounds, another connector made them, nobody
                with this secret signed them, or (without a secret) they name an address that is not private. What
                they name must not be spoken to.
        """
        own = params.get(PARAMS_KEY)
        if not isinstance(own, dict):
            raise ParamsError(f"kv_transfer_params have no '{PARAMS_KEY}' entry: no KVFerry producer made them")
        version, mac = own.get("version"), own.get("mac")
        if version != PROTOCOL_VERSION:
            # Anything may stand there, also what has no finite text.
            said = version if isinstance(version, int) and 0 <= version < 1000 else "an unknown one"
            raise ParamsError(f"the producer's protocol version is {said}, this is {PROTOCOL_VERSION}")
        fields = {
            "host": params.get("remote_host"),
            "port": params.get("remote_port"),
            "engine_id": params.get("remote_engine_id"),
            "request": params.get("remote_request_id"),
            "tokens": params.get("remote_num_tokens"),
            **{name: own.get(name) for name in ("incarnation", "nonce", "token_hash", "layout")},
        }
        try:
            offer = msgspec.convert(fields, cls)
            text = offer.signed_text
        except (msgspec.ValidationError, UnicodeError, RecursionError, OverflowError) as error:
            raise ParamsError(f"kv_transfer_params are malformed: {error}") from error
        if (offer.tokens is None) != (offer.token_hash is None):
            raise ParamsError("kv_transfer_params have a number of tokens without their hash, or the other way round")
        if not seal.accepts(_unhex(mac), Purpose.PARAMETERS, text):
            raise ParamsError(NOT_SIGNED)
        return offer.admitted(seal)


class Transfer(msgspec.Struct, frozen=True):
    """What a prefill request is told of a transfer that streams: under which name, and for whom, to hold its blocks.

    Attributes:
        name: drawn by whoever sends both legs; stands for the request in every message about its blocks.
        nonce: as in ``Offer``.
    """

    name: Token
    nonce: Token

    @classmethod
    def of_request(cls, request: str) -> Transfer:
        """Of a request whose two legs go under one id: vLLM's id of it without the random end that each engine adds.

        That id is as hard to guess as its sender made it.
        """
        base = RANDOM_END.sub("", request).encode()
        name, nonce = (hashlib.blake2b(base, digest_size=16, person=part).hexdigest() for part in (b"name", b"nonce"))
        return cls(name, nonce)

    def to_params(self) -> dict[str, Any]:
        """``kv_transfer_params`` of the prefill request."""
        own = {"version": PROTOCOL_VERSION, **msgspec.structs.asdict(self)}
        return {"do_remote_prefill": False, "do_remote_decode": True, PARAMS_KEY: own}

    @classmethod
    def from_params(cls, params: dict[str, Any]) -> Transfer | None:
        """Read the ``kv_transfer_params`` of a prefill request; None where it is an ordinary one.

        Raises:
            ParamsError: they are malformed, or of another version.
        """
        own = params.get(PARAMS_KEY)
        if own is None:
            return None
        if not isinstance(own, dict) or own.get("version") != PROTOCOL_VERSION:
            raise ParamsError(f"'{PARAMS_KEY}' in kv_transfer_params is not of protocol version {PROTOCOL_VERSION}")
        try:
            return msgspec.convert(own, cls)
        except (msgspec.ValidationError, RecursionError, OverflowError) as error:
            raise ParamsError(f"kv_transfer_params are malformed: {error}") from error


def engine_identity(address: Address, incarnation: str, seal: Seal) -> str:
    """An engine id that says where a producer answers claims, to routers that keep it and pass it on by itself."""
    mac = seal.sign(Purpose.IDENTITY, _identity_text(address, incarnation)).hex()
    return f"kvferry-{incarnation}-{mac}"


def _identity_text(address: Address, incarnation: str) -> bytes:
    return encode((PROTOCOL_VERSION, *address, incarnation))


def _unhex(mac: object) -> bytes:
    """What a MAC in parameters stands for; nothing if it is none."""
    try:
        return bytes.fromhex(mac) if isinstance(mac, str) else b""
    except ValueError:
        return b""


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First contact of a worker with an incarnation."""

    incarnation: Token


class Claim(msgspec.Struct, tag=True, frozen=True):
    """A consumer accepts an offer.

    Attributes:
        claim: drawn by the consumer for this acceptance; repeating a message repeats it.
        consumer: incarnation of the consumer's engine core.
        readers: names of all workers that will send an ``Ack``.
        tokens, token_hash: whose KV cache is claimed; as in ``Offer``, where that says it.
        ahead: the request may be yet to come, as it may in a transfer that streams.
    """

    incarnation: Token
    request: Name
    nonce: Token
    claim: Token
    consumer: Token
    readers: Names
    tokens: Count
    token_hash: Token
    ahead: bool = False


class Follow(msgspec.Struct, tag=True, frozen=True):
    """One worker asks for news of a claimed prefill that goes on: when there are, or after ``WAIT_S`` without any.

    Attributes:
        life, ready: as in the last ``Granted``.
    """

    incarnation: Token
    request: Name
    claim: Token
    reader: Name
    life: Number
    ready: Number


class Renew(msgspec.Struct, tag=True, frozen=True):
    """Prolong the leases of these claims, as (request, claim)."""

    incarnation: Token
    claims: Annotated[list[tuple[Name, Token]], Meta(max_length=1 << 16)]


class Ack(msgspec.Struct, tag=True, frozen=True):
    """One worker says: all my reads for this claim have ended. The answer says whether they may be trusted."""

    incarnation: Token
    request: Name
    claim: Token
    reader: Name


class Release(msgspec.Struct, tag=True, frozen=True):
    """The consumer will not read (any more): aborted, rejected, or found locally."""

    incarnation: Token
    request: Name
    nonce: Token
    claim: Token


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``Hello``: what every worker holds and how to read it."""

    layout: EngineLayout


class Granted(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``Claim`` and to ``Follow``: what may be read.

    Attributes:
        blocks: block ids of the request by KV cache group, as far as they are known.
        tokens: how many tokens there will be.
        ttl: seconds until the lease ends.
        ready: how many tokens from the first on may be read; all of them only once the prefill has ended.
        life: how often the prefill lost its blocks and began anew. What was read in one life and not confirmed by an
            answer of the same life may be anything.
    """

    blocks: list[list[Block]]
    tokens: Count
    ttl: Lease
    ready: Number
    life: Number = 0

    @property
    def complete(self) -> bool:
        """The prefill has ended, and its blocks stay as they are while the lease lasts."""
        return self.ready >= self.tokens


class Waiting(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``Claim``: ask again, the prefill has not begun.

    Attributes:
        known: the producer has the request.
    """

    known: bool


class Held(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``Ack``: the blocks were not freed before this moment, so what was read is the request's own."""


class Renewed(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``Renew``: the claims among them that are gone."""

    gone: list[Token]


class Released(msgspec.Struct, tag=True, frozen=True):
    """Answer to ``Release``, whatever there was to release."""


class Gone(msgspec.Struct, tag=True, frozen=True):
    """The producer does not hold what the message names (any more), or never did."""

    reason: Annotated[str, Meta(max_length=1024)]


Request = Hello | Claim | Follow | Renew | Ack | Release
Reply = Welcome | Granted | Waiting | Held | Renewed | Released | Gone

_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.Encoder().encode


def decode_request(data: bytes) -> Request:
    """Raises ``MessageError`` for anything that is not a request of this protocol."""
    return _decode(_request_decoder, data, MAX_REQUEST_BYTES)  # type: ignore[no-any-return]


def decode_reply(data: bytes) -> Reply:
    """Raises ``MessageError`` for anything that is not a reply of this protocol."""
    return _decode(_reply_decoder, data, MAX_REPLY_BYTES)  # type: ignore[no-any-return]


def _decode(decoder: msgspec.msgpack.Decoder[Any], data: bytes, limit: int) -> Any:
    if len(data) > limit:
        raise MessageError(f"a message of {len(data)} bytes is over the limit of {limit}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise MessageError(f"not a message of protocol {PROTOCOL_VERSION}: {error}") from error
