"""Labels of whole columns: merged with a resource, made canonical."""

from collections.abc import Mapping

import orjson
import pyarrow as pa

from kansoku.errors import InputError
from kansoku.telemetry._attributes import labels_json
from kansoku.telemetry.decode_plain import DROPPED_RESOURCE_KEYS

__all__ = ["merge_labels"]


def merge_labels(rows: pa.Table, resource: Mapping[str, str]) -> pa.Table:
    """Return metric rows whose labels hold the resource too, keys sorted.

    Works on distinct texts only. Raises InputError where a text is not a JSON object.
    """
    if "labels" not in rows.column_names or not len(rows):
        return rows
    kept = {key: value for key, value in resource.items() if key not in DROPPED_RESOURCE_KEYS}
    column = rows.column("labels").cast(pa.string()).fill_null("{}").combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    encoded = column.dictionary_encode()
    try:
        texts = [labels_json(kept, orjson.loads(t)) for t in encoded.dictionary.to_pylist()]
    except (orjson.JSONDecodeError, AttributeError) as error:
        raise InputError(f"metrics: labels are no JSON object: {error}") from None
    merged = pa.DictionaryArray.from_arrays(encoded.indices, pa.array(texts, pa.string()))
    return rows.set_column(rows.column_names.index("labels"), "labels", merged)
