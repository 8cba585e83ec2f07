/* info.c: what is where, and looking on.  Nothing here changes the ring.
 *
 * What is said of an expert's bytes leads nobody out of its slot, whatever somebody wrote over the tables. */
#include "core.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Is this the process that attached?  A forked child has no map of the control segment. */
static bool mine(const smoe_ring *r) {
    return r->fork_generation == fork_generation();
}

const void *smoe_slot_data(const smoe_ring *r, uint32_t slot) {
    return slot < r->n_slots ? r->data + (uint64_t)slot * r->slot_bytes : NULL; /* the child has this map too */
}

int smoe_get_info(const smoe_ring *r, smoe_info *info) {
    if (!mine(r))
        return SMOE_EFORKED;
    *info = (smoe_info){
        .slot_bytes = r->slot_bytes,
        .data_bytes = r->data_bytes,
        .control_bytes = r->control_bytes,
        .creation = {r->header->creation[0], r->header->creation[1]},
        .n_slots = r->n_slots,
        .n_experts = r->n_experts,
        .n_files = r->n_files,
        .n_layouts = r->n_layouts,
        .grid_layers = r->grid_layers,
        .grid_experts = r->grid_experts,
        .queue_capacity = r->queue_capacity,
        .guess_limit = r->guess_limit,
        .read_deadline_ms = r->header->read_deadline_ms,
        .top_k = r->header->top_k,
        .read_align = r->read_align,
        .speculation_ranks = r->header->speculation_ranks,
        .huge = r->header->huge,
        .abi = r->header->abi,
        .id = r->id,
    };
    return 0;
}

int smoe_expert_pair(const smoe_ring *r, uint32_t expert_index, uint32_t *layer, uint32_t *expert) {
    if (!mine(r))
        return SMOE_EFORKED;
    if (expert_index >= r->n_experts)
        return SMOE_EID;
    *layer = r->experts[expert_index].layer;
    *expert = r->experts[expert_index].expert;
    return 0;
}

int smoe_expert_layout(const smoe_ring *r, uint32_t expert_index) {
    if (!mine(r))
        return SMOE_EFORKED;
    return expert_index < r->n_experts ? (int)r->experts[expert_index].layout : SMOE_EID;
}

/* A part of an expert, checked.  What is at fault lies in shared memory, and somebody has written over it. */
static int take_part(const smoe_ring *r, const struct smoe_expert_rec *x, uint32_t i, struct smoe_part_rec *p) {
    if (i >= x->n_parts || !within(x->first_part, x->n_parts, r->n_parts))
        return SMOE_ECORRUPT;
    *p = r->parts[x->first_part + i];
    COPIED(*p);
    return within(p->slot_offset, p->bytes, r->slot_bytes) && p->file < r->n_files ? 0 : SMOE_ECORRUPT;
}

int smoe_expert_parts(const smoe_ring *r, uint32_t expert_index, smoe_part *parts, uint32_t room) {
    if (!mine(r))
        return SMOE_EFORKED;
    if (expert_index >= r->n_experts)
        return SMOE_EID;
    struct smoe_expert_rec x = r->experts[expert_index];
    COPIED(x);
    if (x.n_parts == 0 || !within(x.first_part, x.n_parts, r->n_parts))
        return SMOE_ECORRUPT;
    for (uint32_t i = 0; i < x.n_parts && i < room; i++) {
        struct smoe_part_rec p;
        if (take_part(r, &x, i, &p))
            return SMOE_ECORRUPT;
        parts[i] = (smoe_part){p.slot_offset, p.bytes, p.file_offset, p.file, 0};
    }
    return (int)x.n_parts;
}

static int take_tensor(const smoe_ring *r, const struct smoe_expert_rec *x, uint32_t i, smoe_tensor *out) {
    struct smoe_tensor_rec t = r->tensors[i];
    struct smoe_part_rec p;
    COPIED(t);
    if (take_part(r, x, t.part, &p) || !within(t.offset, t.bytes, p.bytes) || t.ndim > SMOE_NDIM ||
        t.name >= r->strings_bytes || t.dtype >= r->strings_bytes || t.tag >= r->strings_bytes)
        return SMOE_ECORRUPT;
    *out = (smoe_tensor){
        .name = r->strings + t.name,
        .dtype = r->strings + t.dtype,
        .tag = r->strings + t.tag,
        .ndim = t.ndim,
        .part = t.part,
        .offset = p.slot_offset + t.offset,
        .bytes = t.bytes,
    };
    memcpy(out->shape, t.shape, sizeof t.shape);
    return 0;
}

