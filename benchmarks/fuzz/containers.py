"""Changes in the grammar of binary files: safetensors with a checksum that fits again, .npz, Parquet, SQLite; and to
GGUF files, by where their numbers are: counts, lengths, types, sizes, offsets; and entries twice.
"""

from __future__ import annotations

import io
import json
import re
import sqlite3
import struct
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from random import Random
from typing import Any, NamedTuple
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fuzz.trees import NUMBERS, TEXTS, Raw, changed, changed_bytes, strange, written
from trilane.study.journal import checksum_of

# --- safetensors ------------------------------------------------------------------------------------------------------

Sign = Callable[[dict[str, str], dict[str, np.ndarray[Any, Any]]], None]
_TYPES = {"I32": "<i4", "U8": "u1", "I16": "<i2", "F16": "<f2", "F32": "<f4", "I64": "<i8", "BOOL": "?"}


def changed_tensors(random: Random, data: bytes, sign: Sign) -> bytes:
    """A safetensors file with other metadata, another header or other numbers; ``sign`` renews its checksum."""
    size = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:size]), data[size:]
    metadata = header.pop("__metadata__")
    kind = random.choice(("metadata", "metadata", "metadata", "header", "numbers", "numbers"))
    if kind == "metadata":
        _change_metadata(random, metadata)
    elif kind == "header":
        header = changed(random, header)
    else:
        body = _changed_numbers(random, header, body)
    if random.random() < 0.9:
        with suppress(Exception):  # of a header that describes no tensors, or metadata that are none
            sign(metadata, {name: _array(entry, body) for name, entry in header.items()})
    text = written({"__metadata__": metadata, **header} if isinstance(header, dict) else header).encode()
    return len(text).to_bytes(8, "little") + text + body


def _change_metadata(random: Random, metadata: dict[str, Any]) -> None:
    name = random.choice(list(metadata))
    with suppress(ValueError):
        if isinstance(tree := json.loads(metadata[name]), dict):
            metadata[name] = written(changed(random, tree)).encode("utf-8", "replace").decode()
            return
    metadata[name] = random.choice((*TEXTS, strange(random)))


def _changed_numbers(random: Random, header: dict[str, Any], body: bytes) -> bytes:
    start, end = header[random.choice(list(header))]["data_offsets"]
    return body[:start] + changed_bytes(random, body[start:end])[: end - start].ljust(end - start, b"\xff") + body[end:]


def _array(entry: Any, body: bytes) -> np.ndarray[Any, Any]:
    start, end = entry["data_offsets"]
    return np.frombuffer(body[start:end], _TYPES[entry["dtype"]]).reshape(entry["shape"])


# --- .npz -----------------------------------------------------------------------------------------------------------


def changed_archive(random: Random, data: bytes) -> bytes:
    """A .npz file with other bytes, or another header, in one of its arrays, whose checksum fits again."""
    with ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(list(members))
    content = members[name]
    if random.random() < 0.5:
        number = random.choice((0, 1, 9, 2**31, 2**63, 10**18))
        content = re.sub(rb"\(\d+", f"({number}".encode(), content, count=1)
    else:
        content = content.replace(b"<i8", random.choice((b"<f8", b"|O8", b"<u8", b">i8", b"<U8", b"|V8", b"<i4")))
    members[name] = changed_bytes(random, content) if random.random() < 0.3 else content
    members[random.choice((name, name, "../x.npy", "x"))] = members[name]
    with ZipFile(stream := io.BytesIO(), "w", random.choice((ZIP_STORED, ZIP_DEFLATED))) as archive:
        for each, text in members.items():
            archive.writestr(each, text)
    return stream.getvalue()


# --- Parquet ----------------------------------------------------------------------------------------------------------


def changed_table(random: Random, data: bytes) -> bytes:
    """A Parquet file with a column that is of another type, holds strange values, is missing or foreign."""
    table = pq.read_table(pa.BufferReader(data), use_threads=False)
    for _ in range(random.choice((1, 1, 2))):
        with suppress(pa.ArrowException, ValueError, TypeError, OverflowError):
            table = random.choice((_retype, _refill, _refill, _refill, _rename, _cut, _remark))(random, table)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression=random.choice(("zstd", "none", "snappy")))
    return sink.getvalue()


_KINDS = (
    pa.string(), pa.int8(), pa.int64(), pa.uint64(), pa.float16(), pa.float64(), pa.bool_(), pa.binary(), pa.null(),
    pa.timestamp("ns"), pa.decimal128(20, 3), pa.dictionary(pa.int32(), pa.string()), pa.list_(pa.int64()),
    pa.struct([("a", pa.int64())]),
)


