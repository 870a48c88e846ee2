"""A conversation before it is tokens, and an answer after it was tokens, whichever protocol they came by.

Owns the conversation, the deltas of an answer, and chat templates with the forms of a conversation that strict ones
take. Knows nothing of protocols and of tokens. Read `conversation.py` first, then `deltas.py`.
"""
