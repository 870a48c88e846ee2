"""The tiny models that are run on ranks and in stages stand for all."""

from tests.worker.conftest import TINY
from tests.worker.covering import COVERING, elements


def test_what_ranks_see_of_any_family_is_run() -> None:
    run = frozenset().union(*(elements(name) for name in COVERING))
    missing = {name: elements(name) - run for name in TINY}
    assert not {name: left for name, left in missing.items() if left}, "add such a model to COVERING"


def test_every_one_adds_something() -> None:
    for name in COVERING:
        others = frozenset().union(*(elements(other) for other in COVERING if other != name))
        assert elements(name) - others or name == "llama", f"{name} adds nothing to the others"
