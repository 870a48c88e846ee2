"""How many replicas of a model there should be: a pure function of the demand. Knows nothing of Ray."""

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

from cluster.config import ReplicaConfig
from router.fleet.demand import Demand

# One replica fewer is enough if each of the others would have at most this part of what it can do. With the mean load
# higher, bursts wait, and what was taken away comes back.
MAX_BUSY_SHARE = 0.6
# The number is multiplied by this much at once: the wait says little of how long a long queue will last.
MAX_GROWTH = 2

Reason = Literal["steady", "bounds", "request", "queue", "idle"]


class Wanted(NamedTuple):
    """The number of replicas that there should be, and why.

    | reason | meaning |
    | --- | --- |
    | `steady` | nothing asks for another number |
    | `bounds` | it was out of its bounds |
    | `request` | a request has come, and there was no replica |
    | `queue` | requests would wait too long |
    | `idle` | the load has fit on one fewer for long enough |
    """

    number: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Scaling:
    """Bounds and settings of autoscaling, as `ReplicaConfig` has them."""

    min_replicas: int
    max_replicas: int
    target_wait_s: float
    downscale_delay_s: float

    @classmethod
    def of(cls, config: ReplicaConfig) -> Self:
        assert config.max_replicas is not None, "it is autoscaled"
        return cls(config.min_replicas, config.max_replicas, config.target_wait_s, config.downscale_delay_s)


@dataclass(frozen=True, slots=True)
class Trend:
    """The course of the demand since the last change: the mean of the load, in which old looks count less,
    and for how many seconds the wait was too long, or the load has fit on one replica fewer."""

    load: float | None = None
    late_s: float = 0.0
    fits_s: float = 0.0


def wanted(scaling: Scaling, number: int, demand: Demand, trend: Trend, elapsed_s: float) -> tuple[Wanted, Trend]:
    """How many replicas there should be where there should be `number` by now, and the trend with this look.
    `elapsed_s`: seconds since the last look.

    More come only once all that should be there are: until then it is unknown what they are worth.
    """
    within = min(max(number, scaling.min_replicas), scaling.max_replicas)
    if within != number:
        return Wanted(within, "bounds"), Trend()
    if number == 0:
        return (Wanted(1, "request") if demand.waiting else Wanted(0, "steady")), Trend()
    trend = _continued(scaling, number, demand, trend, elapsed_s)
    if trend.late_s >= scaling.target_wait_s and demand.ready >= number < scaling.max_replicas:
        more = min(math.ceil(number * demand.wait_s / scaling.target_wait_s), MAX_GROWTH * number, scaling.max_replicas)
        return Wanted(max(number + 1, more), "queue"), Trend()
    if trend.fits_s >= scaling.downscale_delay_s and number > scaling.min_replicas:
        return Wanted(number - 1, "idle"), replace(trend, fits_s=0.0)
    return Wanted(number, "steady"), trend


def _continued(scaling: Scaling, number: int, demand: Demand, trend: Trend, elapsed_s: float) -> Trend:
    # The mean goes back over a quarter of the delay, so that it has forgotten what was before.
    newest = min(1.0, elapsed_s / (scaling.downscale_delay_s / 4))
    load = demand.load if trend.load is None else trend.load + newest * (demand.load - trend.load)
    is_late = demand.wait_s > scaling.target_wait_s
    # The last one must have been there: a start may take longer than the delay.
    fits = (demand.is_idle and demand.ready > 0) if number == 1 else load <= MAX_BUSY_SHARE * (number - 1)
    fits = fits and not demand.waiting and demand.wait_s <= scaling.target_wait_s / 2
    return Trend(load, trend.late_s + elapsed_s if is_late else 0.0, trend.fits_s + elapsed_s if fits else 0.0)
