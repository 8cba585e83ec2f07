/* segment.c: laying out, creating, checking and attaching the two segments; registration; forks.
 *
 * A segment is trusted only after it has been looked at: its size before it is mapped, the frozen first
 * 64 bytes before anything else, then every offset against the layout that this build computes from the
 * geometry.  What has been checked is copied into the handle; shared memory is not asked again.
 *
 * Life of a ring: the creator makes both objects, takes the supervisor's lock, lays out, gets all pages,
 * and stores LIVE last.  One that never got there reads CREATING, because its pages are zero.
 */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int fail(smoe_error *e, int code, const char *call, int os_error, uint64_t wanted, uint64_t got) {
    if (e) {
        memset(e, 0, sizeof *e);
        e->code = code;
        e->call = call;
        e->os_error = os_error;
        e->wanted = wanted;
        e->got = got;
    }
    return code;
}

static int fail_errno(smoe_error *e, const char *call) {
    int os_error = errno;
    return fail(e, -os_error, call, os_error, 0, 0);
}

/* "/smoe.NAME" or "/smoe.NAME.d": at most 30 characters with the slash, macOS's limit. */
int segment_name(char out[40], const char *name, bool data) {
    int n = snprintf(out, 40, "/smoe.%s%s", name, data ? ".d" : "");
    size_t length = strlen(name);
    /* "x.d" would have the name of x's data segment. */
    bool is_data = length >= 2 && strcmp(name + length - 2, ".d") == 0;
    return n > (data ? 30 : 28) || is_data || strchr(name, '/') ? -ENAMETOOLONG : n;
}

/* --- layout --------------------------------------------------------------------------------------- */

static uint64_t round_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

/* Everything that must be the same on both sides for the structs to mean the same. */
static uint64_t layout_fingerprint(void) {
    const uint64_t facts[] = {
        SMOE_ABI,
        sizeof(struct smoe_header),
        sizeof(struct smoe_hot),
        sizeof(struct smoe_participant),
        sizeof(struct smoe_slot),
        sizeof(struct smoe_expert_rec),
        sizeof(struct smoe_window_rec),
        sizeof(struct smoe_part_rec),
        sizeof(struct smoe_move_rec),
        sizeof(struct smoe_layout_rec),
        sizeof(struct smoe_tensor_rec),
        sizeof(struct smoe_file_rec),
        offsetof(struct smoe_header, off_hot),
        offsetof(struct smoe_header, off_strings),
        offsetof(struct smoe_hot, space),
        offsetof(struct smoe_hot, demand),
        offsetof(struct smoe_slot, error_offset),
        SMOE_PARTICIPANTS,
        SMOE_COUNTER_WORDS,
        SMOE_PHASE_WORDS,
        SMOE_COUNTER_ROW,
        SMOE_COUNTERS,
        SMOE_GROUP,
        SMOE_TRACE_CELLS,
    };
    uint64_t h = 0xCBF29CE484222325ull; /* FNV-1a */
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++)
        for (int b = 0; b < 64; b += 8)
            h = (h ^ (facts[i] >> b & 255)) * 0x100000001B3ull;
    return h;
}

