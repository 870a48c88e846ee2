# ruff: noqa: E501
"""Answers as models write them, well and badly, and what they stand for: the cases that the parsers of vLLM and SGLang
are tested with, format by format, and those that parsers are known to have failed at.

A case is a name, the answer, and what it stands for: texts, thinking as `("thinking", text)`, calls as a name and
arguments. Arguments as a dict are compared as JSON, as a string verbatim. A call that the answer breaks off has a third
part, `"open"`.
"""

from typing import Any

BAR = "\uff5c"
CALLS, CALLS_END = f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>"
CALL, CALL_END, SEP = f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁call▁end{BAR}>", f"<{BAR}tool▁sep{BAR}>"
DSML = f"{BAR}DSML{BAR}"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
WEATHER = {"city": "Oslo", "days": 3}
Case = tuple[str, str, list[Any]]


def v3(name: str, text: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{text}\n```{CALL_END}"


def v31(name: str, text: str) -> str:
    return f"{CALL}{name}{SEP}{text}{CALL_END}"


def kimi(name: str, text: str) -> str:
    return f"<|tool_call_begin|>{name} <|tool_call_argument_begin|> {text}<|tool_call_end|>"


def qwen(name: str, *pairs: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def seed(name: str, *pairs: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in pairs)
    return f"<seed:tool_call>\n<function={name}>\n{inside}</function>\n</seed:tool_call>"


def dsml(name: str, *triples: tuple[str, str, str]) -> str:
    inside = "".join(
        f'<{DSML}parameter name="{key}" string="{is_string}">{value}</{DSML}parameter>\n'
        for key, is_string, value in triples
    )
    return f'<{DSML}invoke name="{name}">\n{inside}</{DSML}invoke>\n'


def dsml_calls(*calls: str, section: str = "function_calls") -> str:
    return f"<{DSML}{section}>\n{''.join(calls)}</{DSML}{section}>"


def v4_calls(*calls: str) -> str:
    return dsml_calls(*calls, section="tool_calls")


def glm(name: str, *pairs: tuple[str, str]) -> str:
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{inside}</tool_call>"


def hy(name: str, *pairs: tuple[str, str]) -> str:
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}<tool_sep>\n{inside}</tool_call>"


def minimax(name: str, *pairs: tuple[str, str]) -> str:
    inside = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in pairs)
    return f'<invoke name="{name}">\n{inside}</invoke>\n'


def k3(name: str, *triples: tuple[str, str, str]) -> str:
    inside = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in triples
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inside}<|close|>call<|sep|>'


def k3_answer(text: str, *calls: str) -> str:
    tools = f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>" if calls else ""
    return f"<|open|>response<|sep|>{text}<|close|>response<|sep|>{tools}<|close|>message<|sep|>"


CASES: dict[str, list[Case]] = {
    "hermes": [
        ("no call", "It rains in Oslo.", ["It rains in Oslo."]),
        ("one call", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>', [("weather", WEATHER)]),
        ("true", '<tool_call>{"name": "answer", "arguments": {"trigger": true}}</tool_call>', [("answer", '{"trigger": true}')]),
        ("text before", 'Let me see.<tool_call>{"name": "f", "arguments": {}}</tool_call>', ["Let me see.", ("f", "{}")]),
        ("text between and after", 'A<tool_call>{"name": "f"}</tool_call>\nB<tool_call>{"name": "g"}</tool_call>\n\nC', ["A", ("f", "{}"), "\nB", ("g", "{}"), "\n\nC"]),
        ("two calls", '<tool_call>{"name": "f", "arguments": {"q": "cats"}}</tool_call>\n<tool_call>{"name": "f", "arguments": {"q": "dogs"}}</tool_call>', [("f", {"q": "cats"}), ("f", {"q": "dogs"})]),
        ("two calls in one section", '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</tool_call>', [("f", "{}"), ("g", "{}")]),
        ("no end marker", '<tool_call>\n{"name": "f", "arguments": {"a": true}}', [("f", {"a": True})]),
        ("no brace at the end", '<tool_call>\n{"name": "f", "arguments": {"a": true}\n</tool_call>', [("f", {"a": True})]),
        ("a brace too many", '<tool_call>\n{"name": "f", "arguments": {"a": true}}}\n</tool_call>', [("f", {"a": True}), "}\n"]),
        ("arguments in a string", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}</tool_call>', [("f", '{"a": "b"}')]),
        ("a string is no object", '<tool_call>{"name": "f", "arguments": "hello"}</tool_call>', [("f", '"hello"')]),
        ("null arguments", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
        ("empty string", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", "{}")]),
        ("arguments before the name", '<tool_call>{"arguments": {"name": "x"}, "name": "f"}</tool_call>', [("f", {"name": "x"})]),
        ("parameters", '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', [("f", {"a": 1})]),
        ("other keys", '<tool_call>{"type": "function", "id": [1, {"}": "]"}], "name": "f", "arguments": {}}</tool_call>', [("f", "{}")]),
        ("braces and markers in strings", '<tool_call>{"name": "f", "arguments": {"code": "</tool_call> {\\"x\\": [}"}}</tool_call>', [("f", {"code": '</tool_call> {"x": [}'})]),
        ("escapes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00e9 \\ud83d\\ude00 \\\\"}}</tool_call>', [("f", '{"a": "\\u00e9 \\ud83d\\ude00 \\\\"}')]),
        ("escaped name", '<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', [("f", "{}")]),
        ("half a character in the name", '<tool_call>{"name": "\\ud83d"}</tool_call>', ['<tool_call>{"name": "\\ud83d"}</tool_call>']),
        ("half a character in a string of arguments", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}</tool_call>', [("f", '"{\\"a\\": \\"\\ud83d\\"}"')]),
        ("raw lines and tabs in strings", '<tool_call>{"name": "f", "arguments": {"a": "b\nc\td\0",\n"e\nf": 1}}</tool_call>', [("f", '{"a": "b\\nc\\td\\u0000",\n"e\\nf": 1}')]),
        ("backslashes that begin no escape", '<tool_call>{"name": "f", "arguments": {"a": "C:\\Users\\users\\u12\\\\ \\d+ it\\\'s \\\n"}}</tool_call>', [("f", {"a": "C:\\Users\\users\\u12\\ \\d+ it's \\\n"})]),
        ("raw lines in arguments in a string", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b\\nc\\"}"}</tool_call>', [("f", {"a": "b\nc"})]),
        ("wrapped arguments", '<tool_call>{"name": "weather", "arguments": { "arguments" : {"city": "Oslo", "days": 3}}}</tool_call>', [("weather", WEATHER)]),
        ("wrapped, but of another tool", '<tool_call>{"name": "weather", "arguments": {"input": {"town": "Oslo"}}}</tool_call>', [("weather", {"input": {"town": "Oslo"}})]),
        ("wrapped, and one more", '<tool_call>{"name": "weather", "arguments": {"input": {"city": "Oslo"}, "days": 3}}</tool_call>', [("weather", {"input": {"city": "Oslo"}, "days": 3})]),
        ("cut in wrapped arguments", '<tool_call>{"name": "weather", "arguments": {"input": {"ci', [("weather", '{"input": {"ci', "open")]),
        ("nesting", '<tool_call>{"name": "f", "arguments": {"a": {"b": [{"c": {}}]}}}</tool_call>', [("f", {"a": {"b": [{"c": {}}]}})]),
        ("white space", '<tool_call>\n\n {\n "name" : "f" ,\n "arguments" : { "a" : 1 }\n }\n </tool_call>\n', [("f", '{ "a" : 1 }')]),
        ("no name", '<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
        ("name is no string", '<tool_call>{"name": 3}</tool_call>', ['<tool_call>{"name": 3}</tool_call>']),
        ("no JSON", "<tool_call>\nI would call f.\n</tool_call>", ["<tool_call>\nI would call f.\n</tool_call>"]),
        ("wrong call, then a right one", '<tool_call>oh<tool_call>{"name": "f"}</tool_call>', ["<tool_call>oh", ("f", "{}")]),
        ("cut in the marker", "Fine <tool_ca", ["Fine <tool_ca"]),
        ("cut in the name", '<tool_call>\n{"name": "wea', ['<tool_call>\n{"name": "wea']),
        ("cut before the arguments", '<tool_call>\n{"name": "f", "argu', [("f", "", "open")]),
        ("cut in the arguments", '<tool_call>\n{"name": "f", "arguments": {"city": "Os', [("f", '{"city": "Os', "open")]),
        ("cut in an escape", '<tool_call>\n{"name": "f", "arguments": {"city": "Os\\', [("f", '{"city": "Os\\', "open")]),
        ("wrong bracket", '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>', [("f", '{"a": [1}}')]),
        ("brace missing in the arguments", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> ok', [("f", '{"a": 1'), " ok"]),
        ("wrong after the name", '<tool_call>{"name": "f", oops}</tool_call>', [("f", ", oops}")]),
        ("like a marker", "1 <tool 2 </tool_call> <tool_call", ["1 <tool 2 </tool_call> <tool_call"]),
        ("only white space", " \n\n", [" \n\n"]),
    ],
    "qwen3_coder": [
        ("one call", qwen("weather", ("city", "Oslo"), ("days", "3")), [("weather", WEATHER)]),
        ("text before", "Sure!\n" + qwen("weather", ("city", "Oslo")), ["Sure!\n", ("weather", {"city": "Oslo"})]),
        ("no arguments", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [("now", "{}")]),
        ("two calls", qwen("weather", ("city", "Oslo")) + "\n" + qwen("weather", ("city", "Rome")), [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]),
        ("types", qwen("types", ("int", "42"), ("float", "3.140"), ("bool", "True"), ("object", '{"k": "v"}'), ("array", "[1, 2]"), ("any", "7")), [("types", '{"int": 42, "float": 3.140, "bool": true, "object": {"k": "v"}, "array": [1, 2], "any": "7"}')]),
        ("wrong types", qwen("types", ("int", "four"), ("bool", "maybe"), ("object", "{oops")), [("types", {"int": "four", "bool": "maybe", "object": "{oops"})]),
        ("Python's literals", qwen("types", ("object", "{'k': None}"), ("array", "('a', True)")), [("types", {"object": {"k": None}, "array": ["a", True]})]),
        ("null", qwen("types", ("int", "null"), ("maybe", "null"), ("any", "null")), [("types", {"int": None, "maybe": None, "any": "null"})]),
        ("nullable", qwen("types", ("maybe", "text")), [("types", {"maybe": "text"})]),
        ("lines in a value", qwen("weather", ("city", "\nA\n\n  B\n")), [("weather", {"city": "\nA\n\n  B\n"})]),
        ("value on one line", "<tool_call><function=weather><parameter=city>Oslo</parameter></function></tool_call>", [("weather", {"city": "Oslo"})]),
        ("tags in a value", qwen("weather", ("city", '<b class="x">1 < 2 && "q"</b> </param')), [("weather", {"city": '<b class="x">1 < 2 && "q"</b> </param'})]),
        ("no section", "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>", [("weather", {"city": "Oslo"})]),
        ("no beginning of the section", qwen("weather", ("city", "Oslo")).removeprefix("<tool_call>\n"), [("weather", {"city": "Oslo"})]),
        ("noise in the section", "<tool_call>\nI call it:\n<function=weather></function>\n</tool_call>", [("weather", "{}")]),
        ("leading zeros", qwen("types", ("int", "05"), ("any", "05")), [("types", {"int": 5, "any": "05"})]),
        ("raw lines in strings of JSON", qwen("types", ("object", '{"a": "b\nc"}')), [("types", {"object": {"a": "b\nc"}})]),
        ("no section, unknown tool", "Write <function=f> here", ["Write <function=f> here"]),
        ("argument without end", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", [("weather", WEATHER)]),
        ("last argument without end", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</function>\n</tool_call>", [("weather", {"city": "Oslo"})]),
        ("empty lines before what ends it", "<tool_call>\n<function=weather>\n<parameter=city>\n\nOslo\n\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", [("weather", {"city": "\nOslo\n", "days": 3})]),
        ("call without end", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</tool_call>", [("weather", {"city": "Oslo"})]),
        ("text between arguments", "<tool_call>\n<function=weather>\nuh\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>", [("weather", {"city": "Oslo"}), "\nuh\n"]),
        ("unknown tool", qwen("f", ("a", "1")), [("f", {"a": "1"})]),
        ("unknown argument", qwen("weather", ("b", "1")), [("weather", {"b": "1"})]),
        ("cut in a value", "<tool_call>\n<function=weather>\n<parameter=city>\nOs", [("weather", '{"city": "Os', "open")]),
        ("cut behind a line", "<tool_call>\n<function=weather>\n<parameter=city>\nOs\n", [("weather", '{"city": "Os\\n', "open")]),
        ("cut behind an empty line", "<tool_call>\n<function=weather>\n<parameter=city>\n\n", [("weather", '{"city": "\\n', "open")]),
        ("cut in a number", "<tool_call>\n<function=weather>\n<parameter=days>\n1", [("weather", '{"days": 1', "open")]),
        ("cut in a tag", "<tool_call>\n<function=weather>\n<parameter=ci", [("weather", "", "open")]),
        ("cut in the name", "<tool_call>\n<function=wea", ["<tool_call>\n<function=wea"]),
        ("JSON instead", '<tool_call>{"name": "f"}</tool_call>', ['<tool_call>{"name": "f"}</tool_call>']),
    ],
    "seed_oss": [
        ("one call", seed("weather", ("city", "Oslo"), ("days", "3")), [("weather", WEATHER)]),
        ("text before", "Sure!\n" + seed("weather", ("city", "Oslo")), ["Sure!\n", ("weather", {"city": "Oslo"})]),
        ("no arguments", "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>", [("now", "{}")]),
        ("two calls", seed("f", ("a", "1")) + "\n" + seed("g"), [("f", {"a": "1"}), ("g", "{}")]),
        ("types", seed("types", ("int", "42"), ("bool", "true"), ("array", "[1]"), ("any", "7")), [("types", {"int": 42, "bool": True, "array": [1], "any": "7"})]),
        ("lines' ends around a value", seed("weather", ("city", "\nA\n  B\n")), [("weather", {"city": "\nA\n  B\n"})]),
        ("the markers of another family", "<tool_call>" + seed("weather", ("city", "Oslo")).replace("seed:", ""), ["<tool_call>", ("weather", {"city": "Oslo"})]),
        ("no section", seed("weather", ("city", "a\n")).removeprefix("<seed:tool_call>\n"), [("weather", {"city": "a\n"})]),
        ("cut in a value", "<seed:tool_call>\n<function=weather>\n<parameter=city>Os", [("weather", '{"city": "Os', "open")]),
        ("cut in the name", "<seed:tool_call>\n<function=wea", ["<seed:tool_call>\n<function=wea"]),
    ],
    "llama3_json": [
        ("no call", "Just text with { and }.", ["Just text with { and }."]),
        ("one call", '{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}', [("weather", WEATHER)]),
        ("arguments", '{"name": "f", "arguments": {"a": "b"}}', [("f", {"a": "b"})]),
        ("tag", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")]),
        ("text before the tag", 'So: <|python_tag|>{"name": "f", "parameters": {}}', ["So: ", ("f", "{}")]),
        ("type", '{"type": "function", "name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        *(
            (f"separator {number}", f'{{"name": "f", "parameters": {{"a": 1}}}}{separator}{{"name": "weather", "parameters": {{}}}}', [("f", {"a": 1}), ("weather", "{}")])
            for number, separator in enumerate(("; ", ";", ";\n", " ; ", "\n"))
        ),
        ("in the middle, known tool", 'I call {"name": "weather", "parameters": {}} for it.', ["I call ", ("weather", "{}"), " for it."]),
        ("in the middle, unknown tool", 'I call {"name": "f", "parameters": {}} for it.', ['I call {"name": "f", "parameters": {}} for it.']),
        ("five levels", '{"name": "f", "parameters": {"a": {"b": {"c": {"d": {"e": "x"}}}}}}', [("f", {"a": {"b": {"c": {"d": {"e": "x"}}}}})]),
        ("braces in strings", '{"name": "f", "parameters": {"q": "a {b} [c]", "n": {"i": "He said \\"{x}\\""}}}', [("f", {"q": "a {b} [c]", "n": {"i": 'He said "{x}"'}})]),
        ("no name", '{"parameters": {}}', ['{"parameters": {}}']),
        ("no parameters", '{"name": "f"}', ['{"name": "f"}']),
        ("another object", '{"name": "Ada", "age": 36}', ['{"name": "Ada", "age": 36}']),
        ("an object with no known key", '{"answer": {"name": "f", "parameters": {}}}', ['{"answer": {"name": "f", "parameters": {}}}']),
        ("brace in text after", '{"name": "f", "parameters": {"a": 1}} I used {f} for this.', [("f", {"a": 1}), " I used {f} for this."]),
        ("JSON in text after", '{"name": "f", "parameters": {"a": 1}} with {"a": 1}', [("f", {"a": 1}), ' with {"a": 1}']),
        ("invalid JSON", '{"name": "f", "parameters": {invalid json}', [("f", "{invalid json}")]),
        ("cut", '{"name": "f", "parameters": {"a": "x', [("f", '{"a": "x', "open")]),
        ("cut in the name", '{"name": "f', ['{"name": "f']),
    ],
    "pythonic": [
        ("no call", "How can I help?", ["How can I help?"]),
        ("one call", "[weather(city='Oslo', days=3)]", [("weather", WEATHER)]),
        ("types", "[f(a=None, b=True, c={'k': ['v', 1.5]}, d=(1, 2), e=-3)]", [("f", {"a": None, "b": True, "c": {"k": ["v", 1.5]}, "d": [1, 2], "e": -3})]),
        ("JSON's literals", "[f(a=null, b=true)]", [("f", {"a": None, "b": True})]),
        ("no arguments", "[now()]", [("now", "{}")]),
        ("empty values", "[f(a={}, b=[], c='')]", [("f", {"a": {}, "b": [], "c": ""})]),
        ("escapes", "[f(a='Martha\\'s', b='\"q\"', c=\"x, y) ]\")]", [("f", {"a": "Martha's", "b": '"q"', "c": "x, y) ]"})]),
        ("two calls", "[f(a=1), g()]", [("f", {"a": 1}), ("g", "{}")]),
        ("text after", "[f(a=1)] Here it is:", [("f", {"a": 1}), " Here it is:"]),
        ("text before, known tool", "Look: [weather(city='Oslo')]", ["Look: ", ("weather", {"city": "Oslo"})]),
        ("text before, unknown tool", "Look: [f(a=1)]", ["Look: [f(a=1)]"]),
        ("no name in Python, known tool", "[7-zip:pack(a=1), f(a=1)]", [("7-zip:pack", {"a": 1}), ("f", {"a": 1})]),
        ("no name in Python, unknown tool", "[8-zip(a=1)]", ["[8-zip(a=1)]"]),
        ("two lists", "[weather(city='Oslo')] and [weather(city='Rome')]", [("weather", {"city": "Oslo"}), " and ", ("weather", {"city": "Rome"})]),
        ("a link", "[here](https://x.y) [1] [f(x) = 2]", ["[here](https://x.y) [1] [f(x) = 2]"]),
        ("half a character", "[f(a='\\ud83d')]", [("f", '{"a": "\\ud83d"}')]),
        ("control characters in strings", "[f(a='b\nc', d=\"\0\")]", [("f", {"a": "b\nc", "d": "\0"})]),
        ("three quotes", "[f(a=\"\"\"b\n\"c\" \"\"\", d='''it's''')]", [("f", {"a": 'b\n"c" ', "d": "it's"})]),
        ("quotes in strings", "[f(a='it's', b=[\"x \"y\" z\"])]", [("f", {"a": "it's", "b": ['x "y" z']})]),
        ("sets", "[f(a={'b', 'a'}, c=[{1}])]", [("f", {"a": ["b", "a"], "c": [[1]]})]),
        ("leading zeros", "[types(int=05, any=-007, maybe=05, other=x05)]", [("types", {"int": 5, "any": -7, "maybe": "05", "other": "x05"})]),
        ("strings with an f", "[f(a=f'b c', d=f'{x}')]", [("f", {"a": "b c", "d": "f'{x}'"})]),
        ("quotes in quotes in a command", "[f(command='sed -n '3,5p' /x', b='y')]", [("f", {"command": "sed -n '3,5p' /x", "b": "y"})]),
        ("JSON's literals inside", "[f(a={'b': [true, null]})]", [("f", {"a": {"b": [True, None]}})]),
        ("no literal", "[f(x=b'z'), g(a=1)]", [("f", {"x": "b'z'"}), ("g", {"a": 1})]),
        ("brackets do not match", "[f(x=1])]", [("f", '{"x": 1])]', "open")]),
        ("cut in a string", "[weather(city='Os", [("weather", "{\"city\": 'Os", "open")]),
        ("cut in the name", "[weath", ["[weath"]),
        ("bracket at the end", "Let's try: [", ["Let's try: ["]),
    ],
    "granite": [
        ("no call", "This is a test.", ["This is a test."]),
        ("one call", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]', [("weather", WEATHER)]),
        ("with spaces", '<|tool_call|> [ {"arguments": {"a": 1}, "name": "f"} ]\n', [("f", {"a": 1})]),
        ("marker of 3.1", '<tool_call>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "f"}]', [("weather", {"city": "Oslo"}), ("f", "{}")]),
        ("marker of 3.1, unknown tool", '<tool_call>[{"name": "f"}]', ['<tool_call>[{"name": "f"}]']),
        ("two calls", '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": [1, {}]}}]', [("f", "{}"), ("g", {"b": [1, {}]})]),
        ("text around", 'Look:<|tool_call|>[{"name": "f", "arguments": {}}] Done.', ["Look:", ("f", "{}"), " Done."]),
        ("no list", '<|tool_call|>{"name": "f", "arguments": {}}', [("f", "{}")]),
        ("no arguments", '<|tool_call|>[{"name": "f"}]', [("f", "{}")]),
        ("empty list", "<|tool_call|>[]", ["<|tool_call|>[]"]),
        ("no JSON", "<|tool_call|>[f(a=1)]", ["<|tool_call|>[f(a=1)]"]),
        ("marker in a string", '<|tool_call|>[{"name": "f", "arguments": {"a": "]}"}}]', [("f", {"a": "]}"})]),
        ("cut", '<|tool_call|>[{"name": "f", "arguments": {"a": "x', [("f", '{"a": "x', "open")]),
        ("cut in the name", '<|tool_call|>[{"name": "f', ['<|tool_call|>[{"name": "f']),
        ("JSON without a marker", '[{"name": "f", "arguments": {}}]', ['[{"name": "f", "arguments": {}}]']),
    ],
    "nemotron_json": [
        ("no call", "This is a test.", ["This is a test."]),
        ("one call", '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]</TOOLCALL>', [("weather", WEATHER)]),
        ("two calls after text", 'Look:\n<TOOLCALL>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": [1, {}]}}]</TOOLCALL>', ["Look:\n", ("f", "{}"), ("g", {"b": [1, {}]})]),
        ("with spaces", '<TOOLCALL> [ {"arguments": {"a": 1}, "name": "f"} ]\n</TOOLCALL>\n', [("f", {"a": 1})]),
        ("text after", '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL> Done.', [("f", "{}"), " Done."]),
        ("empty list", "<TOOLCALL>[]</TOOLCALL>", ["<TOOLCALL>[]</TOOLCALL>"]),
        ("no JSON", "<TOOLCALL>[f(a=1)]</TOOLCALL>", ["<TOOLCALL>[f(a=1)]</TOOLCALL>"]),
        ("marker in a string", '<TOOLCALL>[{"name": "f", "arguments": {"a": "]}"}}]</TOOLCALL>', [("f", {"a": "]}"})]),
        ("cut", '<TOOLCALL>[{"name": "f", "arguments": {"a": "x', [("f", '{"a": "x', "open")]),
        ("cut in the name", '<TOOLCALL>[{"name": "f', ['<TOOLCALL>[{"name": "f']),
    ],
    "kimi_k3": [
        ("no call", k3_answer("This is a test."), ["This is a test."]),
        ("one call", k3_answer("", k3("weather", ("city", "string", "Oslo"), ("days", "number", "3"))), [("weather", WEATHER)]),
        ("text before", k3_answer("Let me look.", k3("f", ("a", "number", "1"))), ["Let me look.", ("f", {"a": 1})]),
        ("two calls", k3_answer("", k3("f", ("a", "object", '{"b": [1]}')), k3("g")), [("f", {"a": {"b": [1]}}), ("g", "{}")]),
        ("a string that looks like a number", k3_answer("", k3("f", ("a", "string", "12"))), [("f", {"a": "12"})]),
        ("spaces and lines in a string", k3_answer("", k3("f", ("a", "string", " x\n <b>y</b> "))), [("f", {"a": " x\n <b>y</b> "})]),
        ("no JSON", k3_answer("", k3("f", ("a", "object", "{x"))), [("f", {"a": "{x"})]),
        ("no index", '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>', [("f", "{}")]),
        ("no response", f"<|open|>tools<|sep|>{k3('now')}<|close|>tools<|sep|><|close|>message<|sep|>", [("now", "{}")]),
        ("cut", '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="a" type="string"<|sep|>x', [("f", '{"a": "x', "open")]),
        ("cut in a marker of the text", "<|open|>response<|sep|>Hi.<|close|>resp", ["Hi.<|close|>resp"]),
    ],
    "gemma4": [
        ("no call", "It rains in Oslo.", ["It rains in Oslo."]),
        ("one call", '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>', [("weather", '{"city": "Oslo", "days": 3}')]),
        ("two calls after text", 'Let me look.<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{}<tool_call|>', ["Let me look.", ("f", {"a": 1}), ("g", "{}")]),
        ("text after", "<|tool_call>call:f{}<tool_call|>\nSo.", [("f", "{}"), "\nSo."]),
        ("types", '<|tool_call>call:f{a:true,b:null,c:[1,-2.5e3,<|"|>x<|"|>],d:{e:{},g:[]},h:<|"|><|"|>}<tool_call|>', [("f", {"a": True, "b": None, "c": [1, -2500.0, "x"], "d": {"e": {}, "g": []}, "h": ""})]),
        ("no escapes in strings", '<|tool_call>call:f{a:<|"|>a "b" \\n {c:[\n\t<<|"|>}<tool_call|>', [("f", {"a": 'a "b" \\n {c:[\n\t<'})]),
        ("a name with signs", "<|tool_call>call:mcp.files:read-all{}<tool_call|>", [("mcp.files:read-all", "{}")]),
        ("keys with signs, and between quotes", '<|tool_call>call:f{x-y z:1,<|"|>a:b<|"|>:2,"c":3}<tool_call|>', [("f", {"x-y z": 1, "a:b": 2, "c": 3})]),
        ("JSON's strings", '<|tool_call>call:f{"a": "x\\n"}<tool_call|>', [("f", {"a": "x\n"})]),
        ("a string without quotes", "<|tool_call>call:f{city:New York,other:None}<tool_call|>", [("f", {"city": "New York", "other": None})]),
        ("white space, and a comma too many", "<|tool_call>call:f{ a : [ 1 , 2 , ] , }<tool_call|>", [("f", {"a": [1, 2]})]),
        ("thinking", '<|channel>thought\nHm.\n<channel|><|tool_call>call:f{}<tool_call|>', [("thinking", "Hm."), ("f", "{}")]),
        ("empty thinking", "<|channel>thought\n<channel|>Yes.", ["Yes."]),
        ("thinking without its label", "<|channel>So.<channel|>Yes.", [("thinking", "So."), "Yes."]),
        ("brace missing", "<|tool_call>call:f{a:1<tool_call|> ok", [("f", '{"a": 1'), " ok"]),
        ("a brace too many", "<|tool_call>call:f{a:1}}<tool_call|>", [("f", {"a": 1}), "}<tool_call|>"]),
        ("wrong bracket", "<|tool_call>call:f{a:[1}]<tool_call|>", [("f", '{"a": [1}]')]),
        ("no value", "<|tool_call>call:f{a:,b:1}<tool_call|>", [("f", '{"a": ,b:1}')]),
        ("no key", "<|tool_call>call:f{1,2}<tool_call|>", [("f", "{1,2}")]),
        ("call left out", "<|tool_call>:f{a:1}<tool_call|>", [("f", {"a": 1})]),
        ("no call:", "<|tool_call>f{}<tool_call|>", ["<|tool_call>f{}<tool_call|>"]),
        ("no arguments", "<|tool_call>call:f<tool_call|>", [("f", "{}")]),
        ("no brace", "<|tool_call>call:f no brace<tool_call|> So.", [("f", "no brace"), " So."]),
        ("no end marker", "<|tool_call>call:f{a:1}", [("f", {"a": 1})]),
        ("cut in the name", "<|tool_call>call:wea", ["<|tool_call>call:wea"]),
        ("cut in a key", "<|tool_call>call:f{a:1,ci", [("f", '{"a": 1, ci', "open")]),
        ("cut in a string", '<|tool_call>call:f{city:<|"|>Os', [("f", '{"city": "Os', "open")]),
        ("cut in a number", "<|tool_call>call:f{a:12", [("f", '{"a": 12', "open")]),
    ],
    "llama4_pythonic": [
        ("markers", "<|python_start|>[weather(city='Oslo')]<|python_end|>", [("weather", {"city": "Oslo"})]),
        ("text around", "One. <|python_start|>[f(a=[1, 2, 3])]<|python_end|> Two.", ["One. ", ("f", {"a": [1, 2, 3]}), " Two."]),
        ("no markers", "[f(a=1), g()]", [("f", {"a": 1}), ("g", "{}")]),
        ("no call", "How can I help?", ["How can I help?"]),
        ("two calls", "<|python_start|>[weather(city='Oslo', days=3), now()]<|python_end|>", [("weather", WEATHER), ("now", "{}")]),
        ("types", "<|python_start|>[f(a=None, b=True, c={'k': ['v', 1.5]}, d={}, e=[], g='')]<|python_end|>", [("f", {"a": None, "b": True, "c": {"k": ["v", 1.5]}, "d": {}, "e": [], "g": ""})]),
        ("escapes", "<|python_start|>[f(a='Martha\\'s', b=\"x, y) ]\")]<|python_end|>", [("f", {"a": "Martha's", "b": "x, y) ]"})]),
        ("no end marker", "<|python_start|>[f(a=1)]", [("f", {"a": 1})]),
        ("no list", "<|python_start|>print(1)<|python_end|>", ["<|python_start|>print(1)<|python_end|>"]),
        ("cut in a string", "<|python_start|>[weather(city='Os", [("weather", "{\"city\": 'Os", "open")]),
    ],
    "lfm2": [
        ("text after", '<|tool_call_start|>[weather(city="Oslo", days=3)]<|tool_call_end|>Let me see.', [("weather", WEATHER), "Let me see."]),
        ("two calls", "Well. <|tool_call_start|>[f(a='x'), g()]<|tool_call_end|>", ["Well. ", ("f", {"a": "x"}), ("g", "{}")]),
        ("no markers", "[f(a=1)]", ["[f(a=1)]"]),
        ("no call", "How can I help?", ["How can I help?"]),
        ("types", "<|tool_call_start|>[f(a=None, b=True, c={'k': ['v', 1.5]}, d='')]<|tool_call_end|>", [("f", {"a": None, "b": True, "c": {"k": ["v", 1.5]}, "d": ""})]),
        ("a name with dots", "<|tool_call_start|>[shop.order(a=1)]<|tool_call_end|>", [("shop.order", {"a": 1})]),
        ("a space before the end", '<|tool_call_start|>[f(a="x")] <|tool_call_end|>', [("f", {"a": "x"})]),
        ("the calls again", "<|tool_call_start|>[f(a='x'), g()]<|tool_call_end|>[f(a='x'), g()]<|tool_call_end|>\n[f(a='x'), g()]<|tool_call_end|>", [("f", {"a": "x"}), ("g", "{}")]),
        ("other calls without a beginning", "<|tool_call_start|>[f(a='x')]<|tool_call_end|>[f(a='y')]<|tool_call_end|>", [("f", {"a": "x"}), "[f(a='y')]<|tool_call_end|>"]),
        ("the calls again, without an end", "<|tool_call_start|>[f()]<|tool_call_end|> [f()] So.", [("f", "{}"), " [f()] So."]),
        ("cut in a string", "<|tool_call_start|>[weather(city='Os", [("weather", "{\"city\": 'Os", "open")]),
    ],
    "mistral": [
        ("no call", "This is a test.", ["This is a test."]),
        ("list", '[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}]', [("add", '{"a": 3.5, "b": 4}')]),
        ("list after a space", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]', [("weather", WEATHER)]),
        ("arguments before the name", '[TOOL_CALLS] [{"arguments":{"name": "John"}, "name": "age"}]', [("age", {"name": "John"})]),
        ("two in a list", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', [("f", {"a": 1}), ("g", "{}")]),
        ("text before", 'Hello[TOOL_CALLS] [{"name": "add", "arguments":{"a": 1}}]', ["Hello", ("add", {"a": 1})]),
        ("text after", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]\nmore', [("f", "{}"), "\nmore"]),
        ("two lists", '[TOOL_CALLS] [{"name": "f", "arguments": {}}][TOOL_CALLS] [{"name": "g", "arguments": {}}]', [("f", "{}"), ("g", "{}")]),
        ("no list", "[TOOL_CALLS] not JSON at all", ["[TOOL_CALLS] not JSON at all"]),
        ("name and object", '[TOOL_CALLS]add{"a": 3.5, "b": 4}', [("add", {"a": 3.5, "b": 4})]),
        ("name and arguments", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', [("add", {"a": 1}), ("now", "{}")]),
        ("two names and objects", '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]multiply{"a": 3}', [("add", {"a": 1}), ("multiply", {"a": 3})]),
        ("braces in strings", '[TOOL_CALLS]bash{"command": "print(\\"}[TOOL_CALLS]{\\")"}', [("bash", {"command": 'print("}[TOOL_CALLS]{")'})]),
        ("wrong JSON", '[TOOL_CALLS]f{"a": 1]', [("f", '{"a": 1]', "open")]),
    ],
    "deepseek_v3": [
        ("one call", CALLS + v3("weather", '{"city": "Oslo", "days": 3}') + CALLS_END, [("weather", WEATHER)]),
        ("two calls", CALLS + v3("f", '{"a": 1}') + "\n" + v3("g", "{}") + CALLS_END, [("f", {"a": 1}), ("g", "{}")]),
        ("text before", "Let me check." + CALLS + v3("f", "{}") + CALLS_END, ["Let me check.", ("f", "{}")]),
        ("escapes", CALLS + v3("f", '{"t": "a \\"b\\"", "p": "C:\\\\x", "n": "1\\n2"}') + CALLS_END, [("f", {"t": 'a "b"', "p": "C:\\x", "n": "1\n2"})]),
        ("fence in a string", CALLS + v3("f", '{"t": "```json\\n```"}') + CALLS_END, [("f", {"t": "```json\n```"})]),
        ("brace missing", CALLS + v3("f", '{"a": 1') + CALLS_END, [("f", '{"a": 1\n```')]),
        ("no begin", f"{CALLS}function{SEP}f\n```json\n{{}}\n```{CALLS_END}", [f"{CALLS}function{SEP}f\n```json\n{{}}\n```{CALLS_END}"]),
        ("no section's end", CALLS + v3("f", '{"a": 1}'), [("f", {"a": 1})]),
    ],
    "deepseek_v31": [
        ("one call", CALLS + v31("weather", '{"city": "Oslo", "days": 3}') + CALLS_END, [("weather", WEATHER)]),
        ("two calls", "Both." + CALLS + v31("f", '{"a": 1}') + v31("g", "{}") + CALLS_END, ["Both.", ("f", {"a": 1}), ("g", "{}")]),
        ("no arguments", CALLS + v31("f", "") + CALLS_END, [("f", "{}")]),
        ("cut", f'{CALLS}{CALL}f{SEP}{{"a": "x', [("f", '{"a": "x', "open")]),
        ("cut in the name", f"{CALLS}{CALL}weath", [f"{CALLS}{CALL}weath"]),
        ("text after", CALLS + v31("f", '{"a": 1}') + CALLS_END + " Done.", [("f", {"a": 1}), " Done."]),
        ("lines between calls", CALLS + "\n" + v31("f", "{}") + "\n" + v31("g", "{}") + "\n" + CALLS_END, [("f", "{}"), ("g", "{}")]),
        ("no call's begin", f'{CALLS}f{SEP}{{"x":1}}{CALLS_END}', [f'{CALLS}f{SEP}{{"x":1}}{CALLS_END}']),
        ("cut before a call", f"I look.{CALLS}weather", [f"I look.{CALLS}weather"]),
        ("markers in a string", CALLS + v31("f", '{"a": "{\\"]"}') + CALLS_END, [("f", {"a": '{"]'})]),
    ],
    "deepseek_v32": [
        ("one call", dsml_calls(dsml("weather", ("city", "true", "Oslo"), ("days", "false", "3"))), [("weather", WEATHER)]),
        ("no arguments", dsml_calls(dsml("now")), [("now", "{}")]),
        ("text before", "Sure! " + dsml_calls(dsml("f", ("a", "true", "b"))), ["Sure! ", ("f", {"a": "b"})]),
        ("two calls", dsml_calls(dsml("f", ("a", "true", "1")), dsml("f", ("a", "false", "1"))), [("f", {"a": "1"}), ("f", {"a": 1})]),
        ("the schema says integer", dsml_calls(dsml("types", ("int", "true", "42"))), [("types", {"int": 42})]),
        ("objects", dsml_calls(dsml("types", ("object", "false", '{"k": [1]}'), ("array", "false", '["a"]'))), [("types", {"object": {"k": [1]}, "array": ["a"]})]),
        ("null", dsml_calls(dsml("types", ("maybe", "false", "null"), ("any", "false", "null")), dsml("f", ("a", "false", "null"))), [("types", {"maybe": None, "any": None}), ("f", {"a": None})]),
        ("null for a string", dsml_calls(dsml("weather", ("city", "false", "null"))), [("weather", {"city": "null"})]),
        ("no JSON", dsml_calls(dsml("f", ("a", "false", "{oops"))), [("f", {"a": "{oops"})]),
        ("said nothing", f'<{DSML}function_calls>\n<{DSML}invoke name="types">\n<{DSML}parameter name="int">4</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>', [("types", {"int": 4})]),
        ("lines and tags", dsml_calls(dsml("weather", ("city", "true", "\n<b>x</b>\n"))), [("weather", {"city": "\n<b>x</b>\n"})]),
        ("cut", f'<{DSML}function_calls>\n<{DSML}invoke name="weather">\n<{DSML}parameter name="city" string="true">Os', [("weather", '{"city": "Os', "open")]),
    ],
    "deepseek_v4": [
        ("no call", "It rains.", ["It rains."]),
        ("one call", "Let me see. " + v4_calls(dsml("weather", ("city", "true", "Oslo"), ("days", "false", "3"))), ["Let me see. ", ("weather", WEATHER)]),
        ("two calls", v4_calls(dsml("f", ("a", "true", "1")), dsml("g")), [("f", {"a": "1"}), ("g", "{}")]),
        ("an object", v4_calls(dsml("f", ("a", "false", '{"b": [null, "</x>"]}'))), [("f", {"a": {"b": [None, "</x>"]}})]),
        ("the section of 3.2", dsml_calls(dsml("f")), [("f", "{}")]),
        ("no section, known tools", "I look. " + dsml("weather", ("city", "true", "Oslo")) + dsml("types"), ["I look. ", ("weather", {"city": "Oslo"}), ("types", "{}")]),
        ("no section, unknown tool", dsml("f"), [dsml("f")]),
        ("no beginning of the section", dsml("weather", ("city", "true", "Oslo")) + f"</{DSML}tool_calls>", [("weather", {"city": "Oslo"})]),
        ("wrapped arguments", v4_calls(dsml("weather", ("arguments", "false", '{"city": "Oslo", "days": 3}'))), [("weather", WEATHER)]),
        ("wrapped arguments as a string", v4_calls(dsml("weather", ("input", "true", '{"city": "Oslo"}'))), [("weather", {"city": "Oslo"})]),
        ("wrapped, but of another tool", v4_calls(dsml("weather", ("input", "false", '{"town": "Oslo"}'))), [("weather", {"input": {"town": "Oslo"}})]),
        ("wrapped, and one more", v4_calls(dsml("weather", ("input", "true", "x"), ("days", "false", "3"))), [("weather", {"input": "x", "days": 3})]),
        ("cut in wrapped arguments", f'<{DSML}tool_calls><{DSML}invoke name="weather"><{DSML}parameter name="input" string="false">{{"ci', [("weather", '{"input": {"ci', "open")]),
        ("no section's end", f"<{DSML}tool_calls>\n{dsml('f')}", [("f", "{}")]),
        ("cut in the name", f'<{DSML}tool_calls>\n<{DSML}invoke name="wea', [f'<{DSML}tool_calls>\n<{DSML}invoke name="wea']),
        ("cut in a key", f'<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="ci', [("f", "", "open")]),
    ],
    "glm45": [
        ("no arguments", "<tool_call>now</tool_call>", [("now", "{}")]),
        ("no arguments, two lines", "<tool_call>now\n</tool_call>", [("now", "{}")]),
        ("one line", "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>", [("weather", {"city": "Oslo"})]),
        ("lines", glm("weather", ("city", "Oslo"), ("days", "3")), [("weather", WEATHER)]),
        ("text before", "Checking.<tool_call>now</tool_call>", ["Checking.", ("now", "{}")]),
        ("white space before", "  \n  <tool_call>now</tool_call>", [("now", "{}")]),
        ("two calls", glm("weather", ("city", "Oslo")) + glm("f", ("a", "1")), [("weather", {"city": "Oslo"}), ("f", {"a": "1"})]),
        ("values", glm("types", ("object", '{"k": "v"}'), ("bool", "true"), ("any", "a\nb\n")), [("types", {"object": {"k": "v"}, "bool": True, "any": "a\nb\n"})]),
        ("no name", "<tool_call>I call it now</tool_call>", ["<tool_call>I call it now</tool_call>"]),
        ("cut", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Os", [("weather", '{"city": "Os', "open")]),
        ("cut behind a line", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Os\n", [("weather", '{"city": "Os\\n', "open")]),
    ],
    "kimi_k2": [
        ("one call", "Yes. " + KIMI + kimi("functions.weather:0", '{"city": "Oslo", "days": 3}') + KIMI_END, ["Yes. ", ("weather", WEATHER)]),
        ("two calls", KIMI + kimi("functions.f:0", '{"a": 1}') + kimi("functions.g:1", "{}") + KIMI_END, [("f", {"a": 1}), ("g", "{}")]),
        ("angle brackets", KIMI + kimi("functions.f:0", '{"html": "<div>x</div>"}') + KIMI_END, [("f", {"html": "<div>x</div>"})]),
        ("lines", KIMI + kimi("functions.f:0", '{\n  "a": 1\n}') + KIMI_END, [("f", '{\n  "a": 1\n}')]),
        ("no namespace", KIMI + kimi("f:0", "{}") + KIMI_END, [("f", "{}")]),
        ("no number", KIMI + kimi("functions.f", "{}") + KIMI_END, [("f", "{}")]),
        ("number alone, several tools", KIMI + kimi("0", "{}") + KIMI_END, [KIMI + kimi("0", "{}") + KIMI_END]),
        ("noise in the section", KIMI + "I call it:\n" + kimi("functions.f:0", '{"a": 1}') + KIMI_END, [("f", {"a": 1})]),
        ("noise, and no call", KIMI + "Nothing." + KIMI_END + " So.", [KIMI + "Nothing." + KIMI_END + " So."]),
        ("long noise", KIMI + "x" * 3000 + kimi("functions.weather:0", "{}") + KIMI_END, [KIMI + "x" * 3000, ("weather", "{}")]),
        ("no section, known tool", "So. " + kimi("functions.weather:0", "{}"), ["So. ", ("weather", "{}")]),
        ("no section, unknown tool", kimi("functions.f:0", "{}"), [kimi("functions.f:0", "{}")]),
        ("invalid JSON, then a call", KIMI + kimi("functions.f:0", '{"a": 1') + kimi("functions.g:1", '{"b": 2}') + KIMI_END, [("f", '{"a": 1'), ("g", {"b": 2})]),
        ("cut", f'{KIMI}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{"a', [("f", '{"a', "open")]),
    ],
    "minimax_m2": [
        ("one call", f"<minimax:tool_call>\n{minimax('weather', ('city', 'Oslo'), ('days', '3'))}</minimax:tool_call>", [("weather", WEATHER)]),
        ("text before", f"Let me. <minimax:tool_call>{minimax('f', ('k', 'v'))}</minimax:tool_call>", ["Let me. ", ("f", {"k": "v"})]),
        ("two calls", f"<minimax:tool_call>{minimax('f', ('a', '1'))}{minimax('g')}</minimax:tool_call>", [("f", {"a": "1"}), ("g", "{}")]),
        ("no call", "It rains.", ["It rains."]),
        ("no arguments", f"<minimax:tool_call>\n{minimax('now')}</minimax:tool_call>", [("now", "{}")]),
        ("types", f"<minimax:tool_call>{minimax('types', ('int', '42'), ('bool', 'true'), ('object', '{}'), ('array', '[1]'), ('any', '7'))}</minimax:tool_call>", [("types", {"int": 42, "bool": True, "object": {}, "array": [1], "any": "7"})]),
        ("lines and tags", f"<minimax:tool_call>{minimax('weather', ('city', '<b>A</b>' + chr(10) + '  B'))}</minimax:tool_call>", [("weather", {"city": "<b>A</b>\n  B"})]),
        ("text after", f"<minimax:tool_call>{minimax('f')}</minimax:tool_call> Done.", [("f", "{}"), " Done."]),
        ("no section's end", f"<minimax:tool_call>{minimax('f', ('a', '1'))}", [("f", {"a": "1"})]),
        ("no JSON object here", '<minimax:tool_call>{"name": "f"}</minimax:tool_call>', ['<minimax:tool_call>{"name": "f"}</minimax:tool_call>']),
        ("cut in a value", '<minimax:tool_call><invoke name="weather"><parameter name="city">Os', [("weather", '{"city": "Os', "open")]),
        ("cut in the name", '<minimax:tool_call><invoke name="wea', ['<minimax:tool_call><invoke name="wea']),
        ("quotes", "<minimax:tool_call><invoke name='f'><parameter name=k>v</parameter></invoke></minimax:tool_call>", [("f", {"k": "v"})]),
        ("the last line's end of a value", f"<minimax:tool_call>{minimax('weather', ('city', '    def f():' + chr(10) + '        return 1' + chr(10)))}</minimax:tool_call>", [("weather", {"city": "    def f():\n        return 1\n"})]),
        ("no section", minimax("weather", ("city", "Oslo")) + "</minimax:tool_call>", [("weather", {"city": "Oslo"})]),
        ("nullable", f"<minimax:tool_call>{minimax('types', ('maybe', 'null'))}{minimax('types', ('maybe', 'x'))}</minimax:tool_call>", [("types", {"maybe": None}), ("types", {"maybe": "x"})]),
    ],
    "phi4_mini_json": [
        ("no call", "It rains in Oslo.", ["It rains in Oslo."]),
        ("one call", 'functools[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]', [("weather", WEATHER)]),
        ("two calls over lines", 'functools[\n{"name": "f", "arguments": {"a": "x"}},\n{"name": "g", "parameters": {}}\n]', [("f", {"a": "x"}), ("g", "{}")]),
        ("text around", 'Let me see.\nfunctools[{"name": "f", "arguments": {}}]\nDone.', ["Let me see.\n", ("f", "{}"), "\nDone."]),
        ("the markers of the model's template", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', [("f", {"a": 1})]),
        ("a module of Python", "import functools\n[functools.cache] functools[0]", ["import functools\n[functools.cache] functools[0]"]),
        ("brackets in strings", 'functools[{"name": "f", "arguments": {"a": "]}"}}]', [("f", {"a": "]}"})]),
        ("cut in the arguments", 'functools[{"name": "f", "arguments": {"a": "x', [("f", '{"a": "x', "open")]),
        ("cut in the name", 'functools[{"name": "f', ['functools[{"name": "f']),
    ],
    "hunyuan_a13b": [
        ("no call", "It rains in Oslo.", ["It rains in Oslo."]),
        ("one call", '<tool_calls>[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]</tool_calls>', [("weather", WEATHER)]),
        ("two calls", '<tool_calls>\n[\n{"name": "f", "arguments": {}},\n{"name": "g", "arguments": {"a": [1]}}\n]\n</tool_calls>', [("f", "{}"), ("g", {"a": [1]})]),
        ("text around", 'I look.<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls> So.', ["I look.", ("f", "{}"), " So."]),
        ("no list", '<tool_calls>{"name": "f", "arguments": {}}</tool_calls>', [("f", "{}")]),
        ("no JSON", "<tool_calls>f()</tool_calls>", ["<tool_calls>f()</tool_calls>"]),
        ("no end", '<tool_calls>[{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),
        ("deep", '<tool_calls>[{"name": "f", "arguments": {"a": {"b": {"c": {}}}}}]</tool_calls>', [("f", {"a": {"b": {"c": {}}}})]),
        ("cut in the arguments", '<tool_calls>[{"name": "f", "arguments": {"a": "x', [("f", '{"a": "x', "open")]),
    ],
    "xlam": [
        ("no call", "It rains in Oslo.", ["It rains in Oslo."]),
        ("one call", '[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]', [("weather", WEATHER)]),
        ("two calls", '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]', [("f", "{}"), ("g", {"a": 1})]),
        ("between tags", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', [("f", {"a": 1})]),
        ("behind a tag", 'I look. [TOOL_CALLS][{"name": "f", "arguments": {}}]', ["I look.", ("f", "{}")]),
        ("in a block of code", 'I look:\n```json\n[{"name": "weather", "arguments": {"city": "Oslo"}}]\n```', ["I look:", ("weather", {"city": "Oslo"})]),
        ("another block of code", "```json\n[1, 2]\n```", ["```json\n[1, 2]\n```"]),
        ("text before, known tool", 'So: [{"name": "weather", "arguments": {}}]', ["So:", ("weather", "{}")]),
        ("text before, unknown tool", 'So: [{"name": "f", "arguments": {}}]', ['So: [{"name": "f", "arguments": {}}]']),
        ("a list of something else", "[1, 2, 3]", ["[1, 2, 3]"]),
        ("cut in the arguments", '[{"name": "f", "arguments": {"a": "x', [("f", '{"a": "x', "open")]),
    ],
    "internlm": [
        ("no call", "It rains in Oslo.", ["It rains in Oslo."]),
        ("one call", '<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}<|action_end|>', [("weather", WEATHER)]),
        ("text before", 'I look.<|action_start|><|plugin|>{"name": "f", "parameters": {}}<|action_end|>', ["I look.", ("f", "{}")]),
        ("text after", '<|action_start|><|plugin|>{"name": "f", "parameters": {}}<|action_end|> So.', [("f", "{}"), " So."]),
        ("two calls", '<|action_start|><|plugin|>{"name": "f"}<|action_end|>\n<|action_start|><|plugin|>{"name": "g"}<|action_end|>', [("f", "{}"), ("g", "{}")]),
        ("another action", "<|action_start|><|interpreter|>x<|action_end|>", ["<|action_start|><|interpreter|>x<|action_end|>"]),
        ("no end", '<|action_start|><|plugin|>{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        ("cut in the arguments", '<|action_start|><|plugin|>{"name": "f", "parameters": {"a": "x', [("f", '{"a": "x', "open")]),
    ],
    "cohere_command3": [
        ("no call", "<|START_RESPONSE|>It rains in Oslo.<|END_RESPONSE|>", ["It rains in Oslo."]),
        ("no markers", "It rains in Oslo.", ["It rains in Oslo."]),
        ("thinking", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", [("thinking", "Hm."), "Yes."]),
        ("one call", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo", "days": 3}}\n]<|END_ACTION|>', [("weather", WEATHER)]),
        ("thinking and two calls", '<|START_THINKING|>Both.<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}, {"tool_call_id": "1", "tool_name": "g", "parameters": {"a": 1}}]<|END_ACTION|>', [("thinking", "Both."), ("f", "{}"), ("g", {"a": 1})]),
        ("the text of another version", "<|START_TEXT|>Yes.<|END_TEXT|>", ["Yes."]),
        ("no JSON", "<|START_ACTION|>f()<|END_ACTION|>", ["<|START_ACTION|>f()<|END_ACTION|>"]),
        ("cut in the arguments", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": "x', [("f", '{"a": "x', "open")]),
    ],
    "olmo3": [
        ("no call", "It rains in Oslo.", ["It rains in Oslo."]),
        ("one call", '<function_calls>weather(city="Oslo", days=3)</function_calls>', [("weather", WEATHER)]),
        ("lines", "<function_calls>\nf(a='x')\ng()\n</function_calls>", [("f", {"a": "x"}), ("g", "{}")]),
        ("text around", "I look.\n<function_calls>\nf(a=null, b=true)\n</function_calls>\nSo.", ["I look.\n", ("f", {"a": None, "b": True}), "\nSo."]),
        ("nested values", "<function_calls>f(a={'k': [1, {'m': false}]})</function_calls>", [("f", {"a": {"k": [1, {"m": False}]}})]),
        ("no call between the markers", "<function_calls>Nothing.</function_calls>", ["<function_calls>Nothing.</function_calls>"]),
        ("no end", "<function_calls>f(a=1)", [("f", {"a": 1})]),
        ("cut in a string", "<function_calls>f(a='x", [("f", "{\"a\": 'x", "open")]),
    ],
    "hy_v3": [
        ("no call", "It rains in Oslo.", ["It rains in Oslo."]),
        ("one call", f"<tool_calls>\n{hy('weather', ('city', 'Oslo'), ('days', '3'))}\n</tool_calls>", [("weather", WEATHER)]),
        ("one line", "<tool_calls><tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>x</arg_value></tool_call></tool_calls>", [("f", {"a": "x"})]),
        ("no arguments", "<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", [("now", "{}")]),
        ("two calls after text", f"I look.<tool_calls>\n{hy('f', ('a', '1'))}\n{hy('g')}\n</tool_calls>", ["I look.", ("f", {"a": "1"}), ("g", "{}")]),
        ("types", f"<tool_calls>{hy('types', ('int', '42'), ('object', '{}'), ('any', 'a' + chr(10)))}</tool_calls>", [("types", {"int": 42, "object": {}, "any": "a\n"})]),
        ("no section", hy("weather", ("city", "Oslo")) + "</tool_calls>", [("weather", {"city": "Oslo"})]),
        ("no separator", "<tool_calls><tool_call>f</tool_call></tool_calls>", ["<tool_calls><tool_call>f</tool_call></tool_calls>"]),
        ("cut in a value", "<tool_calls><tool_call>f<tool_sep><arg_key>a</arg_key><arg_value>x", [("f", '{"a": "x', "open")]),
    ],
    "functiongemma": [
        ("no call", "It rains in Oslo.", ["It rains in Oslo."]),
        ("one call", "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3}<end_function_call>", [("weather", WEATHER)]),
        ("two calls after text", "I look.<start_function_call>call:f{a:1}<end_function_call><start_function_call>call:g{}<end_function_call>", ["I look.", ("f", {"a": 1}), ("g", "{}")]),
        ("types", "<start_function_call>call:f{a:true,b:[1,<escape>x<escape>],c:{d:null}}<end_function_call>", [("f", {"a": True, "b": [1, "x"], "c": {"d": None}})]),
        ("braces in a string", "<start_function_call>call:f{a:<escape>{x},\"y\"<escape>}<end_function_call>", [("f", {"a": '{x},"y"'})]),
        ("no end", "<start_function_call>call:f{a:1}", [("f", {"a": 1})]),
        ("no call:", "<start_function_call>f{}<end_function_call>", ["<start_function_call>f{}<end_function_call>"]),
        ("cut in a string", "<start_function_call>call:f{a:<escape>x", [("f", '{"a": "x', "open")]),
    ],
    "openai": [
        ("final", "<|channel|>final<|message|>Hello<|return|>", ["Hello"]),
        ("thinking and final", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello", [("thinking", "Hm."), "Hello"]),
        ("call", '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}<|call|>', [("thinking", "Hm."), ("weather", WEATHER)]),
        ("recipient first", '<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>', [("f", {"a": 1})]),
        ("the prompt began the header", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', [("f", {"a": 1})]),
        ("two calls", '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|call|>', [("f", {"a": 1}), ("g", "{}")]),
        ("no arguments", "<|channel|>commentary to=functions.f<|message|><|call|>", [("f", "{}")]),
        ("preamble", '<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>', ["I will look.", ("f", "{}")]),
        ("a tool of the model's own", '<|channel|>analysis to=browser.search code<|message|>{"query": "x"}<|call|>', [("browser.search", {"query": "x"})]),
        ("no JSON", "<|channel|>analysis to=python code<|message|>print(1 < 2)<|call|>", [("python", "print(1 < 2)")]),
        ("no channel", "Hello", ["Hello"]),
        ("unknown channel", "<|channel|>notes<|message|>x<|end|>", ["<|channel|>notes<|message|>x<|end|>"]),
        ("no end", "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hello", [("thinking", "Hm."), "Hello"]),
        ("cut in the header", "<|channel|>fin", ["<|channel|>fin"]),
        ("cut in the arguments", '<|channel|>commentary to=functions.f<|message|>{"a": ', [("f", '{"a": ', "open")]),
    ],
}  # fmt: skip
