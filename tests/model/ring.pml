/* ring.pml: the ring's protocol, as csrc/ has it, for spin.  README.md says how to read and run it.
 *
 * Processes: clients (T threads each), workers, a guesser (prewarm), the supervisor.  Any of them may be
 * killed, CRASHES in all, or stopped for ever, STOPS in all, after each of its writes to shared memory.
 * (A kill between two reads shows others nothing that a kill after the write before does not.)
 *
 * One atomic block is one access to shared memory.  A loop "load the word, compute, CAS, on failure
 * again" that does nothing else is one step: its last round is what counts.  The queue of the C code is
 * modelled access by access with REALQ, else as a bounded FIFO whose operations are one step.
 *
 * READY and CONSUMED are one state here (the claim tells them apart for nobody in the protocol), and
 * the victim is any evictable slot: what holds for any choice holds for the least recently used.
 */

/* --- size ------------------------------------------------------------------------------------------- */
#ifndef S
#define S 2             /* slots, at most 3 */
#endif
#ifndef NE
#define NE 2            /* experts, at most 3 */
#endif
#ifndef C
#define C 2             /* clients, at most 3 */
#endif
#ifndef T
#define T 1             /* threads of each client */
#endif
#ifndef B
#define B 1             /* experts in a batch, at most 2 */
#endif
#ifndef W
#define W 2             /* workers, at most 3 */
#endif
#ifndef Q
#define Q 4             /* capacity of a queue: twice the slots, a power of two */
#endif
#ifndef ROUNDS
#define ROUNDS 1        /* batches of each thread, anew after a restart */
#endif
#ifndef GUESSES
#define GUESSES 0       /* speculations of the guesser */
#endif
#ifndef CRASHES
#define CRASHES 0
#endif
#ifndef STOPS
#define STOPS 0
#endif
#ifndef FAILS
#define FAILS 0         /* reads that may fail */
#endif
#ifndef GIVEUPS
#define GIVEUPS 0       /* waits that may end by the caller's own time limit */
#endif
/* RESERVE: with reservations.  REALQ: the queue access by access.  WARM: slot 0 holds the last expert at
 * first.  STALE: expert 0's home names slot 0, which is empty.  RESTART: a dead client comes back under its id when the entry is free. */

/* --- the slot word: core.h -------------------------------------------------------------------------- */
#define EMPTY    0
#define QUEUED   1
#define READING  2
#define READY    3
#define FAILED   4
#define SPEC     8
#define ST(w)    ((w) & 7)
#define WK(w)    (((w) >> 4) & 3)
#define EX(w)    (((w) >> 6) & 3)
#define HOLD(w)  ((w) & (7 << 8))
#define BIT(c)   (1 << (8 + (c)))
#define WORD(st, wk, ex, ho) ((st) | ((wk) << 4) | ((ex) << 6) | (ho))
#define NONE     3      /* no slot, no expert, no bytes worth having */

short word[S];          /* smoe_slot.word */
byte  data[S];          /* whose bytes lie in the slot */
byte  home[NE];         /* homes */
byte  res[C];           /* reservations */
byte  granted[C];       /* ghost: what reserve() has returned true for */
#if T > 1
byte  priv[C * S];      /* private_holds: the count ... */
bool  lck[C * S];       /* ... and its lock bit */
bool  killed[C];        /* all threads of a process die at once */
#endif

/* --- death and stopping ----------------------------------------------------------------------------- */
byte  crashes, stops, fails, giveups, finished;
bool  cdead[C], wdead[W], pdead;        /* the entry is used and its lock free: plat_lock_query says so */
bool  cstop[C], wstop[W], pstop;        /* stopped: the lock is held */
bool  dropped;                          /* a push met a full queue: then nobody promised an entry */

#if CRASHES > 0
#define DIE(mark)  :: crashes < CRASHES -> crashes++; mark; goto dead
#else
#define DIE(mark)
#endif
#if STOPS > 0
#define STOP(mark) :: stops < STOPS -> stops++; mark; goto halt
#else
#define STOP(mark)
#endif
#if T > 1
#define CDIES   cdead[me] = true; killed[me] = true
#define GONE    if :: killed[me] -> goto gone :: else fi;
#define LIVE    !killed[me] &&
#else
#define CDIES   cdead[me] = true
#define GONE
#define LIVE
#endif
#define NOTGONE
#define CRISK   if DIE(CDIES) STOP(cstop[me] = true) :: true fi
#define WRISK   if DIE(wdead[me] = true) STOP(wstop[me] = true) :: true fi
#define PRISK   if DIE(pdead = true) STOP(pstop = true) :: true fi
#define SRISK   if DIE(skip) :: true fi

