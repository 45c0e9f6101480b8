"""Every exception Nightmill raises on purpose. Row failures are statuses, not exceptions.

NightmillError
├── SettingsError        a setting is unknown or out of range
├── InputDataError       a file, a column or a table cannot be used
├── PromptError          a template or a messages column cannot be rendered, for the whole job
├── ConstraintError      a schema, regex, grammar or choice list is malformed or refused
├── ModelError           a model cannot be found, understood or loaded
├── KernelError          a kernel backend was asked for by name and cannot be had
├── EngineError          the engine process failed
│   └── EngineDied       it ended while requests were in flight
├── BrokerError          the queue cannot be reached or used
├── StoreError           the job store refused a read or a write
│   ├── AlreadyExists    exclusive creation lost the race: somebody committed before
│   ├── NotFound         nothing is stored under this name
│   └── JobNotFound      no such job directory
├── JobError             the job's files contradict each other or the request
└── Interrupted          the caller asked a chunk to stop: control flow, not a failure
"""


class NightmillError(Exception):
    """Base of all; command lines print its message and exit with ``exit_code``."""

    exit_code = 1


class SettingsError(NightmillError):
    """A setting is unknown or out of range."""

    exit_code = 2


class InputDataError(NightmillError):
    """A file, a column or a table cannot be used."""

    exit_code = 2


class PromptError(NightmillError):
    """A template or messages column cannot be rendered for any row."""

    exit_code = 2


class ConstraintError(NightmillError):
    """A schema, regex, grammar or choice list is malformed or refused."""

    exit_code = 2


class ModelError(NightmillError):
    """A model cannot be found, understood or loaded."""

    exit_code = 2


class KernelError(NightmillError):
    """A kernel backend was asked for by name and cannot be had."""

    exit_code = 2


class EngineError(NightmillError):
    """The engine process failed."""


class EngineDied(EngineError):
    """The engine process ended while requests were in flight."""


class BrokerError(NightmillError):
    """The queue cannot be reached or used."""


class StoreError(NightmillError):
    """The job store refused a read or a write."""


class AlreadyExists(StoreError):
    """Exclusive creation lost the race: somebody committed before."""


class NotFound(StoreError):
    """Nothing is stored under this name."""


class JobNotFound(StoreError):
    """No job directory of that name under the jobs root."""

    exit_code = 2


class JobError(NightmillError):
    """The job's files contradict each other or the request."""


class Interrupted(NightmillError):
    """The caller asked a chunk to stop (cancel, pause, shutdown); nothing of it was committed."""
