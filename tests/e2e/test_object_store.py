"""Jobs root, inputs and output in a bucket of S3 or GCS: a peer on loopback, a worker in another process."""

import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.broker import stop_broker
from jobs.job import Job
from jobs.source import scan_inputs
from jobs.store import open_store, probe, replace
from jobs.verify import verify
from schemas.errors import AlreadyExists
from schemas.records import RowStatus
from schemas.settings import Settings
from tests.tiny_jobs import make_job, results_of
from tests.tiny_models import write_tiny_model

pytest.importorskip("moto", reason="moto, the server of this test, is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

ROOT = Path(__file__).resolve().parent.parent.parent


def variables_of(scheme: str, endpoint: str) -> dict[str, str]:
    """What a user would set for a server of his own."""
    if scheme == "s3":
        return {
            "AWS_ENDPOINT": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }
    key = {"gcs_base_url": endpoint, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key), "GOOGLE_ALLOW_HTTP": "true"}


@pytest.fixture(params=["s3", "gs"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of an empty bucket; its name is new, since connections are kept by bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server_of = {"s3": ["-m", "moto.server", "-p"], "gs": ["-m", "tests.e2e.gcs_server"]}
    with (tmp_path / "server.log").open("w") as log:
        command = [sys.executable, *server_of[request.param], str(port)]
        server = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    for name, value in variables_of(request.param, f"http://127.0.0.1:{port}").items():
        monkeypatch.setenv(name, value)
    name = f"nightmill-{port}"
    deadline_s = time.monotonic() + 60
    while True:
        try:
            urlopen(Request(f"http://127.0.0.1:{port}/{name}", method="PUT")).close()
            break
        except URLError:
            assert time.monotonic() < deadline_s, (tmp_path / "server.log").read_text()
            time.sleep(0.1)
    yield f"{request.param}://{name}"
    server.terminate()
    server.wait()


def upload(uri: str, table: pa.Table) -> None:
    data = io.BytesIO()
    pq.write_table(table, data)
    place, _, name = uri.rpartition("/")
    open_store(place).create(name, data.getvalue())


def test_one_of_many_racing_creators_wins_and_two_committers_give_one_part(bucket: str, tmp_path: Path) -> None:
    store = open_store(f"{bucket}/jobs")
    probe(store)

    def create(number: int) -> bool:
        try:
            store.create("key", str(number).encode())
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(16)))
    assert won.count(True) == 1
    assert store.read("key") == str(won.index(True)).encode()
    job = make_job(tmp_path, store=store)
    other = Job.open(open_store(f"{bucket}/jobs"), job.job_id)
    statuses = (RowStatus.OK, RowStatus.FAILED)
    with ThreadPoolExecutor(2) as pool:
        results = [results_of(job, 0, status) for status in statuses]
        first = list(pool.map(lambda pair: pair[0].commit_part(0, pair[1]), zip((job, other), results, strict=True)))
    assert sorted(first) == [False, True]
    assert other.counts() == {statuses[first.index(True)]: job.chunks[0].num_rows}


def test_a_large_object_appears_whole_under_any_name_and_goes_again(bucket: str) -> None:
    store, key = open_store(f"{bucket}/jobs"), "deep/a b+c é%20.bin"
    data = b"0123456789" * 1_500_000  # more than one part of an upload
    replace(store, key, data)
    with store.open_reader(key) as file:
        file.seek(12_000_003)
        assert file.read(4) == b"3456"
    replace(store, key, b"anew")
    assert (store.read(key), store.list(), store.list("deep")) == (b"anew", ["deep"], [key.partition("/")[2]])
    store.delete(key)
    store.delete(key)
    assert (store.walk(), store.stat(key)) == ((), None)


def test_a_job_lives_in_a_bucket_from_its_inputs_to_its_output(bucket: str, tmp_path: Path) -> None:
    for lang in ("de", "en"):
        for number in range(2):
            rows = [f"{lang} {number}: ticket {i}" for i in range(6)]
            upload(f"{bucket}/in/lang={lang}/{number}.parquet", pa.table({"id": range(6), "text": rows}))
    settings = Settings(state_dir=tmp_path / "state", jobs_root=f"{bucket}/jobs")
    environment = os.environ | {
        "NIGHTMILL_STATE_DIR": str(settings.state_dir),
        "NIGHTMILL_JOBS_ROOT": settings.jobs_root,
        "NIGHTMILL_ENGINE__KV_CACHE_GIB": "0.1",
        "NIGHTMILL_ENGINE__MAX_NUM_SEQS": "8",
        "OMP_NUM_THREADS": "1",
    }
    model = write_tiny_model(tmp_path / "model", "qwen3")
    command = [sys.executable, "-m", "jobs.submit", f"{bucket}/in", "--model", str(model), "--max-model-len", "512"]
    options = ["--prompt", "{{ lang }}: {{ text }}", "--where", "id < 5", "--choice", "yes,no", "--chunk-rows", "4"]
    try:
        submitted = subprocess.run(
            [*command, *options, "--output", f"{bucket}/out", "--name", "tickets"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        stop_broker(settings)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    store = open_store(settings.jobs_root)
    job = Job.open(store, Job.list_ids(store)[0])
    assert verify(job).faults == []
    success = job.success()
    assert success is not None
    assert success.counts == {RowStatus.OK: 20, RowStatus.SKIPPED: 4}
    assert [file.num_rows for file in success.outputs] == [6] * 4
    assert scan_inputs([f"{bucket}/out"]).schema.names[:3] == ["id", "text", "lang"]
