// Fresh memory in pages of 2 MiB, where Linux gives these to those who ask.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace megablocks {

// The whole pages inside; whoever gets no huge ones has the others.
inline void ask_for_huge_pages(const void* memory, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr std::uintptr_t kPage = std::uintptr_t{1} << 21;
    const auto start = reinterpret_cast<std::uintptr_t>(memory);
    const std::uintptr_t begin = (start + kPage - 1) / kPage * kPage;
    const std::uintptr_t end = (start + bytes) / kPage * kPage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    static_cast<void>(memory);
    static_cast<void>(bytes);
#endif
}

}  // namespace megablocks
