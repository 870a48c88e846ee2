"""dots.llm1: Qwen3's attention, DeepSeek-V3's experts."""

from worker.models.families.qwen import qwen3
from worker.models.family import Family
from worker.models.family_experts import sigmoid_experts

FAMILIES = {"dots1": Family(lambda hf: qwen3(hf) | {"experts": sigmoid_experts(hf)})}