/* --- queues: queue.c -------------------------------------------------------------------------------- */
#define DEMAND 0
#if GUESSES > 0
#define NQ 2
#else
#define NQ 1
#endif

#ifdef REALQ
byte seq[NQ * Q], val[NQ * Q], head[NQ], tail[NQ];
#define AT(q, p)   ((q) * Q + (p) % Q)
#define QEMPTY(q)  (seq[AT(q, head[q])] <= head[q])             /* queue_empty: d <= 0 */
#define QWORK(q)   (seq[AT(q, head[q])] > head[q])
#define QHELP(q)   (QEMPTY(q) && seq[AT(q, tail[q])] >= tail[q])        /* a push in vain for ever is a hang */
#ifdef BUG_VYUKOV
/* The original: first a position (the tail moves), then the cell. */
#define PUSH_CELL(q, v, RK) tail[q] == qt -> tail[q] = qt + 1; r = 4; RK
#define PUSH_LATE(q, v, RK) if :: r == 4 -> atomic { seq[AT(q, qt)] = qt + 1; val[AT(q, qt)] = v; r = 1; RK } :: else fi;
#else
#define PUSH_CELL(q, v, RK) true -> seq[AT(q, qt)] = qt + 1; val[AT(q, qt)] = v; r = 1; RK
#define PUSH_LATE(q, v, RK)
#endif
/* queue_push.  GN: what a thread of a dead process looks at; RK: what may befall; then OK or FULL. */
#define PUSH(q, v, GN, RK, OK, FULL) \
    do \
    :: atomic { GN qt = tail[q] };                              /* the tail's load */ \
       atomic { GN if                                           /* the cell's load; at d = 0 its CAS */ \
                   :: seq[AT(q, qt)] == qt -> if :: PUSH_CELL(q, v, RK) :: else -> r = 2 fi \
                   :: seq[AT(q, qt)] > qt -> r = 2 \
                   :: else -> r = 3 \
                   fi }; \
       PUSH_LATE(q, v, RK) \
       atomic { GN if \
                   :: r == 3 && tail[q] == qt -> r = 0; qt = 0; dropped = true; FULL \
                   :: r == 3 && tail[q] != qt -> r = 0; qt = 0 \
                   :: else -> if :: tail[q] == qt -> tail[q] = qt + 1 :: else fi;       /* move_on */ \
                              qt = 0; if :: r == 1 -> r = 0; OK :: else -> r = 0 fi \
                   fi } \
    od
/* queue_pop into s; then OK or NOTHING.  An empty queue is looked at again, or left, with no effect on
 * others: that the head has not moved is checked in the cell's step. */
#define POP(q, WHEN, OK, NOTHING) \
    do \
    :: atomic { WHEN; qt = head[q] };                           /* the head's load */ \
       atomic { if                                              /* the cell's load; at d = 1 its CAS */ \
                :: seq[AT(q, qt)] == qt + 1 -> s = val[AT(q, qt)]; seq[AT(q, qt)] = qt + Q; \
                                               val[AT(q, qt)] = 0; r = 1; WRISK \
                :: seq[AT(q, qt)] > qt + 1 \
                :: else -> qt = 0; NOTHING \
                fi }; \
       atomic { if :: head[q] == qt -> head[q] = qt + 1 :: else fi;                     /* move_on */ \
                qt = 0; if :: r == 1 -> OK :: else fi } \
    od
/* Workers are alike: the first pop of all is worker 0's. */
#define MYTURN (me == 0 || seq[0] >= Q)
#define UNUSED (tail[0] == 0)
#else
#define QEMPTY(q)  (len(fifo[q]) == 0)
#define QWORK(q)   (len(fifo[q]) > 0)
#define QHELP(q)   QEMPTY(q)
chan fifo[NQ] = [Q] of { byte };
#define PUSH(q, v, GN, RK, OK, FULL) \
    atomic { GN if :: len(fifo[q]) < Q -> fifo[q]!v; RK; OK :: else -> dropped = true; FULL fi }
