/* The slices of one chunk of Kineto events as rows of numbers, in one pass over its bytes.

   Each distinct text gets a number and is copied once; the next chunk finds those of the chunks
   before it. The caller makes all arrays and says how many rows fit. kineto_events_read() returns
   0, or -1 for whatever is not whole JSON in the form that Kineto writes (a key twice or escaped, text or a
   negative number as a stamp, a beginning without its end in one event, more than fits): the
   general reader decides about those. Every read is checked against the end of the chunk. */
#include <stdint.h>
#include <string.h>

enum { TOKENS = 1 << 15, TOKEN_SLOTS = 1 << 16, PLACES = 1 << 12, PLACE_SLOTS = 1 << 13 };
enum { CATEGORY, NAME, PLACE, START, DURATION, CORRELATION, SIZE, ARGUMENTS, LENGTH, COLUMNS };
enum { TEXT_BYTES = 1 << 22 };
enum { LAST_CATEGORY, LAST_PROCESS, LAST_THREAD, LAST_TEXTS };
enum { DEEPEST = 64, LONGEST_NUMBER = 64 };

#define ABSENT INT64_MIN
#define EACH(byte) (0x0101010101010101ull * (byte))

struct text {
    const uint8_t *start;
    int64_t length; /* quotes included; 0: absent */
};

struct reader {
    const uint8_t *data, *end;
    uint8_t *texts;
    int64_t *tokens; /* (start in texts, length) of each, quotes included */
    int32_t *token_slots, *place_slots; /* number and one, 0 where empty; zeroed by the caller */
    int32_t *places; /* tokens of process, thread, device and stream of each */
    int64_t text_bytes;
    int32_t token_count, place_count, last_place;
    struct text last[LAST_TEXTS]; /* category, process and thread of the slice before */
    int32_t last_tokens[LAST_TEXTS];
};

struct event {
    struct text phase, category, name, process, thread, stamp, duration, arguments;
    struct text correlation, device, stream, bytes, size;
    int has_collective;
};

static inline const uint8_t *past_space(const uint8_t *at, const uint8_t *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r'))
        at++;
    return at;
}

