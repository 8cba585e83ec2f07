/* recover.c: the sweep after a death.
 *
 * Each step is idempotent: a sweeper killed half-way is made good by the next one that does it again.
 * The entry is freed last, so that until then everybody sees that there is something to clean.
 */
#include "core.h"

/* Everything that a client leaves: its holder bits (the last one of a FAILED slot empties it) and its
 * reservation.  The caller holds the client's lock, or has seen that nobody does. */
void recover_client(smoe_ring *r, uint32_t id) {
    for (uint32_t s = 0; s < r->n_slots; s++)
        slot_drop(r, s, HOLDER_BIT(id));
    atomic_store_explicit(&r->reservations[id], 0, memory_order_seq_cst);
    uint32_t g = atomic_load_explicit(&r->participants[id].generation, memory_order_acquire);
    atomic_store_explicit(&r->participants[id].generation, (g | 1) + 1, memory_order_release);
    space_freed(r);
}

int smoe_recover_clients(smoe_ring *r) {
    int dead = 0;
    for (uint32_t id = 0; id < SMOE_CLIENTS; id++) {
        uint32_t g = atomic_load_explicit(&r->participants[id].generation, memory_order_acquire);
        if (!(g & 1) || plat_lock_query(r->lock_fd, id) != 0)
            continue;
        /* The lock is free, so the owner is gone for good; the id is taken for the time of the sweep, so
         * that nobody registers under it meanwhile. */
        if (plat_lock_try(r->lock_fd, id) != 0)
            continue;
        recover_client(r, id);
        plat_lock_drop(r->lock_fd, id);
        dead++;
    }
    return dead;
}
