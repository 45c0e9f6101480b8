"""Tables in hive directories (``lang=de/part-00000.parquet``), split by the values of columns. Knows no jobs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.source import HIVE_NULL, check_columns
from jobs.store import Store, exists
from schemas.errors import InputDataError, StoreError

MAX_PARTITIONS = 1000  # of one file: each has a file open


def write_partitioned(
    store: Store,
    name: str,
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    columns: Sequence[str],
    *,
    overwrite: bool,
) -> None:
    """Write each row to the file ``name`` in the directory of its values in ``columns``, which the file then lacks.

    Raises InputDataError for columns that make no directories, StoreError for a file that exists unless ``overwrite``.
    """
    _check(columns, schema)
    written = pa.schema([field for field in schema if field.name not in columns], schema.metadata)
    writers: dict[str, pq.ParquetWriter] = {}
    with ExitStack() as stack:
        for batch in batches:
            for directory, rows in _split(batch, columns):
                if directory not in writers:
                    writers[directory] = _open(store, f"{directory}/{name}", written, stack, overwrite)
                    if len(writers) > MAX_PARTITIONS:
                        raise InputDataError(
                            f"{', '.join(columns)} make more than {MAX_PARTITIONS} partitions: use fewer"
                        )
                writers[directory].write_batch(rows.select(written.names))


def _check(columns: Sequence[str], schema: pa.Schema) -> None:
    check_columns(columns, schema, "--partition-by")
    nested = [name for name in columns if pa.types.is_nested(schema.field(name).type)]
    if nested or len(columns) >= len(schema):
        raise InputDataError(f"--partition-by {', '.join(nested or columns)}: name plain columns, and leave some over")


def _open(store: Store, key: str, schema: pa.Schema, stack: ExitStack, overwrite: bool) -> pq.ParquetWriter:
    if not overwrite and exists(store, key):
        raise StoreError(f"{store.locate(key)} exists: choose another --to, or pass --overwrite")
    return stack.enter_context(
        pq.ParquetWriter(stack.enter_context(store.open_writer(key)), schema, compression="zstd")
    )


def _split(batch: pa.RecordBatch, columns: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the rows of each combination of values, in the order in which the combinations first come."""
    texts = [batch.column(name).cast(pa.string()).to_pylist() for name in columns]
    directories = ["/".join(map(_part, columns, values)) for values in zip(*texts, strict=True)]
    array = pa.array(directories, pa.string())
    for directory in dict.fromkeys(directories):
        yield directory, batch.filter(pc.equal(array, directory))


def _part(name: str, value: str | None) -> str:
    return f"{quote(name, safe='')}={HIVE_NULL if value is None else quote(value, safe='') or HIVE_NULL}"
