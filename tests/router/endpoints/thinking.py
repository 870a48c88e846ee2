"""A model that thinks and calls tools, by its template, and texts that it writes."""

# As Qwen3's: tools in the system's message, thinking in the history, calls as JSON between tags.
THINKER = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function.name }} {{ call.function.arguments | tojson }}"
    '\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{# <tool_call> {"name", "arguments"} #}'
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>\nIt is cold.\n</think>\n\nCold."
