"""Values of JSON without a schema's other parts."""

import random
import re

from worker.structured_output.ebnf import Regex
from worker.structured_output.values import other_name


def test_both_ways_to_say_another_name_say_the_same() -> None:
    """xgrammar follows a pattern that branches off from the names, llguidance a difference."""
    choose = random.Random(0)
    for _ in range(60):
        names = ["".join(choose.choices('ab1/"', k=choose.randint(0, 4))) for _ in range(choose.randint(1, 6))]
        node = other_name(names)
        assert isinstance(node, Regex)
        whole, texts = node.difference or (node.pattern, ())
        told = [f'"{name}"' for name in names]
        for text in [*told, *(f'"{"".join(choose.choices("ab1/", k=choose.randint(0, 5)))}"' for _ in range(40))]:
            expected = text not in told and '"' not in text[1:-1]
            assert (re.fullmatch(node.pattern, text) is not None) == expected, (names, text)
            assert (re.fullmatch(whole, text) is not None and text not in texts) == expected, (names, text)
