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

    A field of a struct, ``label.route``, names directories, too; the struct stays in the file.

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
    check_columns([_path(name, schema)[0] for name in columns], schema, "--partition-by")
    for name in columns:
        kind = schema.field(_path(name, schema)[0]).type
        for step in _path(name, schema)[1:]:
            inner = kind.names if pa.types.is_struct(kind) else []
            if step not in inner:
                raise InputDataError(
                    f"--partition-by {name}: no field {step!r}; there are: {', '.join(inner) or 'none'}"
                )
            kind = kind.field(step).type
        if pa.types.is_nested(kind):
            example = f", or a field such as {name}.{kind.names[0]}" if pa.types.is_struct(kind) and kind.names else ""
            raise InputDataError(f"--partition-by {name} is {kind}: name plain columns{example}")
    if not set(schema.names) - set(columns):
        raise InputDataError(f"--partition-by {', '.join(columns)}: leave some columns over")


def _path(name: str, schema: pa.Schema) -> list[str]:
    """The column, and the fields in it, that a name with dots means: a column of just this name before others."""
    return [name] if name in schema.names else name.split(".")


def _values(batch: pa.RecordBatch, name: str) -> pa.Array:
    column, *fields = _path(name, batch.schema)
    values = batch.column(column)
    return pc.struct_field(values, fields) if fields else values


def _open(store: Store, key: str, schema: pa.Schema, stack: ExitStack, overwrite: bool) -> pq.ParquetWriter:
    if not overwrite and exists(store, key):
        raise StoreError(f"{store.locate(key)} exists: choose another --to, or pass --overwrite")
    return stack.enter_context(
        pq.ParquetWriter(stack.enter_context(store.open_writer(key)), schema, compression="zstd")
    )


def _split(batch: pa.RecordBatch, columns: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield the rows of each combination of values, in the order in which the combinations first come."""
    texts = [_values(batch, name).cast(pa.string()).to_pylist() for name in columns]
    directories = ["/".join(map(_part, columns, values)) for values in zip(*texts, strict=True)]
    array = pa.array(directories, pa.string())
    for directory in dict.fromkeys(directories):
        yield directory, batch.filter(pc.equal(array, directory))


def _part(name: str, value: str | None) -> str:
    return f"{quote(name, safe='')}={HIVE_NULL if value is None else quote(value, safe='') or HIVE_NULL}"