static int check_geometry(const smoe_geometry *g, smoe_error *e) {
    const struct {
        const char *what;
        uint64_t value, least, most;
    } ranges[] = {
        {"n_slots", g->n_slots, 1, SMOE_SLOTS_MAX},
        {"slot_bytes", g->slot_bytes, SMOE_SLOT_ALIGN, 1ull << 40},
        {"n_experts", g->n_experts, 1, SMOE_EXPERTS_MAX},
        {"n_windows", g->n_windows, 1, 1u << 26},
        {"n_parts", g->n_parts, 1, 1u << 26},
        {"n_moves", g->n_moves, 0, 1u << 26},
        {"n_layouts", g->n_layouts, 1, SMOE_EXPERTS_MAX},
        {"n_tensors", g->n_tensors, 0, 1u << 26},
        {"n_files", g->n_files, 1, SMOE_FILES_MAX},
        {"grid_layers", g->grid_layers, 1, SMOE_GRID_MAX},
        {"grid_experts", g->grid_experts, 1, SMOE_GRID_MAX},
        {"grid", (uint64_t)g->grid_layers * g->grid_experts, 1, SMOE_GRID_MAX},
        {"strings_bytes", g->strings_bytes, 1, 1u << 28},
        {"read_align", g->read_align, 512, SMOE_PAGE_ALIGN},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (ranges[i].value < ranges[i].least || ranges[i].value > ranges[i].most)
            return fail(e, SMOE_ECORRUPT, ranges[i].what, 0, ranges[i].most, ranges[i].value);
    if (g->slot_bytes % SMOE_SLOT_ALIGN)
        return fail(e, SMOE_ECORRUPT, "slot_bytes", 0, SMOE_SLOT_ALIGN, g->slot_bytes);
    if (g->read_align & (g->read_align - 1))
        return fail(e, SMOE_ECORRUPT, "read_align", 0, 4096, g->read_align);
    return 0;
}

/* The layout that the geometry gives: the one place where regions get their offsets. */
static int lay_out(const smoe_geometry *g, struct smoe_header *h, smoe_error *e) {
    int rc = check_geometry(g, e);
    if (rc)
        return rc;
    memset(h, 0, sizeof *h);
    h->magic = SMOE_MAGIC;
    h->abi = SMOE_ABI;
    h->header_bytes = sizeof *h;
    h->fingerprint = layout_fingerprint();
    h->slot_bytes = g->slot_bytes;
    h->n_slots = g->n_slots;
    h->n_groups = (g->n_slots + SMOE_GROUP - 1) / SMOE_GROUP;
    h->n_experts = g->n_experts;
    h->n_files = g->n_files;
    h->n_layouts = g->n_layouts;
    h->n_tensors = g->n_tensors;
    h->n_windows = g->n_windows;
    h->n_parts = g->n_parts;
    h->n_moves = g->n_moves;
    h->grid_layers = g->grid_layers;
    h->grid_experts = g->grid_experts;
    h->strings_bytes = g->strings_bytes;
    h->read_deadline_ms = g->read_deadline_ms;
    h->top_k = g->top_k;
    h->direct_required = g->direct_required;
    h->read_align = g->read_align;
    h->speculation_ranks = g->speculation_ranks;
    h->verify = g->verify;
    h->guess_limit = g->n_slots / 4;
    h->queue_capacity = 2;
    while (h->queue_capacity < 2 * g->n_slots)
        h->queue_capacity *= 2;

    uint64_t at = round_up(sizeof *h, SMOE_LINE);
#define REGION(field, bytes)                                                                                           \
    do {                                                                                                               \
        h->field = at;                                                                                                 \
        at = round_up(at + (uint64_t)(bytes), SMOE_LINE);                                                              \
    } while (0)
    REGION(off_hot, sizeof(struct smoe_hot));
    REGION(off_reservations, SMOE_CLIENTS * sizeof(uint32_t));
    REGION(off_participants, SMOE_PARTICIPANTS * sizeof(struct smoe_participant));
    REGION(off_counters, SMOE_PARTICIPANTS * SMOE_COUNTER_ROW * sizeof(uint64_t));
    REGION(off_marks, SMOE_PARTICIPANTS * SMOE_COUNTER_ROW * sizeof(uint64_t));
    REGION(off_file_modes, h->n_files * sizeof(uint32_t));
    REGION(off_ticks, (uint64_t)h->n_groups * SMOE_GROUP * sizeof(uint64_t));
    REGION(off_bounds, SMOE_SPANS(h->n_groups) * SMOE_SPAN * sizeof(uint64_t));
    REGION(off_empties, SMOE_SPANS(h->n_groups) * SMOE_SPAN * sizeof(uint64_t));
    REGION(off_guesses, SMOE_SPANS(h->n_groups) * SMOE_SPAN * sizeof(uint64_t));
    REGION(off_colds, SMOE_SPANS(h->n_groups) * SMOE_SPAN * sizeof(uint64_t));
    REGION(off_demand, (uint64_t)h->queue_capacity * sizeof(uint64_t));
    REGION(off_speculative, (uint64_t)h->queue_capacity * sizeof(uint64_t));
    REGION(off_homes, (uint64_t)h->n_experts * sizeof(uint32_t));
    REGION(off_histogram, (uint64_t)h->n_experts * sizeof(uint32_t));
    REGION(off_words, (uint64_t)h->n_slots * sizeof(uint64_t));
    REGION(off_slots, (uint64_t)h->n_slots * sizeof(struct smoe_slot));
    REGION(off_trace, SMOE_TRACE_CELLS * sizeof(uint64_t));
    at = round_up(at, SMOE_PAGE_ALIGN);
    h->tables_offset = at;
    REGION(off_grid, (uint64_t)h->grid_layers * h->grid_experts * sizeof(uint32_t));
    REGION(off_experts, (uint64_t)h->n_experts * sizeof(struct smoe_expert_rec));
    REGION(off_windows, (uint64_t)h->n_windows * sizeof(struct smoe_window_rec));
    REGION(off_parts, (uint64_t)h->n_parts * sizeof(struct smoe_part_rec));
    REGION(off_moves, (uint64_t)h->n_moves * sizeof(struct smoe_move_rec));
    REGION(off_layouts, (uint64_t)h->n_layouts * sizeof(struct smoe_layout_rec));
    REGION(off_tensors, (uint64_t)h->n_tensors * sizeof(struct smoe_tensor_rec));
    REGION(off_files, h->n_files * sizeof(struct smoe_file_rec));
    REGION(off_strings, h->strings_bytes);
#undef REGION
    h->control_bytes = round_up(at, SMOE_PAGE_ALIGN);
    h->data_bytes = (uint64_t)h->n_slots * h->slot_bytes;
    if (h->data_bytes > 1ull << 46)
        return fail(e, SMOE_ECORRUPT, "data_bytes", 0, 1ull << 46, h->data_bytes);
    return 0;
}

int smoe_measure(const smoe_geometry *geometry, uint64_t *control_bytes, uint64_t *data_bytes, smoe_error *error) {
    struct smoe_header h;
    int rc = lay_out(geometry, &h, error);
    if (rc)
        return rc;
    *control_bytes = h.control_bytes;
    *data_bytes = h.data_bytes;
    return 0;
}

/* Point the handle's regions into a map whose header has been checked, and copy the geometry. */
static void bind_regions(smoe_ring *r, unsigned char *base, const struct smoe_header *h) {
    r->header = (struct smoe_header *)base;
    r->hot = (struct smoe_hot *)(base + h->off_hot);
    r->reservations = (_Atomic uint32_t *)(base + h->off_reservations);
    r->participants = (struct smoe_participant *)(base + h->off_participants);
    r->counters = (_Atomic uint64_t (*)[SMOE_COUNTER_ROW])(base + h->off_counters);
    r->marks = (_Atomic uint64_t (*)[SMOE_COUNTER_ROW])(base + h->off_marks);
    r->file_modes = (_Atomic uint32_t *)(base + h->off_file_modes);
    r->ticks = (_Atomic uint64_t *)(base + h->off_ticks);
    r->bounds = (_Atomic uint64_t *)(base + h->off_bounds);
    r->empties = (_Atomic uint64_t *)(base + h->off_empties);
    r->guesses = (_Atomic uint64_t *)(base + h->off_guesses);
    r->colds = (_Atomic uint64_t *)(base + h->off_colds);
    r->demand_cells = (_Atomic uint64_t *)(base + h->off_demand);
    r->speculative_cells = (_Atomic uint64_t *)(base + h->off_speculative);
    r->homes = (_Atomic uint32_t *)(base + h->off_homes);
    r->histogram = (_Atomic uint32_t *)(base + h->off_histogram);
    r->words = (_Atomic uint64_t *)(base + h->off_words);
    r->slots = (struct smoe_slot *)(base + h->off_slots);
    r->trace = (_Atomic uint64_t *)(base + h->off_trace);
    r->grid = (const uint32_t *)(base + h->off_grid);
    r->experts = (const struct smoe_expert_rec *)(base + h->off_experts);
    r->windows = (const struct smoe_window_rec *)(base + h->off_windows);
    r->parts = (const struct smoe_part_rec *)(base + h->off_parts);
    r->moves = (const struct smoe_move_rec *)(base + h->off_moves);
    r->layouts = (const struct smoe_layout_rec *)(base + h->off_layouts);
    r->tensors = (const struct smoe_tensor_rec *)(base + h->off_tensors);
    r->files = (const struct smoe_file_rec *)(base + h->off_files);
    r->strings = (const char *)(base + h->off_strings);
    r->n_slots = h->n_slots;
    r->n_groups = h->n_groups;
    r->n_experts = h->n_experts;
    r->n_files = h->n_files;
    r->n_windows = h->n_windows;
    r->n_parts = h->n_parts;
    r->n_moves = h->n_moves;
    r->n_layouts = h->n_layouts;
    r->n_tensors = h->n_tensors;
    r->grid_layers = h->grid_layers;
    r->grid_experts = h->grid_experts;
    r->queue_capacity = h->queue_capacity;
    r->guess_limit = h->guess_limit;
    r->read_align = h->read_align;
    r->slot_bytes = h->slot_bytes;
    r->control_bytes = h->control_bytes;
    r->data_bytes = h->data_bytes;
    r->strings_bytes = h->strings_bytes;
}

/* --- create --------------------------------------------------------------------------------------- */

/* Hold every number of the tables against the others, before anybody relies on them. */
static int check_tables(const smoe_ring *r, smoe_error *e) {
#define CHECK(condition, what, i)                                                                                      \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return fail(e, SMOE_ECORRUPT, what, 0, 0, (i));                                                            \
    } while (0)
    CHECK(r->strings[r->strings_bytes - 1] == 0, "strings end", r->strings_bytes);
    for (uint32_t i = 0; i < r->n_experts; i++) {
        const struct smoe_expert_rec *x = &r->experts[i];
        CHECK(x->layer < r->grid_layers && x->expert < r->grid_experts, "expert ids", i);
        CHECK(x->layout < r->n_layouts, "expert layout", i);
        CHECK(x->n_windows && within(x->first_window, x->n_windows, r->n_windows), "expert windows", i);
        CHECK(x->n_parts && within(x->first_part, x->n_parts, r->n_parts), "expert parts", i);
        CHECK(within(x->first_move, x->n_moves, r->n_moves), "expert moves", i);
        const struct smoe_layout_rec *l = &r->layouts[x->layout];
        CHECK(within(l->first_tensor, l->n_tensors, r->n_tensors), "layout tensors", x->layout);
        for (uint32_t t = l->first_tensor; t < l->first_tensor + l->n_tensors; t++) {
            const struct smoe_tensor_rec *q = &r->tensors[t];
            CHECK(q->part < x->n_parts, "tensor part", t);
            CHECK(within(q->offset, q->bytes, r->parts[x->first_part + q->part].bytes), "tensor place", t);
            CHECK(q->name < r->strings_bytes && q->dtype < r->strings_bytes, "tensor strings", t);
            CHECK(q->tag < r->strings_bytes && q->ndim <= SMOE_NDIM, "tensor", t);
        }
    }
    for (uint32_t i = 0; i < r->n_windows; i++) {
        const struct smoe_window_rec *w = &r->windows[i];
        CHECK(w->file < r->n_files, "window file", i);
        CHECK(w->length && w->need && w->need <= w->length, "window length", i);
        CHECK(within(w->file_offset, w->need, r->files[w->file].size), "window place in its file", i);
        CHECK(within(w->slot_offset, w->length, r->slot_bytes), "window place in the slot", i);
        CHECK((w->file_offset | w->length | w->slot_offset) % r->read_align == 0, "window alignment", i);
    }
    for (uint32_t i = 0; i < r->n_parts; i++) {
        const struct smoe_part_rec *p = &r->parts[i];
        CHECK(p->file < r->n_files && within(p->file_offset, p->bytes, r->files[p->file].size), "part in its file", i);
        CHECK(within(p->slot_offset, p->bytes, r->slot_bytes), "part place in the slot", i);
    }
    for (uint32_t i = 0; i < r->n_moves; i++)
        CHECK(within(r->moves[i].from, r->moves[i].bytes, r->slot_bytes) &&
                  within(r->moves[i].to, r->moves[i].bytes, r->slot_bytes),
              "move place in the slot", i);
    for (uint32_t i = 0; i < r->n_files; i++)
        CHECK(r->files[i].path < r->strings_bytes, "file path", i);
#undef CHECK
    return 0;
}

