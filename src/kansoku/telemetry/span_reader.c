/* Where the fields of all spans of an OTLP request lie: offsets into its bytes, nothing copied.

   Two passes over the same bytes: span_reader_measure() counts groups, spans, keys and attributes,
   the caller makes arrays of that size, span_reader_fill() fills them. Both return 0, or -1 for
   whatever is malformed or not laid out as senders do it (a field twice, a group, a wire type that
   is not the field's): the general reader decides about those. Every read is checked against the
   end of the message that it belongs to, every write against the counts. */
#include <stdint.h>
#include <string.h>

enum { KEYS = 256, SLOTS = 1024 };
enum { NAME, TRACE_ID = 2, SPAN_ID = 4, PARENT_ID = 6, START = 8, END, KIND, FAILED, COLUMNS };
enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };

struct field {
    uint64_t number, value; /* value: of a number, or the length of bytes */
    const uint8_t *start;
    int wire;
};

struct key {
    const uint8_t *start;
    int64_t length, count;
    int follower; /* key that followed it last time: senders keep their order */
};

struct reader {
    const uint8_t *data;
    int64_t groups, spans, attributes;
    int keys, last;
    struct key key[KEYS];
    int16_t slot[SLOTS]; /* key's number and one, 0 where empty */
    /* Of the second pass: arrays, and how much fits. */
    int64_t max_groups, max_spans;
    int64_t *group_rows, *span_columns, *attribute_columns;
    int64_t max_attributes, next[KEYS], until[KEYS];
};

static inline const uint8_t *varint(const uint8_t *at, const uint8_t *end, uint64_t *value)
{
    if (at < end && *at < 0x80) {
        *value = *at;
        return at + 1;
    }
    uint64_t total = 0;
    for (int shift = 0; shift < 70; shift += 7) {
        if (at >= end)
            return NULL;
        uint8_t byte = *at++;
        total |= (uint64_t)(byte & 0x7f) << (shift < 63 ? shift : 63);
        if (byte < 0x80) {
            *value = total;
            return at;
        }
    }
    return NULL;
}

/* Read one field; return where the next begins, NULL where there is none. */
static inline const uint8_t *take(const uint8_t *at, const uint8_t *end, struct field *found)
{
    uint64_t tag;
    if (!(at = varint(at, end, &tag)) || tag >> 32 || tag < 8)
        return NULL;
    found->number = tag >> 3;
    found->wire = tag & 7;
    switch (found->wire) {
    case VARINT:
        return varint(at, end, &found->value);
    case FIXED64:
        if (end - at < 8)
            return NULL;
        memcpy(&found->value, at, 8);
        return at + 8;
    case FIXED32:
        return end - at < 4 ? NULL : at + 4;
    case BYTES:
        if (!(at = varint(at, end, &found->value)) || found->value > (uint64_t)(end - at))
            return NULL;
        found->start = at;
        return at + found->value;
    default:
        return NULL;
    }
}

static int equal(const struct key *key, const uint8_t *start, int64_t length)
{
    return key->length == length && !memcmp(key->start, start, (size_t)length);
}

/* Return the number of a key, -1 where there are too many. */
static int number_of(struct reader *r, const uint8_t *start, int64_t length)
{
    if (r->last >= 0) {
        int guess = r->key[r->last].follower;
        if (guess >= 0 && equal(&r->key[guess], start, length))
            return r->last = guess;
    }
    uint32_t hash = 2166136261u;
    for (int64_t i = 0; i < length; i++)
        hash = (hash ^ start[i]) * 16777619u;
    uint32_t at = (hash ^ hash >> 15) % SLOTS;
    while (r->slot[at] && !equal(&r->key[r->slot[at] - 1], start, length))
        at = (at + 1) % SLOTS;
    if (!r->slot[at]) {
        if (r->keys == KEYS)
            return -1;
        r->key[r->keys] = (struct key){start, length, 0, -1};
        r->slot[at] = (int16_t)++r->keys;
    }
    int found = r->slot[at] - 1;
    if (r->last >= 0)
        r->key[r->last].follower = found;
    return r->last = found;
}

static int read_attribute(struct reader *r, const uint8_t *at, const uint8_t *end)
{
    const uint8_t *key = at, *value = at;
    int64_t key_length = 0, value_length = 0;
    int has_key = 0, has_value = 0;
    struct field one;
    while (at < end) {
        if (!(at = take(at, end, &one)))
            return -1;
        if (one.number > 2)
            continue;
        if (one.wire != BYTES || (one.number == 1 ? has_key++ : has_value++))
            return -1;
        /* One by one: a struct copied whole waits for its parts to be stored. */
        if (one.number == 1) {
            key = one.start;
            key_length = (int64_t)one.value;
        } else {
            value = one.start;
            value_length = (int64_t)one.value;
        }
    }
    int number = number_of(r, key, key_length);
    if (number < 0)
        return -1;
    r->key[number].count++;
    if (r->attribute_columns) {
        int64_t place = r->next[number]++;
        if (place >= r->until[number] || r->attributes >= r->max_attributes)
            return -1;
        int64_t *into = r->attribute_columns + place;
        into[0] = r->spans;
        into[r->max_attributes] = value - r->data;
        into[2 * r->max_attributes] = value_length;
    }
    r->attributes++;
    return 0;
}

