// What went wrong while the interpreter was away, to be raised when it is there again.
#pragma once

#include <cstdint>
#include <string>

namespace te {

struct Failure {
  enum class Kind : uint8_t { runtime, value, memory };
  Kind kind = Kind::runtime;
  std::string text;
};

}  // namespace te
