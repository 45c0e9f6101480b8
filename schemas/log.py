"""Logging set-up for entry points. Knows nothing of what is logged."""

import logging
import sys
from typing import Any, Literal

import structlog


def configure_logging(level: str = "INFO", log_format: Literal["auto", "console", "json"] = "auto") -> None:
    """Send structlog events to stderr: readable on a terminal, else JSON lines, unless ``log_format`` says which."""
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    renderer: Any = structlog.dev.ConsoleRenderer(pad_event_to=24)
    if as_json:
        renderer = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
