// Where each sample of a stream of documents begins; megablocks_core/data/sample_index.py says how.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
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

    // Writes the lengths of the documents [first, last) and returns their sum. They lie in memory in
    // another order, so this waits for memory; it does nothing else, so that many waits overlap.
    std::int64_t copy_lengths(std::int64_t first, std::int64_t last, std::int32_t* out) const {
        std::int64_t total = 0;
        for (std::int64_t position = first; position < last; ++position) {
            const auto document = static_cast<std::int64_t>(documents[position]);
            if (document < 0 || document >= num_lengths) refuse_document(position, document);
            const std::int32_t length = lengths[document];
            if (length < 0) refuse_length(document, length);
            out[position - first] = length;
            total += length;
        }
        return total;
    }

    [[noreturn]] void refuse_document(std::int64_t position, std::int64_t document) const {
        throw std::invalid_argument("document_index[" + std::to_string(position) +
                                    "]=" + std::to_string(document) + " must be one of " +
                                    std::to_string(num_lengths) + " documents");
    }

    [[noreturn]] void refuse_length(std::int64_t document, std::int32_t length) const {
        throw std::invalid_argument("lengths[" + std::to_string(document) +
                                    "]=" + std::to_string(length) + " must be 0 or more");
    }
};

// Where each sample begins. A sample begins in the document that holds the last token of the one
// before: token number sample * sequence_length + extra of the stream.
template <typename Index>
struct Samples {
    std::int64_t sequence_length, extra, count;
    Index* out;  // [count + 1, 2]

    // Writes those that begin in the documents [first, last), whose lengths are given and which
    // `before` tokens precede. Returns how many tokens precede `last`.
    std::int64_t write(const std::int32_t* lengths, std::int64_t first, std::int64_t last,
                       std::int64_t before) const {
        constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
        std::int64_t sample = before < extra ? 1 : (before - extra) / sequence_length + 1;
        std::int64_t ends = sample <= count ? sample * sequence_length + extra : kNever;
        std::int64_t total = before;
        for (std::int64_t position = first; position < last; ++position) {
            const std::int64_t begin = total;
            total += lengths[position - first];
            while (ends <= total) {
                out[2 * sample] = static_cast<Index>(position);
                out[2 * sample + 1] = static_cast<Index>(ends - extra - begin);
                ++sample;
                ends = sample <= count ? ends + sequence_length : kNever;
            }
        }
        return total;
    }
};

// Fills the rows of all samples of a stream, and returns how many tokens it holds.
template <typename Document, typename Index>
std::int64_t write_samples(const Stream<Document>& stream, const Samples<Index>& samples,
                           std::int64_t threads) {
    constexpr std::int64_t kWorthAThread = 1 << 19;  // about 2 ms
    constexpr std::int64_t kBlock = 1 << 11;         // whose lengths stay in the nearest cache
    const std::int64_t size = stream.num_documents;
    threads = threads_worth(size, kWorthAThread, threads);
    if (threads == 1) {
        std::vector<std::int32_t> lengths(kBlock);
        std::int64_t total = 0;
        for (std::int64_t first = 0; first < size; first += kBlock) {
            const std::int64_t last = std::min(first + kBlock, size);
            stream.copy_lengths(first, last, lengths.data());
            total = samples.write(lengths.data(), first, last, total);
        }
        return total;
    }
    // Each thread must know how many tokens precede its documents.
    const std::unique_ptr<std::int32_t[]> lengths(new std::int32_t[size]);
    std::vector<std::int64_t> before(threads + 1, 0);
    share(size, threads, [&](std::int64_t thread, std::int64_t first, std::int64_t last) {
        before[thread + 1] = stream.copy_lengths(first, last, lengths.get() + first);
    });
    for (std::int64_t thread = 0; thread < threads; ++thread) before[thread + 1] += before[thread];
    share(size, threads, [&](std::int64_t thread, std::int64_t first, std::int64_t last) {
        samples.write(lengths.get() + first, first, last, before[thread]);
    });
    return before[threads];
}

// Fills samples.out for a stream that must hold num_tokens. A last sample that is cut short by the
// end of the stream ends where, with an extra token, the last document that is not empty does.
template <typename Document, typename Index>
void build_sample_index(const Stream<Document>& stream, const Samples<Index>& samples,
                        std::int64_t num_tokens, std::int64_t threads) {
    samples.out[0] = samples.out[1] = 0;
    const std::int64_t total = write_samples(stream, samples, threads);
    if (total != num_tokens) {
        throw std::invalid_argument("num_tokens=" + std::to_string(num_tokens) + " must be the " +
                                    std::to_string(total) +
                                    " tokens of the documents in document_index");
    }
    const std::int64_t needed = samples.count * samples.sequence_length + samples.extra;
    if (samples.count > 0 && needed > num_tokens) {
        std::int64_t position = stream.num_documents - 1;
        std::int32_t length = 0;
        stream.copy_lengths(position, position + 1, &length);
        while (samples.extra && length == 0 && position > 0) {
            --position;
            stream.copy_lengths(position, position + 1, &length);
        }
        samples.out[2 * samples.count] = static_cast<Index>(position);
        samples.out[2 * samples.count + 1] = static_cast<Index>(length - samples.extra);
    }
}

}  // namespace megablocks
