"""What ``celery -A worker beat`` runs: the schedules of the nightly runs, in beat's own process and loop.

No task is sent: a slot is a file in the jobs root, so that it needs no free worker and no queue that kept its message.
"""

import sys
from typing import Any

import structlog
from celery.beat import Scheduler

from jobs.nightly import Beat
from schemas.errors import NightmillError
from schemas.log import configure_logging

log = structlog.get_logger(__name__)


class NightlyScheduler(Scheduler):  # type: ignore[misc]
    """Celery's loop around jobs.nightly; keeps nothing of its own on the disk."""

    def setup_schedule(self) -> None:
        """Read the schedules; wrong ones end the process."""
        settings = self.app.settings
        configure_logging(settings.log.level, settings.log.format)  # Celery does so later
        try:
            self._beat = Beat(settings)
        except NightmillError as error:
            log.error("beat_cannot_start", reason=str(error))
            sys.exit(error.exit_code)

    def tick(self, *_: Any, **__: Any) -> float:
        """Fire what is due and return the seconds until the next look."""
        return self._beat.tick()

    @property
    def info(self) -> str:
        """What beat's banner says."""
        return f"    . schedules -> {self.app.settings.schedules}"
