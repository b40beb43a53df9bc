"""Asks a running coordinator, with nothing but the standard library."""

from __future__ import annotations

import http.client
import json
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode, urlsplit

from coordinator.errors import CallRefusedError, ConfigError, NoAnswerError
from coordinator.printable import printable_lines

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from coordinator.config import Http

#: How long an answer may take; it is there within a fraction of that.
ANSWER_S: Final = 10.0
#: A follower hears something at least every 10 s, be it only that the coordinator is there.
SILENCE_S: Final = 30.0
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - where to connect instead


def url_of(settings: Http) -> str:
    """Return where a coordinator with these settings is served, from its own host.

    Raises:
        ConfigError: it is not.

    """
    if not settings.address:
        problem = "http.address is empty: this coordinator serves no operators"
        raise ConfigError([problem])
    host, _, port = settings.address.rpartition(":")
    return f"http://{_WILDCARDS.get(host, host)}:{port}"


class Caller:
    """Calls one coordinator.

    Attributes:
        url: where it is.

    """

    def __init__(self, url: str, token: str = "") -> None:
        """Call the coordinator at ``url``, such as ``http://127.0.0.1:7780``.

        Raises:
            ConfigError: it is no such URL, or no such token can be.

        """
        self._host, self._port = _place(url)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{self._port}"
        if not (token.isascii() and token.isprintable()):
            problem = "the token has characters that cannot be sent; it is one line of printable ASCII"
            raise ConfigError([problem])
        self._token = token

    def get(self, path: str, **parameters: object) -> Any:  # noqa: ANN401 - whatever JSON says
        """Ask for something.

        Raises:
            NoAnswerError: nobody answers.
            CallRefusedError: it was refused.

        """
        with self._answer("GET", path, parameters) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:  # noqa: ANN401 - as above
        """Have something done.

        Raises:
            NoAnswerError: nobody answers.
            CallRefusedError: it was refused.

        """
        with self._answer("POST", path, {}, body) as answer:
            return json.loads(answer.read())

    def lines(self, path: str, **parameters: object) -> Generator[str, None, None]:
        """Yield an answer line by line, as the lines come.

        Raises:
            NoAnswerError: nobody answers, or not any more.
            CallRefusedError: it was refused.

        """
        with self._answer("GET", path, parameters, timeout_s=SILENCE_S) as answer:
            while line := answer.readline():
                yield line.decode().rstrip("\n")

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, object],
        body: Mapping[str, object] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        query = urlencode({name: value for name, value in parameters.items() if value is not None})
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        try:
            connection.request(
                method,
                quote(path) + (f"?{query}" if query else ""),
                json.dumps(body) if body is not None else None,
                headers,
            )
            # It holds the connection's socket until it is read to its end.
            with closing(connection.getresponse()) as answer:
                if answer.status >= http.client.BAD_REQUEST:
                    raise CallRefusedError(_told(answer))
                yield answer
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            message = f"no coordinator answers at {self.url}: {_why(error)}"
            raise NoAnswerError(message) from error
        finally:
            connection.close()


def _place(url: str) -> tuple[str, int]:
    """Return host and port of a URL.

    Raises:
        ConfigError: it is none of a coordinator.

    """
    try:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        host, port = parts.hostname or "", parts.port or 80
        # What sockets do with a name; one that is too long is refused there by an error of another kind.
        if parts.scheme == "http" and host.encode("idna"):
            return host, port
    except ValueError:
        pass
    problem = f"{url!r} is no URL of a coordinator, which looks like http://127.0.0.1:7780"
    raise ConfigError([problem])


def _told(answer: http.client.HTTPResponse) -> str:
    """Return the sentence of a refusal, as a terminal may have it."""
    text = answer.read().decode(errors="replace")
    try:
        told = json.loads(text)
        return printable_lines(str(told["error"]) if "error" in told else "; ".join(told["reasons"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return printable_lines(f"{answer.status} {answer.reason}: {text[:200]!r}")


def _why(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there; is it running, and is this its http.address?"
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, http.client.HTTPException):
        return f"what is there does not speak HTTP, or broke off ({type(error).__name__})"
    if isinstance(error, (ValueError, RecursionError)):
        return f"what is there answers with something else ({type(error).__name__})"
    return getattr(error, "strerror", None) or str(error)
