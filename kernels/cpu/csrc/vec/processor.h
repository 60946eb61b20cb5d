// What kernels know of the processor beyond its instruction sets.
#pragma once
#include <cpuid.h>

// Whether this is Zen 5, whose caches are best filled in another way than those of Zen 4 (measured).
inline bool is_zen5() {
    static const bool found = [] {
        unsigned eax, ebx, ecx, edx;
        if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != signature_AMD_ebx) return false;
        if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
        constexpr unsigned kFamily = 0x1A;
        return (eax >> 8 & 0xF) + (eax >> 20 & 0xFF) == kFamily;
    }();
    return found;
}
