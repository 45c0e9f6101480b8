"""Text generation with constraints: ``from engine import LLM, SamplingParams``. Knows no Parquet and no Celery."""

from engine.llm import LLM, SamplingParams

__all__ = ["LLM", "SamplingParams"]