def _retype(random: Random, table: pa.Table) -> pa.Table:
    place = random.randrange(table.num_columns)
    kind = random.choice(_KINDS)
    name, column = table.schema.names[place], table.column(place)
    try:
        cast = column.cast(kind)
    except pa.ArrowException:
        cast = pa.nulls(len(column), kind)
    return table.set_column(place, name, cast)


def _refill(random: Random, table: pa.Table) -> pa.Table:
    """Strange values in a column of its own type."""
    place = random.randrange(table.num_columns)
    name, column = table.schema.names[place], table.column(place)
    pool = [value for value in NUMBERS if not isinstance(value, Raw)] + [float("nan"), float("inf"), -float("inf")]
    texts = [text.encode("utf-8", "replace").decode() for text in TEXTS] + [
        written(strange(random)).encode("utf-8", "replace").decode()
    ]
    if pa.types.is_string(column.type):
        pool = texts
    if pa.types.is_integer(column.type):
        pool = [value for value in pool if isinstance(value, int) and -(2**63) <= value < 2**63]
    if pa.types.is_floating(column.type):
        pool = [float(value) for value in pool if abs(value) < 10**300 or isinstance(value, float)]
    values = [random.choice((value, random.choice((None, *pool)))) for value in column.to_pylist()]
    if random.random() < 0.3:
        values = [random.choice((None, *pool))] * len(values)
    return table.set_column(place, name, pa.array(values, column.type))


def _rename(random: Random, table: pa.Table) -> pa.Table:
    names = list(table.schema.names)
    names[random.randrange(len(names))] = random.choice((*names, "", "\x1b[31m", "x" * 10_000))
    return table.rename_columns(names)


def _cut(random: Random, table: pa.Table) -> pa.Table:
    if random.random() < 0.5:
        return table.slice(0, random.choice((0, 1, 2)))
    return table.drop_columns([random.choice(table.schema.names)])


def _remark(random: Random, table: pa.Table) -> pa.Table:
    """Other names of axes, or metadata that are no JSON."""
    metadata = dict(table.schema.metadata or {b"trilane sweep": b"[]"})
    key = random.choice(list(metadata))
    tree = changed(random, json.loads(metadata[key])) if random.random() < 0.7 else strange(random)
    metadata[key] = written(tree).encode("utf-8", "replace")
    return table.replace_schema_metadata(metadata)


# --- SQLite -----------------------------------------------------------------------------------------------------------

_STATEMENTS = (
    "UPDATE {0} SET key = NULL", "UPDATE {0} SET key = 7 WHERE rowid = 1", "DELETE FROM {0}",
    "UPDATE {0} SET content = x'ff00'", "UPDATE {0} SET content = 1e999", "DROP TABLE {0}",
    "ALTER TABLE {0} RENAME COLUMN content TO other", "ALTER TABLE {0} RENAME TO other",
    "ALTER TABLE {0} ADD COLUMN more", "CREATE TABLE other (x)", "PRAGMA application_id = 1",
    "CREATE VIEW other AS SELECT * FROM {0}", "PRAGMA user_version = 9", "VACUUM",
    "CREATE TRIGGER t AFTER INSERT ON {0} BEGIN DELETE FROM {0}; END",
)


