/* SHA-256 of one short message (FIPS 180-4), without an object, a set-up or a lock: what a chain of block keys needs. */
#ifndef QUIPU_SHA256_H
#define QUIPU_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define SHA256_BYTES 32

/* The digest of message[0..length), in 32 bytes. */
void sha256(const uint8_t *message, size_t length, uint8_t *digest);

#endif
