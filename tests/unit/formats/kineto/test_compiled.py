"""The compiled reader of events: equal to the general one, and within the bytes it is given."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from tests.labs.sanitized import run_sanitized

from kansoku.catalog.kernels import RowKind
from kansoku.formats.kineto import NO_ID, _compiled, _read
from kansoku.formats.kineto._columns import read_piece
from kansoku.formats.kineto._scan import Piece

KERNEL = (
    '{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "pid": 0, "tid": 40,\n'
    '  "ts": 1711964646000001.250, "dur": 10.5,\n  "args": {"device": 1, "stream": 7, '
    '"correlation": 12, "bytes": 4096, "Collective name": "allreduce", "Seq": 3,'
    ' "Process Group Name": "0", "grid": [1, [2.5e-3, {"a": null}], true]}\n}'
)
LAUNCH = (
    '{"name": "cudaLaunchKernel", "cat": "cuda_runtime", "args": {"correlation": -12}, "ph": "X",'
    ' "tid": "a\\"b", "pid": 5, "dur": 4, "ts": 3}'
)
FLOW = '{"ph": "s", "id": 12, "pid": 5, "tid": 5, "ts": -1e3, "cat": "ac2g", "name": null}'


@pytest.fixture(autouse=True)
def reader():
    """Once is enough here: these tests name the reader themselves."""


def piece(text, *, last=False):
    data = text if isinstance(text, bytes) else text.encode()
    return Piece(kind="events", data=data, offset=0, last=last)


def compiled(text, reader, *, last=False):
    taken = _compiled.Reader(reader)
    return taken.take(exact=False) if taken.read(piece(text, last=last)) else None


def plain(batch):
    """Return what a batch says, whatever its codes and the order of its rows."""
    columns = {name: values.tolist() for name, values in batch.columns.items()}
    noted = {
        name: dict(zip(rows.tolist(), values.tolist(), strict=True))
        for name, (rows, values) in batch.details.items()
    }
    rows = []
    for row in range(len(columns["kind"])):
        said = noted["collective"].get(row)
        rows.append(
            (
                columns["kind"][row],
                batch.names[columns["name"][row]],
                batch.lanes[columns["lane"][row]],
                *(columns[name][row] for name in ("start_ns", "duration_ns", "correlation")),
                noted["bytes"].get(row),
                noted["sequence"].get(row),
                None if said is None else batch.collectives[said],
            )
        )
    return {
        "rows": sorted(rows, key=repr),
        "operators": batch.operators,
        "counts": (batch.rows, batch.slices, batch.python_rows, dict(batch.set_aside)),
        "host": (batch.host_start_ns, batch.host_end_ns),
        "rest": (batch.damage, batch.tail, batch.edges),
    }


def test_by_hand(compiled_reader):
    batch = compiled(f"\n {KERNEL},\n{FLOW} , {LAUNCH},", compiled_reader)
    assert batch.columns["kind"].tolist() == [RowKind.COLLECTIVE, RowKind.LAUNCH]
    assert batch.columns["start_ns"].tolist() == [1711964646000001250, 3000]
    assert batch.columns["duration_ns"].tolist() == [10500, 4000]
    assert batch.columns["correlation"].tolist() == [12, -12]
    assert [batch.lanes[code] for code in batch.columns["lane"]] == [
        ("0", "7", 1),
        ("5", 'a"b', None),
    ]
    assert (batch.rows, batch.slices, batch.tail) == (3, 2, None)
    assert {name: values.tolist() for name, (_, values) in batch.details.items()} == {
        "bytes": [4096],
        "collective": [0],
        "sequence": [3],
    }
    assert (batch.collectives[0].operation, batch.collectives[0].group) == ("allreduce", "0")


def test_the_end_of_the_array_and_what_follows(compiled_reader):
    batch = compiled(LAUNCH + '\n], "traceName": "x"}', compiled_reader, last=True)
    assert (batch.slices, batch.tail) == (1, ', "traceName": "x"}')
    assert compiled("\n]}", compiled_reader, last=True).rows == 0


def events(draw):
    """Return events of many shapes, written in many ways."""
    out = []
    for number in range(draw.randint(0, 40)):
        category = draw.choice(
            ("cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "cuda_driver", "user_annotation",
             "python_function", "gpu_user_annotation", "overhead", "never seen", None)
        )  # fmt: skip
        event = {
            "ph": draw.choice("XXXXXXXsfMi"),
            "cat": category,
            "name": draw.choice(
                ("aten::add", "record_param_comms", "nn.Module: L_0", "cudaLaunchKernel",
                 "cudaStreamIsCapturing", "ncclKernel_é", "a\\b\t", "x" * draw.randint(0, 300), 7)
            ),
            "pid": draw.choice((0, 1, 2910249, "Spans")),
            "tid": draw.choice((7, "stream 7", -1)),
            "ts": draw.choice((number, 4458676000000 + number / 8, 0, 1711964646000001 + number)),
            "dur": draw.choice((0, 1, 12.125, 0.5, 900_000_000_000)),
        }  # fmt: skip
        arguments = {
            "External id": number, "correlation": draw.choice((number, 0, -3, None)),
            "device": draw.choice((0, 1, "1", None)), "stream": draw.choice((7, 40, "s")),
            "bytes": draw.choice((0, 1 << 40, None)), "size": 12, "grid": [1, [], {}, {"a": [2]}],
            "Collective name": draw.choice(("allreduce", None)), "Seq": draw.choice((3, -1, "4")),
            "Process Group Name": draw.choice(("0", 1, None)), "dtype": "é", "In msg nelems": 5,
            "Concrete Inputs": ["", '"', "\\"], "weight": draw.choice((1e-7, -0.0, True, False)),
        }  # fmt: skip
        chosen = draw.sample(sorted(arguments), draw.randint(0, len(arguments)))
        event["args"] = {key: arguments[key] for key in chosen}
        keys = draw.sample(sorted(event), len(event))
        if draw.random() < 0.3:
            keys = [key for key in keys if key not in draw.choice((("args",), ("cat",)))]
        out.append({key: event[key] for key in keys})
    return out


def written(draw):
    indent, ascii_only = draw.choice((None, 1, 4)), draw.random() < 0.2
    between = draw.choice((",", " ,\n", ",\r\n\t"))
    found = (json.dumps(e, indent=indent, ensure_ascii=ascii_only) for e in events(draw))
    return between.join(found).encode()


@pytest.mark.parametrize("seed", range(60))
def test_the_compiled_reader_equals_the_general_one(seed, compiled_reader):
    data = written(random.Random(seed))
    batch = compiled(data, compiled_reader)
    assert batch is not None or b"\\u" in data
    if batch is not None:
        assert plain(batch) == plain(read_piece(piece(data)))


def test_damaged_chunks_have_the_general_readers_answer_or_none(compiled_reader):
    draw = random.Random(3)
    same = refused = 0
    for _ in range(1500):
        hurt = bytearray(
            written(draw)[:1500] if draw.random() < 0.1 else (KERNEL + "," + LAUNCH).encode()
        )
        for _ in range(draw.randint(1, 2)):
            at = draw.randrange(len(hurt) + 1)
            hurt[at : at + draw.randint(0, 2)] = draw.choice(
                (
                    b"",
                    b"{",
                    b"}",
                    b"]",
                    b'"',
                    b"\\",
                    b",",
                    b":",
                    b"0",
                    b"-",
                    b"e",
                    b"\xff",
                    b"\0",
                    b" ",
                )
            )
        batch = compiled(bytes(hurt), compiled_reader)
        if batch is None:
            refused += 1
        else:
            same += 1
            assert plain(batch) == plain(read_piece(piece(bytes(hurt)))), bytes(hurt)
    assert same > 100
    assert refused > 100


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(LAUNCH.replace('"ts": 3', '"ts": "3"'), id="a stamp as text"),
        pytest.param(LAUNCH.replace('"ts": 3', '"ts": 3.0001'), id="four decimals"),
        pytest.param(LAUNCH.replace('"ts": 3', '"ts": 3e1'), id="an exponent"),
        pytest.param(LAUNCH.replace('"ts": 3', '"ts": -3'), id="a negative stamp"),
        pytest.param(LAUNCH.replace('"ts": 3', '"ts": 03'), id="a zero in front"),
        pytest.param(LAUNCH.replace('"ts": 3', '"ts": 9999999999999999'), id="beyond a stamp"),
        pytest.param(LAUNCH.replace('"ts": 3', '"ts": 3, "ts": 4'), id="a key twice"),
        pytest.param(LAUNCH.replace('"ts"', '"\\u0074s"'), id="an escaped key"),
        pytest.param(LAUNCH.replace('"pid": 5', '"pid": [5]'), id="a process that is a list"),
        pytest.param(LAUNCH.replace('"pid": 5', '"pid": 1.5'), id="a process with a fraction"),
        pytest.param(LAUNCH.replace("-12", "1" * 19), id="an id of 19 digits"),
        pytest.param(LAUNCH.replace("-12", '"0x1f"'), id="an id as text"),
        pytest.param(LAUNCH.replace("-12", "NaN"), id="NaN"),
        pytest.param(LAUNCH.replace("-12", "1" + "[" * 70 + "]" * 70), id="deep nesting"),
        pytest.param(LAUNCH.replace("{", "{,", 1), id="a comma too many"),
        pytest.param(LAUNCH.replace('"X"', '"B"'), id="a beginning alone"),
        pytest.param(LAUNCH.replace('"X"', '"?"'), id="an unknown phase"),
        pytest.param(LAUNCH.replace('"ph": "X", ', ""), id="no phase"),
        pytest.param(LAUNCH.replace("cudaL", "\x01"), id="a control character"),
        pytest.param(LAUNCH.encode().replace(b"cudaL", b"\xff"), id="no UTF-8"),
        pytest.param(LAUNCH + LAUNCH, id="no comma between"),
        pytest.param(LAUNCH[:-1], id="cut"),
    ],
)
def test_what_is_unusual_or_broken_is_left_to_the_general_reader(text, compiled_reader):
    assert compiled(text, compiled_reader) is None


def test_more_texts_than_fit_are_left_to_the_general_reader(compiled_reader):
    def many(count):
        return ",".join(LAUNCH.replace("cudaLaunchKernel", f"n{n}") for n in range(count))

    assert compiled(many(40_000), compiled_reader) is None
    assert compiled(many(32_000), compiled_reader).slices == 32_000


@pytest.mark.parametrize("seed", range(12))
def test_pieces_that_wait_together_say_what_each_of_them_says(seed, compiled_reader):
    """Whole and damaged pieces in a row; what waits is taken when there is no room or a refusal."""
    draw = random.Random(seed)
    reader = _compiled.Reader(compiled_reader)
    together, alone = [], []

    def take():
        if reader.waiting:
            together.append(plain(reader.take(exact=False)))

    for number in range(12):
        data = written(draw).replace(b"\\u", b"u")
        one = piece(data if draw.random() < 0.7 else data + b"]", last=number == 11)
        if not reader.has_room(one):
            take()
        if reader.read(one):
            alone.append(plain(read_piece(one)))
        else:
            take()
    take()
    assert len(together) < len(alone)
    assert summed(together) == summed(alone)


def summed(answers):
    """Return what several batches say together."""
    operators = {}
    for answer in answers:
        for name, figures in answer["operators"].items():
            known = operators.get(name, (0, 0, 0.0))
            operators[name] = tuple(a + b for a, b in zip(known, figures, strict=True))
    set_aside = Counter()
    for answer in answers:
        set_aside.update(answer["counts"][3])
    stamps = [stamp for answer in answers for stamp in answer["host"] if stamp is not None]
    return {
        "rows": sorted((row for answer in answers for row in answer["rows"]), key=repr),
        "operators": operators,
        "counts": [sum(answer["counts"][n] for answer in answers) for n in range(3)],
        "set aside": set_aside,
        "host": (min(stamps), max(stamps)),
        "tail": answers[-1]["rest"][1],
    }


def test_texts_that_fill_the_tables_are_forgotten(compiled_reader):
    """A reader goes on for as long as the file does, whatever many names it has."""
    reader = _compiled.Reader(compiled_reader)
    before = []
    for part in range(5):
        names = [f"n{part}_{n}" for n in range(12_000)]
        one = piece(",".join(LAUNCH.replace("cudaLaunchKernel", name) for name in names))
        if part:
            batch = reader.take(exact=False)
            assert [batch.names[code] for code in batch.columns["name"]] == before
        assert reader.read(one)
        before = names


def test_many_chunks_of_a_file_are_one_batch(tmp_path, compiled_reader, monkeypatch):
    monkeypatch.setattr(_read, "library", lambda _: compiled_reader)
    monkeypatch.setattr(_read, "CHUNK_BYTES", 20_000)
    monkeypatch.setattr("kansoku.formats.kineto._source._BLOCK_BYTES", 5_000)
    batches = []
    add = _read._Merger.add
    monkeypatch.setattr(_read._Merger, "add", lambda m, b: batches.append(b.slices) or add(m, b))
    path = tmp_path / "rank0.json"
    texts = [LAUNCH.replace("-12", str(n)) for n in range(2_500)]
    path.write_text('{"traceEvents": [' + ",\n".join(texts) + "]}")
    (source,) = _read_sources(path)
    trace = _read.read_trace(source)
    assert batches == [2_500]
    assert sorted(trace.columns["correlation"].tolist()) == list(range(2_500))


def test_only_a_large_input_has_the_reader_built(monkeypatch):
    asked = []
    monkeypatch.setattr(_compiled, "kept_library", lambda _, *, build: asked.append(build))
    _compiled._library.cache_clear()
    try:
        assert _compiled.library(1 << 20) is None
        assert asked == [False]
        assert _compiled.library(1 << 30) is None
        assert asked == [False, True]
    finally:
        _compiled._library.cache_clear()


def test_a_chunk_left_to_the_general_reader_in_the_middle_of_others(
    tmp_path, compiled_reader, monkeypatch
):
    """Three chunks, a damaged stretch in the second: the others are read by the compiled reader."""
    monkeypatch.setattr(_read, "library", lambda _: compiled_reader)
    monkeypatch.setattr(_read, "CHUNK_BYTES", 100_000)
    monkeypatch.setattr("kansoku.formats.kineto._source._BLOCK_BYTES", 50_000)
    used = []
    monkeypatch.setattr(_read, "read_piece", lambda p, **k: used.append(p) or read_piece(p, **k))
    texts = [LAUNCH.replace("-12", str(n)) for n in range(2_500)]
    texts[1_200] = texts[1_200].replace('"dur"', '"\x01dur')
    path = tmp_path / "rank0.json"
    path.write_text('{"traceEvents": [' + ",\n".join(texts) + "]}")
    (source,) = _read_sources(path)
    trace = _read.read_trace(source)
    assert len(used) == 1
    assert len(np.setdiff1d(np.arange(2_500), trace.columns["correlation"])) <= 1
    assert trace.rows >= 2_499


def _read_sources(path):
    from kansoku.formats.kineto import find_sources

    return find_sources([path])


HARNESS = """
#include "{source}"
#include <stdio.h>
#include <stdlib.h>
int main(void)
{{
    int64_t size, room, counts[6] = {{0}}, read = 0;
    uint8_t *texts = malloc(TEXT_BYTES);
    int64_t *tokens = calloc(TOKENS, 16);
    int32_t *places = calloc(PLACES, 16), *slots = calloc(TOKEN_SLOTS, 4);
    int32_t *place_slots = calloc(PLACE_SLOTS, 4);
    while (fread(&size, 8, 1, stdin) == 1 && fread(&room, 8, 1, stdin) == 1) {{
        uint8_t *data = malloc(size ? size : 1); /* exactly as long as the chunk */
        if (size && fread(data, size, 1, stdin) != 1)
            return 2;
        int64_t *rows = calloc(room * COLUMNS + 1, 8);
        if (!kineto_events_read(data, size, room, room, rows, texts, tokens, places, slots,
                                place_slots, counts)) {{
            for (int64_t i = 0; i < counts[3]; i++)
                if (tokens[2 * i] < 0 || tokens[2 * i] + tokens[2 * i + 1] >= counts[5])
                    return 3;
            for (int64_t i = 0; i < counts[1]; i++)
                if (rows[ARGUMENTS * room + i] + rows[LENGTH * room + i] > size
                    || rows[NAME * room + i] >= counts[3] || rows[PLACE * room + i] >= counts[4])
                    return 4;
            read++;
        }} else {{
            memset(counts, 0, sizeof counts);
            memset(slots, 0, 4 * TOKEN_SLOTS);
            memset(place_slots, 0, 4 * PLACE_SLOTS);
        }}
        free(data), free(rows);
    }}
    free(texts), free(tokens), free(places), free(slots), free(place_slots);
    printf("%ld\\n", (long)read);
    return 0;
}}
"""


def test_damaged_chunks_stay_within_their_bytes(tmp_path):
    draw = random.Random(7)
    stream = bytearray()
    chunks = 0
    for _ in range(30):
        whole = written(draw)
        for _ in range(60):
            hurt = bytearray(whole)
            for _ in range(draw.randint(0, 2)):
                if hurt:
                    hurt[draw.randrange(len(hurt))] = draw.choice(b'"\\{}[],:0\xff\0')
            cut = hurt if draw.random() < 0.7 else hurt[: draw.randint(0, len(hurt))]
            room = len(cut) // 40 + 1 if draw.random() < 0.9 else draw.randint(0, 5)
            stream += len(cut).to_bytes(8, "little") + room.to_bytes(8, "little") + cut
            chunks += 1
    read = run_sanitized(tmp_path, HARNESS.format(source=_compiled.SOURCE), bytes(stream))
    assert 200 < read < chunks  # some were read whole, some refused


def test_absent_ids_are_the_same_number_on_both_sides():
    assert np.iinfo(np.int64).min == NO_ID  # ABSENT in event_reader.c
