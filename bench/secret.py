"""The secret of the sockets between processes that benchmarks start on this machine. It protects nothing."""

SECRET = bytes(32)