#define POP(q, WHEN, OK, NOTHING) \
    atomic { WHEN; if :: len(fifo[q]) > 0 -> fifo[q]?s; r = 1; WRISK; OK :: else -> NOTHING fi }
#define MYTURN true
#define UNUSED false
#endif

/* --- who may take which slot: ring.c take_slot, lru.c ----------------------------------------------- */
#define IDLE(s)    (ST(word[s]) == EMPTY || (ST(word[s]) == READY && HOLD(word[s]) == 0))
#define UNHELDQ(s) (ST(word[s]) == QUEUED && HOLD(word[s]) == 0)       /* unheld_queued */
#ifdef BUG_TAKE_READING
#define TAKEABLE(s) (IDLE(s) || UNHELDQ(s) || (ST(word[s]) == READING && HOLD(word[s]) == 0))
#else
#define TAKEABLE(s) (IDLE(s) || UNHELDQ(s))
#endif
#if S > 2
#define CHOOSE(which, to) :: which(0) -> to = 0 :: which(1) && !FRESH -> to = 1 :: which(2) && !FRESH -> to = 2
#define EACH(f)  (f(0) || f(1) || f(2))
#define HELD(m)  (((word[0] & BIT(m)) != 0) + ((word[1] & BIT(m)) != 0) + ((word[2] & BIT(m)) != 0))
#else
#define CHOOSE(which, to) :: which(0) -> to = 0 :: which(1) && !FRESH -> to = 1
#define EACH(f)  (f(0) || f(1))
#define HELD(m)  (((word[0] & BIT(m)) != 0) + ((word[1] & BIT(m)) != 0))
#endif
/* Of a ring that nobody has used yet slot 0 is taken first, as lru_find_empty does. */
#define FRESH    (UNUSED && ST(word[0]) == EMPTY && ST(word[1]) == EMPTY && home[0] == NONE && home[1] == NONE)
/* A worker that is stopped in the middle of a read: its waiters' time limit will end (ReadTimeout). */
#if STOPS > 0
#define STUCK(s)  (ST(word[s]) == READING && wstop[WK(word[s])])
#define LOST(s)   (STUCK(s) && HOLD(word[s]) == 0)
#else
#define STUCK(s)  false
#define LOST(s)   false
#endif

