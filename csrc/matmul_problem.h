// A matrix product with an epilogue, by cuBLASLt: what is prepared once for each problem, and its run. Knows nothing of
// Python.
//
// Matrices are row-major here: out[m, n] = a[m, k] b[k, n]. The library's are column-major, so it gets the factors in
// the other order and sees every matrix transposed: its A is b, its B is a.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cublaslt.h"
#include "cuda_launch.h"
#include "tensor.h"
#include "workspace.h"

namespace te {

// What an epilogue is called, its number in the library, and which tensors it takes beside the factors and the output.
struct Epilogue {
  enum class Use : uint8_t { none, read, written };
  enum class Length : uint8_t { columns, rows };  // of a bias or of sums: n or m of the output
  const char* name;
  int number;
  Use bias;
  Length bias_length;
  Use aux;
};

// The epilogue of that name, or nullptr.
const Epilogue* find_epilogue(const std::string& name);
std::string known_epilogues();

// The library's number of a dtype; -1 for one that products do not take.
int product_type(const DType& dtype);

// What is added to the product before the epilogue: nothing, what the output held, or a tensor of its own.
enum class Addend : uint8_t { none, out, c };

// What of a factor of 8 bits has a scale of its own: all, 128 numbers along what is summed, or 128 such rows together.
struct FactorScales {
  const char* name;
  int mode;       // the library's number
  int64_t block;  // rows that have one

  bool is_one() const { return mode == CublasLt::scale_scalar; }
  // How many there are for a factor of so many rows, each of k numbers.
  int64_t count(int64_t rows, int64_t k) const;
};

// The kind of that name, or nullptr.
const FactorScales* find_factor_scales(const std::string& name);

struct MatmulForm {
  std::string name;
  DType dtype;      // of a, and of b where that has none of its own
  DType b_dtype;
  DType out_dtype;  // of the output, the addend, the bias and aux
  bool transpose_a, transpose_b;
  const Epilogue* epilogue;
  Addend addend;
  bool fast_accumulation;  // of 8 bits: sums in fewer bits than float32's
  const FactorScales *scales_a, *scales_b;

  // Factors of 8 bits come with the numbers that they are multiplied by.
  bool is_scaled() const { return dtype.bits == 8; }
};

// The tensors of one call. Rows and columns are those of the tensors;
struct MatmulCall {
  int32_t device;
  CublasLt::Stream stream;
  bool tf32;
  Matrix a, b, out, c, aux;
  void* bias;
  void *scale_a, *scale_b;
  int64_t scales_a, scales_b;  // how many numbers are there
};

struct MatmulSizes {
  int64_t m, n, k;
};

// Everything that the choice of an algorithm depends on.
struct MatmulKey {
  int64_t m, n, k, lda, ldb, ldout, ldc, ldaux;
  uint64_t flags;  // device, orientation of the factors, precision, alignments

  bool operator==(const MatmulKey& other) const;
  int32_t device() const { return static_cast<int32_t>(flags >> layout_bits); }
  uint64_t layout() const { return flags & ((uint64_t{1} << layout_bits) - 1); }

  static constexpr int layout_bits = 24;
};

struct MatmulKeyHash {
  size_t operator()(const MatmulKey& key) const;
};

// One problem with its descriptions and the algorithm that solves it.
class MatmulProblem {
 public:
  explicit MatmulProblem(const CublasLtDevice& on) : on_(on) {}
  MatmulProblem(const MatmulProblem&) = delete;
  MatmulProblem& operator=(const MatmulProblem&) = delete;
  ~MatmulProblem();

  CublasLt::Status describe(const MatmulForm& form, const MatmulKey& key, const MatmulCall& call);
  CublasLt::Status list(const MatmulKey& key, int most, std::vector<CublasLt::Candidate>& found);
  CublasLt::Status choose(const CublasLt::Algorithm& algorithm);
  bool run(const MatmulForm& form, const MatmulCall& call, Workspace& workspace, Failure& failure);
  uint64_t runs() const { return runs_; }
  const CublasLtDevice& on() const { return on_; }

 private:
  CublasLt::Status set_pointers(const MatmulForm& form, const MatmulCall& call);

  const CublasLtDevice& on_;
  CublasLt::Description description_ = nullptr;
  CublasLt::Layout a_ = nullptr, b_ = nullptr, c_ = nullptr, out_ = nullptr;
  // A run writes pointers into the description, so there is one at a time.
  std::mutex mutex_;
  CublasLt::Algorithm algorithm_{};
  size_t workspace_ = 0;
  std::atomic<uint64_t> runs_{0};
};

// Algorithms that were measured before, from outside. Both are called without locks and without the interpreter's.
struct TunedAlgorithms {
  std::function<bool(const MatmulKey& key, CublasLt::Algorithm& algorithm)> find;  // false: there is none
  std::function<void(const MatmulKey& key, const std::string& why)> drop;          // the library does not take it
};

// A product as it was configured, with the problems that it met. Any number of threads may use it at once.
// The functions need no interpreter lock, and throw std::bad_alloc.
class Matmul {
 public:
  explicit Matmul(MatmulForm form) : form(std::move(form)) {}

  const MatmulForm form;
  TunedAlgorithms tuned;  // set before the first call, or not at all

  // The sizes of a call, or false when its tensors do not fit together.
  bool sizes(const MatmulCall& call, MatmulSizes& sizes, Failure& failure) const;
  bool run(const MatmulCall& call, Workspace& workspace, Failure& failure);
  // The problem of a call, prepared but not run.
  bool meet(const MatmulCall& call, MatmulKey& key, Failure& failure);
  // Every problem that was met, and how often it ran.
  std::vector<std::pair<MatmulKey, uint64_t>> problems();
  // Of a problem that was met: the library's candidates, its best guess first; and another algorithm from now on.
  bool list(const MatmulKey& key, int most, std::vector<CublasLt::Candidate>& found, Failure& failure);
  bool choose(const MatmulKey& key, const CublasLt::Algorithm& algorithm, Failure& failure);

 private:
  std::shared_ptr<MatmulProblem> find(const MatmulKey& key);
  std::shared_ptr<MatmulProblem> known(const MatmulKey& key, Failure& failure);
  std::shared_ptr<MatmulProblem> problem(const MatmulCall& call, bool for_run, Failure& failure);
  std::shared_ptr<MatmulProblem> prepare(const CublasLtDevice& on, const MatmulKey& key, const MatmulCall& call,
                                         Failure& failure) const;
  void take_tuned(MatmulProblem& problem, const MatmulKey& key) const;
  MatmulKey key_of(const MatmulCall& call) const;
  bool refuse(const MatmulCall& call, const std::string& what, Failure& failure) const;
  bool refuse(const MatmulKey& key, const std::string& what, Failure& failure) const;
  std::string describe(int64_t m, int64_t k, int64_t inner, int64_t n) const;

  std::mutex mutex_;
  std::unordered_map<MatmulKey, std::shared_ptr<MatmulProblem>, MatmulKeyHash> problems_;
};

}  // namespace te