static int fill_tables(unsigned char *base, const struct smoe_header *h, const smoe_tables *t, smoe_error *e) {
    memcpy(base + h->off_experts, t->experts, (size_t)h->n_experts * sizeof(struct smoe_expert_rec));
    memcpy(base + h->off_windows, t->windows, (size_t)h->n_windows * sizeof(struct smoe_window_rec));
    memcpy(base + h->off_parts, t->parts, (size_t)h->n_parts * sizeof(struct smoe_part_rec));
    if (h->n_moves)
        memcpy(base + h->off_moves, t->moves, (size_t)h->n_moves * sizeof(struct smoe_move_rec));
    memcpy(base + h->off_layouts, t->layouts, (size_t)h->n_layouts * sizeof(struct smoe_layout_rec));
    if (h->n_tensors)
        memcpy(base + h->off_tensors, t->tensors, (size_t)h->n_tensors * sizeof(struct smoe_tensor_rec));
    memcpy(base + h->off_files, t->files, (size_t)h->n_files * sizeof(struct smoe_file_rec));
    memcpy(base + h->off_strings, t->strings, h->strings_bytes);
    uint32_t *grid = (uint32_t *)(base + h->off_grid);
    const struct smoe_expert_rec *experts = t->experts;
    for (uint32_t i = 0; i < h->n_experts; i++) {
        if (experts[i].layer >= h->grid_layers || experts[i].expert >= h->grid_experts)
            return fail(e, SMOE_ECORRUPT, "expert ids", 0, 0, i);
        uint32_t *cell = &grid[(size_t)experts[i].layer * h->grid_experts + experts[i].expert];
        if (*cell)
            return fail(e, SMOE_ECORRUPT, "expert named twice", 0, *cell - 1, i);
        *cell = i + 1;
    }
    return 0;
}

static void init_words(smoe_ring *r) {
    queue_init(r->demand_cells, r->queue_capacity);
    queue_init(r->speculative_cells, r->queue_capacity);
    lru_init(r);
}

