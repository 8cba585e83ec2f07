/* scan.h: 64 shared words at once.
 *
 * The search for a victim reads some thousand bytes of ticks and bounds that other processes write meanwhile;
 * four words a step made it three times as fast, and eight, where the processor has AVX-512, half as fast again.  C11
 * knows no vector of atomics.  What is needed of each word is a relaxed load: some value that it had, not torn.  On
 * x86-64 every aligned eight bytes of a vector load are read at once, and an intrinsic is a load that the compiler
 * neither repeats nor splits; so that is what the vectors are made of.  Elsewhere, on older processors and under
 * ThreadSanitizer, which would not know them for atomics, the words are loaded one by one. */
#ifndef SMOE_SCAN_H
#define SMOE_SCAN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#define SMOE_SCAN_AVX2 1
#else
#define SMOE_SCAN_AVX2 0
#endif

/* The smallest of 64 words, all below 2^63 (vectors compare signed numbers only). */
uint64_t least_of_64(const _Atomic uint64_t *words);

/* Is any of 64 words not zero? */
bool any_of_64(const _Atomic uint64_t *words);

/* The same without vectors, whatever the processor: for tests. */
uint64_t least_of_64_plain(const _Atomic uint64_t *words);
bool any_of_64_plain(const _Atomic uint64_t *words);

#endif
