"""The router: HTTP and OpenAI's protocol on one side, replicas over ZeroMQ on the other.

Owns: validation, chat templates, tokens to text and back, where a request goes, resuming a stream whose replica died.
Knows nothing of tensors or GPUs. Of `worker` it imports the messages alone. Read `api.py` first.
"""
