"""The endpoints: routes, and for each protocol a reader of requests and a writer of answers.

Owns what chat completions and plain completions look like as they leave, scores of choices, templates of programs,
adapters, and what operators steer a server by; in folders Responses, Messages and embeddings. A reader makes a
`router.chat.conversation.Conversation` of a request; a writer makes bytes of `router.chat.deltas`. Read
`chat_writer.py` first.
"""
