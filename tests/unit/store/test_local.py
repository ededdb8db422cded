"""The embedded store: appending, ranges, sealing, limits, duplicates."""

import itertools
import json

import polars as pl
import pytest

from kansoku.errors import BusyError, InputError, StoreError
from kansoku.model import Origin
from kansoku.store import QUERIES, LocalStore, Matcher, Retention, StoreLimits

HOUR = 3600 * 10**9
SECOND = 10**9
NOW = 500_000 * HOUR


def samples(metric, labels, times, values):
    n = len(times)
    return pl.DataFrame(
        {"metric": [metric] * n, "labels": [labels] * n, "time_ns": times, "value": values},
        schema={"metric": pl.String, "labels": pl.String, "time_ns": pl.Int64, "value": pl.Float64},
    )


@pytest.fixture
def clock():
    class Clock:
        now = NOW

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    with LocalStore(tmp_path / "store", clock_ns=clock) as store:
        yield store


def test_average_of_a_step_by_hand(store):
    start = NOW - HOUR
    store.append(
        "metrics",
        samples("m", '{"gpu":"0"}', [start, start + SECOND, start + 60 * SECOND], [1.0, 3.0, 10.0]),
    )
    answer = store.metric_range(
        "m", start_ns=start, end_ns=start + 120 * SECOND, step_ns=60 * SECOND
    )
    assert answer["time_ns"].to_list() == [start, start + 60 * SECOND]
    assert answer["value"].to_list() == [2.0, 10.0]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("min", 1), ("max", 5), ("sum", 9), ("count", 3), ("last", 3), ("avg", 3)],
)
def test_aggregates_by_hand(store, aggregate, expected):
    start = NOW - HOUR
    store.append("metrics", samples("m", "{}", [start, start + 1, start + 2], [1.0, 5.0, 3.0]))
    answer = store.metric_range(
        "m", start_ns=start, end_ns=start + 1, step_ns=SECOND, aggregate=aggregate
    )
    assert answer["value"].to_list() == [expected]


def test_counter_reset_counts_from_zero(store):
    """100, 110, reset, 5, 8: it grew by 10 + 5 + 3."""
    start = NOW - HOUR
    times = [start + i * 10 * SECOND for i in range(4)]
    store.append("metrics", samples("c", "{}", times, [100.0, 110.0, 5.0, 8.0]))
    grown = store.metric_range(
        "c", start_ns=start, end_ns=start + 60 * SECOND, step_ns=60 * SECOND, aggregate="increase"
    )
    assert grown["value"].to_list() == [18.0]
    rate = store.metric_range(
        "c", start_ns=start, end_ns=start + 60 * SECOND, step_ns=60 * SECOND, aggregate="rate"
    )
    assert rate["value"].to_list() == pytest.approx([0.3])


def test_a_step_counts_growth_since_the_sample_before_it(store):
    start = NOW - HOUR
    store.append("metrics", samples("c", "{}", [start - 10 * SECOND, start + SECOND], [7.0, 9.0]))
    grown = store.metric_range(
        "c", start_ns=start, end_ns=start + 60 * SECOND, step_ns=60 * SECOND, aggregate="increase"
    )
    assert grown["value"].to_list() == [2.0]


def test_sealing_changes_no_answer(store):
    start = NOW - 5 * HOUR
    times = [start + i * 7 * SECOND for i in range(2000)]
    # A sawtooth, so that a counter's reset falls inside and between buckets.
    for gpu in "01":
        values = [float((i * (3 + int(gpu))) % 101) for i in range(2000)]
        store.append("metrics", samples("m", f'{{"gpu":"{gpu}"}}', times, values))

    def ask(aggregate, step_s):
        return store.metric_range(
            "m", start_ns=start, end_ns=NOW, step_ns=step_s * SECOND, aggregate=aggregate
        )

    asked = list(
        itertools.product(
            ("avg", "min", "max", "count", "last", "increase", "sum"), (60, 300, 600, 3600)
        )
    )
    before = {one: ask(*one) for one in asked}
    store.keeper.maintain()
    assert store.statistics()["sealed_hours"] >= 3
    for one in asked:
        after = ask(*one)
        assert before[one].drop("value").equals(after.drop("value"))
        assert (before[one]["value"] - after["value"]).abs().max() < 1e-6


