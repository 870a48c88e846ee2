"""The router: HTTP and OpenAI's protocol on one side, replicas over ZeroMQ on the other.

Owns: validation, chat templates, tokenisation and detokenisation, placement, and resuming a stream whose replica died.
Knows nothing of tensors or GPUs, and imports only the messages of `worker`. Read `api.py` first.
"""
