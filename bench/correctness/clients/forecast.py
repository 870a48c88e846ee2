"""The task that all clients give the model: a question, and the form of its answer."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "How will the weather be in Paris in the next three days?"


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


PARAMETERS: dict[str, Any] = Forecast.model_json_schema()


def forecast(city: Literal["Paris", "Rome"], days: int) -> str:
    """The weather of a city in the next days.

    Args:
        city: the city.
        days: their number.
    """
    return f"In {city}, the sky is blue for {days} days."
