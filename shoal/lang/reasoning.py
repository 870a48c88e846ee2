"""The reasoning of models that write it between marks before their answer."""

from typing import NamedTuple


class Marks(NamedTuple):
    """Where the reasoning of a model stands. The first mark may be missing: some chat templates write it. `around`:
    what may stand before and after the answer, and is no part of it."""

    opening: str = "<think>"
    closing: str = "</think>"
    around: tuple[str, str] = ("", "")


# By the model types that SGLang knows; see `marks_of` for other spellings.
MARKS: dict[str, Marks] = {
    **dict.fromkeys(
        (
            *("deepseek-r1", "deepseek-v3", "deepseek-v4", "deepseek-v41", "dots", "gigachat35", "glm45", "holo2"),
            *(
                "hy-v3",
                "interns1",
                "iquest-q1",
                "kimi-k2",
                "ling3",
                "mimo",
                "minimax",
                "minimax-append-think",
                "minimax-m2",
            ),
            *("nanbeige", "nemotron-3", "nemotron-v3", "olmo3", "poolside-v1", "qwen3", "qwen3-thinking", "step3"),
            "step3p5",
        ),
        Marks(),
    ),
    "apertus2509": Marks("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere-command4": Marks("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_TEXT|>", "<|END_TEXT|>")),
    "cohere-command3": Marks("<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
    "ernie45": Marks(around=("<response>", "</response>")),
    "gemma4": Marks("<|channel>thought", "<channel|>"),
    "gpt-oss": Marks(
        "<|channel|>analysis<|message|>", "<|end|>", ("<|start|>assistant<|channel|>final<|message|>", "<|return|>")
    ),
    "granite": Marks("Here is my thought process:", "Here is my response:"),
    "hunyuan": Marks(around=("<answer>", "</answer>")),
    "kimi": Marks("◁think▷", "◁/think▷"),
    "kimi-k3": Marks(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", ("<|open|>response<|sep|>", "<|close|>response<|sep|>")
    ),
    "minimax-m3": Marks("<mm:think>", "</mm:think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed-oss": Marks("<seed:think>", "</seed:think>"),
}
_OTHER_NAMES = {
    "glm47": "glm45",
    "granite-thinking-parser": "qwen3",
    "hunyuan-a13b": "hunyuan",
    "minimax-m2-append-think": "minimax-m2",
    "openai": "gpt-oss",
    "openai-gptoss": "gpt-oss",
}


def marks_of(model_type: str) -> Marks:
    """The marks of a model type, in SGLang's or in vLLM's spelling. Raises ValueError for an unknown one."""
    name = model_type.lower().replace("_", "-")
    found = MARKS.get(_OTHER_NAMES.get(name, name))
    if found is None:
        raise ValueError(f"there are no marks of reasoning for {model_type!r}; known: {', '.join(sorted(MARKS))}")
    return found


def split_reasoning(text: str, model_type: str) -> tuple[str, str]:
    """(reasoning, answer) of an output. Without the closing mark, an output that begins with the opening one is all
    reasoning (it was cut off), and any other is all answer. Raises ValueError for an unknown model type."""
    opening, closing, around = marks_of(model_type)
    begun = text.lstrip().startswith(opening)
    body = text.lstrip().removeprefix(opening)
    reasoning, closed, answer = body.partition(closing)
    if closed:
        return reasoning.strip(), _inside(answer.lstrip("\n"), around)
    return (body.strip(), "") if begun else ("", _inside(text, around))


def _inside(answer: str, around: tuple[str, str]) -> str:
    before, after = around
    if before and answer.lstrip().startswith(before):
        answer = answer.lstrip().removeprefix(before).lstrip("\n")
    if after and answer.rstrip().endswith(after):
        answer = answer.rstrip().removesuffix(after).rstrip("\n")
    return answer
