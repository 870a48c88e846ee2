"""Functions that programs are written with: `gen`, `select`, roles, pictures. Names and arguments are SGLang's."""

from collections.abc import Sequence
from typing import Any

from shoal.lang import loop
from shoal.lang.backend import Backend
from shoal.lang.choices import ChoicesSamplingMethod, token_length_normalized
from shoal.lang.ir import (
    Expr,
    ExprList,
    Gen,
    Image,
    RoleBegin,
    RoleEnd,
    Select,
    SeparateReasoning,
    Unordered,
    Video,
    gen_params,
    parts_of,
)
from shoal.lang.program import resolved_backend

Texts = str | Sequence[str] | None


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: Texts = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: Texts = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: str | None = None,
) -> Expr:
    """Text that the model generates; `s[name]` is its text.

    | argument | meaning |
    | --- | --- |
    | `n` | the number of outputs: the variable is a list of them, and the text goes on with the first |
    | `stop`, `stop_regex` | texts and regular expressions that end the output; they are not part of it |
    | `choices` | the output is one of these, chosen by `choices_method` as by `select` |
    | `dtype` | int, float, bool or str: the output is written as one |
    | `regex`, `json_schema` | the output matches; the schema is a text of JSON |
    | `return_logprob`, `top_logprobs_num` | `get_meta_info(name)` has log probabilities, and those of alternatives |

    Arguments that are None are those of `run`. Raises ValueError, TypeError or re.error for a wrong one.
    """
    if choices:
        return select(name, choices, temperature or 0.0, choices_method or token_length_normalized)
    return Gen(
        name,
        gen_params(
            max_new_tokens=max_tokens,
            min_new_tokens=min_tokens,
            n=n,
            stop=stop,
            stop_token_ids=stop_token_ids,
            stop_regex=stop_regex,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            ignore_eos=ignore_eos,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            return_text_in_logprobs=return_text_in_logprobs,
            dtype=dtype,
            regex=regex,
            json_schema=json_schema,
        ),
    )


def gen_int(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Expr:
    """An integer: `gen(..., dtype=int)`."""
    return gen(name, max_tokens, dtype=int, **sampling)


def gen_string(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Expr:
    """A text in double quotes, as JSON writes it: `gen(..., dtype=str)`. The quotes are part of it."""
    return gen(name, max_tokens, dtype=str, **sampling)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = token_length_normalized,
) -> Expr:
    """The likeliest of some texts, as `choices_method` ranks them. Raises ValueError without choices."""
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("select needs choices: texts that are not empty")
    return Select(name, tuple(choices), temperature, choices_method)


def image(source: Any) -> Expr:
    """A picture within a message: a path, a URL, bytes, or a PIL image."""
    return Image(source)


def video(source: Any, num_frames: int) -> Expr:
    """A film within a message: a path, a URL or bytes, of which the model sees `num_frames` pictures."""
    return Video(source, num_frames)


def system(expr: Expr | str | None = None) -> Expr:
    """A message of the system."""
    return _message("system", expr)


def user(expr: Expr | str | None = None) -> Expr:
    """A message of the user."""
    return _message("user", expr)


def assistant(expr: Expr | str | None = None) -> Expr:
    """A message of the assistant."""
    return _message("assistant", expr)


def _message(role: str, expr: Expr | str | None) -> Expr:
    return ExprList((RoleBegin(role), *(() if expr is None else parts_of(expr)), RoleEnd(role)))


def system_begin() -> Expr:
    """The beginning of a message of the system; `system_end` ends it."""
    return RoleBegin("system")


def system_end() -> Expr:
    return RoleEnd("system")


def user_begin() -> Expr:
    """The beginning of a message of the user; `user_end` ends it."""
    return RoleBegin("user")


def user_end() -> Expr:
    return RoleEnd("user")


def assistant_begin() -> Expr:
    """The beginning of a message of the assistant; `assistant_end` ends it."""
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    return RoleEnd("assistant")


def separate_reasoning(expr: Expr, model_type: str) -> Expr:
    """`expr`, with the reasoning of each `gen` in it split off: `s[name]` is the answer, and
    `s[name + "_reasoning_content"]` the reasoning. `model_type`: as for
    `shoal.lang.reasoning.marks_of`."""
    parts = parts_of(expr)
    names = tuple(part.name for part in parts if isinstance(part, Gen | Select) and part.name is not None)
    return ExprList((*parts, SeparateReasoning(names, model_type)))


def unordered(*parts: Expr | str) -> Expr:
    """Parts whose order does not matter to the program: `compile()` may move those that are shared to the front."""
    return Unordered(tuple(ExprList(parts_of(part)) for part in parts))


def flush_cache(backend: Backend | None = None) -> bool:
    """Empties a backend's cache of prefixes. Returns whether it has one that can be emptied."""
    return loop.wait(resolved_backend(backend).flush_cache(), loop.background_loop())


def get_server_info(backend: Backend | None = None) -> dict[str, Any] | None:
    """A backend's version and model, as far as it tells."""
    return loop.wait(resolved_backend(backend).server_info(), loop.background_loop())
