"""Faults for tests, each with one line: bad lines, bad weather for messages, processes that stand still.

with Faults() as faults:
    line = faults.line(control, outcomes)    # a rank's way to its coordinator, through two proxies
    line.storm(seed=7)                       # broadcasts are lost, doubled and late
    line.cut() / .stall() / .vanish() / .delay(0.1) / .refuse() / .heal()
with frozen(pid):                            # SIGSTOP, then SIGCONT
    ...
"""

from tests.support.faults.lines import Faults, Line
from tests.support.faults.processes import frozen, kill
from tests.support.faults.proxy import Proxy, Way
from tests.support.faults.weather import Weather

__all__ = ["Faults", "Line", "Proxy", "Way", "Weather", "frozen", "kill"]
