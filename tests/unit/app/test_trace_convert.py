"""Conversion: what other tools read back is what the trace said."""

import json

import polars as pl
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from tests.labs.kineto_files import BASE_NS, Job, events, row, text, write

from kansoku.app.trace import breakdown, convert
from kansoku.errors import InputError
from kansoku.formats.perfetto import write_perfetto
from kansoku.model import table_schema

JOB = Job(rank=2)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "rank2.json", text(JOB))


def slices(trace):
    """Return (track, name, category, start, duration) and check that each track nests."""
    names, categories, open_slices, out, last = {}, {}, {}, [], {}
    for packet in trace.packet:
        for entry in packet.interned_data.event_names:
            names[entry.iid] = entry.name
        for entry in packet.interned_data.event_categories:
            categories[entry.iid] = entry.name
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        track = event.track_uuid
        assert packet.timestamp >= last.get(track, 0)
        last[track] = packet.timestamp
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            open_slices.setdefault(track, []).append((names[event.name_iid], packet.timestamp))
        else:
            assert event.type == TrackEvent.TYPE_SLICE_END
            name, start = open_slices[track].pop()
            out.append((track, name, start, packet.timestamp - start))
    assert not any(open_slices.values())
    return out


def test_perfetto_by_its_own_protos(source, tmp_path):
    result = convert([source], to="perfetto", out=tmp_path / "t.perfetto-trace")
    trace = Trace.FromString((tmp_path / "t.perfetto-trace").read_bytes())
    found = slices(trace)
    rows = [e for e in events(JOB) if e["ph"] == "X"]
    expected = sorted(
        (e["name"], BASE_NS + round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in rows
    )
    assert sorted((name, start, length) for _, name, start, length in found) == expected
    assert result.files[0][1] == len(rows)
    tracks = {
        p.track_descriptor.uuid: p.track_descriptor
        for p in trace.packet
        if p.HasField("track_descriptor")
    }
    processes = [t for t in tracks.values() if t.HasField("process")]
    assert [p.process.process_name for p in processes] == ["rank 2"]
    assert {t.name for t in tracks.values()} >= {
        "gpu:2 stream 7",
        "gpu:2 stream 40",
        "cpu thread 4001",
    }
    assert {track for track, *_ in found} <= set(tracks)
    assert {p.trusted_packet_sequence_id for p in trace.packet} == {1}


def test_slices_that_do_not_nest_go_to_another_track(tmp_path):
    rows = [
        row("kernel", n, 0, 7, s, d, {})
        for n, s, d in [("a", 10, 10), ("b", 15, 10), ("c", 16, 2), ("d", 30, 5)]
    ]
    path = write(tmp_path / "rank0.json", text(Job(base=False), rows))
    convert([path], to="perfetto", out=tmp_path / "t.pftrace")
    trace = Trace.FromString((tmp_path / "t.pftrace").read_bytes())
    assert sorted((n, s, d) for _, n, s, d in slices(trace)) == [
        ("a", 10000, 10000),
        ("b", 15000, 10000),
        ("c", 16000, 2000),
        ("d", 30000, 5000),
    ]
    assert sum(t.track_descriptor.name.endswith("(overlap 1)") for t in trace.packet) == 1


def test_spans_without_end_are_left_out(tmp_path):
    schema = table_schema("spans")
    frame = pl.DataFrame(
        [
            {"rank": 0, "name": "open", "start_ns": 5},
            {"rank": 0, "name": "x", "start_ns": 5, "duration_ns": 2},
        ],
        schema=schema,
    )
    with (tmp_path / "t").open("wb") as file:
        assert write_perfetto(file, [frame]) == 1


def test_kineto_comes_back_with_the_same_figures(source, tmp_path):
    convert([source], to="kineto", out=tmp_path / "back.json")
    one, other = breakdown([source]).to_json(), breakdown([tmp_path / "back.json"]).to_json()
    for key in (
        "ranks",
        "steps",
        "kernels",
        "collectives",
        "copies",
        "idle",
        "launches",
        "operators",
    ):
        for item in (*one[key], *other[key]):
            item.pop("file", None)
        assert one[key] == other[key], key


def test_kineto_of_many_ranks_is_a_folder(tmp_path):
    (tmp_path / "in").mkdir()
    for rank in range(3):
        write(tmp_path / "in" / f"rank{rank}.json", text(Job(rank=rank)))
    result = convert([tmp_path / "in"], to="kineto", out=tmp_path / "out")
    assert [file.rpartition("/")[2] for file, _, _ in result.files] == [
        "rank0.json",
        "rank1.json",
        "rank2.json",
    ]
    assert [r["rank"] for r in breakdown([tmp_path / "out"]).to_json()["ranks"]] == [0, 1, 2]


def test_otlp_protobuf(source, tmp_path):
    convert([source], to="otlp", out=tmp_path / "t.pb")
    data = TracesData.FromString((tmp_path / "t.pb").read_bytes())
    spans = [s for r in data.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert len(spans) == sum(e["ph"] == "X" for e in events(JOB))
    assert len({s.span_id for s in spans}) == len(spans)
    assert {len(s.trace_id) for s in spans} == {16}
    resource = {a.key: a.value for a in data.resource_spans[0].resource.attributes}
    assert resource["kansoku.rank"].int_value == 2
    collective = next(s for s in spans if "AllReduce" in s.name)
    attributes = {a.key: a.value for a in collective.attributes}
    assert attributes["kansoku.kind"].string_value == "collective"
    assert attributes["kansoku.sequence"].int_value == 0
    assert attributes["kansoku.step"].int_value == 5
    assert collective.end_time_unix_nano - collective.start_time_unix_nano == 30_500


def test_otlp_json_lines(source, tmp_path):
    convert([source], to="otlp", out=tmp_path / "t.json")
    lines = (tmp_path / "t.json").read_text().splitlines()
    spans = [
        s for line in lines for s in json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    ]
    assert len(spans) == sum(e["ph"] == "X" for e in events(JOB))
    assert len(bytes.fromhex(spans[0]["traceId"])) == 16
    assert isinstance(spans[0]["startTimeUnixNano"], str)


def test_parquet_has_the_spans_schema(source, tmp_path):
    convert([source], to="parquet", out=tmp_path / "t.parquet")
    frame = pl.read_parquet(tmp_path / "t.parquet")
    assert dict(frame.schema) == table_schema("spans")
    assert frame["rank"].unique().to_list() == [2]
    assert frame.filter(pl.col("kind") == "collective")["sequence"].to_list() == list(range(12))
    assert frame.filter(pl.col("step") == 6).height > 100
    assert json.loads(frame["attributes"][0])["cat"] == "cpu_op"


def test_damaged_rows_are_left_out_and_said(tmp_path):
    broken = (
        text(JOB)
        .replace("native::kernel_2<float", 'native::"kernel"_2<float')
        .replace('"dur": 5.0', '"dur": -5.0')
    )
    path = write(tmp_path / "rank2.json", broken)
    result = convert([path], to="parquet", out=tmp_path / "t.parquet")
    assert any("negative duration" in remark for remark in result.remarks)
    assert (
        pl.read_parquet(tmp_path / "t.parquet").height
        == sum(e["ph"] == "X" for e in events(JOB)) - 3
    )


def test_unknown_target(source):
    with pytest.raises(InputError, match="perfetto"):
        convert([source], to="svg")


def test_what_no_writer_expects_is_converted(tmp_path):
    """Half a surrogate pair, numbers beyond 64 bits, a step and a rank beyond 32."""
    rows = events(JOB)
    rows[0]["name"] = "half \ud83d"
    rows[0]["args"]["note"] = "half \ud83d"
    rows[0]["args"]["huge"] = 10**30
    rows += [
        row("user_annotation", f"ProfilerStep#{10**12}", 1, 1, rows[0]["ts"], 5.0, {}),
        row("cpu_op", "long", 10**25, 10**25, rows[0]["ts"], 5.0, {}),
    ]
    content = json.dumps({"distributedInfo": {"rank": 5 * 10**12}, "traceEvents": rows})
    path = write(tmp_path / "odd.json", content)
    for to in ("perfetto", "otlp", "kineto", "parquet"):
        result = convert([path], to=to, out=tmp_path / f"out.{to}")
        assert result.files[0][1] == sum(one["ph"] == "X" for one in rows)
    table = pl.read_parquet(tmp_path / "out.parquet")
    first = table.filter(pl.col("name") == "half ?")
    assert first["attributes"].str.contains("half ?", literal=True).to_list() == [True]
    assert (
        next(
            one["args"]["huge"]
            for one in json.loads((tmp_path / "out.kineto").read_bytes())["traceEvents"]
            if one["name"] == "half ?"
        )
        == 10**30
    )


def test_spans_before_1970_are_left_out_of_otlp_and_said(tmp_path):
    rows = [row("kernel", "k", 0, 7, start, 5.0, {}) for start in (-20.0, -1.0, 3.0)]
    path = write(tmp_path / "rank0.json", json.dumps({"traceEvents": rows}))
    result = convert([path], to="otlp", out=tmp_path / "o.otlp")
    assert result.files[0][1] == 1
    assert [one for one in result.remarks if "1970" in one] == [
        "2 spans are stamped before 1970, for which OTLP has no time"
    ]
