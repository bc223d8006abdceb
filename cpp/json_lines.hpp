// Texts out of JSON lines: the string under one key of an object a line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace megablocks {

// What the letter after a backslash stands for, or a NUL.
struct Escapes {
    constexpr Escapes() {
        constexpr std::string_view letters = "\"\\/bfnrt", values = "\"\\/\b\f\n\r\t";
        for (std::size_t each = 0; each < letters.size(); ++each) {
            meaning[static_cast<unsigned char>(letters[each])] = values[each];
        }
    }
    char meaning[256] = {};
};

// One line. It is taken if it is a JSON object of RFC 8259 in UTF-8 whose last member of the key is
// a string; a line that needs more care is not, whatever it holds: deep nesting, long numbers,
// escapes in keys, escaped NULs and halves of surrogate pairs.
class JsonLine {
  public:
    JsonLine(const char* begin, const char* end, std::string_view key)
        : at_(begin), end_(end), key_(key) {}

    bool is_blank() {
        skip_space();
        return at_ == end_;
    }

    // Writes the text and returns its end, or null if the line is not taken. What is written past
    // that end, up to the length of the line, means nothing.
    char* text(char* out) {
        skip_space();
        if (!take('{')) return nullptr;
        char* text_end = nullptr;
        do {
            skip_space();
            char* const free = text_end ? text_end : out;
            const char* const key = at_ + 1;
            const char* const key_end = string(free);
            if (!key_end || key_end - free != at_ - 1 - key) return nullptr;
            const bool wanted = std::string_view(free, key_end - free) == key_;
            skip_space();
            if (!take(':')) return nullptr;
            skip_space();
            if (!wanted) {
                if (!value(1, free)) return nullptr;
            } else if (!(text_end = string(out))) {
                return nullptr;
            }
            skip_space();
        } while (take(','));
        return take('}') && is_blank() && !has_nul_ ? text_end : nullptr;
    }

  private:
    static constexpr Escapes kEscapes{};
    static constexpr int kDeepest = 64;  // far below the limit of any parser
    static constexpr std::ptrdiff_t kLongest = 400;  // digits, which Python limits too

    bool take(char expected) {
        if (at_ == end_ || *at_ != expected) return false;
        ++at_;
        return true;
    }

    void skip_space() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\r')) ++at_;
    }

    bool literal(std::string_view name) {
        if (static_cast<std::size_t>(end_ - at_) < name.size() ||
            std::memcmp(at_, name.data(), name.size()) != 0) {
            return false;
        }
        at_ += name.size();
        return true;
    }

    bool digits() {
        const char* const begin = at_;
        while (at_ < end_ && '0' <= *at_ && *at_ <= '9') ++at_;
        return at_ > begin;
    }

    bool number() {
        const char* const begin = at_;
        take('-');
        if (!take('0') && !digits()) return false;
        if (take('.') && !digits()) return false;
        if (take('e') || take('E')) {
            if (!take('+')) take('-');
            if (!digits()) return false;
        }
        return at_ - begin <= kLongest;
    }

    // Passes over a value; strings in it are written from `out` on, where there is room.
    bool value(int depth, char* out) {
        if (at_ == end_ || depth > kDeepest) return false;
        switch (*at_) {
            case '"': return string(out);
            case '{': return members(depth, out);
            case '[': return elements(depth, out);
            case 't': return literal("true");
            case 'f': return literal("false");
            case 'n': return literal("null");
            default: return number();
        }
    }

    bool members(int depth, char* out) {
        ++at_;
        skip_space();
        if (take('}')) return true;
        do {
            skip_space();
            if (!string(out)) return false;
            skip_space();
            if (!take(':')) return false;
            skip_space();
            if (!value(depth + 1, out)) return false;
            skip_space();
        } while (take(','));
        return take('}');
    }

    bool elements(int depth, char* out) {
        ++at_;
        skip_space();
        if (take(']')) return true;
        do {
            skip_space();
            if (!value(depth + 1, out)) return false;
            skip_space();
        } while (take(','));
        return take(']');
    }

    // Writes what a string stands for, and returns its end, or null if it is none.
    char* string(char* out) {
        if (!take('"')) return nullptr;
        while (true) {
            copy_plain(out);
            if (at_ == end_) return nullptr;
            if (take('"')) return out;
            const auto c = static_cast<unsigned char>(*at_);
            if (c < 0x20) return nullptr;
            out = c == '\\' ? escaped(out) : several(out);
            if (!out) return nullptr;
        }
    }

    // Copies up to the first byte that is not one of ASCII that stands for itself.
    void copy_plain(char*& out) {
#if defined(__SSE2__) && defined(__GNUC__)
        for (; end_ - at_ >= 16; at_ += 16, out += 16) {
            const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at_));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out), word);
            // As signed numbers, control characters and bytes beyond ASCII are below a space.
            const __m128i found = _mm_or_si128(
                _mm_cmplt_epi8(word, _mm_set1_epi8(0x20)),
                _mm_or_si128(_mm_cmpeq_epi8(word, _mm_set1_epi8('"')),
                             _mm_cmpeq_epi8(word, _mm_set1_epi8('\\'))));
            if (const int mask = _mm_movemask_epi8(found)) {
                const int plain = __builtin_ctz(static_cast<unsigned>(mask));
                at_ += plain;
                out += plain;
                return;
            }
        }
