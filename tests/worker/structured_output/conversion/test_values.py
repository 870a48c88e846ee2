"""Values of JSON without a schema's other parts."""

import json
import random
import re

from worker.structured_output.conversion.values import other_name
from worker.structured_output.rules.ebnf import Regex


def test_both_ways_to_say_another_name_say_the_same() -> None:
    """xgrammar follows a pattern that branches off from the names, llguidance a difference."""
    choose = random.Random(0)
    for _ in range(20):
        names = ["".join(choose.choices('ab1/"\né', k=choose.randint(0, 4))) for _ in range(choose.randint(1, 4))]
        node = other_name(names)
        assert isinstance(node, Regex)
        whole, taken = node.difference or (node.pattern, ())
        for name in [*names, *("".join(choose.choices('ab1/"\né', k=choose.randint(0, 5))) for _ in range(40))]:
            plain = json.dumps(name, ensure_ascii=False)
            for text in (plain, json.dumps(name), plain.replace("/", "\\/"), plain.replace('\\"', "\\u0022")):
                expected = name not in names
                assert (re.fullmatch(node.pattern, text) is not None) == expected, (names, text)
                is_taken = any(re.fullmatch(each, text) for each in taken)
                assert (re.fullmatch(whole, text) is not None and not is_taken) == expected, (names, text)
