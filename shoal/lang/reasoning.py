"""The reasoning of models that write it between marks before their answer."""

# The marks before and after the reasoning. The first may be missing: some chat templates write it.
_THINK = ("<think>", "</think>")
_LIKE_THINK = """
deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots gigachat35 glm45 granite_thinking_parser hunyuan interns1
iquest_q1 kimi_k2 ling3 mimo minimax minimax-append-think nanbeige nemotron_3 poolside_v1 qwen3 qwen3-thinking step3
step3p5
""".split()
# By model type, with SGLang's names.
MARKS = dict.fromkeys(_LIKE_THINK, _THINK) | {
    "apertus2509": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "minimax-m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


def split_reasoning(text: str, model_type: str) -> tuple[str, str]:
    """(reasoning, answer) of an output. Without the closing mark, an output that begins with the opening one is all
    reasoning (it was cut off), and any other is all answer. Raises ValueError for an unknown model type."""
    model_type = model_type.lower()
    if model_type not in MARKS:
        raise ValueError(f"there are no marks of reasoning for {model_type!r}; known: {', '.join(sorted(MARKS))}")
    opening, closing = MARKS[model_type]
    begun = text.lstrip().startswith(opening)
    body = text.lstrip().removeprefix(opening)
    reasoning, closed, answer = body.partition(closing)
    if closed:
        return reasoning.strip(), answer.lstrip("\n")
    return (body.strip(), "") if begun else ("", text)
