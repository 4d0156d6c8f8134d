// What libraries that are opened at run time have in common.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

namespace te {

// Collects the functions of a library; remembers the first one that is not there.
class Binder {
 public:
  explicit Binder(void* library) : library_(library) {}

  template <class Function>
  void operator()(Function& target, const char* symbol) {
    target = reinterpret_cast<Function>(dlsym(library_, symbol));
    if (target == nullptr && missing_.empty()) missing_ = symbol;
  }

  const std::string& missing() const { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

// The file, opened for good; nullptr with "WHAT cannot be loaded: " and the reason in `why`.
inline void* open_file(const std::string& file, const char* what, std::string& why) {
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) return library;
  const char* reason = dlerror();
  why = std::string(what) + " cannot be loaded: " + (reason != nullptr ? reason : file);
  return nullptr;
}

// The functions of a library, opened when they are first asked for; `open(file, why)` gives them, or nullptr with what is
// missing. One of these is never destroyed: what it gave may be used until the very end of the process.
template <class Functions, auto open>
class OpenedOnce {
 public:
  explicit OpenedOnce(std::string file) : file_(std::move(file)) {}

  const Functions* get(std::string& why) {
    if (const Functions* found = found_.load(std::memory_order_acquire)) return found;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!tried_) {
      tried_ = true;
      found_.store(open(file_, why_), std::memory_order_release);
    }
    why = why_;
    return found_.load(std::memory_order_acquire);
  }

  // Another file from now on.
  void reset(const std::string& file) {
    const std::lock_guard<std::mutex> lock(mutex_);
    file_ = file;
    tried_ = false;
    why_.clear();
    found_.store(nullptr, std::memory_order_release);
  }

 private:
  std::mutex mutex_;
  std::string file_;
  bool tried_ = false;
  std::string why_;
  std::atomic<const Functions*> found_{nullptr};
};

}  // namespace te
