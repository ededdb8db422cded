"""OTLP's profiles signal (``v1development``) to and from rows of the profiles table.

A row is one stack of one profile: frames joined by ``;``, root first, as folded stacks are. The
protocol is still in development: it is offered where the installed opentelemetry-proto has the
form of OTLP 1.9 (stacks in a table of the dictionary), and not otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from kansoku.model import table_schema
from kansoku.telemetry._attributes import add_attribute, any_value, attribute_dict
from kansoku.telemetry._names import COLUMN_PREFIX
from kansoku.telemetry.decode_plain import Decoded, arrow_types, fits, owner_of

try:
    from opentelemetry.proto.collector.profiles.v1development.profiles_service_pb2 import (
        ExportProfilesServiceRequest,
        ExportProfilesServiceResponse,
    )
    from opentelemetry.proto.profiles.v1development.profiles_pb2 import ProfilesDictionary
except ImportError:
    OFFERED = False
else:
    OFFERED = "stack_table" in ProfilesDictionary.DESCRIPTOR.fields_by_name

__all__ = [
    "OFFERED",
    "PATH",
    "SERVICE",
    "decode_profiles",
    "encode_profiles",
    "request_type",
    "response_type",
]

PATH = "/v1development/profiles"
SERVICE = "opentelemetry.proto.collector.profiles.v1development.ProfilesService"
_DEEPEST = 1024
_LONGEST_STACK = 64 << 10
_MOST_TEXT = 256 << 20
"""Characters of all distinct stacks of a request: names are shared on the wire, not in rows."""
_MAX = 2**63 - 1


def request_type() -> Any:
    """Return the request's message class."""
    return ExportProfilesServiceRequest


def response_type() -> Any:
    """Return the response's message class."""
    return ExportProfilesServiceResponse