int smoe_create(int control_fd, int data_fd, const smoe_geometry *geometry, const smoe_tables *tables,
                smoe_error *error) {
    struct smoe_header h;
    struct stat control, data;
    int rc = lay_out(geometry, &h, error);
    if (rc)
        return rc;
    if (fstat(control_fd, &control) != 0 || fstat(data_fd, &data) != 0)
        return fail_errno(error, "fstat");
    if ((uint64_t)control.st_size != h.control_bytes || (uint64_t)data.st_size != h.data_bytes)
        return fail(error, SMOE_ECORRUPT, "segment size", 0, h.control_bytes + h.data_bytes,
                    (uint64_t)control.st_size + (uint64_t)data.st_size);
    unsigned char *base = mmap(NULL, h.control_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, control_fd, 0);
    if (base == MAP_FAILED)
        return fail_errno(error, "mmap of the control segment");
    unsigned char *slots = mmap(NULL, h.data_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, data_fd, 0);
    if (slots == MAP_FAILED) {
        rc = fail_errno(error, "mmap of the data segment");
        munmap(base, h.control_bytes);
        return rc;
    }
    /* All pages before anything is written: a write to a page that is not there would be a SIGBUS. */
    rc = plat_populate(base, h.control_bytes, control_fd, 0);
    if (rc >= 0)
        rc = plat_populate(slots, h.data_bytes, data_fd, 1);
    if (rc < 0) {
        rc = fail(error, rc == -ENOSPC || rc == -ENOMEM ? SMOE_ENOSPACE : rc, "reserving the pages", -rc,
                  h.control_bytes + h.data_bytes, 0);
        goto out;
    }
    h.huge = (uint32_t)rc;
    h.data_dev = (uint64_t)data.st_dev;
    h.data_ino = (uint64_t)data.st_ino;
    uint64_t seed = plat_now_ns();
    int random = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (random < 0 || read(random, h.creation, sizeof h.creation) != (ssize_t)sizeof h.creation)
        h.creation[0] = seed, h.creation[1] = seed * 0x9E3779B97F4A7C15ull + (uint64_t)getpid();
    if (random >= 0)
        close(random);
    smoe_ring r;
    memset(&r, 0, sizeof r);
    bind_regions(&r, base, &h);
    rc = fill_tables(base, &h, tables, error);
    if (rc == 0)
        rc = check_tables(&r, error);
    if (rc)
        goto out;
    init_words(&r);
    h.state = SMOE_CREATING;
    memcpy(base, &h, sizeof h);
    atomic_store_explicit(&r.header->state, SMOE_LIVE, memory_order_seq_cst);
out:
    munmap(slots, h.data_bytes);
    munmap(base, h.control_bytes);
    return rc;
}

/* The header's offsets are those that its geometry gives. */
static int check_header(const struct smoe_header *h, smoe_error *e) {
    const smoe_geometry g = {
        .slot_bytes = h->slot_bytes,
        .n_slots = h->n_slots,
        .n_experts = h->n_experts,
        .n_windows = h->n_windows,
        .n_parts = h->n_parts,
        .n_moves = h->n_moves,
        .n_layouts = h->n_layouts,
        .n_tensors = h->n_tensors,
        .n_files = h->n_files,
        .grid_layers = h->grid_layers,
        .grid_experts = h->grid_experts,
        .strings_bytes = h->strings_bytes,
        .read_align = h->read_align,
    };
    struct smoe_header own;
    int rc = lay_out(&g, &own, e);
    if (rc)
        return rc;
    size_t regions = offsetof(struct smoe_header, off_hot);
    if (own.control_bytes != h->control_bytes || own.data_bytes != h->data_bytes || own.n_groups != h->n_groups ||
        own.queue_capacity != h->queue_capacity || own.guess_limit != h->guess_limit ||
        memcmp((const char *)&own + regions, (const char *)h + regions, sizeof own - regions) != 0)
        return fail(e, SMOE_ECORRUPT, "region offsets", 0, own.control_bytes, h->control_bytes);
    return 0;
}

/* --- adopt ---------------------------------------------------------------------------------------- */

static int differs(smoe_error *e, const char *what, uint64_t wanted, uint64_t got) {
    return fail(e, SMOE_EDIFFERS, what, 0, wanted, got);
}

static int same_geometry(const struct smoe_header *own, const smoe_ring *r, smoe_error *e) {
    const struct smoe_header *h = r->header;
    const struct {
        const char *what;
        uint64_t wanted, got;
    } numbers[] = {
        {"slots", own->n_slots, r->n_slots},
        {"slot size", own->slot_bytes, r->slot_bytes},
        {"experts", own->n_experts, r->n_experts},
        {"files", own->n_files, r->n_files},
        {"read alignment", own->read_align, r->read_align},
        {"control segment size", own->control_bytes, r->control_bytes},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].wanted != numbers[i].got)
            return differs(e, numbers[i].what, numbers[i].wanted, numbers[i].got);
    size_t regions = offsetof(struct smoe_header, off_hot);
    return memcmp((const char *)own + regions, (const char *)h + regions, sizeof *own - regions) == 0
               ? 0
               : differs(e, "region offsets", own->control_bytes, h->control_bytes);
}

/* The vault's identity: device, inode, size, mtime, header digest and path of every file. */
static int same_files(const smoe_ring *r, const smoe_tables *t, smoe_error *e) {
    for (uint32_t i = 0; i < r->n_files; i++) {
        const struct smoe_file_rec *own = (const struct smoe_file_rec *)t->files + i, *made = &r->files[i];
        const char *what = own->dev != made->dev || own->ino != made->ino                 ? "a file's device or inode"
                           : own->size != made->size                                      ? "a file's size"
                           : own->mtime_ns != made->mtime_ns                              ? "a file's time of change"
                           : memcmp(own->digest, made->digest, 16) != 0                   ? "a file's header"
                           : strcmp(t->strings + own->path, r->strings + made->path) != 0 ? "a file's path"
                                                                                          : NULL;
        if (what)
            return differs(e, what, i, i);
    }
    return 0;
}

/* How much there is to compare, as this handle has it.  Regions may be alike where this is not: they end in room to
 * spare.  After the files, which say more of what is another. */
static int same_counts(const struct smoe_header *own, const smoe_ring *r, smoe_error *e) {
    const struct {
        const char *what;
        uint64_t wanted, got;
    } numbers[] = {
        {"layers", own->grid_layers, r->grid_layers}, {"experts a layer", own->grid_experts, r->grid_experts},
        {"windows", own->n_windows, r->n_windows},    {"parts", own->n_parts, r->n_parts},
        {"moves", own->n_moves, r->n_moves},          {"layouts", own->n_layouts, r->n_layouts},
        {"tensors", own->n_tensors, r->n_tensors},    {"bytes of names", own->strings_bytes, r->strings_bytes},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].wanted != numbers[i].got)
            return differs(e, numbers[i].what, numbers[i].wanted, numbers[i].got);
    return 0;
}

