// What libraries that are opened at run time have in common.
#pragma once

#include <dlfcn.h>

#include <string>

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

}  // namespace te
