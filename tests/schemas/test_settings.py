"""Settings: order of sources, unknown names, ranges."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from schemas.errors import SettingsError
from schemas.settings import Settings


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load().jobs.chunk_rows == 2048
    (tmp_path / "nightmill.toml").write_text('broker_url = "redis://file"\n[jobs]\nchunk_rows = 10\n')
    assert Settings.load().jobs.chunk_rows == 10
    monkeypatch.setenv("NIGHTMILL_JOBS__CHUNK_ROWS", "20")
    monkeypatch.setenv("NIGHTMILL_BROKER_URL", "redis://environment")
    assert Settings.load().jobs.chunk_rows == 20
    assert Settings.load(broker_url="redis://flag").broker_url == "redis://flag"


@pytest.mark.parametrize("name", ["NIGHTMILL_BROKER", "NIGHTMILL_ENGINE__MAX_SEQS", "NIGHTMILL_ENGIN__DEVICE"])
def test_an_unknown_setting_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=name):
        Settings.load()


def test_an_unknown_setting_in_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "nightmill.toml").write_text("[engine]\ndevise = 'cpu'\n")
    with pytest.raises(SettingsError, match=r"engine\.devise"):
        Settings.load()


@pytest.mark.parametrize("url", ["localhost:6379", "http://x", "amqp://x", "//x", "redis"])
def test_a_broker_url_that_kombu_would_send_elsewhere_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match=r"broker_url: .*scheme must be one of redis, rediss"):
        Settings.load(broker_url=url)


@pytest.mark.parametrize("url", ["redis://host:1/0", "rediss://host", "redis+socket:///run/x.sock"])
def test_redis_urls_are_taken(url: str) -> None:
    assert Settings.load(broker_url=url).broker_url == url


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENGINE__BLOCK_SIZE", "-1"),
        ("ENGINE__COMPILE_TIMEOUT_S", "0"),
        ("JOBS__CHUNK_ROWS", "-1"),
        ("LOG__LEVEL", "LOUD"),
    ],
)
def test_a_value_out_of_range_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"NIGHTMILL_{name}", value)
    with pytest.raises(SettingsError, match=name.lower().replace("__", r"\.")):
        Settings.load()


def test_jobs_root_follows_the_state_directory(tmp_path: Path) -> None:
    assert Settings.load(state_dir=tmp_path).jobs_root == str(tmp_path / "jobs")
    assert Settings.load(state_dir=tmp_path, jobs_root="s3://bucket/x").jobs_root == "s3://bucket/x"


def test_settings_cannot_be_changed() -> None:
    settings = Settings.load()
    with pytest.raises(ValidationError, match="frozen"):
        settings.engine.device = "cuda"  # type: ignore[misc]
