"""The autoscaler without Ray around it: what it tells Serve and the routers."""

import asyncio
from typing import Any

import pytest

from cluster import autoscaler as autoscaler_module
from cluster.autoscaler import Autoscaler, Teller
from cluster.scaling import Scaling, Wanted
from router.fleet.demand import Demand

pytestmark = pytest.mark.anyio
SCALING = Scaling(min_replicas=0, max_replicas=4, target_wait_s=2.0, downscale_delay_s=3.0)
IDLE, WAITS = Demand(ready=1), Demand(waiting=1, is_idle=False)
BUSY = Demand(ready=1, wait_s=9.0, load=1.0, is_idle=False)


class Serve:
    """The numbers of replicas as Serve has them. `told`: those that it was told."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = numbers
        self.told: list[tuple[str, int]] = []

    def scale(self, name: str, number: int) -> None:
        self.told.append((name, number))
        self.numbers[name] = number


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    serve = Serve(a=1, b=2, Router=1)
    monkeypatch.setattr(autoscaler_module, "targets", lambda: dict(serve.numbers))
    monkeypatch.setattr(autoscaler_module, "scale", serve.scale)
    monkeypatch.setattr(autoscaler_module, "HEARD_S", 0.0)
    return serve


@pytest.fixture
async def scaler(serve: Serve) -> Any:
    """One for the deployments a and b, that looks only when it is told to."""
    made = Autoscaler.__new__(Autoscaler)
    await made.__init__({"a": SCALING, "b": SCALING}, "text")  # type: ignore[misc,func-returns-value]
    made._looking.cancel()
    await asyncio.sleep(0)
    return made


async def test_it_tells_serve_and_routers_what_it_decides(scaler: Autoscaler, serve: Serve) -> None:
    await scaler.look()
    assert await scaler.tell("one", {"a": BUSY}) == {"a": Wanted(1, "steady"), "b": Wanted(2, "steady")}
    await scaler.look()
    await scaler.look()
    assert serve.told == [("a", 2)], "b's routers have told nothing"
    assert (await scaler.tell("one", {"a": BUSY}))["a"] == Wanted(2, "queue")
    await scaler.look()
    assert (await scaler.tell("one", {"a": BUSY}))["a"] == Wanted(2, "queue"), "the reason of the last change stays"


async def test_the_demand_of_all_routers_counts_while_it_is_new(
    scaler: Autoscaler, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scaler.tell("one", {"a": IDLE})
    await scaler.tell("two", {"a": Demand(ready=1, is_idle=False)})
    for _ in range(4):
        await scaler.look()
    assert not serve.told
    await scaler.tell("two", {"a": IDLE})
    for _ in range(3):
        await scaler.look()
    assert serve.told == [("a", 0)]
    await scaler.tell("two", {"a": WAITS})
    monkeypatch.setattr(autoscaler_module, "STALE_S", 0.0)
    await scaler.look()
    assert serve.told == [("a", 0)], "routers that are gone ask for nothing"


async def test_it_goes_on_from_the_number_that_somebody_else_set(scaler: Autoscaler, serve: Serve) -> None:
    await scaler.tell("one", {"a": IDLE})
    await scaler.look()
    await scaler.look()
    serve.numbers["a"] = 3  # and the mean load begins anew
    await scaler.look()
    assert not serve.told and (await scaler.tell("one", {"a": IDLE}))["a"] == Wanted(3, "steady")
    await scaler.look()
    await scaler.look()
    assert serve.told == [("a", 2)]


async def test_a_request_that_comes_as_the_last_one_is_to_go_keeps_it(
    scaler: Autoscaler, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, Wanted]] = []

    async def sleep(seconds: float) -> None:
        """In place of the time in which routers hear of it."""
        heard.append(dict(await scaler.tell("one", {"a": Demand(ready=1, load=0.1, is_idle=False)})))

    await scaler.tell("one", {"a": IDLE})
    monkeypatch.setattr(autoscaler_module.asyncio, "sleep", sleep)
    for _ in range(3):
        await scaler.look()
    assert heard[0]["a"] == Wanted(0, "idle") and not serve.told
    assert (await scaler.tell("one", {"a": IDLE}))["a"] == Wanted(1, "steady")
    monkeypatch.undo()


async def test_it_waits_for_serve_and_fails_its_health_check_without_a_loop(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def gone() -> dict[str, int]:
        looks.append("look")
        raise KeyError("shoal")

    monkeypatch.setattr(autoscaler_module, "targets", gone)
    monkeypatch.setattr(autoscaler_module, "LOOK_S", 0.0)
    made = Autoscaler.__new__(Autoscaler)
    await made.__init__({"a": SCALING}, "text")  # type: ignore[misc,func-returns-value]
    while len(looks) < 2:
        await asyncio.sleep(0)
    made.check_health()
    made._looking.cancel()
    await asyncio.gather(made._looking, return_exceptions=True)
    with pytest.raises(RuntimeError, match="loop"):
        made.check_health()


async def test_a_router_tells_again_when_it_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler_module, "LOOK_S", 0.0)
    monkeypatch.setattr(autoscaler_module, "ANSWER_S", 0.01)
    asked: list[Any] = []
    heard = asyncio.Event()

    class Handle:
        """Answers from the second time on."""

        def __init__(self) -> None:
            self.tell = self

        def remote(self, router: str, demands: dict[str, Demand]) -> asyncio.Future[dict[str, Wanted]]:
            asked.append((router, demands))
            answer: asyncio.Future[dict[str, Wanted]] = asyncio.get_running_loop().create_future()
            if len(asked) > 1:
                answer.set_result({"a": Wanted(0, "idle")})
            return answer

    told: list[tuple[str, Wanted]] = []

    def hear(name: str, wanted: Wanted) -> None:
        told.append((name, wanted))
        heard.set()

    handle: Any = Handle()
    teller = Teller("r", handle, {"a": lambda: IDLE}, hear)
    await asyncio.wait_for(heard.wait(), 5)
    await teller.close()
    assert asked[0] == ("r", {"a": IDLE}) and told[0] == ("a", Wanted(0, "idle"))
