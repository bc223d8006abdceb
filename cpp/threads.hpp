// Shares work that is counted in equal units among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <future>
#include <stdexcept>
#include <thread>
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

// Where threads wait for each other, again and again.
class Meeting {
  public:
    explicit Meeting(std::int64_t threads) : threads_(threads) {}

    // Until all have come. Throws if one never will.
    void wait() {
        const std::int64_t turn = turn_.load(std::memory_order_relaxed);
        if (come_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            come_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int tries = 0; turn_.load(std::memory_order_acquire) == turn; ++tries) {
            if (cancelled_.load(std::memory_order_relaxed)) {
                throw std::runtime_error("another thread failed");
            }
            if (tries >= kTriesAwake) std::this_thread::yield();
        }
    }

    void cancel() { cancelled_.store(true, std::memory_order_relaxed); }

  private:
    static constexpr int kTriesAwake = 1 << 12;
    const std::int64_t threads_;
    std::atomic<std::int64_t> come_{0}, turn_{0};
    std::atomic<bool> cancelled_{false};
};

// Calls work(thread, meeting) on each thread, the first one on the caller's. An exception of any
// leaves once all have ended, and none waits for one that failed or never began.
template <typename Work>
void together(std::int64_t threads, const Work& work) {
    Meeting meeting(threads);
    const auto guarded = [&](std::int64_t thread) {
        try {
            work(thread, meeting);
        } catch (...) {
            meeting.cancel();
            throw;
        }
    };
    std::vector<std::future<void>> others;
    try {
        for (std::int64_t thread = 1; thread < threads; ++thread) {
            others.push_back(std::async(std::launch::async, guarded, thread));
        }
    } catch (...) {
        meeting.cancel();
        throw;
    }
    guarded(0);
    for (auto& other : others) other.get();
}

}  // namespace megablocks
