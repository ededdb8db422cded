"""The sampler of a node where its folder cannot be written."""

import polars as pl

from kansoku.node.edge.fast import FastSampler


def test_a_full_disk_ends_the_sampling_and_nothing_else(tmp_path, monkeypatch):
    def full(*_, **__):
        """As polars says it when the disk fills while it writes."""
        raise pl.exceptions.ComputeError("No space left on device (os error 28)")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    sampler = FastSampler(tmp_path, node="n1")
    columns = {name: [] for name in ("device", "quantity", "time_ns", "value")}
    assert sampler._write(columns) is False
    assert sampler.error == f"{tmp_path}: No space left on device (os error 28)"
