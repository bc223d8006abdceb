// Shares work that is counted in equal units among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <future>
#include <vector>

namespace megablocks {

// How many threads pay for `size` units, when one more pays from `worth` units on; at least 1.
inline std::int64_t threads_worth(std::int64_t size, std::int64_t worth, std::int64_t threads) {
    return std::max(std::int64_t{1}, std::min(size / worth, threads));
}

// Calls work(thread, begin, end) on each thread with its equal share of [0, size). The first share
// is done by the caller. An exception of any share leaves once all have ended.
template <typename Work>
void share(std::int64_t size, std::int64_t threads, const Work& work) {
    const auto edge = [=](std::int64_t thread) {
        return thread == threads ? size : size / threads * thread;
    };
    std::vector<std::future<void>> others;  // their destructors wait, also when an exception leaves
    for (std::int64_t thread = 1; thread < threads; ++thread) {
        others.push_back(std::async(std::launch::async, [&work, edge, thread] {
            work(thread, edge(thread), edge(thread + 1));
        }));
    }
    work(0, edge(0), edge(1));
    for (auto& other : others) other.get();
}

}  // namespace megablocks
