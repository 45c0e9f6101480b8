"""The exception tree: every error has a place in it and an exit code."""

import inspect

from schemas import errors


def test_every_error_is_one_of_ours_and_drawn_in_the_tree() -> None:
    ours = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == "schemas.errors"]
    assert len(ours) > 10
    for cls in ours:
        assert issubclass(cls, errors.NightmillError)
        assert cls.__name__ in (errors.__doc__ or "")
        assert cls.__doc__


def test_what_the_user_typed_wrong_exits_with_2() -> None:
    for cls in (
        errors.SettingsError,
        errors.InputDataError,
        errors.ConstraintError,
        errors.ModelError,
        errors.KernelError,
        errors.JobNotFound,
    ):
        assert cls.exit_code == 2
    assert errors.EngineDied.exit_code == 1
