"""Fetches images from addresses that clients name, so it must not become their hand inside the operator's network.

Only hosts that the operator listed are asked. Where that is every host (*), it is every public address: a name is
looked up once, what it stands for is judged, and that very address is connected to, so that no later answer of a name
server counts. Redirects are not followed, the size is counted as it comes, and time is bounded over all of it.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import httpx

from moespeq.config import format_bytes
from moespeq.errors import UsageError
from moespeq.ports import Clock

__all__ = ["ImageFetcher"]

_ANY = "*"
_PORTS = {"http": 80, "https": 443}


class ImageFetcher:
    """hosts: names or addresses; threads may share it."""

    def __init__(self, hosts: Sequence[str], *, most_bytes: int, timeout_s: float, clock: Clock) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._most_bytes, self._timeout_s, self._clock = most_bytes, timeout_s, clock

    def __call__(self, url: str) -> bytes:
        """The file at `url`. Raises UsageError."""
        try:
            parsed = httpx.URL(url)
            host, port = parsed.host.lower(), parsed.port or _PORTS[parsed.scheme]
        except (httpx.InvalidURL, KeyError, ValueError) as error:
            raise UsageError("The address of an image is no http or https URL; correct it.") from error
        address = self._address(host, port)
        until_s = self._clock.now_s() + self._timeout_s
        try:
            return self._get(parsed, parsed.copy_with(host=address), until_s)
        except httpx.TimeoutException as error:
            raise self._too_slow(host) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise UsageError(
                f"The image at {host:.100} cannot be fetched ({type(error).__name__}); send it as a data URL."
            ) from error

    def _get(self, url: httpx.URL, direct: httpx.URL, until_s: float) -> bytes:
        host = url.host
        headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity"}
        data = bytearray()
        with (
            httpx.Client(trust_env=False, timeout=self._timeout_s, follow_redirects=False) as client,
            client.stream("GET", direct, headers=headers, extensions={"sni_hostname": host}) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise UsageError(
                    f"{host:.100} answers {answer.status_code} for an image, and 200 is needed; redirects are not "
                    "followed. Give the image's own address."
                )
            for piece in answer.iter_raw():
                data += piece
                if len(data) > self._most_bytes:
                    raise UsageError(
                        f"The image at {host:.100} has more than {format_bytes(self._most_bytes)}; send a smaller one."
                    )
                if self._clock.now_s() > until_s:
                    raise self._too_slow(host)
        return bytes(data)

    def _address(self, host: str, port: int) -> str:
        """Where to connect to. Raises UsageError for a host that is not to be asked."""
        is_listed = host in self._hosts
        if not (is_listed or _ANY in self._hosts):
            raise UsageError(f"Images of {host:.100} are not fetched here; send it as a data URL.")
        try:
            found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except (OSError, UnicodeError) as error:
            raise UsageError(f"The host {host:.100} of an image is not known; correct the address.") from error
        if not is_listed and not all(_is_public(address) for address in found):
            raise UsageError(f"Images of {host:.100}, which is no public address, are not fetched; send a data URL.")
        return found[0]

    def _too_slow(self, host: str) -> UsageError:
        return UsageError(f"The image at {host:.100} did not come within {self._timeout_s:g} s; send it as a data URL.")


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(parsed, "ipv4_mapped", None) or getattr(parsed, "sixtofour", None) or parsed
    return parsed.is_global and inner.is_global and not parsed.is_multicast