/* The read plans, and what they lead to. */
static int same_tables(const smoe_ring *r, const smoe_tables *t, smoe_error *e) {
    const struct {
        const char *what;
        const void *own, *made;
        uint64_t bytes;
    } runs[] = {
        {"the experts' table", t->experts, r->experts, (uint64_t)r->n_experts * sizeof *r->experts},
        {"the read plans", t->windows, r->windows, (uint64_t)r->n_windows * sizeof *r->windows},
        {"the parts", t->parts, r->parts, (uint64_t)r->n_parts * sizeof *r->parts},
        {"the moves", t->moves, r->moves, (uint64_t)r->n_moves * sizeof *r->moves},
        {"the layouts", t->layouts, r->layouts, (uint64_t)r->n_layouts * sizeof *r->layouts},
        {"the tensors", t->tensors, r->tensors, (uint64_t)r->n_tensors * sizeof *r->tensors},
        {"the names", t->strings, r->strings, r->strings_bytes},
    };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++)
        if (runs[i].bytes && memcmp(runs[i].own, runs[i].made, runs[i].bytes) != 0)
            return differs(e, runs[i].what, 0, 0);
    return 0;
}

/* States and numbers in range: what a scribbling client, or a bug, may have left. */
static int sane_words(const smoe_ring *r, smoe_error *e) {
    for (uint32_t s = 0; s < r->n_slots; s++) {
        uint64_t w = slot_word(r, s);
        if (WORD_STATE(w) >= SMOE_STATES || WORD_EXPERT(w) >= r->n_experts || (WORD_STATE(w) == SMOE_EMPTY && w != 0) ||
            (WORD_STATE(w) == SMOE_READING && WORD_WORKER(w) >= SMOE_WORKERS))
            return fail(e, SMOE_ECORRUPT, "a slot word", 0, s, w);
    }
    for (uint32_t i = 0; i < r->n_experts; i++)
        if (atomic_load_explicit(&r->homes[i], memory_order_relaxed) > r->n_slots)
            return fail(e, SMOE_ECORRUPT, "a home", 0, r->n_slots, i);
    return 0;
}

/* The queues of a ring that no worker serves.  Whoever was killed right behind its compare-exchange of a cell left
 * head or tail one back. */
static int sane_queues(const smoe_ring *r, smoe_error *e) {
    const struct queue queues[] = {demand_queue(r), speculative_queue(r)};
    for (int q = 0; q < 2; q++) {
        uint64_t head = atomic_load_explicit(&queues[q].pos->head, memory_order_acquire);
        uint64_t tail = atomic_load_explicit(&queues[q].pos->tail, memory_order_acquire);
        if (tail + 1 - head > r->queue_capacity + 2ull)
            return fail(e, SMOE_ECORRUPT, "a queue's positions", 0, r->queue_capacity, tail - head);
    }
    return 0;
}

int smoe_intact(const smoe_ring *r, int state, smoe_error *error) {
    struct smoe_header h = *r->header;
    COPIED(h);
    if (r->fork_generation != fork_generation())
        return SMOE_EFORKED;
    if (h.magic != SMOE_MAGIC || h.abi != SMOE_ABI || h.control_bytes != r->control_bytes || check_header(&h, error))
        return fail(error, SMOE_ECORRUPT, "the header", 0, SMOE_MAGIC, h.magic);
    if (h.state != (uint32_t)state)
        return fail(error, SMOE_ECORRUPT, "the state", 0, (uint64_t)state, h.state);
    return sane_words(r, error);
}

int smoe_adoptable(smoe_ring *r, const smoe_geometry *geometry, const smoe_tables *tables, smoe_error *error) {
    struct smoe_header own;
    int rc = lay_out(geometry, &own, error);
    if (rc == 0)
        rc = same_geometry(&own, r, error);
    if (rc == 0)
        rc = same_files(r, tables, error);
    if (rc == 0)
        rc = same_counts(&own, r, error);
    if (rc == 0)
        rc = same_tables(r, tables, error);
    if (rc == 0)
        rc = sane_words(r, error);
    return rc ? rc : sane_queues(r, error);
}

int smoe_set_settings(smoe_ring *r, const smoe_geometry *geometry) {
    r->header->read_deadline_ms = geometry->read_deadline_ms;
    r->header->top_k = geometry->top_k;
    r->header->direct_required = geometry->direct_required;
    r->header->speculation_ranks = geometry->speculation_ranks;
    r->header->verify = geometry->verify;
    return 0;
}

/* --- looking at a segment by name ----------------------------------------------------------------- */

/* A half-made segment of ours is empty or zero, and one that was cut short begins with our magic; anything
 * else so small is somebody else's. */
static bool may_be_ours(int fd, size_t bytes) {
    if (bytes == 0)
        return true;
    unsigned char *page = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return false;
    const uint64_t magic = SMOE_MAGIC;
    bool zero = true, ours = bytes >= sizeof magic && memcmp(page, &magic, sizeof magic) == 0;
    for (size_t i = 0; zero && i < bytes; i++)
        zero = page[i] == 0;
    munmap(page, bytes);
    return zero || ours;
}

/* Open the control segment and check all that can be checked before it is mapped whole.  Returns the
 * descriptor; *h is a copy of the header. */
