/* guess.pml: "QUEUED and READING guesses together never exceed the limit": lru.c guess_admit, guess_mark,
 * guess_clear, guess_over; ring.c guess_one.  G guessers, three slots, a limit of one; a worker that lands guesses.
 *
 * The bit, a look at all bits (with the cleaning of stale ones), the take, the bit again, and then a look at all words;
 * too many: give back exactly.  Left out is guess_over's shortcut: so far below the limit that all clients together
 * could not overstep it the words are not counted.
 *   -DBUG_GUESS_NO_RECOUNT   no look after the take
 *   -DBUG_GUESS_BITS         that look at the bits instead of at the words
 */
#ifndef G
#define G 3
#endif
#define S 3
#define LIMIT 1

byte admitted;          /* ghost: guesses that have been pushed, or may be, and have not landed */
bool guess[S];          /* word_guess(slot word) */
bool hint[S];            /* the hint bit */
bool pushed[S];

/* guess_count, word by word of the groups (each slot a group of its own) */
#define COUNT(of)  n = of[0]; n = n + of[1]; n = n + of[2]
/* guess_clear */
#define CLEAR(x) \
    if :: hint[x] -> hint[x] = false; if :: guess[x] -> hint[x] = true :: else fi :: else fi

proctype guesser() {
    byte s, n, o;
    if :: s = 0 :: s = 1 :: s = 2 fi;           /* lru_find_empty, lru_victim */
    !guess[s];
    hint[s] = true;                              /* guess_admit */
    COUNT(hint);
    if
    :: n <= LIMIT
    :: else ->
        o = 0;
        do
        :: o < S -> if :: o != s && hint[o] && !guess[o] -> CLEAR(o) :: else fi; o++
        :: else -> break
        od;
        COUNT(hint);
        if :: n <= LIMIT :: else -> CLEAR(s); goto fin fi
    fi;
    atomic { if :: guess[s] -> goto lost :: else -> guess[s] = true fi };       /* slot_take */
    hint[s] = true;                              /* guess_mark */
#if defined(BUG_GUESS_NO_RECOUNT)
    n = 0;
#elif defined(BUG_GUESS_BITS)
    COUNT(hint);
#else
    COUNT(guess);                                /* guess_over */
#endif
    if
    :: n <= LIMIT -> atomic { admitted++; assert(admitted <= LIMIT); pushed[s] = true; goto fin }
    :: else -> guess[s] = false                 /* take_back_guess: slot_give_back */
    fi;
lost:
    CLEAR(s);
fin: skip
}

proctype worker() {
    byte s;
endidle:
    do
    :: atomic { pushed[0] -> pushed[0] = false; guess[0] = false; admitted--; s = 0 }; CLEAR(s)
    :: atomic { pushed[1] -> pushed[1] = false; guess[1] = false; admitted--; s = 1 }; CLEAR(s)
    :: atomic { pushed[2] -> pushed[2] = false; guess[2] = false; admitted--; s = 2 }; CLEAR(s)
    od
}

init {
    atomic {
        byte i;
        run worker();
        do :: i < G -> run guesser(); i++ :: else -> break od
    }
}