/* --- the own holder bit: ring.c hold_lock, hold_unlock ---------------------------------------------- */
/* OPEN and SHUT stand inside an atomic block and split it in two where there are threads. */
#if T > 1
#define P(s)  (me * S + (s))
#ifdef BUG_NO_LOCKBIT
#define OPEN(s)   held = priv[P(s)] }; atomic { GONE skip
#else
#define OPEN(s)   if :: killed[me] -> goto gone \
                     :: !killed[me] && !lck[P(s)] -> lck[P(s)] = true; held = priv[P(s)] \
                     fi }; atomic { GONE skip
#endif
#define SHUT(s, n) skip }; atomic { GONE priv[P(s)] = n; lck[P(s)] = false; held = 0
#else
#define OPEN(s)   skip
#define SHUT(s, n) skip
#define held 0
#endif

#ifdef RESERVE
#define COVERED assert(HELD(me) <= res[me])     /* each slot with the own bit is covered */
#if C > 2
#define GRANTED (granted[0] + granted[1] + granted[2])
#define OTHERS  (res[0] + res[1] + res[2] - res[me])
#define ADDUP   sum = res[0]; sum = sum + res[1]; sum = sum + res[2]    /* reserved_total: word by word */
#define SOMECSTOP (cstop[0] || cstop[1] || cstop[2])
#elif C > 1
#define GRANTED (granted[0] + granted[1])
#define OTHERS  (res[0] + res[1] - res[me])
#define ADDUP   sum = res[0]; sum = sum + res[1]
#define SOMECSTOP (cstop[0] || cstop[1])
#else
#define GRANTED granted[0]
#define OTHERS  0
#define ADDUP   sum = res[0]
#define SOMECSTOP false
#endif
#else
#define COVERED skip
#endif

/* Which experts a batch names.  Experts are alike: in a ring that nobody has used the first client's is 0. */
#if defined(WARM) || defined(STALE)
#define ANYPICK true
#else
#define ANYPICK (me > 0 || t > 0 || round > 1 || crashes > 0)
#endif
#if B > 1
#if NE > 2
#define PICK if :: e[0] = 0; e[1] = 1 :: ANYPICK -> e[0] = 1; e[1] = 0 :: ANYPICK -> e[0] = 1; e[1] = 2 \
                :: ANYPICK -> e[0] = 2; e[1] = 0 fi
#else
#define PICK if :: e[0] = 0; e[1] = 1 :: ANYPICK -> e[0] = 1; e[1] = 0 fi
#endif
#elif NE > 2
#define PICK if :: e[0] = 0 :: ANYPICK -> e[0] = 1 :: ANYPICK -> e[0] = 2 fi
#else
#define PICK if :: e[0] = 0 :: ANYPICK -> e[0] = 1 fi
#endif

#define NO   0          /* enum slot_join: JOIN_NO; */
#define WAIT 1          /* JOIN_HIT, JOIN_LOADING, JOIN_PROMOTED while it is being read; */
#define KICK 2          /* JOIN_PROMOTED while it is queued, JOIN_RETRY: push it */

#if C > 2
#define CDEAD (cdead[0] || cdead[1] || cdead[2])
#elif C > 1
#define CDEAD (cdead[0] || cdead[1])
#else
#define CDEAD cdead[0]
#endif
#if W > 2
#define WDEAD (wdead[0] || wdead[1] || wdead[2])
#elif W > 1
#define WDEAD (wdead[0] || wdead[1])
#else
#define WDEAD wdead[0]
#endif
#define ANYDEAD (CDEAD || WDEAD || pdead)
#define LOADING(s) (ST(word[s]) == QUEUED || ST(word[s]) == READING)
#define CALM (!EACH(LOADING))
/* Step 4 of recovery: what was dead when the sweep began. */
#define FREE atomic { \
        i = 0; do :: i < C -> if :: (cs & (1 << i)) -> cdead[i] = false :: else fi; i++ :: else -> break od; \
        i = 0; do :: i < W -> if :: (ws & (1 << i)) -> wdead[i] = false :: else fi; i++ :: else -> break od; \
        if :: ps -> pdead = false :: else fi; i = 0; SRISK }

