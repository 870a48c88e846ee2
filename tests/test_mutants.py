"""The seeded faults are faults of the code as it is now."""

from pathlib import Path

import pytest

from tests.mutants.faults import FAULTS, PACKAGES, Fault

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_put_in(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    wrong = fault.put_into(text)  # raises unless its text stands there once
    assert wrong != text
    compile(wrong, fault.file, "exec")


def test_a_text_that_is_not_there_once_is_an_error() -> None:
    fault = FAULTS[0]
    for text in ("", 2 * fault.before):
        with pytest.raises(ValueError, match=f"{fault.name}: its text stands {2 * bool(text)} times in {fault.file}"):
            fault.put_into(text)


def test_there_are_fifty_with_names_of_their_own() -> None:
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) == 50


def test_every_package_has_some_and_its_tests_are_there() -> None:
    assert {fault.package for fault in FAULTS} == PACKAGES.keys()
    assert all((ROOT / path).exists() for tests in PACKAGES.values() for path in tests)