static int open_control(const char *name, struct smoe_header *h, bool any_state, smoe_error *e) {
    char path[40];
    struct stat st;
    if (segment_name(path, name, true) < 0 || segment_name(path, name, false) < 0)
        return fail(e, -ENAMETOOLONG, "shm_open", ENAMETOOLONG, 22, strlen(name));
    int fd = shm_open(path, O_RDWR, 0);
    if (fd < 0)
        return fail_errno(e, "shm_open");
    int rc = 0;
    memset(h, 0, sizeof *h);
    if (fstat(fd, &st) != 0)
        rc = fail_errno(e, "fstat");
    else if (st.st_mode & S_IWOTH) /* never made so: a stranger's, who would have us attach to it */
        rc = fail(e, -EACCES, "segment mode", EACCES, 0660, st.st_mode & 0777);
    else if ((uint64_t)st.st_size < sizeof *h)
        rc = may_be_ours(fd, (size_t)st.st_size)
                 ? fail(e, SMOE_ENOTLIVE, "segment size", 0, sizeof *h, (uint64_t)st.st_size)
                 : fail(e, SMOE_EABI, "magic", 0, SMOE_MAGIC, 0);
    if (rc == 0) {
        void *page = mmap(NULL, sizeof *h, PROT_READ, MAP_SHARED, fd, 0);
        if (page == MAP_FAILED) {
            rc = fail_errno(e, "mmap");
        } else {
            memcpy(h, page, sizeof *h);
            munmap(page, sizeof *h);
        }
    }
    if (rc == 0 && h->magic != SMOE_MAGIC)
        rc = h->magic == 0 ? fail(e, SMOE_ENOTLIVE, "magic", 0, SMOE_MAGIC, 0)
                           : fail(e, SMOE_EABI, "magic", 0, SMOE_MAGIC, h->magic);
    if (rc == 0 && h->abi != SMOE_ABI)
        rc = fail(e, SMOE_EABI, "ABI", 0, SMOE_ABI, h->abi);
    if (rc == 0 && h->fingerprint != layout_fingerprint())
        rc = fail(e, SMOE_EABI, "layout fingerprint", 0, layout_fingerprint(), h->fingerprint);
    if (rc == 0 && !any_state && h->state != SMOE_LIVE && h->state != SMOE_STALE) /* a stale ring says itself why */
        rc = fail(e,
                  h->state == SMOE_GONE       ? SMOE_EGONE
                  : h->state == SMOE_STOPPING ? SMOE_ESTOPPING
                                              : SMOE_ENOTLIVE,
                  "state", 0, SMOE_LIVE, h->state);
    if (rc == 0 && h->control_bytes != (uint64_t)st.st_size)
        rc = fail(e, SMOE_ECORRUPT, "control segment size", 0, h->control_bytes, (uint64_t)st.st_size);
    if (rc) {
        close(fd);
        return rc;
    }
    return fd;
}

static int open_data(const char *name, const struct smoe_header *h, bool write, smoe_error *e) {
    char path[40];
    struct stat st;
    segment_name(path, name, true);
    int fd = shm_open(path, write ? O_RDWR : O_RDONLY, 0);
    if (fd < 0)
        return fail_errno(e, "shm_open of the data segment");
    int rc = 0;
    if (fstat(fd, &st) != 0)
        rc = fail_errno(e, "fstat");
    else if ((uint64_t)st.st_ino != h->data_ino || (uint64_t)st.st_dev != h->data_dev)
        rc = fail(e, SMOE_EGONE, "inode of the data segment", 0, h->data_ino, (uint64_t)st.st_ino);
    else if ((uint64_t)st.st_size != h->data_bytes)
        rc = fail(e, SMOE_ECORRUPT, "data segment size", 0, h->data_bytes, (uint64_t)st.st_size);
    if (rc) {
        close(fd);
        return rc;
    }
    return fd;
}

int smoe_supervisor_lock(const char *name, smoe_error *error) {
    char path[40];
    if (segment_name(path, name, false) < 0)
        return fail(error, -ENAMETOOLONG, "shm_open", ENAMETOOLONG, 22, strlen(name));
    int fd = plat_lock_open(path);
    if (fd < 0)
        return fail(error, fd, "shm_open", -fd, 0, 0);
    int rc = plat_lock_try(fd, SMOE_ID_SUPERVISOR);
    if (rc == 0 && !plat_lock_is_of(fd, path))
        rc = -EAGAIN; /* the name was given to another ring between the opening and the locking */
    if (rc) {
        plat_lock_close(fd);
        return rc == -EAGAIN ? fail(error, SMOE_ETAKEN, "lock", EAGAIN, 0, 0) : fail(error, rc, "lock", -rc, 0, 0);
    }
    return fd;
}

void smoe_supervisor_unlock(int lock) {
    plat_lock_close(lock);
}

int smoe_peek(const char *name, int *alive, smoe_error *error) {
    struct smoe_header h;
    char path[40];
    *alive = 0;
    int rc = segment_name(path, name, false);
    int lock = rc < 0 ? rc : plat_lock_open(path);
    if (lock >= 0) {
        *alive = plat_lock_query(lock, SMOE_ID_SUPERVISOR) == 1;
        plat_lock_close(lock);
    }
    int fd = open_control(name, &h, true, error);
    if (fd == SMOE_ENOTLIVE)
        return SMOE_CREATING;
    if (fd < 0)
        return fd;
    close(fd);
    return (int)h.state;
}

int smoe_locks_held(const char *name) {
    char path[40];
    int rc = segment_name(path, name, false), held = 0;
    int lock = rc < 0 ? rc : plat_lock_open(path);
    if (lock < 0)
        return lock;
    for (uint32_t id = 0; id < SMOE_PARTICIPANTS; id++)
        held += plat_lock_query(lock, id) == 1;
    plat_lock_close(lock);
    return held;
}

/* --- attach --------------------------------------------------------------------------------------- */

static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;
static smoe_ring *handles;
static uint32_t forks; /* how many forks this process is away from the one that loaded the library */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

uint32_t fork_generation(void) {
    return __atomic_load_n(&forks, __ATOMIC_RELAXED);
}

/* In the child every handle is dead at once.  The lock descriptors are closed: an inherited one would
 * keep the parent's locks alive after the parent's death. */
static void in_child(void) {
    __atomic_add_fetch(&forks, 1, __ATOMIC_RELAXED);
    for (smoe_ring *r = handles; r; r = r->next)
        if (r->lock_fd >= 0) {
            plat_lock_close(r->lock_fd);
            r->lock_fd = -1;
        }
    handles = NULL;
    pthread_mutex_unlock(&handles_lock);
}
static void before_fork(void) {
    pthread_mutex_lock(&handles_lock);
}
static void in_parent(void) {
    pthread_mutex_unlock(&handles_lock);
}
static void watch_forks(void) {
    pthread_atfork(before_fork, in_parent, in_child);
}

/* Take id's lock.  Whoever gets it with a used entry cleans up after the dead owner first. */
static int try_id(smoe_ring *r, uint32_t id) {
    int rc = plat_lock_try(r->lock_fd, id);
    if (rc)
        return rc;
    r->id = id;
    bool used = atomic_load_explicit(&r->participants[id].generation, memory_order_acquire) & 1;
    FAILPOINT("register.locked");
    if (id < SMOE_CLIENTS) {
        r->bit = HOLDER_BIT(id);
        if (used)
            recover_client(r, id);
    } else if (id < SMOE_ID_SUPERVISOR && used) {
        recover_worker(r, id - SMOE_ID_WORKER);
    } else if (id == SMOE_ID_TRACE) {
        recover_trace(r);
    }
    return 0;
}

