/* fuzz_attach.c: attaching a segment that is anything, and looking at all that an onlooker and a supervisor look at. */
#include "scribble.h"

#include <string.h>

static void look_at_experts(const smoe_ring *r, const smoe_info *info) {
    smoe_part parts[4];
    smoe_tensor tensors[8];
    uint32_t layer, expert;
    for (uint32_t x = 0; x < info->n_experts && x < 64; x++) {
        int n = smoe_expert_parts(r, x, parts, 4);
        for (int i = 0; i < n && i < 4; i++)
            REQUIRE(within(parts[i].offset, parts[i].bytes, info->slot_bytes));
        n = smoe_expert_tensors(r, x, tensors, 8);
        for (int i = 0; i < n && i < 8; i++)
            REQUIRE(within(tensors[i].offset, tensors[i].bytes, info->slot_bytes) && tensors[i].ndim <= 4 &&
                    strlen(tensors[i].name) + strlen(tensors[i].dtype) + strlen(tensors[i].tag) < 1u << 20);
        smoe_expert_pair(r, x, &layer, &expert);
        (void)smoe_expert_layout(r, x);
    }
    for (int64_t l = 0; l < 3; l++)
        for (int64_t e = 0; e < 14; e++)
            REQUIRE(smoe_expert_index(r, l, e) < (int64_t)info->n_experts);
}

static void look_on(smoe_ring *r) {
    smoe_participant_info who[163];
    smoe_tally tally;
    smoe_error e;
    smoe_info info;
    uint32_t census[9];
    uint8_t states[128];
    REQUIRE(smoe_get_info(r, &info) == 0);
    look_at_experts(r, &info);
    int n = smoe_participants(r, who, 163);
    for (int i = 0; i < n; i++)
        REQUIRE(memchr(who[i].label, 0, sizeof who[i].label) && who[i].role <= SMOE_ROLE_TRACE);
    for (int id = -1; id < 163; id++)
        (void)smoe_get_tally(r, id, SMOE_OF_ALL, &tally);
    smoe_census(r, census);
    smoe_slot_states(r, states, sizeof states);
    for (uint32_t f = 0; f < info.n_files && f < 8; f++) {
        (void)strlen(smoe_file_path(r, f));
        REQUIRE(smoe_file_mode(r, f) <= SMOE_MODE_MEMORY);
        (void)smoe_file_refusal(r, f);
    }
    (void)smoe_queue_length(r, 0);
    (void)smoe_ring_state(r);
    (void)smoe_intact(r, SMOE_LIVE, &e);
    (void)smoe_files_sum(r);
}

/* As the next supervisor does with a ring that it finds. */
static void adopt(void) {
    const smoe_tables tables = testring_tables(&ring);
    smoe_error e;
    smoe_ring *r;
    int lock = smoe_supervisor_lock(ring.name, &e);
    REQUIRE(lock >= 0);
    if (smoe_attach(ring.name, SMOE_ROLE_SUPERVISOR, (uint32_t)lock, "fuzz", &r, &e) < 0)
        return;
    if (smoe_adoptable(r, &ring.geometry, &tables, &e) == 0)
        (void)smoe_recover(r, 1, NULL);
    smoe_detach(r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct stream in = {data, size};
    struct op op;
    smoe_error e;
    smoe_ring *r = NULL;
    scribble_mend();
    for (uint32_t i = 0; i < OPS_MOST && scribble_next(&in, &op); i++) {
        if (op.what < 0xC0) {
            scribble_put(&op);
        } else if (!r && smoe_attach(ring.name, SMOE_ROLE_OBSERVER, 0, "fuzz", &r, &e) < 0) {
            r = NULL;
        }
    }
    if (r || smoe_attach(ring.name, SMOE_ROLE_OBSERVER, 0, "fuzz", &r, &e) == 0) {
        look_on(r);
        smoe_detach(r);
    }
    adopt();
    return 0;
}