int smoe_expert_tensors(const smoe_ring *r, uint32_t expert_index, smoe_tensor *tensors, uint32_t room) {
    if (!mine(r))
        return SMOE_EFORKED;
    if (expert_index >= r->n_experts)
        return SMOE_EID;
    struct smoe_expert_rec x = r->experts[expert_index];
    COPIED(x);
    if (x.layout >= r->n_layouts)
        return SMOE_ECORRUPT;
    struct smoe_layout_rec l = r->layouts[x.layout];
    COPIED(l);
    if (!within(l.first_tensor, l.n_tensors, r->n_tensors))
        return SMOE_ECORRUPT;
    for (uint32_t i = 0; i < l.n_tensors && i < room; i++)
        if (take_tensor(r, &x, l.first_tensor + i, &tensors[i]))
            return SMOE_ECORRUPT;
    return (int)l.n_tensors;
}

const char *smoe_file_path(const smoe_ring *r, uint32_t file) {
    return mine(r) && file < r->n_files ? r->strings + r->files[file].path : "?";
}

int smoe_file_mode(const smoe_ring *r, uint32_t file) {
    if (!mine(r))
        return SMOE_EFORKED;
    if (file >= r->n_files)
        return -EINVAL;
    int mode = (int)(atomic_load_explicit(&r->file_modes[file], memory_order_relaxed) & 255u);
    return mode <= SMOE_MODE_MEMORY ? mode : SMOE_MODE_UNKNOWN;
}

int smoe_file_refusal(const smoe_ring *r, uint32_t file) {
    if (!mine(r))
        return SMOE_EFORKED;
    return file < r->n_files ? (int)(atomic_load_explicit(&r->file_modes[file], memory_order_relaxed) >> 8) : -EINVAL;
}

int smoe_set_file_mode(smoe_ring *r, uint32_t file, int mode, int os_error) {
    if (!mine(r))
        return SMOE_EFORKED;
    if (file >= r->n_files || mode < 0 || mode > SMOE_MODE_MEMORY)
        return -EINVAL;
    atomic_store_explicit(&r->file_modes[file], (uint32_t)mode | (uint32_t)os_error << 8, memory_order_relaxed);
    return 0;
}

int smoe_census(const smoe_ring *r, uint32_t *out) {
    if (!mine(r))
        return SMOE_EFORKED;
    memset(out, 0, 9 * sizeof *out);
    for (uint32_t s = 0; s < r->n_slots; s++) {
        uint64_t w = slot_word(r, s);
        if (WORD_STATE(w) < SMOE_STATES)
            out[WORD_STATE(w)]++;
        out[6] += WORD_HOLDERS(w) != 0;
        out[7] += word_guess(w);
    }
    for (uint32_t c = 0; c < SMOE_CLIENTS; c++)
        out[8] += atomic_load_explicit(&r->reservations[c], memory_order_relaxed);
    return 0;
}

int smoe_slot_states(const smoe_ring *r, uint8_t *out, uint32_t n) {
    if (!mine(r))
        return SMOE_EFORKED;
    for (uint32_t s = 0; s < r->n_slots && s < n; s++) {
        uint64_t w = slot_word(r, s);
        out[s] =
            (uint8_t)(WORD_STATE(w) | (WORD_HOLDERS(w) ? SMOE_SHOWN_HELD : 0) | (word_guess(w) ? SMOE_SHOWN_GUESS : 0));
    }
    return 0;
}

int smoe_ring_state(const smoe_ring *r) {
    if (!mine(r))
        return SMOE_EFORKED;
    return (int)atomic_load_explicit(&r->header->state, memory_order_acquire);
}

uint64_t smoe_slot_word(const smoe_ring *r, uint32_t slot) {
    return mine(r) && slot < r->n_slots ? slot_word(r, slot) : 0;
}

int smoe_memory_level(void) {
    return plat_memory_level();
}

uint64_t smoe_slot_tick(const smoe_ring *r, uint32_t slot) {
    return mine(r) && slot < r->n_slots ? lru_tick(r, slot) : 0;
}

