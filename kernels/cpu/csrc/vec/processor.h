// What kernels know of the processor beyond its instruction sets.
#pragma once
#include <cpuid.h>

// Returns the family of AMD's processors, 0 for others.
inline unsigned find_amd_family() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx) return 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return 0;
    return (eax >> 8 & 0xF) + (eax >> 20 & 0xFF);
}

// The caches of these two are best filled in different ways (measured). Zen 3 is of Zen 4's family, without AVX-512.
inline bool is_zen4() {
    static const bool found = find_amd_family() == 0x19;
    return found;
}
inline bool is_zen5() {
    static const bool found = find_amd_family() == 0x1A;
    return found;
}