static inline uint64_t word_at(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

/* From after the opening quote; return after the closing one, NULL where there is none. */
static inline const uint8_t *past_string(const uint8_t *at, const uint8_t *end, int *escaped)
{
    for (;;) {
        while (end - at >= 8) {
            uint64_t word = word_at(at), quote = word ^ EACH('"'), slash = word ^ EACH('\\');
            uint64_t found = ((quote - EACH(1)) & ~quote) | ((slash - EACH(1)) & ~slash) |
                             ((word - EACH(0x20)) & ~word);
            if (found &= EACH(0x80)) {
                at += __builtin_ctzll(found) >> 3;
                break;
            }
            at += 8;
        }
        while (at < end && *at >= 0x20 && *at != '"' && *at != '\\')
            at++;
        if (at >= end || *at < 0x20)
            return NULL;
        if (*at == '"')
            return at + 1;
        if (end - at < 2 || !at[1] || !strchr("\"\\/bfnrt", at[1]))
            return NULL; /* \u among them: rare, and half a pair is no text */
        *escaped = 1;
        at += 2;
    }
}

static inline const uint8_t *past_digits(const uint8_t *at, const uint8_t *end)
{
    while (at < end && *at >= '0' && *at <= '9')
        at++;
    return at;
}

static const uint8_t *past_number(const uint8_t *at, const uint8_t *end)
{
    const uint8_t *start = at, *from;
    if (at < end && *at == '-')
        at++;
    from = at;
    at = past_digits(at, end);
    if (at == from || (*from == '0' && at - from > 1))
        return NULL;
    if (at < end && *at == '.') {
        from = ++at;
        if ((at = past_digits(at, end)) == from)
            return NULL;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        if (++at < end && (*at == '-' || *at == '+'))
            at++;
        from = at;
        if ((at = past_digits(at, end)) == from || at - from > 2)
            return NULL;
    }
    return at - start > LONGEST_NUMBER ? NULL : at;
}

/* The same for a whole number, as most are; NULL for any other. */
static inline const uint8_t *past_whole(const uint8_t *at, const uint8_t *end)
{
    const uint8_t *start = at;
    if (at >= end || *at < '1' || *at > '9')
        return NULL;
    at = past_digits(at, end);
    return at < end && at - start <= 18 && *at != '.' && *at != 'e' && *at != 'E' ? at : NULL;
}

static const uint8_t *past_word(const uint8_t *at, const uint8_t *end, const char *word, int size)
{
    return end - at >= size && !memcmp(at, word, (size_t)size) ? at + size : NULL;
}

static const uint8_t *past_value(const uint8_t *at, const uint8_t *end, int depth);

static const uint8_t *past_array(const uint8_t *at, const uint8_t *end, int depth)
{
    at = past_space(at + 1, end);
    if (at < end && *at == ']')
        return at + 1;
    for (;;) {
        const uint8_t *past = past_whole(at, end);
        if (!past && !(past = past_value(at, end, depth)))
            return NULL;
        at = past_space(past, end);
        if (at >= end)
            return NULL;
        if (*at == ']')
            return at + 1;
        if (*at != ',')
            return NULL;
        at = past_space(at + 1, end);
    }
}

/* Read a key and its colon; return where the value begins, NULL for none or an escaped one. */
static inline const uint8_t *take_key(const uint8_t *at, const uint8_t *end, struct text *key)
{
    int escaped = 0;
    if (at >= end || *at != '"')
        return NULL;
    key->start = at + 1;
    if (!(at = past_string(at + 1, end, &escaped)) || escaped)
        return NULL;
    key->length = at - 1 - key->start;
    at = past_space(at, end);
    if (at >= end || *at != ':')
        return NULL;
    return past_space(at + 1, end);
}

/* After a value: return where the next key begins, or set done and return after the brace. */
static inline const uint8_t *after_value(const uint8_t *at, const uint8_t *end, int *done)
{
    if (!at)
        return NULL;
    at = past_space(at, end);
    if (at >= end)
        return NULL;
    if (*at == '}') {
        *done = 1;
        return at + 1;
    }
    return *at == ',' ? past_space(at + 1, end) : NULL;
}

static const uint8_t *past_object(const uint8_t *at, const uint8_t *end, int depth)
{
    struct text key;
    int done = 0;
    at = past_space(at + 1, end);
    if (at < end && *at == '}')
        return at + 1;
    while (at && !done) {
        if (!(at = take_key(at, end, &key)))
            return NULL;
        at = after_value(past_value(at, end, depth), end, &done);
    }
    return at;
}

static const uint8_t *past_value(const uint8_t *at, const uint8_t *end, int depth)
{
    int escaped;
    if (at >= end || depth == DEEPEST)
        return NULL;
    switch (*at) {
    case '"':
        return past_string(at + 1, end, &escaped);
    case '[':
        return past_array(at, end, depth + 1);
    case '{':
        return past_object(at, end, depth + 1);
    case 't':
        return past_word(at, end, "true", 4);
    case 'f':
        return past_word(at, end, "false", 5);
    case 'n':
        return past_word(at, end, "null", 4);
    default:
        return past_number(at, end);
    }
}

#define IS(key, word) ((key).length == sizeof(word) - 1 && !memcmp((key).start, word, sizeof(word) - 1))

static struct text *event_field(struct event *e, struct text key)
{
    switch (key.length) {
    case 2:
        return IS(key, "ph") ? &e->phase : IS(key, "ts") ? &e->stamp : NULL;
    case 3:
        return IS(key, "cat")   ? &e->category
               : IS(key, "pid") ? &e->process
               : IS(key, "tid") ? &e->thread
               : IS(key, "dur") ? &e->duration
                                : NULL;
    case 4:
        return IS(key, "name") ? &e->name : IS(key, "args") ? &e->arguments : NULL;
    default:
        return NULL;
    }
}

static struct text *argument_field(struct event *e, struct text key)
{
    switch (key.length) {
    case 4:
        return IS(key, "size") ? &e->size : NULL;
    case 5:
        return IS(key, "bytes") ? &e->bytes : NULL;
    case 6:
        return IS(key, "device") ? &e->device : IS(key, "stream") ? &e->stream : NULL;
    case 11:
        return IS(key, "correlation") ? &e->correlation : NULL;
    default:
        return NULL;
    }
}

static int is_of_collective(struct text key)
{
    switch (key.length) {
    case 3:
        return IS(key, "Seq");
    case 5:
        return IS(key, "dtype");
    case 10:
        return IS(key, "Group size");
    case 13:
        return IS(key, "In msg nelems");
    case 14:
        return IS(key, "Out msg nelems");
    case 15:
        return IS(key, "Collective name");
    case 18:
        return IS(key, "Process Group Name");
    case 19:
        return IS(key, "Process Group Ranks");
    case 25:
        return IS(key, "Process Group Description");
    default:
        return 0;
    }
}

static inline const uint8_t *take_value(const uint8_t *at, const uint8_t *end, struct text *into)
{
    const uint8_t *start = at;
    if (!(at = past_whole(start, end)) && !(at = past_value(start, end, 0)))
        return NULL;
    if (into) {
        if (into->length)
            return NULL; /* a key twice */
        *into = (struct text){start, at - start};
    }
    return at;
}

static const uint8_t *read_arguments(struct event *e, const uint8_t *at, const uint8_t *end)
{
    struct text key;
    int done = 0;
    if (at >= end || *at != '{' || e->arguments.length)
        return NULL;
    e->arguments.start = at;
    at = past_space(at + 1, end);
    if (at < end && *at == '}') {
        e->arguments.length = ++at - e->arguments.start;
        return at;
    }
    while (at && !done) {
        if (!(at = take_key(at, end, &key)))
            return NULL;
        e->has_collective |= is_of_collective(key);
        at = after_value(take_value(at, end, argument_field(e, key)), end, &done);
    }
    if (at)
        e->arguments.length = at - e->arguments.start;
    return at;
}

static const uint8_t *read_event(struct event *e, const uint8_t *at, const uint8_t *end)
{
    struct text key, *into;
    int done = 0;
    if (at >= end || *at != '{')
        return NULL;
    at = past_space(at + 1, end);
    while (at && !done) {
        if (!(at = take_key(at, end, &key)))
            return NULL;
        into = event_field(e, key);
        at = into && into == &e->arguments ? read_arguments(e, at, end) : take_value(at, end, into);
        at = after_value(at, end, &done);
    }
    return at;
}

/* Microseconds of at most three decimals to nanoseconds. */
static int nanoseconds(struct text value, int64_t *into)
{
    const uint8_t *at = value.start, *end = at + value.length;
    int64_t total = 0, decimals = 0;
    while (at < end && *at >= '0' && *at <= '9' && at - value.start < 16)
        total = 10 * total + (*at++ - '0');
    if (at == value.start || total >= 1ll << 52)
        return -1;
    if (at < end && *at == '.')
        for (at++; at < end && *at >= '0' && *at <= '9' && decimals < 3; decimals++)
            total = 10 * total + (*at++ - '0');
    for (; decimals < 3; decimals++)
        total *= 10;
    *into = total;
    return at == end ? 0 : -1;
}

/* A whole number of at most 18 digits; absent where there is none, or null. */
static int whole(struct text value, int signs, int64_t *into)
{
    const uint8_t *at = value.start, *end = at + value.length;
    int64_t total = 0;
    *into = ABSENT;
    if (!value.length || *at == 'n')
        return 0;
    int negative = signs && *at == '-';
    at += negative;
    if (end - at > 18)
        return -1;
    for (; at < end; at++) {
        if (*at < '0' || *at > '9')
            return -1;
        total = 10 * total + (*at - '0');
    }
    *into = negative ? -total : total;
    return 0;
}

static uint64_t hash_of(const uint8_t *at, int64_t length)
{
    uint64_t hash = (uint64_t)length, word = 0;
    for (; length >= 8; at += 8, length -= 8) {
        hash = (hash ^ word_at(at)) * 0x9e3779b97f4a7c15ull;
        hash ^= hash >> 29;
    }
    memcpy(&word, at, (size_t)length);
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    return hash ^ hash >> 32;
}

/* Return the number of a text or whole number, -1 for an absent one, -2 for anything else. */
static int32_t token_of(struct reader *r, struct text value)
{
    int64_t ignored;
    if (!value.length || *value.start == 'n')
        return -1;
    if (*value.start != '"' && whole(value, 1, &ignored))
        return -2;
    uint64_t at = hash_of(value.start, value.length) % TOKEN_SLOTS;
    for (; r->token_slots[at]; at = (at + 1) % TOKEN_SLOTS) {
        int64_t *known = r->tokens + 2 * (r->token_slots[at] - 1);
        if (known[1] == value.length &&
            !memcmp(r->texts + known[0], value.start, (size_t)value.length))
            return r->token_slots[at] - 1;
    }
    if (r->token_count == TOKENS || value.length >= TEXT_BYTES - r->text_bytes)
        return -2;
    memcpy(r->texts + r->text_bytes, value.start, (size_t)value.length);
    r->tokens[2 * r->token_count] = r->text_bytes;
    r->tokens[2 * r->token_count + 1] = value.length;
    r->text_bytes += value.length;
    r->texts[r->text_bytes++] = ','; /* any run of them is the inside of an array */
    r->token_slots[at] = ++r->token_count;
    return r->token_count - 1;
}

/* The same for a text that is often that of the slice before. */
static inline int32_t token_again(struct reader *r, struct text value, int field)
{
    struct text last = r->last[field];
    if (last.length != value.length || !value.length ||
        memcmp(last.start, value.start, (size_t)value.length)) {
        r->last[field] = value;
        r->last_tokens[field] = token_of(r, value);
    }
    return r->last_tokens[field];
}

static int32_t place_of(struct reader *r, const struct event *e)
{
    int32_t place[4] = {token_again(r, e->process, LAST_PROCESS),
                        token_again(r, e->thread, LAST_THREAD), token_of(r, e->device),
                        token_of(r, e->stream)};
    if (place[0] < 0 || place[1] < 0 || place[2] == -2 || place[3] == -2)
        return -1;
    if (r->last_place >= 0 && !memcmp(r->places + 4 * r->last_place, place, sizeof place))
        return r->last_place;
    uint64_t at = hash_of((const uint8_t *)place, sizeof place) % PLACE_SLOTS;
    for (; r->place_slots[at]; at = (at + 1) % PLACE_SLOTS) {
        int32_t known = r->place_slots[at] - 1;
        if (!memcmp(r->places + 4 * known, place, sizeof place))
            return r->last_place = known;
    }
    if (r->place_count == PLACES)
        return -1;
    memcpy(r->places + 4 * r->place_count, place, sizeof place);
    r->place_slots[at] = ++r->place_count;
    return r->last_place = r->place_count - 1;
}

/* A column is `stride` numbers; `row` points at this slice's place in the first one. */
static int put_slice(struct reader *r, const struct event *e, int64_t *row, int64_t stride)
{
    int32_t category = token_again(r, e->category, LAST_CATEGORY), name = token_of(r, e->name);
    int32_t place = place_of(r, e);
    if (category == -2 || name < 0 || place < 0 || (category >= 0 && *e->category.start != '"'))
        return -1;
    row[CATEGORY * stride] = category;
    row[NAME * stride] = name;
    row[PLACE * stride] = place;
    if (nanoseconds(e->stamp, row + START * stride) || nanoseconds(e->duration, row + DURATION * stride) ||
        whole(e->correlation, 1, row + CORRELATION * stride) || whole(e->bytes, 0, row + SIZE * stride))
        return -1;
    int64_t size;
    if (whole(e->size, 0, &size))
        return -1;
    if (row[SIZE * stride] == ABSENT)
        row[SIZE * stride] = size;
    row[ARGUMENTS * stride] = e->has_collective ? e->arguments.start - r->data : 0;
    row[LENGTH * stride] = e->has_collective ? e->arguments.length : 0;
    return 0;
}

/* rows: where the first of COLUMNS arrays, `stride` apart, goes on; max_rows more fit. texts:
   TEXT_BYTES; tokens: 2 * TOKENS; places: 4 * PLACES; token_slots and place_slots: as many as named
   above, zeroed before the first chunk. counts: events, slices and slices of collectives of this
   chunk; tokens, places and bytes of texts of all chunks, zero before the first. After a refusal
   they stand as before, and no further chunk may follow before slots are zeroed. */
int kineto_events_read(const uint8_t *data, int64_t size, int64_t max_rows, int64_t stride,
                       int64_t *rows, uint8_t *texts, int64_t *tokens, int32_t *places,
                       int32_t *token_slots, int32_t *place_slots, int64_t counts[6])
{
    struct reader r = {.data = data,
                       .end = data + size,
                       .texts = texts,
                       .tokens = tokens,
                       .token_count = (int32_t)counts[3],
                       .place_count = (int32_t)counts[4],
                       .text_bytes = counts[5],
                       .token_slots = token_slots,
                       .place_slots = place_slots,
                       .places = places,
                       .last_place = -1};
    const uint8_t *at = data;
    int64_t events = 0, slices = 0, of_collectives = 0;
    while (at < r.end && (*at == ',' || past_space(at, r.end) > at))
        at++;
    while (r.end > at && (r.end[-1] == ',' || past_space(r.end - 1, r.end) == r.end))
        r.end--;
    while (at < r.end) {
        struct event e = {0};
        if (events && (*at++ != ',' || (at = past_space(at, r.end)) == r.end))
            return -1;
        if (!(at = read_event(&e, at, r.end)))
            return -1;
        at = past_space(at, r.end);
        events++;
        if (e.phase.length != 3 || *e.phase.start != '"' ||
            !memchr("XbensftMiICPNODvVRc(),=SpF", e.phase.start[1], 26))
            return -1;
        if (e.phase.start[1] != 'X')
            continue;
        if (slices == max_rows || put_slice(&r, &e, rows + slices, stride))
            return -1;
        slices++;
        of_collectives += e.has_collective;
    }
    counts[0] = events;
    counts[1] = slices;
    counts[2] = of_collectives;
    counts[3] = r.token_count;
    counts[4] = r.place_count;
    counts[5] = r.text_bytes;
    return 0;
}