def changed_journal(random: Random, data: bytes) -> bytes:
    """A journal of a study with other entries and their checksums, or another schema."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.deserialize(data[:18] + b"\1\1" + data[20:])  # without the write-ahead log that memory cannot have
        [(table,)] = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        if random.random() < 0.3:
            database.execute(random.choice(_STATEMENTS).format(table))
        else:
            rows = database.execute(f"SELECT rowid, key, content, blob FROM {table}").fetchall()
            for rowid, key, content, blob in random.sample(rows, random.choice((1, len(rows)))):
                if blob and random.random() < 0.8:
                    blob = changed_table(random, blob)
                else:
                    content = written(changed(random, json.loads(content))).encode("utf-8", "replace").decode()
                checksum = checksum_of(key.encode(), content.encode(), blob) if random.random() < 0.9 else content[:32]
                database.execute(
                    f"UPDATE {table} SET content = ?, blob = ?, checksum = ? WHERE rowid = ?",
                    (content, blob, checksum, rowid),
                )
        return database.serialize()


# --- GGUF files -------------------------------------------------------------------------------------------------------


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of values, by type
_TEXT, _LIST = 8, 9
_STRANGE_NUMBERS = (
    0, 1, 2, 3, 31, 32, 33, 255, 256, 2**15, 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**45, 2**63 - 1, 2**63, 2**64 - 1,
)


class Places(NamedTuple):
    """Places of numbers, with their bytes, and of the entries of metadata and of the table, with their ends."""

    numbers: list[tuple[int, int]]
    keys: list[tuple[int, int]]
    tensors: list[tuple[int, int]]


def changed_gguf(random: Random, data: bytes) -> bytes:
    """A copy with one to three changes that a reader of headers could fall for."""
    for _ in range(random.choice((1, 1, 2, 3))):
        try:
            places = places_of(data)
        except (struct.error, KeyError):
            return data  # too damaged for a further change
        data = random.choice(_GGUF_CHANGES)(random, data, places)
    return data


def places_of(data: bytes) -> Places:
    """Places in a file that was valid. Raises struct.error or KeyError for one that is not any more."""
    numbers, keys, tensors = [(4, 4), (8, 8), (16, 8)], [], []
    count, metadata = struct.unpack_from("<QQ", data, 8)
    at = 24
    for _ in range(min(metadata, 100)):
        begin, at = at, _text(data, at, numbers)
        numbers.append((at, 4))
        at = _value(data, at + 4, struct.unpack_from("<I", data, at)[0], numbers)
        keys.append((begin, at))
    for _ in range(min(count, 500)):
        begin, at = at, _text(data, at, numbers)
        dimensions = struct.unpack_from("<I", data, at)[0]
        numbers += [(at, 4), *((at + 4 + 8 * axis, 8) for axis in range(min(dimensions, 8)))]
        at += 4 + 8 * min(dimensions, 8)
        numbers += [(at, 4), (at + 4, 8)]
        at += 12
        tensors.append((begin, at))
    return Places(numbers, keys, tensors)


def _text(data: bytes, at: int, numbers: list[tuple[int, int]]) -> int:
    numbers.append((at, 8))
    return at + 8 + min(struct.unpack_from("<Q", data, at)[0], len(data))


def _value(data: bytes, at: int, kind: int, numbers: list[tuple[int, int]]) -> int:
    if kind == _TEXT:
        return _text(data, at, numbers)
    if kind != _LIST:
        numbers.append((at, _SIZES[kind]))
        return at + _SIZES[kind]
    numbers += [(at, 4), (at + 4, 8)]
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner != _TEXT:
        return at + _SIZES[inner] * min(count, len(data))
    for _ in range(min(count, 100)):
        at = _text(data, at, numbers)
    return at


def _number(random: Random, data: bytes, places: Places) -> bytes:
    """Another number: a strange one, or one next to it."""
    at, size = random.choice(places.numbers)
    old = int.from_bytes(data[at : at + size], "little")
    new = random.choice((*_STRANGE_NUMBERS, old + 1, old - 1, old * 2, old // 2, random.getrandbits(8 * size)))
    return data[:at] + (new % 2 ** (8 * size)).to_bytes(size, "little") + data[at + size :]


def _twice(random: Random, data: bytes, places: Places) -> bytes:
    """An entry twice, mostly with the count that it then has."""
    entries, count_at = random.choice(((places.keys, 16), (places.tensors, 8)))
    if not entries:
        return data
    begin, end = random.choice(entries)
    data = data[:end] + data[begin:end] + data[end:]
    count = struct.unpack_from("<Q", data, count_at)[0] + (random.random() < 0.9)
    return data[:count_at] + struct.pack("<Q", count % 2**64) + data[count_at + 8 :]


def _without(random: Random, data: bytes, places: Places) -> bytes:
    """An entry less, with the count that it then has."""
    entries, count_at = random.choice(((places.keys, 16), (places.tensors, 8)))
    if not entries:
        return data
    begin, end = random.choice(entries)
    count = struct.unpack_from("<Q", data, count_at)[0] - 1
    data = data[:begin] + data[end:]
    return data[:count_at] + struct.pack("<Q", count % 2**64) + data[count_at + 8 :]


def _key(random: Random, data: bytes, places: Places) -> bytes:
    """A key that means something, with a strange value, in front of the others."""
    name = random.choice((b"general.alignment", b"split.count", b"split.no", b"split.tensors.count"))
    value = struct.pack("<IQ", 10, random.choice(_STRANGE_NUMBERS))
    count = struct.unpack_from("<Q", data, 16)[0] + 1
    entry = struct.pack("<Q", len(name)) + name + value
    return data[:16] + struct.pack("<Q", count % 2**64) + entry + data[24:]


def _without_end(random: Random, data: bytes, places: Places) -> bytes:
    """The end missing, near an entry or among the weights."""
    end = max(places.tensors[-1][1] if places.tensors else 24, 24)
    return data[: random.choice((random.choice(places.numbers)[0], end, random.randint(end, max(len(data), end))))]


_GGUF_CHANGES: Sequence[Callable[[Random, bytes, Places], bytes]] = (
    _number, _number, _number, _twice, _without, _key, _without_end,
)
