// Products of bfloat16 matrices, whose sums are float32, by a processor's tile unit (Intel AMX) or
// by its vectors of pairs (AVX-512 BF16): a unit, of which both have the same functions.
// A tile has 16 rows of 64 bytes. A left operand lies as tiles of 16 rows and 32 columns; a right
// one as strips of 32 columns, two tiles for each 32 rows, in which a row holds 16 columns of a
// pair of rows. A tile of the one kind, seen as 16 x 16 pairs and transposed, is one of the other.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef MEGABLOCKS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MEGABLOCKS_ON_TILES \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")))
#endif

namespace megablocks {

#ifdef MEGABLOCKS_TILES

using Bits = std::int16_t;                   // of a bfloat16
constexpr std::int64_t kTileRows = 16;       // also the columns of a right tile
constexpr std::int64_t kTileColumns = 32;    // of a left tile; also the rows of a right one
constexpr std::int64_t kTile = kTileRows * kTileColumns;
constexpr std::int64_t kBlock = 32;          // rows and columns of the sums made at a time

// A left and a right operand for each of the blocks of sums from `begin` to `end`: where those of
// block 0 lie, and how many numbers the next block's are away.
struct Operands {
    const Bits* left;
    std::int64_t left_step;
    const Bits* strip;
    std::int64_t strip_step;
    std::int64_t depth;  // tiles in a row of the left one, which follow each other
    std::int64_t begin, end;
    std::int64_t half;   // a block of 16 rows, if there is one
};

MEGABLOCKS_ON_TILES inline void fetch(const Bits* line) {
    _mm_prefetch(reinterpret_cast<const char*>(line), _MM_HINT_T0);
}

// Where a product of 32 rows, or of 16, and a strip of 32 columns is made, added to sums [32 32]
// or in their place.
struct Addends {
    const Bits* left;
    std::int64_t next;  // numbers from 16 rows of the left operand to the others
    const Bits* strip;
    std::int64_t depth;
    bool half;  // of 16 rows
    bool fresh;  // there are no sums yet
};

// A processor's tiles. In between something else is done: a tile's product takes long.
struct TileUnit {
    // Linux is asked once; what says no is taken as an answer.
    static bool is_there() {
        static const bool ready = [] {
            constexpr long kAskForState = 0x1023, kTileData = 18;
            __builtin_cpu_init();
            return has_vectors() && __builtin_cpu_supports("amx-tile") &&
                   __builtin_cpu_supports("amx-bf16") &&
                   syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
        }();
        return ready;
    }

    static bool has_vectors() {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bf16");
    }

    // Tiles of this thread are set up for as long as this lives.
    class On {
      public:
        MEGABLOCKS_ON_TILES On() {
            alignas(64) struct {
                std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
                std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
                std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
            } config;
            _tile_loadconfig(&config);
        }
        MEGABLOCKS_ON_TILES ~On() { _tile_release(); }
        On(const On&) = delete;
        On& operator=(const On&) = delete;
    };

    template <typename Between>
    MEGABLOCKS_ON_TILES static void add(const Addends& of, float* sums, Between& between) {
        if (of.fresh) {
            clear();
        } else {
            give(sums);
        }
        for (std::int64_t k = 0; k < of.depth; ++k) {
            _tile_loadd(4, of.left + k * kTile, 64);
            _tile_loadd(6, of.strip + 2 * k * kTile, 64);
            _tile_loadd(7, of.strip + (2 * k + 1) * kTile, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (!of.half) {
                _tile_loadd(5, of.left + of.next + k * kTile, 64);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            between.some();
        }
        between.rest();
        take(sums);
    }

  private:
    static constexpr std::int64_t kRowBytes = kBlock * sizeof(float);

    MEGABLOCKS_ON_TILES static void clear() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }

    MEGABLOCKS_ON_TILES static void take(float* sums) {
        _tile_stored(0, sums, kRowBytes);
        _tile_stored(1, sums + kTileRows, kRowBytes);
        _tile_stored(2, sums + kTileRows * kBlock, kRowBytes);
        _tile_stored(3, sums + kTileRows * kBlock + kTileRows, kRowBytes);
    }

    MEGABLOCKS_ON_TILES static void give(const float* sums) {
        _tile_loadd(0, sums, kRowBytes);
        _tile_loadd(1, sums + kTileRows, kRowBytes);
        _tile_loadd(2, sums + kTileRows * kBlock, kRowBytes);
        _tile_loadd(3, sums + kTileRows * kBlock + kTileRows, kRowBytes);
    }
};

// Vectors of 16 sums, to which products of pairs of numbers are added.
struct VectorUnit {
    static bool is_there() {
        __builtin_cpu_init();
        return TileUnit::has_vectors();
    }

    struct On {
        On() {}  // nothing to set up
    };

