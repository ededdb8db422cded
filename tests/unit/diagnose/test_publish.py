"""Addresses that incidents are told at: checked at the start, and never repeated in a log."""

import socket

import pytest

from kansoku.app.serve import Server, ServeSettings
from kansoku.app.watch import WatchSettings
from kansoku.diagnose.edge.publish import check_address, post_json
from kansoku.errors import ConfigurationError, PlatformError


@pytest.mark.parametrize(
    "url",
    ["foo", "", "ftp://host/x", "http://", "https:///path", "http://host:99999/", "http://h:0/",
     "http://[::1/", "http://host /x", "http://host/x\ny", "http://user:pa55word@host/x"],
)  # fmt: skip
@pytest.mark.parametrize("flag", ["webhook", "alertmanager", "otlp"])
def test_an_address_that_is_none_stops_the_start(tmp_path, url, flag):
    settings = ServeSettings(folder=tmp_path, watch=WatchSettings(**{flag: url}))
    with pytest.raises(ConfigurationError) as raised:
        Server(settings)
    assert raised.value.where == f"--{flag}"
    assert "pa55word" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:9/hook?key=1", "https://hooks.example/services/T0/B0/x", "http://[::1]:9"],
)
def test_addresses_that_are_some(url):
    check_address(url, "--webhook")


def test_the_secret_of_a_webhook_stays_out_of_the_error():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))  # and nobody listens
        base = f"http://127.0.0.1:{one.getsockname()[1]}"
        with pytest.raises(PlatformError) as raised:
            post_json(f"{base}/services/s3cret?key=s3cret", {})
    assert raised.value.where == base
    assert "s3cret" not in str(raised.value)
