// Where each sample of a stream of documents begins; megablocks_core/data/sample_index.py says how.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "threads.hpp"

namespace megablocks {

template <typename Document>
struct Stream {
    const std::int32_t* lengths;
    std::int64_t num_lengths;
    const Document* documents;  // in the order of the stream
    std::int64_t num_documents;

    // Lengths lie in memory in another order than documents: they are asked for in time.
    void prefetch(std::int64_t position) const {
#if defined(__GNUC__) || defined(__clang__)
        constexpr std::int64_t kAhead = 24;
        if (position + kAhead < num_documents) {
            const auto document = static_cast<std::uint64_t>(documents[position + kAhead]);
            if (document < static_cast<std::uint64_t>(num_lengths)) {
                __builtin_prefetch(lengths + document);
            }
        }
#else
        (void)position;
#endif
    }

    std::int64_t length(std::int64_t position) const {
        const auto document = static_cast<std::int64_t>(documents[position]);
        if (document < 0 || document >= num_lengths || lengths[document] < 0) refuse(position);
        return lengths[document];
    }

    [[noreturn]] void refuse(std::int64_t position) const {
        const auto document = static_cast<std::int64_t>(documents[position]);
        const std::string document_index =
            "document_index[" + std::to_string(position) + "]=" + std::to_string(document);
        if (document < 0 || document >= num_lengths) {
            throw std::invalid_argument(document_index + " must be one of " +
                                        std::to_string(num_lengths) + " documents");
        }
        throw std::invalid_argument("lengths[" + std::to_string(document) + "]=" +
                                    std::to_string(lengths[document]) + " must be 0 or more");
    }
};

// Writes out[sample] = (position, offset) for samples 1 to num_samples whose last token, number
// sample * sequence_length + extra of the stream, is in one of the documents [first, last).
// `before` tokens precede them; returns how many precede `last`.
template <typename Document, typename Index>
std::int64_t walk(const Stream<Document>& stream, std::int64_t first, std::int64_t last,
                  std::int64_t before, std::int64_t sequence_length, std::int64_t extra,
                  std::int64_t num_samples, Index* out) {
    std::int64_t sample = before < extra ? 1 : (before - extra) / sequence_length + 1;
    constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
    std::int64_t ends = sample <= num_samples ? sample * sequence_length + extra : kNever;
    std::int64_t total = before;
    for (std::int64_t position = first; position < last; ++position) {
        stream.prefetch(position);
        const std::int64_t begin = total;
        total += stream.length(position);
        while (ends <= total) {
            out[2 * sample] = static_cast<Index>(position);
            out[2 * sample + 1] = static_cast<Index>(ends - extra - begin);
            ++sample;
            ends = sample <= num_samples ? ends + sequence_length : kNever;
        }
    }
    return total;
}

// Fills out [num_samples + 1, 2] for a stream that must hold num_tokens. A last sample that is cut
// short by the end of the stream ends where the last document with a token does.
template <typename Document, typename Index>
void build_sample_index(const Stream<Document>& stream, std::int64_t sequence_length,
                        std::int64_t extra, std::int64_t num_tokens, std::int64_t num_samples,
                        Index* out, std::int64_t threads) {
    constexpr std::int64_t kWorthAThread = 1 << 19;  // about 2 ms
    const std::int64_t size = stream.num_documents;
    threads = threads_worth(size, kWorthAThread, threads);
    std::vector<std::int64_t> before(threads + 1, 0);
    if (threads > 1) {  // each thread must know what precedes its documents
        share(size, threads, [&](std::int64_t thread, std::int64_t first, std::int64_t last) {
            before[thread + 1] = walk<Document, Index>(stream, first, last, 0, 1, 0, 0, nullptr);
        });
        for (std::int64_t thread = 1; thread < threads; ++thread) before[thread + 1] += before[thread];
    }
    out[0] = out[1] = 0;
    share(size, threads, [&](std::int64_t thread, std::int64_t first, std::int64_t last) {
        const std::int64_t total = walk(stream, first, last, before[thread], sequence_length, extra,
                                        num_samples, out);
        if (thread == threads - 1) before[threads] = total;
    });
    if (before[threads] != num_tokens) {
        throw std::invalid_argument("num_tokens=" + std::to_string(num_tokens) + " must be the " +
                                    std::to_string(before[threads]) +
                                    " tokens of the documents in document_index");
    }
    if (num_samples > 0 && num_samples * sequence_length + extra > num_tokens) {
        std::int64_t position = size - 1;
        if (extra) {
            while (stream.length(position) == 0) --position;
        }
        out[2 * num_samples] = static_cast<Index>(position);
        out[2 * num_samples + 1] = static_cast<Index>(stream.length(position) - extra);
    }
}

}  // namespace megablocks
