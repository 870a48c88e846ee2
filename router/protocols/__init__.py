"""The protocols around a conversation: for each, a reader of requests and a writer of answers.

Owns what chat completions, plain completions, Responses and Messages look like on the wire. A reader makes a
`router.conversation.Conversation` of a request; a writer makes bytes of `router.deltas`. Read `chat_reader.py` first,
then `chat_writer.py`.
"""