/* Return whether a status is an error, -1 where it cannot be read. */
static int read_status(const uint8_t *at, const uint8_t *end)
{
    struct field one;
    uint64_t code = 0;
    while (at < end) {
        if (!(at = take(at, end, &one)))
            return -1;
        if (one.number != 3)
            continue;
        if (one.wire != VARINT || one.value >> 31)
            return -1;
        code = one.value;
    }
    return code == 2;
}

static void put(struct reader *r, int column, int64_t value)
{
    if (r->span_columns)
        r->span_columns[column * r->max_spans + r->spans] = value;
}

static int read_span(struct reader *r, const uint8_t *at, const uint8_t *end)
{
    static const int8_t column[] = {-1, TRACE_ID, SPAN_ID, -1, PARENT_ID, NAME, KIND, START, END,
                                    -1, -1,       -1,      -1, -1,        -1,   FAILED};
    static const int8_t wire[] = {-1, BYTES, BYTES, -1, BYTES, BYTES, VARINT, FIXED64, FIXED64,
                                  -1, -1,    -1,    -1, -1,    -1,    BYTES};
    uint32_t seen = 0;
    struct field one;
    if (r->span_columns && r->spans >= r->max_spans)
        return -1;
    while (at < end) {
        if (!(at = take(at, end, &one)))
            return -1;
        if (one.number == 9) {
            if (one.wire != BYTES || read_attribute(r, one.start, one.start + one.value))
                return -1;
            continue;
        }
        if (one.number > 15 || column[one.number] < 0)
            continue;
        if (one.wire != wire[one.number] || seen >> one.number & 1)
            return -1;
        seen |= 1u << one.number;
        int64_t value = (int64_t)one.value;
        if (one.number == 15)
            value = read_status(one.start, one.start + one.value);
        if ((one.number == 15 && value < 0) || (one.number == 6 && one.value >> 31))
            return -1;
        if (one.wire == BYTES && one.number != 15) {
            put(r, column[one.number], one.start - r->data);
            put(r, column[one.number] + 1, value);
        } else {
            put(r, column[one.number], value);
        }
    }
    r->spans++;
    return 0;
}

static int read_scope(struct reader *r, const uint8_t *at, const uint8_t *end)
{
    struct field one;
    while (at < end) {
        if (!(at = take(at, end, &one)))
            return -1;
        if (one.number != 2)
            continue;
        if (one.wire != BYTES || read_span(r, one.start, one.start + one.value))
            return -1;
    }
    return 0;
}

static int read_group(struct reader *r, const uint8_t *at, const uint8_t *end)
{
    struct field one, resource = {.start = at};
    int64_t before = r->spans;
    int has_resource = 0;
    while (at < end) {
        if (!(at = take(at, end, &one)))
            return -1;
        if (one.number > 2)
            continue;
        if (one.wire != BYTES)
            return -1;
        if (one.number == 2) {
            if (read_scope(r, one.start, one.start + one.value))
                return -1;
        } else {
            if (has_resource++)
                return -1;
            resource = one;
        }
    }
    if (r->group_rows) {
        if (r->groups >= r->max_groups)
            return -1;
        int64_t *into = r->group_rows + 3 * r->groups;
        into[0] = resource.start - r->data;
        into[1] = (int64_t)resource.value;
        into[2] = r->spans - before;
    }
    r->groups++;
    return 0;
}

static int read_request(struct reader *r, int64_t size)
{
    const uint8_t *at = r->data, *end = r->data + size;
    struct field one;
    r->last = -1;
    while (at < end) {
        if (!(at = take(at, end, &one)))
            return -1;
        if (one.number != 1)
            continue;
        if (one.wire != BYTES || read_group(r, one.start, one.start + one.value))
            return -1;
    }
    return 0;
}

/* counts: groups, spans, attributes, keys; keys: (start, length, attributes) of each. */
int span_reader_measure(const uint8_t *data, int64_t size, int64_t counts[4], int64_t *keys)
{
    struct reader r = {.data = data};
    if (read_request(&r, size))
        return -1;
    counts[0] = r.groups;
    counts[1] = r.spans;
    counts[2] = r.attributes;
    counts[3] = r.keys;
    for (int i = 0; i < r.keys; i++) {
        keys[3 * i] = r.key[i].start - data;
        keys[3 * i + 1] = r.key[i].length;
        keys[3 * i + 2] = r.key[i].count;
    }
    return 0;
}

/* groups: (resource's start, length, spans) of each; spans: COLUMNS arrays, zeroed;
   attributes: arrays of span, start, length, the keys' one after the other. */
int span_reader_fill(const uint8_t *data, int64_t size, const int64_t counts[4],
                     const int64_t *keys, int64_t *groups, int64_t *spans, int64_t *attributes)
{
    struct reader r = {.data = data,
                       .max_groups = counts[0],
                       .max_spans = counts[1],
                       .max_attributes = counts[2],
                       .group_rows = groups,
                       .span_columns = spans,
                       .attribute_columns = attributes};
    int64_t place = 0;
    for (int i = 0; i < counts[3] && i < KEYS; i++) {
        r.next[i] = place;
        r.until[i] = place += keys[3 * i + 2];
    }
    return read_request(&r, size);
}
