"""Youtu-LLM: latent attention in a plain Llama."""

from worker.models.families.deepseek import latent
from worker.models.family import Family

FAMILIES = {"youtu": Family(latent)}
