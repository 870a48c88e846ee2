"""Bodies of requests and of answers, field by field, as types; and errors in the form that clients get.

Owns what may stand in a body: the fields of OpenAI and Anthropic, those of other servers that ask for nothing, and the
words of an error for a field that is none. Knows nothing of what a field does. Read `requests.py` first, then
`responses.py`.
"""
