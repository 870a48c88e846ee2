"""Text to tokens and back.

Owns the tokenizer with its chat template, the prompt of a conversation, prompts that are cut, the detokenizer, stop
strings, and the text of a sequence as it grows. Knows nothing of HTTP and of replicas. Read `tokenizer.py` first, then
`output_text.py`.
"""
