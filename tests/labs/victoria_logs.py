"""The part of LogsQL that our dashboards use, over entries in memory.

Not VictoriaLogs: a reader of its documented grammar for a few filters and pipes, so that a query
with a wrong field, quote or pipe fails here. The real server is asked where it is on PATH.
"""

import re

__all__ = ["logsql"]

_TOKEN = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|(:=|:~|:in\(|:)|([(),|*])|([A-Za-z_][\w.]*)|(\d+))')


def _tokens(text):
    found, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"LogsQL: cannot read {text[at:]!r}")
        quoted, operator, mark, word, number = match.groups()
        if quoted is not None:
            found.append(("text", re.sub(r"\\(.)", r"\1", quoted)))
        elif operator or mark:
            found.append(("mark", operator or mark))
        else:
            found.append(("word" if word else "number", word or number))
        at = match.end()
    return found


class _Reader:
    def __init__(self, text):
        self.tokens, self.at = _tokens(text), 0

    def peek(self, value=None):
        if self.at >= len(self.tokens):
            return None
        kind, text = self.tokens[self.at]
        return text if value is None or (kind != "text" and text == value) else None

    def take(self, value=None, kinds=()):
        if self.at >= len(self.tokens):
            raise ValueError(f"LogsQL: it ends where {value or kinds} should come")
        kind, text = self.tokens[self.at]
        if (value is not None and (kind == "text" or text != value)) or (
            kinds and kind not in kinds
        ):
            raise ValueError(f"LogsQL: {text!r} where {value or kinds} should come")
        self.at += 1
        return text

    def name(self):
        return self.take(kinds=("text", "word"))


def logsql(query, entries):
    """Return the rows of a query, newest first unless it sorts."""
    reader = _Reader(query)
    rows = list(entries)
    while reader.peek() is not None and not reader.peek("|"):
        rows = [row for row in rows if _filter(reader, row, peek=True)]
        _filter(reader, {}, peek=False)
    while reader.peek("|"):
        reader.take("|")
        rows = _pipe(reader, rows)
    return rows


def _filter(reader, row, *, peek):
    start = reader.at
    negated = bool(reader.peek("NOT"))
    if negated:
        reader.take("NOT")
    field = reader.name()
    operator = reader.take(kinds=("mark",))
    value = row.get(field, "")
    if operator == ":=":
        result = value == reader.take(kinds=("text",))
    elif operator == ":~":
        result = re.search(reader.take(kinds=("text",)), value) is not None
    elif operator == ":in(":
        wanted = [reader.take(kinds=("text",))]
        while reader.peek(","):
            reader.take(",")
            wanted.append(reader.take(kinds=("text",)))
        reader.take(")")
        result = value in wanted
    else:
        reader.take("*")
        result = value != ""
    if peek:
        reader.at = start
    return result != negated


def _number(text):
    try:
        return float(text)
    except ValueError:
        return None


def _key(value):
    number = _number(value)
    return (0, number, "") if number is not None else (1, 0.0, value)


def _pipe(reader, rows):
    name = reader.take(kinds=("word",))
    if name == "fields":
        wanted = [reader.name()]
        while reader.peek(","):
            reader.take(",")
            wanted.append(reader.name())
        return [{f: row[f] for f in wanted if f in row} for row in rows]
    if name == "limit":
        return rows[: int(reader.take(kinds=("number",)))]
    if name == "sort":
        return _sort(reader, rows)
    if name == "stats":
        return _stats(reader, rows)
    raise ValueError(f"LogsQL: pipe {name!r} is not read here")


def _sort(reader, rows):
    reader.take("by")
    reader.take("(")
    keys = []
    while True:
        keys.append((reader.name(), bool(reader.peek("desc") and reader.take("desc"))))
        if not reader.peek(","):
            break
        reader.take(",")
    reader.take(")")
    for field, down in reversed(keys):
        rows = sorted(rows, key=lambda row, f=field: _key(row.get(f, "")), reverse=down)
    return rows


def _stats(reader, rows):
    by = []
    if reader.peek("by"):
        reader.take("by")
        reader.take("(")
        by.append(reader.name())
        while reader.peek(","):
            reader.take(",")
            by.append(reader.name())
        reader.take(")")
    functions = []
    while True:
        function = reader.take(kinds=("word",))
        reader.take("(")
        field = None if reader.peek(")") else reader.name()
        reader.take(")")
        functions.append((function, field, reader.name()))
        if not reader.peek(","):
            break
        reader.take(",")
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row.get(field, "") for field in by), []).append(row)
    return [
        dict(zip(by, key, strict=True)) | {title: _value(f, field, found) for f, field, title in functions}
        for key, found in groups.items()
    ]  # fmt: skip


def _value(function, field, rows):
    values = [row[field] for row in rows if row.get(field)] if field else []
    numbers = [n for n in map(_number, values) if n is not None]
    if function == "count":
        return str(len(rows) if field is None else len(values))
    if function == "count_uniq":
        return str(len(set(values)))
    if function in {"max", "min"}:
        return (max if function == "max" else min)(values, key=_key) if values else ""
    if function == "sum":
        return str(sum(numbers))
    if function == "avg":
        return str(sum(numbers) / len(numbers)) if numbers else "NaN"
    raise ValueError(f"LogsQL: function {function!r} is not read here")