/* --- a client's thread: ring.c smoe_fetch ----------------------------------------------------------- */
proctype client(byte me; byte t) {
    byte e[B], s[B];    /* the batch: experts and, once held, slots */
    byte k, h, r, qt, old, round, err;
#if T > 1
    byte held;
#endif
#ifdef RESERVE
    byte sum;
#endif
#ifdef BUG_RESERVE_ONE_BY_ONE
#define AGAIN one
#else
#define AGAIN acquire
#endif
begin:
        atomic { GONE if
                 :: round < ROUNDS -> round++; PICK; s[0] = NONE; s[B-1] = NONE
                 :: else -> finished++; goto fin
                 fi };
#ifdef RESERVE
reserve:
#if defined(BUG_RESERVE_CHECK_FIRST)
        atomic { GONE sum = OTHERS + res[me] + B };
#elif defined(BUG_RESERVE_ONE_BY_ONE)
one:    atomic { GONE res[me]++; CRISK };
        ADDUP;
#else
        atomic { GONE res[me] = res[me] + B; CRISK };           /* reserve_try: add to the own word ... */
        ADDUP;                                                  /* ... then look at all: reserved_total */
#endif
        atomic { GONE if
                 :: sum <= S ->
#ifdef BUG_RESERVE_CHECK_FIRST
                    res[me] = res[me] + B;
#endif
#ifdef BUG_RESERVE_ONE_BY_ONE
                    granted[me]++; sum = 0; r = 1
#else
                    granted[me] = granted[me] + B; sum = 0; r = 1;
                    assert(GRANTED <= S)
#endif
                 :: else -> sum = 0; r = 0
                 fi };
        if
        :: r == 0 ->
#if defined(BUG_RESERVE_ONE_BY_ONE)
            atomic { GONE res[me]--; CRISK };
            (OTHERS + granted[me] + 1 <= S);
            goto one
#else
#ifndef BUG_RESERVE_CHECK_FIRST
            atomic { GONE res[me] = res[me] - B; CRISK };       /* reserve_try: take it back */
#endif
            atomic { if                                         /* reserve: space_nap, demand_check */
#if T > 1
                     :: killed[me] -> goto gone
#endif
                     :: OTHERS + res[me] + B <= S -> goto reserve
#if STOPS > 0
                     :: SOMECSTOP -> r = 0; e[0] = 0; e[B-1] = 0; s[0] = 0; s[B-1] = 0; goto begin           /* Busy: no reservation in time */
#endif
                     fi }
#endif
        :: else -> r = 0
        fi;
#endif
acquire:                                                        /* acquire_one */
        atomic { GONE h = home[e[k]];                           /* load of the home */
                 if :: h == NONE -> goto take :: else fi };
        atomic { GONE
            OPEN(h);                                            /* join_home: hold_lock */
            if                                                  /* slot_join */
            :: ST(word[h]) == EMPTY || EX(word[h]) != e[k] -> r = NO
            :: else ->
                if
                :: ST(word[h]) == FAILED ->
                    word[h] = WORD(QUEUED, 0, EX(word[h]), HOLD(word[h]) | BIT(me)); r = KICK
                :: ST(word[h]) == QUEUED && (word[h] & SPEC) -> word[h] = (word[h] & ~SPEC) | BIT(me); r = KICK
                :: else -> word[h] = (word[h] & ~SPEC) | BIT(me); r = WAIT
                fi;
                s[k] = h; COVERED;
                CRISK
            fi;
#if T > 1 && defined(RESERVE)
            old = (r != NO && held > 0);
#endif
            SHUT(h, (r == NO -> held : held + 1));              /* join_home: hold_unlock */
            if :: r == NO -> goto take :: else -> h = 0 fi;
#if T > 1 && defined(RESERVE)
            if :: old -> skip :: else -> goto joined fi };
        atomic { GONE old = 0; res[me]--; granted[me]--; CRISK };       /* join_home: it is covered already */
joined: atomic { GONE
#endif
            if :: r == KICK -> r = 0; goto kick :: else -> r = 0; goto next_one fi
        };
take:                                                           /* take_slot */
        atomic {
            if
#if T > 1
            :: killed[me] -> goto gone
#endif
            CHOOSE(TAKEABLE, s[k])                              /* lru_find_empty, lru_victim, unheld_queued */
#if STOPS > 0
            :: EACH(LOST) -> k = 0; err = B + 1; goto release   /* take_slot: its time limit */
#endif
            fi;
            OPEN(s[k]);                                         /* take_slot: hold_lock */
            if
            :: held == 0 && TAKEABLE(s[k]) ->
                old = (ST(word[s[k]]) == EMPTY -> NONE : EX(word[s[k]]));
                word[s[k]] = WORD(QUEUED, 0, e[k], BIT(me));    /* slot_take */
                r = 1; COVERED;
                CRISK
            :: else -> r = 0
            fi;
            SHUT(s[k], (r == 1 -> 1 : held));                   /* take_slot: hold_unlock */
            if
            :: r == 0 -> s[k] = NONE; goto take
            :: r == 1 && old == NONE -> r = 0; old = 0; goto home_in
            :: r == 1 && old != NONE -> r = 0
            fi
        };
        atomic { GONE                                           /* taken: clear the victim's home */
                 if :: home[old] == s[k] -> home[old] = NONE; old = 0; CRISK :: else -> old = 0 fi };
home_in:
        atomic { GONE if                                        /* acquire_one: the home's CAS */
                 :: home[e[k]] == h || home[e[k]] == s[k] -> home[e[k]] = s[k]; h = 0; CRISK; goto kick
                 :: else -> h = 0
                 fi };
        atomic { GONE
                 OPEN(s[k]);                                    /* lost: slot_give_back, exactly as taken */
                 if
#ifdef BUG_GIVEBACK_ANY
                 :: ST(word[s[k]]) == QUEUED && EX(word[s[k]]) == e[k] ->
#else
                 :: word[s[k]] == WORD(QUEUED, 0, e[k], BIT(me)) && held <= 1 ->
#endif
                    word[s[k]] = 0; r = 1; CRISK
                 :: else                                        /* somebody has joined: it stays */
                 fi;
                 SHUT(s[k], (r == 1 -> 0 : held));
                 if :: r == 1 -> r = 0; s[k] = NONE; goto acquire :: else fi };
kick:   PUSH(DEMAND, s[k], GONE, CRISK, goto next_one, goto next_one);  /* queue_demand; full: the waiter helps */
next_one:
#if B > 1
        atomic { k++; if :: k < B -> goto AGAIN :: else -> k = 0 fi };
#endif
look:                                                           /* wait_one: look, after_slice, help */
        atomic { if
                 :: LIVE ST(word[s[k]]) == READY ->
                    assert((word[s[k]] & BIT(me)) && EX(word[s[k]]) == e[k] && data[s[k]] == e[k]);
                    k++; if :: k < B -> goto look :: else -> k = 0; goto release fi
                 :: LIVE ST(word[s[k]]) == FAILED ->
                    assert((word[s[k]] & BIT(me)) && EX(word[s[k]]) == e[k]);
                    k = 0; err = 1; goto release                /* ExpertReadError; smoe_fetch releases all */
#ifndef BUG_NO_HELP
                 :: LIVE ST(word[s[k]]) == QUEUED && QHELP(DEMAND)
#endif
                 :: LIVE STUCK(s[k]) -> k = 0; err = 1; goto release /* ReadTimeout */
#if GIVEUPS > 0
                 :: LIVE (ST(word[s[k]]) == QUEUED || ST(word[s[k]]) == READING) && giveups < GIVEUPS ->
                    giveups++; k = 0; err = 1; goto release     /* its own time limit */
#endif
                 :: LIVE (!(word[s[k]] & BIT(me)) || EX(word[s[k]]) != e[k] || ST(word[s[k]]) == EMPTY) -> assert(false)
#if T > 1
                 :: killed[me] -> goto gone
#endif
                 fi };
        PUSH(DEMAND, s[k], GONE, CRISK, goto look, goto look);  /* help */
release:                                                        /* smoe_release: release_one for each hold */
        atomic { GONE
            if :: s[k] == NONE -> r = 1; goto released :: else fi;
            OPEN(s[k]);
            assert(word[s[k]] & BIT(me));                       /* until here the caller computed with it */
            assert(EX(word[s[k]]) == e[k]);
            assert(err || (ST(word[s[k]]) == READY && data[s[k]] == e[k]));
            if
            :: held <= 1 ->                                     /* slot_drop */
                if
                :: ST(word[s[k]]) == FAILED && HOLD(word[s[k]]) == BIT(me) -> word[s[k]] = 0
                :: else -> word[s[k]] = word[s[k]] & ~BIT(me)
                fi;
                r = 1;
                CRISK
            :: else
            fi;
            SHUT(s[k], held - 1)
#ifdef RESERVE
        };
released:                                                       /* release_one: unreserve */
        atomic { GONE
            if :: r == 1 -> res[me]--; granted[me]--; CRISK :: else fi;
#else
            ;
released:
#endif
            r = 0; e[k] = 0; s[k] = 0; k++;
            if :: k < B -> goto release :: else -> k = 0; err = 0; goto begin fi
        };
dead:                                                           /* all that was private dies */
    atomic { k = 0; err = 0; r = 0; h = 0; old = 0; qt = 0; round = 0; e[0] = 0; e[B-1] = 0; s[0] = 0; s[B-1] = 0;
#if T > 1
             held = 0;
#endif
#ifdef RESERVE
             sum = 0;
#endif
    };
    atomic { !cdead[me];                                        /* the entry is free again */
#ifdef RESTART
             goto begin                                         /* another process under this id: smoe_attach */
#else
             finished++; goto fin
#endif
    };
#if T > 1
gone:
    atomic { k = 0; err = 0; r = 0; h = 0; old = 0; qt = 0; e[0] = 0; e[B-1] = 0; s[0] = 0; s[B-1] = 0; held = 0;
#ifdef RESERVE
             sum = 0;
#endif
             finished++; goto fin };
#endif
#if STOPS > 0
halt:
    finished++;
endhalt:
    false;
#endif
fin: skip
}

