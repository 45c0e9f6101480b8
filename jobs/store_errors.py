"""What errors of file systems and buckets mean: which to try again, and what to tell the user. Opens nothing."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tenacity
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError

from schemas.errors import AlreadyExists, NotFound, StoreError

TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET})
HINTS = {
    errno.ENOSPC: "the disk is full: free space, then resume the job",
    errno.EDQUOT: "the quota is used up: free space, then resume the job",
    errno.EROFS: "the file system is read-only: choose another jobs_root or --output",
    errno.EACCES: "permission denied: give this user access, or choose another jobs_root or --output",
    errno.EPERM: "not permitted: give this user access, or choose another jobs_root or --output",
    errno.EXDEV: "_staging lies on another file system: it must share one with its parent",
    errno.ENOTDIR: "a parent of this path is a file, not a directory",
}
WRONG_CLOCK = "RequestTimeTooSkewed"
"""How S3 refuses what was signed more than a quarter of an hour away from its own time."""


def is_transient(error: BaseException) -> bool:
    """Say whether trying again can help. A full, read-only or forbidden place is never worth it."""
    cause = error.__cause__ if isinstance(error, StoreError) else error
    if isinstance(cause, OSError):
        return cause.errno in TRANSIENT
    return isinstance(cause, GenericError)


def retrying() -> tenacity.Retrying:
    """Attempts at one call, again after transient errors, a few times."""
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        wait=tenacity.wait_random_exponential(multiplier=0.05, max=5),
        stop=tenacity.stop_after_attempt(5),
        reraise=True,
    )


@contextmanager
def explained(verb: str, where: str | Path) -> Iterator[None]:
    """Turn errors of the file system or the bucket into StoreErrors that say where and what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"cannot {verb} {where}: no such file") from error
    except AlreadyExistsError as error:
        raise AlreadyExists(f"{where} exists already") from error
    except OSError as error:
        hint = HINTS.get(error.errno or 0)
        reason = f"{error.strerror or error}" + (f" ({hint})" if hint else "")
        raise StoreError(f"cannot {verb} {where}: {reason}") from error
    except BaseError as error:
        hint = " (this machine's clock is wrong: set it)" if WRONG_CLOCK in str(error) else ""
        raise StoreError(f"cannot {verb} {where}: {str(error).splitlines()[0]}{hint}") from error