static int take_id(smoe_ring *r, int role, uint32_t worker, smoe_error *e) {
    int rc = -EAGAIN;
    if (role == SMOE_ROLE_CLIENT) {
        for (uint32_t id = 0; id < SMOE_CLIENTS && rc == -EAGAIN; id++)
            rc = try_id(r, id);
        if (rc == -EAGAIN)
            return fail(e, SMOE_ECLIENTS, "lock", 0, SMOE_CLIENTS, SMOE_CLIENTS);
    } else if (role == SMOE_ROLE_WORKER) {
        if (worker >= SMOE_WORKERS)
            return fail(e, -EINVAL, "worker id", EINVAL, SMOE_WORKERS - 1, worker);
        rc = try_id(r, SMOE_ID_WORKER + worker);
    } else {
        rc = try_id(r, role == SMOE_ROLE_SUPERVISOR ? SMOE_ID_SUPERVISOR
                       : role == SMOE_ROLE_TRACE    ? SMOE_ID_TRACE
                                                    : SMOE_ID_PREWARM);
    }
    if (rc == -EAGAIN)
        return fail(e, SMOE_ETAKEN, "lock", EAGAIN, 0, 0);
    return rc ? fail(e, rc, "lock", -rc, 0, 0) : 0;
}

static void register_self(smoe_ring *r, const char *label) {
    struct smoe_participant *p = &r->participants[r->id];
    p->pid = (uint32_t)getpid();
    p->role = (uint32_t)r->role;
    p->pid_namespace = plat_pid_namespace();
    p->started_ns = plat_now_ns();
    memset(p->label, 0, sizeof p->label);
    if (label)
        memcpy(p->label, label, strnlen(label, sizeof p->label - 1));
    atomic_store_explicit(&p->read_started_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&p->current_slot, 0, memory_order_relaxed);
    if (r->id < SMOE_CLIENTS)
        counters_begin(r);
    FAILPOINT("register.filled");
    uint32_t g = atomic_load_explicit(&p->generation, memory_order_acquire);
    r->generation = (g | 1) + (g & 1 ? 2 : 0);
    atomic_store_explicit(&p->generation, r->generation, memory_order_release);
    FAILPOINT("register.done");
}

/* Keep the files' records and all strings as they are now: a worker opens files by them, whatever somebody writes over
 * them later. */
static int keep_files(smoe_ring *r, smoe_error *e) {
    size_t bytes = r->n_files * sizeof *r->files;
    char *own = malloc(bytes + r->strings_bytes);
    if (!own)
        return fail(e, -ENOMEM, "malloc", ENOMEM, bytes + r->strings_bytes, 0);
    memcpy(own, r->files, bytes);
    memcpy(own + bytes, r->strings, r->strings_bytes);
    r->own = own;
    r->files = r->own;
    r->strings = own + bytes;
    if (r->strings[r->strings_bytes - 1] != 0)
        return fail(e, SMOE_ECORRUPT, "strings end", 0, 0, r->strings_bytes);
    for (uint32_t i = 0; i < r->n_files; i++)
        if (r->files[i].path >= r->strings_bytes)
            return fail(e, SMOE_ECORRUPT, "file path", 0, r->strings_bytes, r->files[i].path);
    return 0;
}

uint32_t smoe_files_sum(const smoe_ring *r) {
    return smoe_crc32c(0, r->own, r->n_files * sizeof *r->files + r->strings_bytes);
}

static void unmap(smoe_ring *r) {
    free(r->own);
    if (r->data)
        munmap(r->data, r->data_bytes);
    if (r->header)
        munmap(r->header, r->control_bytes);
    if (r->lock_fd >= 0)
        plat_lock_close(r->lock_fd);
    free((void *)r->private_holds);
    free(r);
}

/* In most vaults the grid's cells are the indices in order; then look-ups need not read it. */
static void find_run(smoe_ring *r) {
    uint64_t cells = (uint64_t)r->grid_layers * r->grid_experts;
    while (r->grid_first < cells && r->grid[r->grid_first] != 1)
        r->grid_first++;
    while (r->grid_run < r->n_experts && r->grid_first + r->grid_run < cells &&
           r->grid[r->grid_first + r->grid_run] == r->grid_run + 1)
        r->grid_run++;
}

