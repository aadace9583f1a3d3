// llama.cpp's AMX kernels end the process (SIGSEGV) where g++ removes the stores of its tile configuration. No harness, no
// llama.cpp: its `tile_config_t` and `ggml_tile_config_init` (ggml/src/ggml-cpu/amx/mmq.cpp) alone.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cstdint>
#include <cstdio>

struct tile_config_t {
    uint8_t palette_id = 0;
    uint8_t start_row = 0;
    uint8_t reserved_0[14] = {0};
    uint16_t colsb[16] = {0};
    uint8_t rows[16] = {0};
};

__attribute__((noinline)) static void ggml_tile_config_init() {
    alignas(64) tile_config_t tc = {};
    tc.palette_id = 1;
    tc.rows[0] = 8;   tc.colsb[0] = 64;
    tc.rows[1] = 8;   tc.colsb[1] = 64;
    tc.rows[2] = 16;  tc.colsb[2] = 32;
    tc.rows[3] = 16;  tc.colsb[3] = 32;
    for (int i = 4; i < 8; ++i) { tc.rows[i] = 16; tc.colsb[i] = 64; }
#ifdef KEEP
    asm volatile("" :: "r"(&tc) : "memory");  // the compiler must not drop the stores
#endif
    _tile_loadconfig(&tc);
}

__attribute__((noinline)) static void dirty() {
    volatile char stack[4096];
    for (auto & byte : stack) byte = 0x5a;
}

int main() {
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return puts("no AMX here"), 2;
    dirty();
    ggml_tile_config_init();
    puts("configured");
}