#endif
        while (at_ < end_ && is_plain(*at_)) *out++ = *at_++;
    }

    static bool is_plain(char c) {
        return c != '"' && c != '\\' && static_cast<signed char>(c) >= 0x20;
    }

    char* escaped(char* out) {
        if (end_ - at_ < 2) return nullptr;
        const auto kind = static_cast<unsigned char>(at_[1]);
        at_ += 2;
        if (kind == 'u') return numbered(out);
        *out = kEscapes.meaning[kind];
        return *out ? out + 1 : nullptr;
    }

    // The value of four hexadecimal digits, or -1.
    std::int32_t four_digits() {
        if (end_ - at_ < 4) return -1;
        std::int32_t code = 0;
        for (int each = 0; each < 4; ++each, ++at_) {
            const char c = *at_;
            const char lower = static_cast<char>(c | 0x20);
            if ('0' <= c && c <= '9') {
                code = code * 16 + (c - '0');
            } else if ('a' <= lower && lower <= 'f') {
                code = code * 16 + (lower - 'a' + 10);
            } else {
                return -1;
            }
        }
        return code;
    }

    char* numbered(char* out) {
        std::int32_t code = four_digits();
        if (code < 0 || (0xDC00 <= code && code < 0xE000)) return nullptr;
        if (0xD800 <= code && code < 0xDC00) {
            if (!take('\\') || !take('u')) return nullptr;
            const std::int32_t low = four_digits();
            if (low < 0xDC00 || low >= 0xE000) return nullptr;
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        }
        has_nul_ |= code == 0;
        const int more = (code >= 0x80) + (code >= 0x800) + (code >= 0x10000);
        constexpr int kFirst[] = {0, 0xC0, 0xE0, 0xF0};
        *out++ = static_cast<char>(kFirst[more] | (code >> (6 * more)));
        for (int left = more - 1; left >= 0; --left) {
            *out++ = static_cast<char>(0x80 | ((code >> (6 * left)) & 0x3F));
        }
        return out;
    }

    // Copies characters of several bytes, if they are UTF-8: nothing too long, no surrogates.
    char* several(char* out) {
        while (at_ < end_ && static_cast<unsigned char>(*at_) >= 0x80) {
            const auto first = static_cast<unsigned char>(*at_);
            const int more = (first >= 0xC2) + (first >= 0xE0) + (first >= 0xF0);
            if (more == 0 || first > 0xF4 || end_ - at_ <= more) return nullptr;
            std::uint32_t code = first & (0x3F >> more);
            for (int each = 1; each <= more; ++each) {
                const auto next = static_cast<unsigned char>(at_[each]);
                if ((next & 0xC0) != 0x80) return nullptr;
                code = code << 6 | (next & 0x3F);
            }
            constexpr std::uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
            if (code < kLeast[more] || code > 0x10FFFF || code - 0xD800 < 0x800) return nullptr;
            for (int each = 0; each <= more; ++each) *out++ = *at_++;
        }
        return out;
    }

    const char* at_;
    const char* const end_;
    const std::string_view key_;
    bool has_nul_ = false;
};

// What lines hold.
struct LineTexts {
    std::vector<std::int64_t> ends;     // of each text
    std::vector<std::int64_t> numbers;  // of the line of each, from 1
    std::vector<std::int64_t> others;   // number, begin and end of each line that is not taken
    std::int64_t lines = 0;
};

// Writes the texts of all lines but blank ones, a NUL after each, and returns their end. There must
// be room for as many bytes as the lines have.
inline char* texts_of_lines(std::string_view lines, std::string_view key, std::int64_t max_bytes,
                            char* out, LineTexts& found) {
    const char *at = lines.data(), *const end = at + lines.size();
    char* const begin = out;
    while (at < end) {
        ++found.lines;
        const void* const newline = std::memchr(at, '\n', static_cast<std::size_t>(end - at));
        const char* const stop = newline ? static_cast<const char*>(newline) : end;
        const bool is_long = stop - at > max_bytes;
        JsonLine line(at, stop, key);
        if (is_long || !line.is_blank()) {
            if (char* const text_end = is_long ? nullptr : line.text(out)) {
                found.ends.push_back(text_end - begin);
                found.numbers.push_back(found.lines);
                *text_end = '\0';
                out = text_end + 1;
            } else {
                found.others.insert(found.others.end(),
                                    {found.lines, at - lines.data(), stop - lines.data()});
            }
        }
        at = stop + 1;
    }
    return out;
}

}  // namespace megablocks
