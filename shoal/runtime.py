"""SGLang's `Runtime`: a model in this process for programs that were written for SGLang's language."""

import os
import warnings
from typing import Any

from shoal.engine import Engine
from shoal.lang.api import flush_cache

# SGLang's names of settings that an Engine has.
_NAMES = {
    "chunked_prefill_size": "token_budget",
    "max_running_requests": "max_running",
    "max_total_tokens": "kv_tokens",
    "mem_fraction_static": "kv_memory_fraction",
    "pp_size": "pp",
    "tp_size": "tp",
}
# Those that change no answer, and for which an Engine has a way of its own.
_OWN_WAY = frozenset(
    """
    attention_backend cuda_graph_bs cuda_graph_max_bs disable_cuda_graph disable_overlap_schedule enable_metrics
    enable_mixed_chunk enable_torch_compile grammar_backend host launch_timeout log_level log_level_http
    log_requests max_prefill_tokens nccl_port port sampling_backend schedule_conservativeness schedule_policy
    show_time_cost stream_interval trust_remote_code watchdog_timeout
    """.split()
)


class Runtime(Engine):
    """An `Engine` with SGLang's names: of its settings, and of its methods. Programs take it as a backend.

    | attribute | meaning |
    | --- | --- |
    | `endpoint` | the backend of programs that run here |
    | `url` | the address of the endpoints, over `transport` alone: no port is open |
    """

    url = Engine.base_url.removesuffix("/v1")

    def __init__(
        self, model_path: str | os.PathLike[str], *, incremental_streaming_output: bool = False, **settings: Any
    ) -> None:
        """Loads the model. `settings` have SGLang's names or an Engine's; those for which an Engine has its own way are
        named in a warning, and not used. `incremental_streaming_output`: the details of a streamed output have what is
        new with each piece. Raises what `Engine` does."""
        unused = sorted(settings.keys() & _OWN_WAY)
        if unused:
            warnings.warn(f"Runtime does not use {', '.join(unused)}: no answer depends on them", stacklevel=2)
        wanted = {_NAMES.get(name, name): value for name, value in settings.items() if name not in _OWN_WAY}
        super().__init__(model_path, **wanted)
        self.endpoint.incremental_streaming_output = incremental_streaming_output
        self.endpoint.model_path = str(self._server.config.model)

    def shutdown(self) -> None:
        """Ends the replica, as `close`."""
        self.close()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as `transformers` reads it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._server.config.model)

    def cache_prefix(self, prefix: str) -> None:
        """Computes a text that prompts will begin with."""
        self.generate(prompt=prefix, max_tokens=0)

    def flush_cache(self) -> bool:
        """Empties the cache of prefixes."""
        return flush_cache(self.endpoint)
