"""The owner of the numbers of replicas that autoscaling changes: one small deployment for all models.

Routers tell it the demand every second (`Teller`). It asks Serve how many replicas there should be by now, so that
another number in a redeploy, or in a configuration that is followed, is where it goes on from, and nothing has to be
taken over when it starts again. What it decides (`cluster.scaling.wanted`), it tells Serve by `cluster.deployed.scale`.
Serve's own autoscaler counts requests that go through Serve, and here none do.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster import log_lines
from cluster.deployed import scale, targets
from cluster.listening import keep_serve_here
from cluster.log_lines import LogFormat
from cluster.scaling import Scaling, Trend, Wanted, wanted
from router.fleet.demand import Demand, of_all_routers

LOOK_S = 1.0  # between two looks at the demand
STALE_S = 5.0  # how long what a router has told counts
HEARD_S = 2 * LOOK_S  # in which every router has told, and got an answer
ANSWER_S = 5.0  # how long a router waits for an answer before it tells again

log = logging.getLogger(__name__)

Answer = Callable[[str, Wanted], None]
"""Called with the name of a deployment and the number of replicas that it should have."""


class Autoscaler:
    """The Serve deployment. `_known`: the demand of each deployment that each router told last, and when."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, scalings: Mapping[str, Scaling], log_format: LogFormat
    ) -> None:
        """`scalings`: by the names of deployments."""
        keep_serve_here()
        log_lines.set_up(log_format)
        self._scalings = scalings
        self._trends = {name: Trend() for name in scalings}
        self._numbers: dict[str, int] = {}  # what it left them at
        self._wanted: dict[str, Wanted] = {}  # the last change, or the number at the start
        self._known: dict[str, tuple[float, Mapping[str, Demand]]] = {}
        self._looking = asyncio.create_task(self._look_often())

    async def tell(self, router: str, demands: Mapping[str, Demand]) -> Mapping[str, Wanted]:
        """Takes the demand as a router sees it, by deployment. Returns how many replicas there should be, and why it
        was changed last."""
        self._known[router] = monotonic(), demands
        return self._wanted

    def check_health(self) -> None:
        """Raises RuntimeError once the loop that looks at the demand has ended."""
        if self._looking.done():
            raise RuntimeError("the loop has ended")

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except (RayError, RayServeException, KeyError) as error:  # Serve starts again, or the application ends
                log.warning("autoscaling waits for Serve: %s", error)

    async def look(self) -> None:
        """Looks at the demand once, and acts."""
        now_s = monotonic()
        self._known = {router: told for router, told in self._known.items() if now_s - told[0] < STALE_S}
        numbers = await asyncio.to_thread(targets)
        for name, scaling in self._scalings.items():
            number = numbers[name]
            if number != self._numbers.get(name):  # changed by a redeploy, or in a followed file
                self._trends[name], self._wanted[name] = Trend(), Wanted(number, "steady")
            if told := self._told(name):  # without routers, the demand is unknown
                await self._decide(name, scaling, number, of_all_routers(told))
            self._numbers[name] = self._wanted[name].number

    def _told(self, name: str) -> list[Demand]:
        """The demand on a deployment that each router has told last."""
        return [demands[name] for _, demands in self._known.values() if name in demands]

    async def _decide(self, name: str, scaling: Scaling, number: int, demand: Demand) -> None:
        # Looks are counted, not seconds: if the whole machine stood still, nothing was idle for that long.
        decided, self._trends[name] = wanted(scaling, number, demand, self._trends[name], LOOK_S)
        if decided.number == number:
            return
        before, self._wanted[name] = self._wanted[name], decided
        if decided.number == 0:
            await asyncio.sleep(HEARD_S)  # first all routers shall hear that requests are answered all the same
            if not of_all_routers(self._told(name)).is_idle:  # one has come meanwhile, and runs on the last replica
                self._wanted[name] = before
                return
        log.info("%s: %d replicas become %d (%s): %s", name, number, decided.number, decided.reason, demand)
        await asyncio.to_thread(scale, name, decided.number)


class Teller:
    """Tells the autoscaler the demand that a router sees, every `LOOK_S`. `told` is called with its answers."""

    def __init__(
        self, router: str, handle: DeploymentHandle, demands: Mapping[str, Callable[[], Demand]], told: Answer
    ) -> None:
        """Must be made in the event loop that serves. `demands`: by deployment."""
        self._router = router
        self._handle = handle
        self._demands = demands
        self._told = told
        self._telling = asyncio.create_task(self._tell_often())

    async def close(self) -> None:
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)

    async def _tell_often(self) -> None:
        while True:
            with contextlib.suppress(RayError, RayServeException, TimeoutError):  # it starts again
                await self._tell()
            await asyncio.sleep(LOOK_S)

    async def _tell(self) -> None:
        demands = {name: demand() for name, demand in self._demands.items()}
        asked: Any = self._handle.tell.remote(self._router, demands)
        async with asyncio.timeout(ANSWER_S):
            answers = await asked
        for name, answer in answers.items():
            self._told(name, answer)