def test_an_hour_grows_in_steps(store, clock):
    """Half the hour is sealed, then the rest: one file, roll-ups of the whole hour."""
    times = [NOW + i * 60 * SECOND for i in range(60)]
    clock.now = NOW + 31 * 60 * SECOND
    store.append("metrics", samples("c", "{}", times[:31], [float(i) for i in range(31)]))
    store.keeper.maintain()
    assert len(store.table("metrics")) == 31
    clock.now = NOW + 2 * HOUR
    store.append("metrics", samples("c", "{}", times[31:], [float(i) for i in range(31, 60)]))
    for _ in range(2):
        grown = store.metric_range(
            "c", start_ns=NOW, end_ns=NOW + HOUR, step_ns=HOUR, aggregate="increase"
        )
        assert grown["value"].to_list() == [59.0]
        store.keeper.maintain()
    assert len(list(store.folder.glob("sealed/metrics/*.parquet"))) == 1


def test_late_rows_join_a_sealed_hour(store):
    start = NOW - 5 * HOUR
    store.append("metrics", samples("m", "{}", [start, start + 10 * SECOND], [1.0, 2.0]))
    store.keeper.maintain()
    store.append("metrics", samples("m", "{}", [start + 5 * SECOND, start], [6.0, 1.0]))
    store.keeper.maintain()
    assert store.table("metrics")["value"].to_list() == [1.0, 6.0, 2.0]
    answer = store.metric_range("m", start_ns=start, end_ns=start + 1, step_ns=300 * SECOND)
    assert answer["value"].to_list() == [3.0]


def test_matchers(store):
    for gpu in range(4):
        store.append("metrics", samples("m", f'{{"gpu":"{gpu}","node":"a"}}', [NOW], [float(gpu)]))

    def gpus(matchers):
        return sorted(store.latest("m", matchers)["value"].to_list())

    assert gpus({"gpu": "2"}) == [2]
    assert gpus({"gpu": ["0", "3"]}) == [0, 3]
    assert gpus([Matcher.parse("gpu=~[12]")]) == [1, 2]
    assert gpus([Matcher.parse("gpu!=0"), Matcher.parse("node=a")]) == [1, 2, 3]
    assert gpus([Matcher.parse("absent=")]) == [0, 1, 2, 3]
    assert gpus({"gpu": []}) == []


def test_merge_across(store):
    for gpu in range(4):
        store.append(
            "metrics", samples("m", f'{{"gpu":"{gpu}","node":"n{gpu // 2}"}}', [NOW], [float(gpu)])
        )
    answer = store.metric_range(
        "m", start_ns=NOW, end_ns=NOW + 1, step_ns=SECOND, by=["node"], across="sum"
    )
    assert answer["labels"].to_list() == ['{"node":"n0"}', '{"node":"n1"}']
    assert answer["value"].to_list() == [1.0, 5.0]


def test_latest_leaves_out_stale_series_and_survives_a_restart(tmp_path, clock):
    with LocalStore(tmp_path, clock_ns=clock) as store:
        store.append("metrics", samples("m", '{"a":"old"}', [NOW - 4 * HOUR], [1.0]))
        store.append("metrics", samples("m", '{"a":"new"}', [NOW - 3 * HOUR], [2.0]))
        store.keeper.maintain()
        assert store.latest("m")["value"].to_list() == [2.0]
        assert store.latest("m", at_ns=NOW - 4 * HOUR)["value"].to_list() == [1.0]
    with LocalStore(tmp_path, clock_ns=clock) as store:
        assert store.latest("m")["value"].to_list() == [2.0]


def test_an_origin_is_kept_once_even_after_a_restart(tmp_path, clock):
    rows = {"metrics": samples("m", "{}", [NOW], [1.0])}
    with LocalStore(tmp_path, clock_ns=clock) as store:
        assert not store.commit(rows, origin=Origin(agent="a", sequence=1)).duplicate
        assert store.commit(rows, origin=Origin(agent="a", sequence=1)).duplicate
        assert not store.commit(rows, origin=Origin(agent="b", sequence=1)).duplicate
        assert not store.submit(rows, digest="d").result().duplicate
    with LocalStore(tmp_path, clock_ns=clock) as store:
        assert store.commit(rows, origin=Origin(agent="a", sequence=1)).duplicate
        assert store.submit(rows, digest="d").result().duplicate
        assert len(store.table("metrics")) == 3


def test_rows_without_time_or_from_the_future_are_counted(store):
    receipt = store.append(
        "metrics", samples("m", "{}", [None, NOW + 2 * HOUR, NOW], [1.0, 2.0, 3.0])
    )
    assert receipt.rejected == {"no_time": 1, "future": 1}
    assert receipt.rows == {"metrics": 1}


