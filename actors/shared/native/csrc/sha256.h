/* SHA-256 of one short message (FIPS 180-4), without an object, setup or lock, for chains of block keys. */
#ifndef QUIPU_SHA256_H
#define QUIPU_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define SHA256_BYTES 32

/* Writes the 32-byte digest of message[0..length). */
void sha256(const uint8_t *message, size_t length, uint8_t *digest);

#endif
