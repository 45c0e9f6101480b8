"""A worker on a broker with TLS and a password, and where a prompt may not turn up while everything fails."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import redis
import trustme

from jobs.broker import broker_url
from jobs.queue import Queue, connect
from jobs.show import describe_service
from ops.doctor import check_broker
from schemas.errors import BrokerError, SettingsError
from schemas.records import JobState, RowStatus
from schemas.settings import Settings
from tests.worker.lab import Lab, until

PASSWORD = "pass/word@with:odd %characters"
SECRET = "xyzzy-4711"


def has_tls(binary: str | None) -> bool:
    if binary is None:
        return False
    answer = subprocess.run([binary, "--tls-port", "x"], capture_output=True, text=True, check=False, timeout=10)
    return "Bad directive" not in answer.stdout + answer.stderr


@pytest.fixture
def tls_broker(tmp_path: Path) -> Iterator[dict[str, object]]:
    """Settings of a redis-server that speaks TLS alone and wants a password."""
    binary = shutil.which("redis-server")
    if not has_tls(binary):
        pytest.skip("no redis-server with TLS is installed")
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    paths = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca"])
    certificate.cert_chain_pems[0].write_to_path(paths["cert"])
    certificate.private_key_pem.write_to_path(paths["key"])
    (tmp_path / "password").write_text(PASSWORD + "\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "redis.conf").write_text(
        f'bind 127.0.0.1\nport 0\ntls-port {port}\ntls-auth-clients no\nsave ""\nrequirepass "{PASSWORD}"\n'
        f"tls-ca-cert-file {paths['ca']}\ntls-cert-file {paths['cert']}\ntls-key-file {paths['key']}\n"
    )
    server = subprocess.Popen([str(binary), str(tmp_path / "redis.conf")], stdout=subprocess.DEVNULL)
    found = {
        "broker_url": f"rediss://localhost:{port}/0",
        "broker_password_file": tmp_path / "password",
        "broker_ca_file": paths["ca"],
    }
    try:
        until(lambda: answers(Settings(**found)), "the server to answer")
        yield found
    finally:
        server.terminate()
        server.wait()


def answers(settings: Settings) -> bool:
    try:
        return bool(connect(broker_url(settings)).ping())
    except redis.ConnectionError:
        return False


def test_a_worker_serves_a_broker_with_tls_and_a_password_from_a_file(
    tmp_path: Path, tls_broker: dict[str, object]
) -> None:
    lab = Lab(tmp_path, tls_broker)
    try:
        worker = lab.worker()
        job = lab.start_job(3)
        lab.wait_done(job)
        lab.wait_clean()
        told = [describe_service(lab.settings, lab.other_model()), check_broker(lab.settings)[0].detail, worker.log]
        for name, wrong in {"broker_ca_file": None, "broker_password_file": None}.items():
            settings = Settings(**{**tls_broker, name: wrong})
            with pytest.raises(BrokerError) as refused:
                Queue(settings, broker_url(settings)).check()
            told.append(str(refused.value))
    finally:
        lab.close()
    assert "CERTIFICATE_VERIFY_FAILED" in told[-2]
    assert "authenticated" in told[-1]
    assert "NIGHTMILL_BROKER_PASSWORD_FILE=" in told[0]
    assert not any(secret in text for text in told for secret in (PASSWORD, "pass%2Fword"))


def test_a_password_or_an_authority_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    wrong = [
        ({"broker_url": "redis://:x@h", "broker_password_file": tmp_path / "empty"}, "keep one of them"),
        ({"broker_url": "redis://h", "broker_password_file": tmp_path / "gone"}, "cannot read broker_password_file"),
        ({"broker_url": "redis://h", "broker_password_file": tmp_path / "empty"}, "is empty"),
        ({"broker_url": "redis://h", "broker_ca_file": tmp_path / "ca"}, "write rediss://"),
    ]
    for fields, message in wrong:
        with pytest.raises(SettingsError, match=message):
            broker_url(Settings(**fields))


def test_certificates_are_checked_unless_the_url_says_otherwise() -> None:
    assert broker_url(Settings(broker_url="rediss://h/0")) == "rediss://h/0?ssl_cert_reqs=required"
    assert broker_url(Settings(broker_url="rediss://h/0?ssl_cert_reqs=none")).endswith("/0?ssl_cert_reqs=none")


def test_no_prompt_is_in_logs_metrics_or_the_broker_whatever_goes_wrong(tmp_path: Path) -> None:
    texts = [f"{SECRET} fine", f"kill {SECRET}", f"raise:{SECRET}", f"{SECRET} template", f"{SECRET} parked"]
    template = f"{{{{ text }}}}{{% if 'template' in text %}}{{{{ text.{SECRET.replace('-', '_')}.x }}}}{{% endif %}}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lab = Lab(tmp_path, metrics_port=port)
    try:
        lab.fault("submitted", 4, "raise-always")
        worker = lab.worker(NIGHTMILL_LOG__LEVEL="DEBUG", NIGHTMILL_ENGINE__MAX_RESTARTS="50")
        job = lab.start_job(5, text=texts.__getitem__, prompt_column=None, prompt_template=template)
        lab.wait_done(job)
        until(lambda: job.state() is JobState.DONE_WITH_ERRORS, "the worker to finish the job")
        stored = b"".join(lab.redis.dump(key) or b"" for key in lab.redis.scan_iter())
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            stored += answer.read()
        files = [path for path in lab.settings.state_dir.rglob("*") if path.is_file()]
        outside = [path for path in files if not path.is_relative_to(lab.settings.jobs_root)]
        leaks = [path for path in [*outside, worker.log_path] if SECRET.encode() in path.read_bytes()]
    finally:
        lab.close()
    assert job.counts() == {RowStatus.OK: 1, RowStatus.INPUT_ERROR: 1, RowStatus.FAILED: 3}
    reproducers = list(Path(job.store.locate("reproducers")).iterdir())
    assert any(SECRET in path.read_text() for path in reproducers), "the prompts did go the whole way"
    for event in ("engine_died", "row_failed", "chunk_failed", "chunk_parked"):
        assert event in worker.log
    assert leaks == []
    assert SECRET.encode() not in stored