    template <typename Between>
    MEGABLOCKS_ON_TILES static void add(const Addends& of, float* sums, Between& between) {
        between.rest();
        for (std::int64_t row = 0; row < (of.half ? kTileRows : kBlock); row += kRows) {
            const Bits* left = of.left + row / kTileRows * of.next + row % kTileRows * kTileColumns;
            rows(left, of.strip, of.depth, of.fresh, sums + row * kBlock);
        }
        if (of.half && of.fresh) {
            std::memset(sums + kTileRows * kBlock, 0, kTileRows * kBlock * sizeof(float));
        }
    }

  private:
    static constexpr std::int64_t kRows = 8;  // whose sums stay in registers

    MEGABLOCKS_ON_TILES static void rows(const Bits* left, const Bits* strip, std::int64_t depth,
                                         bool fresh, float* sums) {
        __m512 first[kRows], second[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            first[r] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * kBlock);
            second[r] = fresh ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * kBlock + kTileRows);
        }
        for (std::int64_t k = 0; k < depth; ++k, left += kTile, strip += 2 * kTile) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) fetch(left + kTile + r * kTileColumns);
#pragma GCC unroll 2
            for (std::int64_t pair = 0; pair < kTileRows; ++pair) {
                const __m512bh one = (__m512bh)_mm512_load_si512(strip + pair * kTileColumns);
                const __m512bh two =
                    (__m512bh)_mm512_load_si512(strip + kTile + pair * kTileColumns);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    std::int32_t both;
                    std::memcpy(&both, left + r * kTileColumns + 2 * pair, sizeof(both));
                    const __m512bh each = (__m512bh)_mm512_set1_epi32(both);
                    first[r] = _mm512_dpbf16_ps(first[r], each, one);
                    second[r] = _mm512_dpbf16_ps(second[r], each, two);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            _mm512_store_ps(sums + r * kBlock, first[r]);
            _mm512_store_ps(sums + r * kBlock + kTileRows, second[r]);
        }
    }
};

// What is still to be done with a block of sums, a pair of rows at a time.
template <typename Finish>
class Unfinished {
  public:
    MEGABLOCKS_ON_TILES Unfinished(Finish& finish, std::int64_t pairs)
        : finish_(finish), pairs_(pairs) {}

    MEGABLOCKS_ON_TILES void begin(std::int64_t block, const float* sums) {
        block_ = block;
        sums_ = sums;
        done_ = 0;
    }
    MEGABLOCKS_ON_TILES void some() { go(done_ + pairs_ < kPairs ? done_ + pairs_ : kPairs); }
    MEGABLOCKS_ON_TILES void rest() {
        go(kPairs);
        if (block_ >= 0) finish_.whole(block_);
        block_ = -1;
    }

  private:
    static constexpr std::int64_t kPairs = kBlock / 2;

    MEGABLOCKS_ON_TILES void go(std::int64_t stop) {
        for (; done_ < stop; ++done_) finish_.pair(block_, 2 * done_, sums_ + 2 * done_ * kBlock);
    }

    Finish& finish_;
    const std::int64_t pairs_;  // at a time
    std::int64_t block_ = -1, done_ = kPairs;
    const float* sums_ = nullptr;
};

// Makes blocks of sums, and finishes each while the next one is made. Long products are made in
// pieces, of which one side stays in the nearest cache.
template <typename Unit, typename Finish>
MEGABLOCKS_ON_TILES inline void products(const Operands& of, Finish& finish) {
    constexpr std::int64_t kPiece = 16, kTogether = 8;
    alignas(64) float sums[kTogether][kBlock * kBlock];
    const std::int64_t together = of.depth > kPiece ? kTogether : 2;
    const std::int64_t steps = of.depth > kPiece ? kPiece : of.depth;
    Unfinished<Finish> before{finish, (kTileRows + steps - 1) / steps};
    for (std::int64_t first = of.begin; first < of.end; first += together) {
        const std::int64_t stop = first + together < of.end ? first + together : of.end;
        for (std::int64_t k = 0; k < of.depth; k += kPiece) {
            const std::int64_t depth = of.depth - k < kPiece ? of.depth - k : kPiece;
            for (std::int64_t block = first; block < stop; ++block) {
                float* own = sums[block - first];
                Unit::add({of.left + block * of.left_step + k * kTile, of.depth * kTile,
                           of.strip + block * of.strip_step + 2 * k * kTile, depth,
                           block == of.half, k == 0},
                          own, before);
                if (k + depth == of.depth) before.begin(block, own);
            }
        }
    }
    before.rest();
}

MEGABLOCKS_ON_TILES inline void transpose_quarters(__m512i* v) {
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        const __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        const __m512i b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
        const __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]);
        const __m512i d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
        v[i] = _mm512_unpacklo_epi64(a, c);
        v[i + 1] = _mm512_unpackhi_epi64(a, c);
        v[i + 2] = _mm512_unpacklo_epi64(b, d);
        v[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
}

