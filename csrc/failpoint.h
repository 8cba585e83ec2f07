/* failpoint.h: test builds only: a process that dies at a named step, or does something in the middle of it.
 *
 * FAILPOINT("name") stands in the core behind the steps of the protocol.  In a build with SMOE_FAILPOINTS each
 * pass calls failpoint(), otherwise it is nothing.  One name stands at one place; a test holds this table
 * against the source.
 */
#ifndef SMOE_FAILPOINT_H
#define SMOE_FAILPOINT_H

#define FAILPOINT_NAMES(X)                                                                                             \
    /* reservation */                                                                                                  \
    X("reserve.added")                                                                                                 \
    X("reserve.undone")                                                                                                \
    X("reserve.wanted")                                                                                                \
    X("unreserve.word")                                                                                                \
    X("space.flag_cleared")                                                                                            \
    /* acquire */                                                                                                      \
    X("join.word")                                                                                                     \
    X("promote.word")                                                                                                  \
    X("promote.guess_cleared")                                                                                         \
    X("promote.pushed")                                                                                                \
    X("retry.word")                                                                                                    \
    X("take.word")                                                                                                     \
    X("take.hint_cleared")                                                                                             \
    X("take.victim_home_cleared")                                                                                      \
    X("home.lost")                                                                                                     \
    X("giveback.word")                                                                                                 \
    X("giveback.hinted")                                                                                               \
    X("home.set")                                                                                                      \
    X("acquire.pushed")                                                                                                \
    /* hints and ticks */                                                                                              \
    X("hint.empty_cleared")                                                                                            \
    X("hint.cold_set")                                                                                                 \
    X("hint.guess_cleared")                                                                                            \
    X("stamp.drawn")                                                                                                   \
    /* queues */                                                                                                       \
    X("push.cell")                                                                                                     \
    X("push.tail")                                                                                                     \
    X("doorbell.added")                                                                                                \
    X("sleep.marked")                                                                                                  \
    X("pop.cell")                                                                                                      \
    X("pop.head")                                                                                                      \
    X("pop.returned")                                                                                                  \
    X("pop.speculative")                                                                                               \
    /* read */                                                                                                         \
    X("read.started")                                                                                                  \
    X("read.recorded")                                                                                                 \
    X("read.window")                                                                                                   \
    X("read.moved")                                                                                                    \
    X("read.done")                                                                                                     \
    X("publish.stamped")                                                                                               \
    X("publish.word")                                                                                                  \
    X("wake.slot")                                                                                                     \
    X("publish.done")                                                                                                  \
    X("publish.guess_cleared")                                                                                         \
    X("count.marked")                                                                                                  \
    X("count.added")                                                                                                   \
    X("error.begun")                                                                                                   \
    X("fail.recorded")                                                                                                 \
    X("fail.word")                                                                                                     \
    /* claim, release, speculate, busy */                                                                              \
    X("claim.word")                                                                                                    \
    X("release.word")                                                                                                  \
    X("drop.emptied")                                                                                                  \
    X("guess.admitted")                                                                                                \
    X("guess.word")                                                                                                    \
    X("guess.marked")                                                                                                  \
    X("guess.home_set")                                                                                                \
    X("guess.pushed")                                                                                                  \
    X("busy.word")                                                                                                     \
    /* trace */                                                                                                        \
    X("trace.drawn")                                                                                                   \
    X("trace.begun")                                                                                                   \
    X("trace.timed")                                                                                                   \
    X("trace.entry")                                                                                                   \
    X("trace.switched")                                                                                                \
    /* coming and going */                                                                                             \
    X("register.locked")                                                                                               \
    X("register.filled")                                                                                               \
    X("register.done")                                                                                                 \
    X("detach.freed")                                                                                                  \
    /* recovery */                                                                                                     \
    X("recover.locked")                                                                                                \
    X("recover.slot_dropped")                                                                                          \
    X("recover.reservation_back")                                                                                      \
    X("recover.busy_back")                                                                                             \
    X("recover.client_done")                                                                                           \
    X("recover.counted")                                                                                               \
    X("recover.killer_recorded")                                                                                       \
    X("recover.requeued")                                                                                              \
    X("recover.read_forgotten")                                                                                        \
    X("recover.trace_off")                                                                                             \
    X("recover.mended")                                                                                                \
    X("recover.pushed")                                                                                                \
    X("recover.rung")                                                                                                  \
    X("recover.freed")                                                                                                 \
    X("recover.unlocked")                                                                                              \
    X("giveup.recorded")                                                                                               \
    X("giveup.word")

/* Die by SIGKILL at the nth pass of `name`, counted from now. */
void failpoint_arm(const char *name, unsigned nth);
/* Call hook(arg) at the next pass of `name`, once: another participant's move in the middle of a step. */
void failpoint_hook(const char *name, void (*hook)(void *), void *arg);

#endif