/* --- a worker: worker.c ----------------------------------------------------------------------------- */
proctype worker(byte me) {
    byte s, r, qt, x;
endidle:                                                        /* idle: the doorbell; serve_next */
#if NQ > 1
    POP(0, (QWORK(0) || QWORK(1)) && MYTURN, goto serve, goto guess);   /* demand first */
guess:
    POP(1, true, goto serve, goto endidle);
#else
    POP(0, QWORK(0) && MYTURN, goto serve, goto endidle);
#endif
serve:
    atomic { if                                                 /* slot_start */
             :: ST(word[s]) == QUEUED ->
                x = EX(word[s]);
                word[s] = WORD(READING, me, x, HOLD(word[s])) | (word[s] & SPEC);
                data[s] = NONE;                                 /* read_plan: bytes begin to change */
                WRISK
             :: else -> s = 0; r = 0; goto endidle              /* a stale hint: skipped */
             fi };
    atomic { assert(ST(word[s]) == READING && WK(word[s]) == me && EX(word[s]) == x);
             if
             :: data[s] = x;                                    /* bytes are in; slot_publish */
                word[s] = WORD(READY, 0, x, HOLD(word[s]))
#if FAILS > 0
             :: fails < FAILS -> fails++;                       /* the read fails; slot_fail */
#ifdef BUG_FAIL_EMPTIES
                word[s] = 0
#else
                word[s] = (HOLD(word[s]) -> WORD(FAILED, 0, x, HOLD(word[s])) : 0)
#endif
#endif
             fi;
             x = 0; s = 0; r = 0;
             WRISK };
    goto endidle;
dead:
    atomic { s = 0; r = 0; qt = 0; x = 0 };
    atomic { !wdead[me] -> goto endidle };                      /* the supervisor starts another one */
#if STOPS > 0
halt:
endhalt:
    false
#endif
}