static int map_segments(smoe_ring *r, const char *name, smoe_error *e) {
    struct smoe_header h;
    bool write = r->role == SMOE_ROLE_WORKER;
    bool any_state = r->role == SMOE_ROLE_OBSERVER || r->role == SMOE_ROLE_WORKER;
    int fd = open_control(name, &h, any_state, e);
    if (fd < 0)
        return fd;
    int rc = check_header(&h, e);
    if (rc) {
        close(fd);
        return rc;
    }
    unsigned char *base = mmap(NULL, h.control_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED)
        return fail_errno(e, "mmap of the control segment");
    bind_regions(r, base, &h);
    plat_prefault(base, h.control_bytes, 1);
    plat_dontfork(base, h.control_bytes);
    rc = keep_files(r, e);
    if (rc)
        return rc;
    if (mprotect(base + h.tables_offset, h.control_bytes - h.tables_offset, PROT_READ) != 0)
        return fail_errno(e, "mprotect of the tables");
    fd = open_data(name, &h, write, e);
    if (fd < 0)
        return fd;
    void *data = mmap(NULL, h.data_bytes, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (data == MAP_FAILED)
        return fail_errno(e, "mmap of the data segment");
    r->data = data;
    find_run(r);
    if (r->role == SMOE_ROLE_CLIENT)
        plat_prefault(r->data, h.data_bytes, 0);
    return 0;
}

int smoe_attach(const char *name, int role, uint32_t id, const char *label, smoe_ring **ring, smoe_error *error) {
    char path[40];
    pthread_once(&fork_once, watch_forks);
    smoe_ring *r = calloc(1, sizeof *r);
    if (!r)
        return fail(error, -ENOMEM, "calloc", ENOMEM, sizeof *r, 0);
    r->role = role;
    r->id = SMOE_PARTICIPANTS; /* none */
    r->lock_fd = role == SMOE_ROLE_SUPERVISOR ? (int)id : -1;
    r->spin_ns = 20000;
    r->fork_generation = fork_generation();
    int rc = map_segments(r, name, error);
    if (rc == 0 && role != SMOE_ROLE_SUPERVISOR) {
        segment_name(path, name, false);
        r->lock_fd = plat_lock_open(path);
        if (r->lock_fd < 0)
            rc = fail(error, r->lock_fd, "shm_open of the lock descriptor", -r->lock_fd, 0, 0);
    }
    if (rc == 0 && role != SMOE_ROLE_OBSERVER) {
        r->private_holds = calloc(r->n_slots, sizeof *r->private_holds);
        rc = r->private_holds ? take_id(r, role, id, error) : fail(error, -ENOMEM, "calloc", ENOMEM, r->n_slots * 4, 0);
    }
    if (rc) {
        unmap(r);
        return rc;
    }
    if (role != SMOE_ROLE_OBSERVER)
        register_self(r, label);
    pthread_mutex_lock(&handles_lock);
    r->next = handles;
    handles = r;
    pthread_mutex_unlock(&handles_lock);
    *ring = r;
    return 0;
}

void smoe_detach(smoe_ring *r) {
    if (!r)
        return;
    if (r->fork_generation != fork_generation()) {
        /* The control segment was not inherited; the parent's registration is the parent's. */
        if (r->data)
            munmap(r->data, r->data_bytes);
        free((void *)r->private_holds);
        free(r->own);
        free(r);
        return;
    }
    pthread_mutex_lock(&handles_lock);
    for (smoe_ring **at = &handles; *at; at = &(*at)->next)
        if (*at == r) {
            *at = r->next;
            break;
        }
    pthread_mutex_unlock(&handles_lock);
    if (r->id < SMOE_CLIENTS && atomic_load(&r->participants[r->id].generation) == r->generation)
        leave_client(r, r->id);
    else if (r->id < SMOE_PARTICIPANTS && atomic_load(&r->participants[r->id].generation) == r->generation) {
        if (r->id == SMOE_ID_TRACE)
            recover_trace(r);
        free_entry(r, r->id);
    }
    FAILPOINT("detach.freed");
    unmap(r); /* the lock goes with its descriptor, last */
}

/* --- ending --------------------------------------------------------------------------------------- */

int smoe_set_state(smoe_ring *r, int state) {
    if (r->fork_generation != fork_generation())
        return SMOE_EFORKED;
    atomic_store_explicit(&r->header->state, (uint32_t)state, memory_order_seq_cst);
    for (uint32_t s = 0; s < r->n_slots; s++)
        plat_wake(slot_futex(r, s), 0);
    for (uint32_t c = 0; c < SMOE_CLIENTS; c++) {
        atomic_fetch_add_explicit(&r->participants[c].landed, 1, memory_order_release);
        plat_wake(&r->participants[c].landed, 0);
    }
    atomic_fetch_add_explicit(&r->hot->space, 1, memory_order_release);
    plat_wake(&r->hot->space, 0);
    doorbell_ring(r, 0);
    prewarm_ring(r);
    return 0;
}

int smoe_set_changed(smoe_ring *r, uint32_t file, uint32_t what) {
    if (r->fork_generation != fork_generation())
        return SMOE_EFORKED;
    if (file >= r->n_files || what == 0 || what > 0xFFFFu)
        return -EINVAL;
    atomic_store_explicit(&r->hot->changed, file | what << 16, memory_order_relaxed);
    return smoe_set_state(r, SMOE_STALE); /* after the word, by its order */
}

/* A ring that cannot be attached, of another ABI or damaged: its first 64 bytes mean what they always do,
 * and whoever waits on it looks at the state at each slice. */
static int bury_by_header(const char *name) {
    char path[40];
    struct stat st;
    int rc = segment_name(path, name, false);
    int fd = rc < 0 ? rc : shm_open(path, O_RDWR, 0);
    if (fd < 0)
        return rc < 0 ? rc : -errno;
    struct smoe_header *h = MAP_FAILED;
    if (fstat(fd, &st) == 0 && (uint64_t)st.st_size >= offsetof(struct smoe_header, control_bytes))
        h = mmap(NULL, sizeof *h, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (h == MAP_FAILED)
        return SMOE_ENOTLIVE;
    rc = h->magic == SMOE_MAGIC ? 0 : SMOE_EABI;
    if (rc == 0)
        atomic_store_explicit(&h->state, SMOE_GONE, memory_order_seq_cst);
    munmap(h, sizeof *h);
    return rc;
}

int smoe_bury(const char *name) {
    smoe_ring *r;
    if (smoe_attach(name, SMOE_ROLE_OBSERVER, 0, NULL, &r, NULL) != 0)
        return bury_by_header(name);
    smoe_set_state(r, SMOE_GONE);
    smoe_detach(r);
    return 0;
}

/* --- memory that is not there any more ---------------------------------------------------------------- */

static char crash_line[2][256];

static void on_crash(int sig) {
    const char *line = crash_line[sig == SIGBUS];
    if (write(STDERR_FILENO, line, strlen(line)) < 0) {
        /* Nobody hears it; the exit status says the signal. */
    }
    signal(sig, SIG_DFL);
    raise(sig); /* when the handler has returned */
}

int smoe_say_crash(const char *name) {
    snprintf(crash_line[0], sizeof crash_line[0],
             "error: ring %s: ended by SIGSEGV: a fault of smoe-mp itself, or somebody wrote over its shared memory "
             "/smoe.%s\n",
             name, name);
    snprintf(crash_line[1], sizeof crash_line[1],
             "error: ring %s: ended by SIGBUS: somebody cut its shared memory short, /smoe.%s or /smoe.%s.d, or its "
             "memory failed\n",
             name, name, name);
    struct sigaction a = {.sa_handler = on_crash};
    return sigaction(SIGSEGV, &a, NULL) || sigaction(SIGBUS, &a, NULL) ? -errno : 0;
}

int smoe_lock_pages(smoe_ring *r) {
    return mlock(r->data, r->data_bytes) == 0 ? 0 : -errno;
}

/* A look costs 0.1 to 0.3 us a page, which the supervisor cannot have for a ring of 100 GiB at each status.  So of a
 * large one pieces are looked at, evenly spread from its first byte to its last. */
uint64_t smoe_resident_bytes(smoe_ring *r) {
    const uint64_t piece = 1u << 18, pieces = 256;
    if (r->data_bytes <= piece * pieces)
        return plat_resident(r->data, r->data_bytes);
    uint64_t step = (r->data_bytes - piece) / (pieces - 1), seen = 0;
    for (uint64_t i = 0; i < pieces; i++)
        seen += plat_resident(r->data + step * i / SMOE_PAGE_ALIGN * SMOE_PAGE_ALIGN, piece);
    double share = (double)seen / (double)(piece * pieces);
    return seen == piece * pieces ? r->data_bytes : (uint64_t)(share * (double)r->data_bytes);
}
