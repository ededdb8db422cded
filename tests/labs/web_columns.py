"""Decode columns as docs/web.md writes them, without the product's own code."""

import json
import struct

import numpy as np


def decode(raw):
    """Return header and arrays."""
    assert raw[:4] == b"KCOL"
    (length,) = struct.unpack("<I", raw[4:8])
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 8 == 0
    arrays = {}
    for one in header["arrays"]:
        assert one["offset"] % 8 == 0
        kind = np.dtype("<" + one["type"])
        count = int(np.prod(one["shape"]))
        start = 8 + length + one["offset"]
        arrays[one["name"]] = np.frombuffer(raw, kind, count, start).reshape(one["shape"])
    return header, arrays