uint32_t smoe_home(const smoe_ring *r, uint32_t expert_index) {
    return mine(r) && expert_index < r->n_experts ? atomic_load_explicit(&r->homes[expert_index], memory_order_relaxed)
                                                  : 0;
}

uint32_t smoe_histogram_count(const smoe_ring *r, uint32_t expert_index) {
    return mine(r) && expert_index < r->n_experts
               ? atomic_load_explicit(&r->histogram[expert_index], memory_order_relaxed)
               : 0;
}

int smoe_histogram_read(const smoe_ring *r, uint32_t *counts, uint32_t n) {
    if (!mine(r))
        return SMOE_EFORKED;
    for (uint32_t i = 0; i < n && i < r->n_experts; i++)
        counts[i] = atomic_load_explicit(&r->histogram[i], memory_order_relaxed);
    return 0;
}

int smoe_histogram_add(smoe_ring *r, uint32_t expert_index, uint32_t n) {
    if (!mine(r))
        return SMOE_EFORKED;
    if (expert_index >= r->n_experts)
        return SMOE_EID;
    uint32_t seen = atomic_load_explicit(&r->histogram[expert_index], memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&r->histogram[expert_index], &seen,
                                                  seen > UINT32_MAX - n ? UINT32_MAX : seen + n, memory_order_relaxed,
                                                  memory_order_relaxed)) {
    }
    return 0;
}

int smoe_histogram_set(smoe_ring *r, uint32_t expert_index, uint32_t n) {
    if (!mine(r))
        return SMOE_EFORKED;
    if (expert_index >= r->n_experts)
        return SMOE_EID;
    atomic_store_explicit(&r->histogram[expert_index], n, memory_order_relaxed);
    return 0;
}

uint32_t smoe_queue_length(const smoe_ring *r, int speculative) {
    return !mine(r) ? 0 : queue_length(speculative ? speculative_queue(r) : demand_queue(r));
}

/* By the id: what the entry says is for other eyes. */
static uint32_t role_of(uint32_t id) {
    return id < SMOE_ID_WORKER       ? SMOE_ROLE_CLIENT
           : id < SMOE_ID_SUPERVISOR ? SMOE_ROLE_WORKER
           : id == SMOE_ID_TRACE     ? SMOE_ROLE_TRACE
           : id == SMOE_ID_PREWARM   ? SMOE_ROLE_PREWARM
                                     : SMOE_ROLE_SUPERVISOR;
}

int smoe_participants(const smoe_ring *r, smoe_participant_info *out, uint32_t room) {
    if (!mine(r))
        return SMOE_EFORKED;
    uint32_t n = 0;
    for (uint32_t id = 0; id < SMOE_PARTICIPANTS; id++) {
        const struct smoe_participant *p = &r->participants[id];
        if (!(atomic_load_explicit(&p->generation, memory_order_acquire) & 1))
            continue;
        if (n < room) {
            out[n] = (smoe_participant_info){
                .id = id,
                .role = role_of(id),
                .pid = p->pid,
                /* By query of the lock; the own one does not conflict with itself. */
                .alive = id == r->id || plat_lock_query(r->lock_fd, id) == 1,
                .reserved_slots =
                    id < SMOE_CLIENTS ? atomic_load_explicit(&r->reservations[id], memory_order_relaxed) : 0,
                .current_slot = atomic_load_explicit(&p->current_slot, memory_order_relaxed),
                .started_ns = p->started_ns,
                .read_started_ns = atomic_load_explicit(&p->read_started_ns, memory_order_relaxed),
            };
            memcpy(out[n].label, p->label, sizeof out[n].label);
            out[n].label[sizeof out[n].label - 1] = 0;
        }
        n++;
    }
    return (int)n;
}

uint64_t smoe_now_ns(void) {
    return plat_now_ns();
}

uint32_t smoe_sizeof(uint32_t record) {
    static const uint32_t sizes[] = {
        sizeof(struct smoe_expert_rec), sizeof(struct smoe_window_rec), sizeof(struct smoe_part_rec),
        sizeof(struct smoe_move_rec),   sizeof(struct smoe_layout_rec), sizeof(struct smoe_tensor_rec),
        sizeof(struct smoe_file_rec),   sizeof(struct smoe_header),     sizeof(struct smoe_slot),
    };
    return record < sizeof sizes / sizeof *sizes ? sizes[record] : 0;
}

