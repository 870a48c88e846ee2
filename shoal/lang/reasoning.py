"""The reasoning of models that write it between marks before their answer."""

# model type: (mark before the reasoning, mark after it). The first mark may be missing: some chat templates write it.
MARKS = {
    "deepseek-r1": ("<think>", "</think>"),
    "deepseek-v3": ("<think>", "</think>"),
    "glm45": ("<think>", "</think>"),
    "qwen3": ("<think>", "</think>"),
    "qwen3-thinking": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
}


def split_reasoning(text: str, model_type: str) -> tuple[str, str]:
    """(reasoning, answer) of an output. Without the closing mark, an output that begins with the opening one is all
    reasoning (it was cut off), and any other is all answer. Raises ValueError for an unknown model type."""
    if model_type not in MARKS:
        raise ValueError(f"there are no marks of reasoning for {model_type!r}; known: {', '.join(sorted(MARKS))}")
    opening, closing = MARKS[model_type]
    begun = text.lstrip().startswith(opening)
    body = text.lstrip().removeprefix(opening)
    reasoning, closed, answer = body.partition(closing)
    if closed:
        return reasoning.strip(), answer.lstrip("\n")
    return (body.strip(), "") if begun else ("", text)
