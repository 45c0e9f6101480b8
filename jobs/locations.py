"""Which files a path, glob or URI means. Lists names and opens nothing; knows no Parquet."""

import glob
import os
import re
from pathlib import Path

import obstore

from jobs.store import (
    Entry,
    absolute_location,
    local_entry,
    local_path,
    object_entry,
    open_bucket,
    stat_input,
)
from jobs.store_errors import explained
from schemas.errors import InputDataError


def find_files(location: str, suffixes: tuple[str, ...]) -> list[Entry]:
    """Expand a file, directory, glob or prefix to files in name order; directories give those with a suffix.

    Names that begin with ``.`` or ``_`` are left out below a directory. Raises InputDataError naming a missing path.
    """
    path = local_path(location)
    entries = _find_objects(location) if path is None else _find_local(path)
    return sorted((e for e in entries if e.relative == "" or _is_data(e.relative, suffixes)), key=lambda e: e.uri)


def split_location(location: str) -> tuple[str, str]:
    """Split the location of a file into that of its directory and its name. Raises InputDataError without a name."""
    directory, _, name = absolute_location(location).rpartition("/")
    if not name or not directory or directory.endswith(":/"):
        raise InputDataError(f"{location!r} names no file")
    return directory, name


def _is_data(relative: str, suffixes: tuple[str, ...]) -> bool:
    return relative.lower().endswith(suffixes) and not any(part[0] in "._" for part in relative.split("/") if part)


def _find_local(path: Path) -> list[Entry]:
    if path.is_file():
        return [local_entry(path)]
    if path.is_dir():
        return _walk(path, path)
    if not glob.has_magic(str(path)):
        raise InputDataError(f"no such file or directory: {path}")
    plain = [part for part in path.parts if not glob.has_magic(part)]
    base = Path(*plain[: next(i for i, part in enumerate(path.parts) if glob.has_magic(part))])
    found = [Path(match) for match in glob.glob(str(path), recursive=True)]
    entries = {e.uri: e for p in found for e in (_walk(p, base) if p.is_dir() else [local_entry(p, base)])}
    if not entries:
        raise InputDataError(f"no file matches {path}")
    return list(entries.values())


def _walk(directory: Path, base: Path) -> list[Entry]:
    with explained("list", directory):
        return [local_entry(Path(top) / name, base) for top, _, names in os.walk(directory) for name in names]


def _find_objects(uri: str) -> list[Entry]:
    bucket, key = open_bucket(uri)
    root = uri[: len(uri) - len(key)].rstrip("/") + "/"
    if key and not glob.has_magic(key) and (entry := stat_input(uri)) is not None:
        return [entry]
    parts = key.rstrip("/").split("/") if key else []
    num_plain = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    base, pattern = "/".join(parts[:num_plain]), "/".join(parts[num_plain:])
    with explained("list", uri):
        found = obstore.list(bucket, base or None).collect()
    below = [(item, str(item["path"])[len(base) :].lstrip("/")) for item in found]
    matches = re.compile(_glob_to_regex(pattern or "**")).fullmatch
    entries = [object_entry(item, root + str(item["path"]), rest) for item, rest in below if matches(rest)]
    if not entries:
        raise InputDataError(f"no file matches {uri}" if pattern else f"no such file or directory: {uri}")
    return entries


def _glob_to_regex(pattern: str) -> str:
    """Translate a glob; only ``**`` crosses a slash (fnmatch's ``*`` would)."""
    special = {"**/": r"(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", pattern)
    return "".join(
        special.get(token, token.replace("[!", "[^") if token[0] == "[" and len(token) > 1 else re.escape(token))
        for token in tokens
    )