class _Stacks:
    """Stack numbers to texts, each made once."""

    def __init__(self, dictionary: Any) -> None:
        self._of = dictionary
        self._texts: dict[int, str | None] = {}
        self._frames: dict[int, str] = {}
        self._room = _MOST_TEXT

    def text(self, number: int) -> str | None:
        """Return a stack, or None where a number points nowhere or the stack is too long."""
        if number not in self._texts:
            try:
                self._texts[number] = self._folded(number)
            except IndexError:
                self._texts[number] = None
        return self._texts[number]

    def _folded(self, number: int) -> str | None:
        places = _at(self._of.stack_table, number).location_indices
        if not places or len(places) > _DEEPEST:
            return None
        # The wire has the leaf first.
        text = ";".join(self._frame(place) for place in reversed(places))
        self._room -= len(text)
        return text if len(text) <= _LONGEST_STACK and self._room >= 0 else None

    def _frame(self, place: int) -> str:
        if place not in self._frames:
            location = _at(self._of.location_table, place)
            names = [
                self.word(_at(self._of.function_table, line.function_index).name_strindex)
                for line in location.lines[:_DEEPEST]
            ]
            # Inlined functions come before the one they were inlined into.
            text = ";".join(name for name in reversed(names) if name)
            self._frames[place] = (text or f"0x{location.address:x}")[:_LONGEST_STACK]
        return self._frames[place]

    def word(self, number: int) -> str:
        """Return a text of the string table; raise IndexError where there is none."""
        return str(_at(self._of.string_table, number))

    def attributes(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return attributes of the attribute table; what points nowhere is left out."""
        rows, words = self._of.attribute_table, self._of.string_table
        found = {}
        for number in numbers[:_DEEPEST]:
            if 0 <= number < len(rows) and 0 < rows[number].key_strindex < len(words):
                found[str(words[rows[number].key_strindex])] = any_value(rows[number].value)
        return found


def _at(table: Any, number: int) -> Any:
    if number < 0:
        raise IndexError(number)
    return table[number]


def decode_profiles(request: Any, decoded: Decoded) -> None:
    """Add the rows of a request; a sample that points nowhere is counted, not kept."""
    stacks = _Stacks(request.dictionary)
    codes: dict[str, int] = {}
    columns: dict[str, list[Any]] = {name: [] for name in arrow_types("profiles")}
    for group in request.resource_profiles:
        resource = attribute_dict(group.resource.attributes)
        if (owner := owner_of(resource)) is not None:
            decoded.owners.add(owner)
        for scope in group.scope_profiles:
            for profile in scope.profiles:
                _profile(profile, resource, stacks, columns, codes, decoded)
    if columns["stack"]:
        types = arrow_types("profiles")
        # A stack's text stands once, however many samples have it.
        stack = pa.DictionaryArray.from_arrays(
            pa.array(columns["stack"], pa.int32()), pa.array(list(codes), pa.string())
        )
        decoded.tables["profiles"] = pa.table(
            [
                stack if name == "stack" else pa.array(columns[name], kind)
                for name, kind in types.items()
            ],
            names=list(types),
        )


def _profile(
    profile: Any,
    resource: Mapping[str, Any],
    stacks: _Stacks,
    columns: dict[str, list[Any]],
    codes: dict[str, int],
    decoded: Decoded,
) -> None:
    about = {**resource, **stacks.attributes(profile.attribute_indices)}
    run = fits("text", about.get(f"{COLUMN_PREFIX}run")) or fits("text", about.get("service.name"))
    rank = fits("int32", about.get(f"{COLUMN_PREFIX}rank"))
    start = profile.time_unix_nano if 0 < profile.time_unix_nano <= _MAX else None
    end = start + profile.duration_nano if start is not None else None
    try:
        unit = stacks.word(profile.sample_type.unit_strindex)
    except IndexError:
        unit = ""
    for sample in profile.samples:
        decoded.items += 1
        text = stacks.text(sample.stack_index)
        if text is None:
            decoded.skip("no_stack")
            continue
        # Without values, every time stamp is one occurrence.
        value = sum(sample.values) if sample.values else len(sample.timestamps_unix_nano)
        row = {
            "run": run,
            "rank": rank,
            "start_ns": start,
            "end_ns": end if end is not None and end <= _MAX else None,
            "stack": codes.setdefault(text, len(codes)),
            "value": fits("int64", value),
            "unit": unit or None,
        }
        for name, column in columns.items():
            column.append(row[name])


class _Book:
    """The dictionary of a request being filled; entry 0 of a table is the empty one."""

    def __init__(self, dictionary: Any) -> None:
        self._of = dictionary
        self._known: dict[tuple[str, Any], int] = {}
        for table in (
            dictionary.mapping_table, dictionary.location_table, dictionary.function_table,
            dictionary.link_table, dictionary.attribute_table, dictionary.stack_table,
        ):  # fmt: skip
            table.add()
        dictionary.string_table.append("")

    def word(self, text: str) -> int:
        """Return the number of a text."""
        table = self._of.string_table
        if text and ("word", text) not in self._known:
            self._known["word", text] = len(table)
            table.append(text)
        return self._known.get(("word", text), 0)

    def stack(self, folded: str) -> int:
        """Return the number of a stack whose frames are joined root first."""
        if ("stack", folded) not in self._known:
            leaf_first = [self._location(name) for name in reversed(folded.split(";"))]
            self._known["stack", folded] = len(self._of.stack_table)
            self._of.stack_table.add(location_indices=leaf_first)
        return self._known["stack", folded]

    def _location(self, name: str) -> int:
        # One function and one location a name: both tables have the same numbers.
        if ("frame", name) not in self._known:
            number = self._known["frame", name] = len(self._of.function_table)
            self._of.function_table.add(name_strindex=self.word(name))
            self._of.location_table.add().lines.add(function_index=number)
        return self._known["frame", name]

    def attribute(self, key: str, value: str | int) -> int:
        """Return the number of an attribute."""
        if (key, value) not in self._known:
            self._known[key, value] = len(self._of.attribute_table)
            entry = self._of.attribute_table.add(key_strindex=self.word(key))
            if isinstance(value, str):
                entry.value.string_value = value
            else:
                entry.value.int_value = value
        return self._known[key, value]


def encode_profiles(rows: pl.DataFrame, resource: Mapping[str, str]) -> Any:
    """Return the request of rows of the profiles table: one profile per run, rank and time."""
    request = ExportProfilesServiceRequest()
    book = _Book(request.dictionary)
    group = request.resource_profiles.add()
    for key, value in resource.items():
        add_attribute(group.resource.attributes, key, value)
    scope = group.scope_profiles.add()
    scope.scope.name = "kansoku"
    absent = [name for name in table_schema("profiles") if name not in rows.columns]
    rows = rows.with_columns(pl.lit(None).alias(name) for name in absent)
    keys = ["run", "rank", "start_ns", "end_ns", "unit"]
    for own, some in rows.group_by(keys, maintain_order=True):
        run, rank, start, end, unit = own
        profile = scope.profiles.add(
            time_unix_nano=max(int(start or 0), 0),
            duration_nano=max(int((end or 0) - (start or 0)), 0),
        )
        profile.sample_type.type_strindex = book.word("samples")
        profile.sample_type.unit_strindex = book.word(str(unit or ""))
        if run is not None:
            profile.attribute_indices.append(book.attribute(f"{COLUMN_PREFIX}run", str(run)))
        if rank is not None:
            profile.attribute_indices.append(book.attribute(f"{COLUMN_PREFIX}rank", int(rank)))
        for folded, count in some.select("stack", "value").iter_rows():
            if folded:
                profile.samples.add(stack_index=book.stack(folded), values=[int(count or 0)])
    return request