def test_label_explosion_is_bounded_and_counted(tmp_path, clock):
    limits = StoreLimits(max_series_per_metric=10)
    with LocalStore(tmp_path, clock_ns=clock, limits=limits) as store:
        rows = pl.concat(samples("m", f'{{"id":"{i}"}}', [NOW], [1.0]) for i in range(100))
        receipt = store.append("metrics", rows)
        assert receipt.rows == {"metrics": 10}
        assert receipt.rejected == {"series_limit": 90}
        store.append("metrics", samples("other", "{}", [NOW], [1.0]))
        assert len(store.series()) == 11
        statistics = store.statistics()
        assert statistics["rows_in"] == statistics["rows_kept"] + 90


@pytest.mark.parametrize(
    ("metric", "labels", "kept"),
    [
        ("m" * 256, "{}", True),
        ("m" * 257, "{}", False),
        ("m" * 5_000_000, "{}", False),
        ("m", {"k" * 256: "v"}, True),
        ("m", {"k" * 257: "v"}, False),
        ("m", {"k": "v" * 4096}, True),
        ("m", {"k": "v" * 4097}, False),
        ("m", {"k": "日" * 1365}, True),  # three bytes each: 4,095
        ("m", {"k": "日" * 1366}, False),  # 4,098
        ("m", {f"k{n}": "v" * 4000 for n in range(16)}, True),
        ("m", {f"k{n}": "v" * 4000 for n in range(17)}, False),  # 68 kB in all
    ],
)
def test_long_names_and_labels_are_refused_and_counted_and_nothing_else(
    store, metric, labels, kept
):
    text = labels if isinstance(labels, str) else json.dumps(labels, ensure_ascii=False)
    rows = pl.concat([samples(metric, text, [NOW], [1.0]), samples("other", "{}", [NOW], [2.0])])
    receipt = store.append("metrics", rows)
    assert receipt.rows == {"metrics": 1 + kept}
    assert receipt.rejected == ({} if kept else {"label_too_long": 1})
    assert len(store.series()) == 1 + kept
    statistics = store.statistics()
    assert statistics["rows_in"] == statistics["rows_kept"] + (not kept)


def test_what_describes_a_metric_is_cut_and_needs_a_name_that_may_be(store):
    rows = {"metrics": samples("m", "{}", [NOW], [1.0]).to_arrow()}
    info = [("m", "s" * 9999, "gauge", "d" * 9999), ("n" * 9999, "s", "gauge", "d")]
    store.submit(rows, info=info).result()
    (row,) = store.metrics().iter_rows(named=True)
    assert (row["metric"], row["kind"]) == ("m", "gauge")
    assert (len(row["unit"]), len(row["description"])) == (1024, 1024)


def test_retention_by_age_and_size(tmp_path, clock):
    limits = StoreLimits(retention=Retention(default_age_s=4 * 3600))
    with LocalStore(tmp_path, clock_ns=clock, limits=limits) as store:
        store.append("metrics", samples("m", "{}", [NOW - 3 * HOUR], [1.0]))
        receipt = store.append("metrics", samples("m", "{}", [NOW - 5 * HOUR], [1.0]))
        assert receipt.rejected == {"too_old": 1}
        store.keeper.maintain()
        clock.now += 3 * HOUR
        store.keeper.maintain()
        assert store.table("metrics").is_empty()
        assert list((tmp_path / "sealed").glob("*/*.parquet")) == []


def test_retention_by_size_removes_the_oldest_hours(tmp_path, clock):
    limits = StoreLimits(retention=Retention(max_bytes=1))
    with LocalStore(tmp_path, clock_ns=clock, limits=limits) as store:
        store.append("metrics", samples("m", "{}", [NOW - 5 * HOUR, NOW], [1.0, 2.0]))
        store.keeper.maintain()
        assert store.table("metrics")["value"].to_list() == [2.0]


def test_every_named_query_runs_on_an_empty_store(store):
    for name in QUERIES:
        assert store.query(name).is_empty()


def test_query_parameters_are_checked(store):
    with pytest.raises(InputError, match="no query"):
        store.query("nothing")
    with pytest.raises(InputError, match="no parameter"):
        store.query("runs", colour="red")
    with pytest.raises(InputError, match="no column"):
        store.table("jobs", filters={"colour": "red"})
    with pytest.raises(InputError, match="unknown column"):
        store.append("jobs", pl.DataFrame({"colour": ["red"]}))


def test_a_second_owner_is_refused_with_the_first_ones_name(tmp_path):
    with LocalStore(tmp_path), pytest.raises(StoreError, match=r"process \d+ owns"):
        LocalStore(tmp_path)


def test_subscription_is_bounded(store):
    listener = store.subscribe(["metrics"], capacity=2)
    for i in range(3):
        store.append("metrics", samples("m", "{}", [NOW + i], [float(i)]))
    store.append("events", pl.DataFrame({"time_ns": [NOW]}))
    first = listener.get(5)
    assert first is not None
    assert first[1]["value"].to_list() == [1.0]
    assert listener.dropped_batches == 1
    listener.close()
    assert len(list(listener)) == 1


