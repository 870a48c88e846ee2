"""The layout of a replica's cache, as data: which layers keep what, in how many pages or rows. Made from the model's
configuration and the memory (`worker.executor.memory_budget`), and known to the scheduler and to every rank alike.

| kind | layers | a unit is | the scheduler's class | what the tree has of it |
| --- | --- | --- | --- | --- |
| `full`, `latent` | attention over all tokens; that of latents | a page | `FullPages` | the pages of its nodes |
| `window`, `chunk` | attention over the last tokens, or the begun chunk | a page | `WindowPages` | `WindowComponent` |
| `states` | recurrent states | a row: a checkpoint of all states of a sequence | `StateRows` | `StateComponent` |

Groups with pages are allocated together: page i of a sequence has the same tokens in each of them. The first group sees
all tokens. It may have no layers; its pages then count the tokens alone.

Another tier (a host's memory) is another `Tier`, with a number of units of the same groups; another kind is another
`Kind`.

| tier | its units are |
| --- | --- |
| `SLOT` | what running sequences have and steps change: the recurrent states of their slots |
| `DEVICE` | the pages and rows of the group's pool |
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["full", "latent", "window", "chunk", "states"]
Tier = Literal[0, 1]  # numbers, as they are in a plan's columns
SLOT: Tier = 0
DEVICE: Tier = 1


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same kind of thing, in a pool of their own.

    | field | meaning |
    | --- | --- |
    | `layers` | the layers of this rank, by their numbers in its stage |
    | `unit_bytes` | bytes of a page, or of a row, in all these layers on this rank |
    | `num_units` | pages, or rows; the same on every rank |
    | `window_tokens` | of a window: how many tokens a token sees, itself included; of a chunk: its length |
    """

    kind: Kind
    layers: tuple[int, ...]
    unit_bytes: int
    num_units: int
    window_tokens: int = 0

    @property
    def is_paged(self) -> bool:
        """Whether its units are pages of tokens."""
        return self.kind != "states"


@dataclass(frozen=True)
class KVLayout:
    """All groups of a model's layers, those with pages first. `page_size`: tokens of a page."""

    page_size: int
    groups: tuple[KVGroup, ...]

    def __post_init__(self) -> None:
        """Raises ValueError unless the first group sees all tokens, and groups with pages come first."""
        paged = [group.is_paged for group in self.groups]
        if not self.groups or self.groups[0].kind not in ("full", "latent") or paged != sorted(paged, reverse=True):
            raise ValueError(
                f"groups {[group.kind for group in self.groups]}: the first sees all tokens, rows are last"
            )

    @property
    def num_pages(self) -> int:
        """Pages of the group that sees all tokens: how many tokens the cache holds, in pages."""
        return self.groups[0].num_units

    @property
    def paged(self) -> tuple[KVGroup, ...]:
        """The groups with pages."""
        return tuple(group for group in self.groups if group.is_paged)

    def of_kind(self, *kinds: Kind) -> list[KVGroup]:
        """The groups of these kinds."""
        return [group for group in self.groups if group.kind in kinds]
