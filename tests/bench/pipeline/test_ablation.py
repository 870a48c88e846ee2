"""The command that simulates `uniform` without one of its mechanisms."""

import pytest

from bench.pipeline.ablation import MECHANISMS, main, without


@pytest.mark.bench
def test_figures_are_relative_to_all_mechanisms_together(capsys):
    asked = "--layout pp2 --requests 16 --rate 0.8 --off whole_tiles,late_planning"
    assert main(asked.split()) == 0
    lines = [line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert lines == ["with all", "whole_tiles", "late_planning"]
    assert main(["--rate", "1", "--off", "greed"]) == 2
    assert "greed" in capsys.readouterr().err


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_is_off_only_within(name):
    owner, attribute, value = MECHANISMS[name]
    before = getattr(owner, attribute)
    with without(name):
        assert getattr(owner, attribute) is value is not before
    assert getattr(owner, attribute) is before