def test_text_filters_are_no_sql(store):
    store.append("events", pl.DataFrame({"time_ns": [NOW], "body": ["it's"], "source": ["x"]}))
    assert len(store.events(contains="it's")) == 1
    assert store.events(source="x' OR true --").is_empty()
    assert store.metric_range("' OR true --", start_ns=0, end_ns=1, step_ns=1).is_empty()


def test_a_crash_while_sealing_leaves_every_row_once(tmp_path, clock, monkeypatch):
    """The file is written, the swap never happens: rows stay hot, the file goes at the next start."""
    with LocalStore(tmp_path, clock_ns=clock) as store:
        store.append("metrics", samples("m", "{}", [NOW - 5 * HOUR], [1.0]))

        def crash(*_):
            raise OSError("killed here")

        monkeypatch.setattr("kansoku.store._seal._sync_folder", crash)
        store.keeper.maintain()
        assert store.statistics()["seal_failures"] == 1
        assert len(list((tmp_path / "sealed").glob("*/*.parquet"))) == 1
        assert store.table("metrics")["value"].to_list() == [1.0]
    monkeypatch.undo()
    with LocalStore(tmp_path, clock_ns=clock) as store:
        assert list((tmp_path / "sealed").glob("*/*.parquet")) == []
        store.keeper.maintain()
        assert store.table("metrics")["value"].to_list() == [1.0]


def test_a_reader_keeps_a_replaced_file_until_it_is_done(store, tmp_path):
    store.append("metrics", samples("m", "{}", [NOW - 5 * HOUR], [1.0]))
    store.keeper.maintain()
    store.append("metrics", samples("m", "{}", [NOW - 5 * HOUR + 1], [2.0]))
    with store.keeper.reading():
        store.keeper.maintain()
        assert len(list(store.folder.glob("sealed/*/*.parquet"))) == 2
    store.keeper.maintain()
    assert len(list(store.folder.glob("sealed/*/*.parquet"))) == 1


def test_sealed_files_are_read_by_other_engines(store):
    """Metric and labels stand beside the numbers: no dictionary of ours is needed."""
    store.append("metrics", samples("m", '{"gpu":"0"}', [NOW - 5 * HOUR], [1.5]))
    store.keeper.maintain()
    (file,) = store.folder.glob("sealed/metrics/*.parquet")
    row = pl.read_parquet(file).row(0, named=True)
    assert (row["metric"], row["labels"], row["value"]) == ("m", '{"gpu":"0"}', 1.5)


def test_a_store_of_an_older_version_gets_its_columns(tmp_path, clock):
    """Rows kept hot and sealed without a column read as null there, new ones with it."""
    old, new = NOW - 3 * HOUR, NOW - HOUR
    burst = {"node": ["c1"], "port": ["eth0"], "duration_ns": [5]}
    with LocalStore(tmp_path / "s", clock_ns=clock) as store:
        store.append("bursts", pl.DataFrame({**burst, "start_ns": [old]}))
        store._database.execute("ALTER TABLE bursts DROP COLUMN attributes")
        copy = store._database.sql("SELECT * FROM bursts").pl()
        folder = tmp_path / "s/sealed/bursts"
        folder.mkdir(parents=True)
        copy.write_parquet(folder / f"{old // HOUR}-1.parquet")
        store._database.execute(
            "INSERT INTO sealed VALUES ('bursts', ?, ?, ?, ?, 1, 100)",
            [f"sealed/bursts/{old // HOUR}-1.parquet", old // HOUR, old, old],
        )
    with LocalStore(tmp_path / "s", clock_ns=clock) as store:
        store.append("bursts", pl.DataFrame({**burst, "start_ns": [new], "attributes": ["{}"]}))
        expected = [None, None, "{}"]
        assert store.table("bursts")["attributes"].to_list() == expected
        store.keeper.maintain()
        assert store.table("bursts")["attributes"].to_list() == expected
        assert store.table("bursts", until_ns=old + 1)["attributes"].to_list() == [None, None]


def test_a_full_queue_is_busy(tmp_path, clock):
    limits = StoreLimits(max_pending_rows=2)
    with LocalStore(tmp_path, clock_ns=clock, limits=limits) as store:
        rows = {"metrics": samples("m", "{}", [NOW, NOW], [1.0, 2.0])}
        with store._writer.exclusive:
            first = store.submit(rows)
            with pytest.raises(BusyError):
                store.submit(rows)
        assert first.result(10).rows == {"metrics": 2}
