"""Expressions: what a program adds to its state with `s += ...`.

An expression is a value. Nothing runs when it is made; the interpreter runs it once it is added to a state. Names and
arguments are those of SGLang's language, so that its programs run here.

| expression | effect on the state |
| --- | --- |
| `ConstantText` | appends text |
| `Gen` | appends what the model generates, and sets a variable |
| `Select` | appends the likeliest of some texts, and sets a variable |
| `RoleBegin`, `RoleEnd` | begins and ends a message of a conversation |
| `Image`, `Video` | appends a picture or a film to the message |
| `VarScopeBegin`, `VarScopeEnd` | sets a variable to the text between them |
| `SeparateReasoning` | splits generated variables into reasoning and answer |
| `ExprList` | its parts, one after the other |
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.lang.choices import ChoicesSamplingMethod, token_length_normalized

# What `dtype` allows. A number may be followed by white space, by which the model says that it has ended.
REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r'"([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'

_DTYPES = {
    "int": ("int", REGEX_INT),
    "float": ("float", REGEX_FLOAT),
    "bool": ("bool", REGEX_BOOL),
    "str": ("str", REGEX_STR),
    "string": ("str", REGEX_STR),
}


@dataclass(frozen=True)
class GenParams:
    """Sampling parameters of a `gen`; None leaves a field to the defaults of `run`.

    `max_new_tokens` is what `gen` calls `max_tokens`. `dtype` is the name of a Python type. `stop` and `stop_regex` are
    tuples. `top_logprobs_num` is the number of alternatives at each position.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    dtype: str | None = None
    regex: str | None = None
    json_schema: str | None = None

    def over(self, defaults: "GenParams") -> "GenParams":
        """Parameters: these, with those of `defaults` where one is None."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) is not None}
        return dataclasses.replace(defaults, **own)

    def pattern(self) -> str | None:
        """The regular expression that the output must match: `regex`, or that of `dtype`."""
        return self.regex if self.dtype is None else _DTYPES[self.dtype][1]

    def used(self) -> set[str]:
        """The names of the fields that are set."""
        return {f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None}


def gen_params(**given: Any) -> GenParams:
    """Checked parameters. Raises ValueError or TypeError with the parameter's name."""
    for name in ("stop", "stop_regex"):
        given[name] = _texts(name, given.get(name))
    if given.get("stop_token_ids") is not None:
        given["stop_token_ids"] = tuple(given["stop_token_ids"])
    for pattern in (given.get("regex"), *(given["stop_regex"] or ())):
        if pattern is not None:
            re.compile(pattern)
    dtype = given.get("dtype")
    if dtype is not None:
        name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
        if name not in _DTYPES:
            raise ValueError(f"dtype is {name!r}; it may be {', '.join(sorted(_DTYPES))}")
        given["dtype"] = _DTYPES[name][0]
    asked = [name for name in ("dtype", "regex", "json_schema") if given.get(name) is not None]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} are given: the output can have one constraint")
    return GenParams(**given)


def _texts(name: str, value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} is {value!r}; it must be a text or a list of texts")
    return tuple(text for text in texts if text)


class Expr:
    """Something that can be added to a state. Expressions and texts are joined by `+`."""

    def __add__(self, other: "Expr | str") -> "ExprList":
        return ExprList((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: "Expr | str") -> "ExprList":
        return ExprList((*parts_of(other), *parts_of(self)))


@dataclass(frozen=True)
class ConstantText(Expr):
    value: str


@dataclass(frozen=True)
class ExprList(Expr):
    parts: tuple[Expr, ...]

    @property
    def expr_list(self) -> list[Expr]:
        """The parts, by SGLang's name."""
        return list(self.parts)


@dataclass(frozen=True)
class Gen(Expr):
    name: str | None = None
    params: GenParams = field(default_factory=GenParams)


@dataclass(frozen=True)
class Select(Expr):
    """`temperature` above 0 draws among the choices by the softmax of their scores over the temperature."""

    name: str | None
    choices: tuple[str, ...]
    temperature: float = 0.0
    method: ChoicesSamplingMethod = token_length_normalized


@dataclass(frozen=True)
class RoleBegin(Expr):
    role: str


@dataclass(frozen=True)
class RoleEnd(Expr):
    role: str


@dataclass(frozen=True)
class Image(Expr):
    """`source` is a path, an http(s) or data URL, bytes, or a PIL image."""

    source: Any


@dataclass(frozen=True)
class Video(Expr):
    """`source` is a path, an http(s) or data URL, or bytes."""

    source: Any
    num_frames: int


@dataclass(frozen=True)
class VarScopeBegin(Expr):
    name: str


@dataclass(frozen=True)
class VarScopeEnd(Expr):
    name: str


@dataclass(frozen=True)
class SeparateReasoning(Expr):
    """Splits the variables that `names` generated. `model_type` names the marks around the reasoning."""

    names: tuple[str, ...]
    model_type: str

    @staticmethod
    def reasoning_name(name: str) -> str:
        return f"{name}_reasoning_content"

    process_name_for_reasoning = reasoning_name  # SGLang's name

    @property
    def name(self) -> str:
        """The variable of the reasoning, or several with commas between them."""
        return ", ".join(map(self.reasoning_name, self.names))

    def __repr__(self) -> str:
        return f"SeparateReasoning(model_type={self.model_type}, name={self.name})"


@dataclass(frozen=True)
class Unordered(Expr):
    """Parts whose order the author leaves free. Without a compiler they run as written."""

    parts: tuple[Expr, ...] = field(default_factory=tuple)


def parts_of(value: object) -> tuple[Expr, ...]:
    """The expressions that a value stands for. Raises TypeError for what is neither an expression nor a text."""
    if isinstance(value, ExprList):
        return value.parts
    if isinstance(value, Expr):
        return (value,)
    if isinstance(value, str):
        return (ConstantText(value),)
    kind = type(value).__name__
    raise TypeError(f"a state takes texts and expressions, not {kind}: {value!r}; str(...) makes a text of it")


def names_set_by(expr: Expr) -> list[str]:
    """The variables that an expression sets, in its order."""
    if isinstance(expr, ExprList | Unordered):
        return [name for part in expr.parts for name in names_set_by(part)]
    if isinstance(expr, SeparateReasoning):
        return [SeparateReasoning.reasoning_name(name) for name in expr.names]
    name = getattr(expr, "name", None) if isinstance(expr, Gen | Select | VarScopeBegin) else None
    return [] if name is None else [name]


# SGLang's names.
SglExpr = Expr
SglConstantText = ConstantText
SglExprList = ExprList
SglGen = Gen
SglSelect = Select
SglRoleBegin = RoleBegin
SglRoleEnd = RoleEnd
SglImage = Image
SglVideo = Video
SglVarScopeBegin = VarScopeBegin
SglVarScopeEnd = VarScopeEnd
SglSeparateReasoning = SeparateReasoning
SglSamplingParams = GenParams
