#include "threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

namespace te {
namespace {

// GCC's OpenMP entry points; LLVM's and Intel's runtimes export the same ones.
struct OpenMp {
  void (*parallel)(void (*function)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  int (*team_size)() = nullptr;
  int (*team_rank)() = nullptr;
  int (*max_threads)() = nullptr;
  int (*torch_threads)() = nullptr;  // at::get_num_threads

  bool has_pool() const { return parallel != nullptr && team_size != nullptr && team_rank != nullptr; }
};

template <class Function>
void resolve(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
}

OpenMp find_openmp() {
  OpenMp found;
  // A look-up through torch's library finds the very OpenMP runtime that torch was linked with, whatever its file is
  // called (wheels rename it): a second runtime would bring a second pool of threads that fight for the same cores.
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (torch == nullptr) return found;
  resolve(torch, "GOMP_parallel", found.parallel);
  resolve(torch, "omp_get_num_threads", found.team_size);
  resolve(torch, "omp_get_thread_num", found.team_rank);
  resolve(torch, "omp_get_max_threads", found.max_threads);
  resolve(torch, "_ZN2at15get_num_threadsEv", found.torch_threads);
  return found;
}

const OpenMp& openmp() {
  static const OpenMp found = find_openmp();
  return found;
}

std::atomic<bool> prefer_std{false};

// OpenMP's threads do not survive a fork, and waiting for them would hang: the child makes its own threads.
void watch_for_fork() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { prefer_std = true; });
  static_cast<void>(registered);
}

bool use_openmp() {
  watch_for_fork();
  return openmp().has_pool() && !prefer_std.load(std::memory_order_relaxed);
}

struct Region {
  detail::Task task;
  void* context;
  int64_t count;
};

// Task i always goes to thread i % team, so that a thread meets the rows that it had in its cache before.
void run_share(void* data) noexcept {
  const Region& region = *static_cast<const Region*>(data);
  const int64_t team = openmp().team_size();
  for (int64_t index = openmp().team_rank(); index < region.count; index += team) region.task(region.context, index);
}

void run_on_openmp(Region& region) {
  // 0 asks for torch's own team size: libgomp ends threads of its pool when a smaller team is asked for, and would
  // have to start them again for torch's next loop.
  openmp().parallel(run_share, &region, 0, 0);
}

void run_on_std_threads(const Region& region) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(region.count - 1));
  int64_t next = 1;
  try {
    for (; next < region.count; ++next) threads.emplace_back(region.task, region.context, next);
  } catch (const std::exception&) {
    // No more threads or no memory for them: what is left runs here.
  }
  region.task(region.context, 0);
  for (; next < region.count; ++next) region.task(region.context, next);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int64_t num_threads() {
  const OpenMp& api = openmp();
  // OpenMP keeps its count per thread, and a new thread has the default until torch sets it: so torch is asked.
  if (api.torch_threads != nullptr) return std::max(1, api.torch_threads());
  if (api.max_threads != nullptr) return std::max(1, api.max_threads());
  return std::max(1u, std::thread::hardware_concurrency());
}

const char* thread_backend() { return use_openmp() ? "openmp" : "std"; }

bool set_thread_backend(const char* name) {
  const bool std_threads = std::strcmp(name, "std") == 0;
  if (!std_threads && (std::strcmp(name, "openmp") != 0 || !openmp().has_pool())) return false;
  watch_for_fork();
  prefer_std = std_threads;
  return true;
}

void detail::run_tasks(int64_t count, Task task, void* context) {
  if (count <= 0) return;
  if (count == 1) {
    task(context, 0);
    return;
  }
  Region region{task, context, count};
  if (use_openmp()) {
    run_on_openmp(region);
  } else {
    run_on_std_threads(region);
  }
}

}  // namespace te
