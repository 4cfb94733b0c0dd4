"""Addresses as users write them.

Owns: `Address`, the workers of a route. Refuses to know: sockets, name servers. Invariant: an
address that exists has a host and a port in range.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ds4py.errors import ConfigError
from ds4py.layer_range import LayerSpec


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP endpoint as the user wrote it.

    Args:
        host: Name or numeric address, no brackets; empty means all addresses.
        port: 0 to 65535; 0 lets the system choose (listeners only).
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port}: expected 0 to 65535")

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `HOST:PORT` or `[IPV6]:PORT`.

        Raises:
            ConfigError: The text has another form.
        """
        host, colon, port = text.strip().rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        bad_host = not host or (":" in host and not bracketed)
        if not colon or bad_host or not (port.isascii() and port.isdigit() and len(port) <= 5):
            raise ConfigError(
                f"address {text!r}: expected HOST:PORT, for example 127.0.0.1:8000 or [::1]:8000"
            )
        return cls(host[1:-1] if bracketed else host, int(port))

    @property
    def is_wildcard(self) -> bool:
        """Whether this names every interface, and so cannot be dialled or advertised."""
        return self.host in {"", "*", "0.0.0.0", "::"}  # noqa: S104 - compared, not bound

    @property
    def is_loopback(self) -> bool:
        """Whether nobody but this machine reaches it, as far as its text tells."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """One worker to dial: `HOST:PORT`, or `HOST:PORT=LAYERS` for a peer that cannot tell."""

    address: Address
    layers: LayerSpec | None = None

    @classmethod
    def parse(cls, text: str) -> RouteEntry:
        """Read one entry of `--dist-route`."""
        address, sign, layers = text.strip().partition("=")
        entry = cls(Address.parse(address), LayerSpec.parse(layers) if sign else None)
        if entry.address.is_wildcard or entry.address.port == 0:
            raise ConfigError(f"route entry {text!r}: expected a host and port that can be dialled")
        return entry


def parse_route(text: str) -> tuple[RouteEntry, ...]:
    """Read `--dist-route`: entries separated by commas, each worker once."""
    entries = tuple(RouteEntry.parse(part) for part in text.split(",") if part.strip())
    if not entries:
        raise ConfigError("--dist-route: no worker named; expected HOST:PORT[,HOST:PORT...]")
    seen: set[Address] = set()
    for entry in entries:
        if entry.address in seen:
            raise ConfigError(f"--dist-route: {entry.address} stands there twice")
        seen.add(entry.address)
    return entries