MEGABLOCKS_ON_TILES inline void fetch_tile(const Bits* from) {
    for (std::int64_t row = 0; row < kTileRows; ++row) {
        _mm_prefetch(reinterpret_cast<const char*>(from + row * kTileColumns), _MM_HINT_T1);
    }
}

// A tile from 16 rows of 64 bytes, transposed as pairs of numbers. `stride` counts numbers.
MEGABLOCKS_ON_TILES inline void transpose_pairs(const Bits* from, std::int64_t stride, Bits* to) {
    __m512i v[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = _mm512_loadu_si512(from + i * stride);
    transpose_quarters(v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i a = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
        _mm512_store_si512(to + i * kTileColumns, _mm512_shuffle_i32x4(a, c, 0x88));
        _mm512_store_si512(to + (i + 4) * kTileColumns, _mm512_shuffle_i32x4(b, d, 0x88));
        _mm512_store_si512(to + (i + 8) * kTileColumns, _mm512_shuffle_i32x4(a, c, 0xdd));
        _mm512_store_si512(to + (i + 12) * kTileColumns, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
}

// A row of both tiles of a strip, from a pair of rows with 32 columns.
MEGABLOCKS_ON_TILES inline void pair_rows(__m512i even, __m512i odd, Bits* to) {
    const __m512i low = _mm512_unpacklo_epi16(even, odd), high = _mm512_unpackhi_epi16(even, odd);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_store_si512(to, _mm512_permutex2var_epi64(low, first, high));
    _mm512_store_si512(to + kTile, _mm512_permutex2var_epi64(low, second, high));
}

// Neighbouring strips from a matrix whose rows are those of the product's right operand. Strips
// are `next` numbers apart; rows are read from end to end, as memory gives them fastest.
MEGABLOCKS_ON_TILES inline void strips_of_rows(const Bits* from, std::int64_t stride,
                                               std::int64_t depth, std::int64_t strips, Bits* to,
                                               std::int64_t next) {
    for (std::int64_t row = 0; row < depth * kTileRows; ++row) {
        const Bits* pair = from + 2 * row * stride;
        Bits* at = to + row / kTileRows * 2 * kTile + row % kTileRows * kTileColumns;
        for (std::int64_t strip = 0; strip < strips; ++strip) {
            const Bits* both = pair + strip * kBlock;
            pair_rows(_mm512_loadu_si512(both), _mm512_loadu_si512(both + stride),
                      at + strip * next);
        }
    }
}

// A strip from two times 16 rows of the right operand's transpose, which has no gaps between rows.
// Meanwhile memory is asked for those of the next strip, `ahead` numbers on, from end to end.
MEGABLOCKS_ON_TILES inline void strip_of_columns(const Bits* first, const Bits* second,
                                                 std::int64_t depth, std::int64_t ahead,
                                                 Bits* to) {
    const std::int64_t stride = depth * kTileColumns;
    for (std::int64_t k = 0; k < depth; ++k) {
        fetch_tile(first + ahead + k * kTile);
        fetch_tile(second + ahead + k * kTile);
        transpose_pairs(first + k * kTileColumns, stride, to + 2 * k * kTile);
        transpose_pairs(second + k * kTileColumns, stride, to + (2 * k + 1) * kTile);
    }
}

MEGABLOCKS_ON_TILES inline __m512 widened_16(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// The first or last 16 of 32 numbers.
MEGABLOCKS_ON_TILES inline __m512 widened_low(__m512i bits) {
    return widened_16(_mm512_castsi512_si256(bits));
}
MEGABLOCKS_ON_TILES inline __m512 widened_high(__m512i bits) {
    return widened_16(_mm512_extracti64x4_epi64(bits, 1));
}

MEGABLOCKS_ON_TILES inline __m256i narrowed_16(__m512 numbers) {
    return (__m256i)_mm512_cvtneps_pbh(numbers);
}

MEGABLOCKS_ON_TILES inline void store_16(Bits* to, __m256i bits) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
}

MEGABLOCKS_ON_TILES inline __m512i narrowed_32(__m512 low, __m512 high) {
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
MEGABLOCKS_ON_TILES inline __m512i narrowed_32(const float* from) {
    return narrowed_32(_mm512_load_ps(from), _mm512_load_ps(from + kTileRows));
}

// Writes 32 numbers past the caches: they are next read when all others are written.
MEGABLOCKS_ON_TILES inline void store_past(Bits* to, __m512i bits) {
    if (reinterpret_cast<std::uintptr_t>(to) % 64) {
        _mm512_storeu_si512(to, bits);
    } else {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits);
    }
}

#endif

}  // namespace megablocks
