"""Paths, globs and URIs mean the same files in a directory and in a bucket."""

from pathlib import Path

import pytest

from jobs.locations import find_files, split_location
from jobs.store import open_input, open_store
from schemas.errors import InputDataError


def names(location: Path | str) -> list[str]:
    return [entry.relative or entry.uri.rsplit("/", 1)[-1] for entry in find_files(str(location), (".parquet",))]


@pytest.mark.parametrize("kind", ["local", "bucket"])
def test_directories_globs_and_files_expand_in_name_order(tmp_path: Path, kind: str) -> None:
    keys = [
        "b.parquet",
        "a.parquet",
        "lang=de/x.parquet",
        "lang=fr/x.parquet",
        "_tmp/y.parquet",
        ".z.parquet",
        "notes.md",
    ]
    root = str(tmp_path) if kind == "local" else f"memory://{tmp_path.name}/data"
    for key in keys:
        open_store(root).create(key, b"1")
    assert names(root) == ["a.parquet", "b.parquet", "lang=de/x.parquet", "lang=fr/x.parquet"]
    assert names(f"{root}/*.parquet") == ["a.parquet", "b.parquet"]
    assert names(f"{root}/**/x.parquet") == ["lang=de/x.parquet", "lang=fr/x.parquet"]
    assert names(f"{root}/lang=[de][!r]/*.parquet") == ["lang=de/x.parquet"]
    assert names(f"{root}/notes.md") == ["notes.md"]
    with pytest.raises(InputDataError, match=r"no such file or directory: .*/gone\.parquet"):
        names(f"{root}/gone.parquet")
    with pytest.raises(InputDataError, match="no file matches"):
        names(f"{root}/gone-*.parquet")
    uri = find_files(f"{root}/a.parquet", (".parquet",))[0].uri
    assert open_input(uri).read() == b"1"


def test_a_file_uri_is_a_local_path(tmp_path: Path) -> None:
    (tmp_path / "a b.parquet").write_bytes(b"1")
    assert find_files(f"file://{tmp_path}/a%20b.parquet", (".parquet",))[0].uri == str(tmp_path / "a b.parquet")


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(InputDataError, match="unknown scheme 'ftp'"):
        find_files("ftp://host/a.parquet", (".parquet",))


def test_a_file_s_location_splits_into_directory_and_name() -> None:
    assert split_location("s3://bucket/some/x.csv") == ("s3://bucket/some", "x.csv")
    assert split_location("/data/x.csv") == ("/data", "x.csv")
    for nothing in ("s3://bucket", "s3://bucket/", "/"):
        with pytest.raises(InputDataError, match="names no file"):
            split_location(nothing)