const char *smoe_strerror(int code) {
    switch (code) {
    case SMOE_EGONE:
        return "the ring was removed or replaced";
    case SMOE_EBUSY:
        return "all slots are held";
    case SMOE_EREAD:
        return "the expert could not be read";
    case SMOE_ETIMEOUT:
        return "not read in time";
    case SMOE_ENOSUPERVISOR:
        return "not read in time, and nobody serves the ring";
    case SMOE_ELEASE:
        return "this process's registration was taken from it";
    case SMOE_EFORKED:
        return "the handle belongs to the parent process";
    case SMOE_EABI:
        return "the ring was made by another version or build";
    case SMOE_ENOTLIVE:
        return "the ring is not finished";
    case SMOE_ECORRUPT:
        return "numbers that do not add up";
    case SMOE_ECLIENTS:
        return "32 clients are attached already";
    case SMOE_EID:
        return "no such layer or expert, or one named twice";
    case SMOE_ETOOLARGE:
        return "more experts than the ring has slots";
    case SMOE_ESTOPPING:
        return "the ring is being stopped";
    case SMOE_ENOSPACE:
        return "the shared-memory file system is too small";
    case SMOE_EDIFFERS:
        return "not the ring that was asked for";
    case SMOE_ECHANGED:
        return "a source file changed under the ring";
    case SMOE_ETAKEN:
        return "another process holds this id's lock";
    default:
        return code < 0 && code > -1000 ? strerror(-code) : "unknown error";
    }
}

uint32_t smoe_api_version(void) {
    return SMOE_API_VERSION;
}

uint32_t smoe_layout_version(void) {
    return SMOE_ABI;
}

static const char *reason_words(int32_t os_error) {
    switch (os_error) {
    case SMOE_READ_SHORT:
        return "the file ended too early";
    case SMOE_READ_CHANGED:
        return "the file is not the one that the ring was made for";
    case SMOE_READ_PLAN:
        return "the read plan does not add up";
    case SMOE_READ_KILLER:
        return "three workers died reading it";
    case SMOE_READ_UNSERVED:
        return "no worker is left to read it";
    case SMOE_READ_CHECKSUM:
        return "its checksum is not the vault's";
    default:
        return strerror(os_error);
    }
}

/* Appends to a text of which only `room` bytes are kept, and counts on. */
__attribute__((format(printf, 4, 5))) static void add(char *text, uint32_t room, int *length, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    uint32_t at = (uint32_t)*length < room ? (uint32_t)*length : room;
    int n = vsnprintf(at < room ? text + at : NULL, room - at, format, arguments);
    va_end(arguments);
    *length += n > 0 ? n : 0;
}

int smoe_error_text(const smoe_ring *r, const smoe_error *e, char *text, uint32_t room) {
    int length = 0;
    if (room)
        text[0] = 0;
    add(text, room, &length, "%s", smoe_strerror(e->code));
    bool of_an_expert = e->code == SMOE_EREAD || e->code == SMOE_ETIMEOUT || e->code == SMOE_ENOSUPERVISOR;
    if (of_an_expert || e->code == SMOE_EID)
        add(text, room, &length, ": layer %u, expert %u", e->layer, e->expert);
    if (e->code == SMOE_EREAD || e->code == SMOE_ECHANGED) {
        const char *path = r && mine(r) ? smoe_file_path(r, e->file) : NULL;
        add(text, room, &length, path ? ": %s" : ": file %s", path ? path : "of the model");
    }
    if (e->code == SMOE_EREAD)
        add(text, room, &length, " at %llu, %llu of %llu bytes", (unsigned long long)e->offset,
            (unsigned long long)e->got, (unsigned long long)e->wanted);
    else if (!of_an_expert && e->code != SMOE_EID && (e->wanted || e->got))
        add(text, room, &length, ": wanted %llu, there is %llu", (unsigned long long)e->wanted,
            (unsigned long long)e->got);
    if (e->call && *e->call)
        add(text, room, &length, " (%s%s%s)", e->call, e->os_error ? ": " : "",
            e->os_error ? reason_words(e->os_error) : "");
    return length;
}
