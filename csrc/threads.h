// A parallel loop on the threads that torch uses already.
#pragma once

#include <cstdint>
#include <type_traits>

namespace te {

// The number of threads that torch would use now, on this thread: follows torch.set_num_threads.
int64_t num_threads();

// Where parallel loops run: "openmp" (torch's own pool) or "std" (threads made for each loop).
const char* thread_backend();

// Chooses the backend by that name; false when it is unknown or torch has no OpenMP pool.
bool set_thread_backend(const char* name);

namespace detail {
using Task = void (*)(void* context, int64_t index) noexcept;
void run_tasks(int64_t count, Task task, void* context);
}  // namespace detail

// Calls body(0) ... body(count - 1), each once, on up to num_threads() threads, and waits for all of them.
// The body must not throw: nothing may unwind through the pool's frames.
template <class Body>
void parallel_for(int64_t count, Body& body) {
  static_assert(std::is_nothrow_invocable_v<Body&, int64_t>, "the body of a parallel loop must be noexcept");
  detail::run_tasks(
      count, [](void* context, int64_t index) noexcept { (*static_cast<Body*>(context))(index); }, &body);
}

}  // namespace te
