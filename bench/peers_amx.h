/* For building llama.cpp on processors with AMX: -DCMAKE_CXX_FLAGS="-include .../bench/peers_amx.h".
 *
 * The _tile_loadconfig of GCC 12 (and others of its time) tells the compiler that 8 of the 64 bytes are read, so the writes to the rest may
 * move past it; llama.cpp's AMX products then load a half-written configuration and die. This one names all bytes.
 */
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%X0" : : "m"(*(const unsigned char(*)[64])(config)))
#endif
