"""The lines of a test, and a rank's way to its coordinator over two of them."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Final, Self

import msgspec

from coordinator.errors import ProtocolError
from coordinator.messages import Welcome, decode_to_rank, encode
from tests.support.faults.proxy import Proxy
from tests.support.faults.weather import Weather

if TYPE_CHECKING:
    from tests.support.faults.zmtp import Message

_ENDING_S: Final = 10.0


class Faults:
    """Runs all proxies of a test in one thread; a context manager, which closes them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faults", daemon=True)
        self._proxies: list[Proxy] = []
        self._thread.start()

    def proxy(self, target: str) -> Proxy:
        """Put a proxy in front of ``tcp://host:port`` or ``ipc:///path``."""
        proxy = Proxy(target, self._loop)
        self._proxies.append(proxy)
        return proxy

    def line(self, control: str, outcomes: str) -> Line:
        """Give one rank a way of its own to its coordinator."""
        return Line(self.proxy(control), self.proxy(outcomes))

    def close(self) -> None:
        """End all of them."""
        for proxy in self._proxies:
            proxy.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ENDING_S)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Line:
    """One rank's way to its coordinator: control and outcomes, each through a proxy.

    The rank connects to ``address``. In the coordinator's ``Welcome`` the proxy puts its own address
    for the outcomes, so nothing has to be changed in either of them.
    """

    def __init__(self, control: Proxy, outcomes: Proxy) -> None:
        self.control = control
        self.outcomes = outcomes
        self.address = control.address
        control.down.rewrite = self._redirect

    def storm(self, seed: int | str, **shares: float) -> Weather[Message]:
        """Have bad weather for the broadcasts on all connections that begin from now on."""
        weather: Weather[Message] = Weather(seed, **shares)
        self.outcomes.down.rewrite = weather.let_through
        return weather

    def cut(self) -> None:
        """See ``Proxy.cut``."""
        self.control.cut()
        self.outcomes.cut()

    def vanish(self) -> None:
        """See ``Proxy.vanish``."""
        self.control.vanish()
        self.outcomes.vanish()

    def stall(self) -> None:
        """See ``Proxy.stall``."""
        self.control.stall()
        self.outcomes.stall()

    def delay(self, delay_s: float) -> None:
        """See ``Proxy.delay``."""
        self.control.delay(delay_s)
        self.outcomes.delay(delay_s)

    def refuse(self) -> None:
        """See ``Proxy.refuse``."""
        self.control.refuse()
        self.outcomes.refuse()

    def heal(self) -> None:
        """See ``Proxy.heal``."""
        self.control.heal()
        self.outcomes.heal()

    def _redirect(self, message: Message) -> list[Message]:
        try:
            told = decode_to_rank(message[0])
        except ProtocolError:
            return [message]
        if isinstance(told, Welcome):
            return [[encode(msgspec.structs.replace(told, outcomes=self.outcomes.address))]]
        return [message]