/* --- the guesser: ring.c guess_one, by the prewarm process or a client's smoe_speculate -------------- */
#if GUESSES > 0
proctype guesser() {
    byte e, s, h, old, r, qt, n;
begin:
    do
    :: n < GUESSES ->
        n++;
        if :: e = 0 :: e = 1
#if NE > 2
           :: e = 2
#endif
        fi;
        h = home[e];                                            /* load of the home */
        if
        :: h != NONE ->
            if                                                  /* there, loading or failed: left as it is */
            :: ST(word[h]) != EMPTY && EX(word[h]) == e -> goto next
            :: else
            fi
        :: else
        fi;
        atomic {
            if
            CHOOSE(IDLE, s)                                     /* lru_find_empty, lru_victim */
            :: goto next                                        /* no idle slot, or guess_admit says no */
            fi;
            old = (ST(word[s]) == EMPTY -> NONE : EX(word[s]));
            word[s] = WORD(QUEUED, 0, e, 0) | SPEC;             /* slot_take */
            PRISK
        };
        if
        :: old != NONE ->                                       /* taken */
            atomic { if :: home[old] == s -> home[old] = NONE; old = 0; PRISK :: else -> old = 0 fi }
        :: else -> old = 0
        fi;
        atomic { if                                             /* guess_one: the home's CAS */
                 :: home[e] == h || home[e] == s -> home[e] = s; h = 0; PRISK
                 :: else -> h = 0; goto undo
                 fi };
        PUSH(1, s, NOTGONE, PRISK, goto next, dropped = false; goto undo);
undo:   atomic { if                                             /* take_back_guess: slot_give_back */
#ifdef BUG_GIVEBACK_ANY
                 :: ST(word[s]) == QUEUED && EX(word[s]) == e ->
#else
                 :: word[s] == (WORD(QUEUED, 0, e, 0) | SPEC) ->
#endif
                    word[s] = 0; PRISK
                 :: else
                 fi };
next:   atomic { e = 0; s = 0; h = 0; r = 0; old = 0 }
    :: else -> break
    od;
    atomic { finished++; goto fin };
dead:
    atomic { e = 0; s = 0; h = 0; r = 0; old = 0; qt = 0 };
    atomic { !pdead -> goto begin };                            /* supervised: started again */
#if STOPS > 0
halt:
    finished++;
endhalt:
    false;
#endif
fin: skip
}
#endif

/* --- the supervisor: recover.c ---------------------------------------------------------------------- */
#if CRASHES > 0
proctype supervisor() {
    byte i, s, r, qt, cs, ws, ps;
    bool sweep;          /* a start sweeps in full; whether before anything else happens is left open */
endsup:
    do
    :: atomic { ANYDEAD || sweep ->                              /* the set of dead ids at its beginning */
           sweep = false; cs = 0; ws = 0; ps = pdead;
           i = 0; do :: i < C -> cs = cs | (cdead[i] << i); i++ :: else -> break od;
           i = 0; do :: i < W -> ws = ws | (wdead[i] << i); i++ :: else -> break od;
           i = 0 };
#ifdef BUG_FREE_EARLY
       FREE;
#endif
       do                                                       /* 1: recover_client */
       :: i < C ->
            atomic {
                do :: s < S && ((cs & (1 << i)) == 0 || (word[s] & BIT(i)) == 0) -> s++ :: else -> break od;
                if
                :: s < S ->                                     /* slot_drop */
                    if
                    :: ST(word[s]) == FAILED && HOLD(word[s]) == BIT(i) -> word[s] = 0
                    :: else -> word[s] = word[s] & ~BIT(i)
                    fi;
                    SRISK
                :: else -> s = 0;
#ifdef RESERVE
                    if                                          /* the reservation */
                    :: cs & (1 << i) -> res[i] = 0; granted[i] = 0; i++; SRISK
                    :: else -> i++
                    fi
#else
                    i++
#endif
                fi }
       :: else -> i = 0; break
       od;
       do                                                       /* 2: READING of dead workers */
       :: i < W ->
            atomic {
                do :: s < S && !((ws & (1 << i)) && ST(word[s]) == READING && WK(word[s]) == i) -> s++ :: else -> break od;
                if
                :: s < S ->
                    word[s] = WORD(QUEUED, 0, EX(word[s]), HOLD(word[s])) | (word[s] & SPEC);
                    SRISK
                :: else -> s = 0; i++
                fi }
       :: else -> i = 0; break
       od;
#ifdef BUG_FREE_FIRST
       FREE;
#endif
push:                                                           /* 3: push every QUEUED slot, by its flag */
       atomic {
           if
           :: s == S -> s = 0; goto pushed
           :: s < S && ST(word[s]) != QUEUED -> s++; goto push
           :: s < S && ST(word[s]) == QUEUED
           fi;
#if NQ > 1
           if :: (word[s] & SPEC) -> goto push1 :: else fi
#endif
       };
       PUSH(0, s, NOTGONE, SRISK, s++; goto push, s++; goto push);
#if NQ > 1
push1: PUSH(1, s, NOTGONE, SRISK, s++; goto push, s++; goto push);
#endif
pushed:
#if !defined(BUG_FREE_FIRST) && !defined(BUG_FREE_EARLY)
       FREE;                                                    /* 4: the entries; others are started */
#endif
       atomic { cs = 0; ws = 0; ps = 0 }
    od;
dead:                                                           /* killed; another one starts */
    atomic { i = 0; s = 0; r = 0; qt = 0; cs = 0; ws = 0; ps = 0;
             if :: sweep = true :: sweep = false fi;
             goto endsup }
}
#endif

init {
    byte i;
    d_step {
        i = 0; do :: i < NE -> home[i] = NONE; i++ :: else -> break od;
        i = 0; do :: i < S -> data[i] = NONE; i++ :: else -> break od;
#ifdef REALQ
        i = 0; do :: i < NQ * Q -> seq[i] = i % Q; i++ :: else -> break od;
#endif
#ifdef STALE
        home[0] = 0;
#endif
#ifdef WARM
        word[0] = WORD(READY, 0, NE - 1, 0); data[0] = NE - 1; home[NE - 1] = 0;
#endif
        i = 0
    }
    atomic {
#if CRASHES > 0
        run supervisor();
#endif
        i = 0; do :: i < W -> run worker(i); i++ :: else -> break od;
#if GUESSES > 0
        run guesser();
#endif
        i = 0; do :: i < C * T -> run client(i / T, i % T); i++ :: else -> break od;
        i = 0
    }
    atomic {
        /* Invariant 3: all clients come to an end.  Dead entries are swept, and nothing that is queued
         * has been lost (unless a stopped process holds it, or a queue was full). */
        finished == C * T + (GUESSES > 0) && !ANYDEAD && (CALM || dropped || stops > 0);
        /* Invariant 4. */
        i = 0;
        do
        :: i < C -> if :: !cstop[i] -> assert(HELD(i) == 0 && res[i] == 0) :: else fi; i++
        :: else -> break
        od
    }
}
