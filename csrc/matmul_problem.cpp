#include "matmul_problem.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace te {
namespace {

using Lt = CublasLt;
using Use = Epilogue::Use;
using Length = Epilogue::Length;

// Sums over the contracted dimension are named after our factors: the library's A is our b.
constexpr Epilogue epilogues[] = {
    {"none", Lt::epilogue_default, Use::none, Length::columns, Use::none},
    {"bias", Lt::epilogue_bias, Use::read, Length::columns, Use::none},
    {"relu_bias", Lt::epilogue_relu_bias, Use::read, Length::columns, Use::none},
    {"gelu_bias", Lt::epilogue_gelu_bias, Use::read, Length::columns, Use::none},
    {"gelu_aux_bias", Lt::epilogue_gelu_aux_bias, Use::read, Length::columns, Use::written},
    {"dgelu", Lt::epilogue_dgelu, Use::none, Length::columns, Use::read},
    {"sum_a", Lt::epilogue_bgradb, Use::written, Length::rows, Use::none},
    {"sum_b", Lt::epilogue_bgrada, Use::written, Length::columns, Use::none},
};

constexpr FactorScales factor_scales[] = {
    {"one", Lt::scale_scalar, 0},
    {"rows", Lt::scale_vec128, 1},
    {"squares", Lt::scale_blk128x128, 128},
};

constexpr size_t most_problems = 4096;  // of one product; beyond that it starts afresh
constexpr uint32_t most_alignment = 256;

uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address == 0) return most_alignment;
  return static_cast<uint32_t>(std::min<uintptr_t>(address & (~address + 1), most_alignment));
}

uint64_t alignment_bits(const void* pointer) {
  uint64_t bits = 0;
  for (uint32_t alignment = alignment_of(pointer); alignment > 1; alignment >>= 1) ++bits;
  return bits;
}

// Where a problem's key has the alignments of its tensors, in the order of a call.
enum AlignmentShift : int { shift_a = 4, shift_b = 8, shift_c = 12, shift_out = 16 };

template <class T>
Lt::Status set(const Lt& lt, Lt::Description description, int attribute, const T& value) {
  return lt.description_set(description, attribute, &value, sizeof(T));
}

// The library's view of a row-major matrix: its rows are our columns. `flipped` ones lie transposed in memory.
Lt::Status make_layout(const Lt& lt, Lt::Layout* layout, int type, const Matrix& matrix) {
  const auto rows = static_cast<uint64_t>(matrix.flipped ? matrix.columns : matrix.rows);
  const auto columns = static_cast<uint64_t>(matrix.flipped ? matrix.rows : matrix.columns);
  return lt.layout_create(layout, type, columns, rows, matrix.stride);
}

class Preference {
 public:
  Preference(const Lt& lt, size_t most_workspace) : lt_(lt), status_(lt.preference_create(&preference_)) {
    const auto bytes = static_cast<uint64_t>(most_workspace);
    if (status_ == Lt::success) {
      status_ = lt.preference_set(preference_, Lt::pref_max_workspace_bytes, &bytes, sizeof(bytes));
    }
  }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  ~Preference() {
    if (preference_ != nullptr) lt_.preference_destroy(preference_);
  }

  void align(int attribute, const MatmulKey& key, AlignmentShift shift) {
    const uint32_t bytes = uint32_t{1} << (key.flags >> shift & 15);
    if (status_ == Lt::success) status_ = lt_.preference_set(preference_, attribute, &bytes, sizeof(bytes));
  }
  Lt::Status status() const { return status_; }
  Lt::Preference get() const { return preference_; }

 private:
  const Lt& lt_;
  Lt::Preference preference_ = nullptr;
  Lt::Status status_;
};

const Matrix& addend_of(const MatmulForm& form, const MatmulCall& call) {
  return form.addend == Addend::c ? call.c : call.out;
}

}  // namespace

const Epilogue* find_epilogue(const std::string& name) {
  for (const Epilogue& epilogue : epilogues) {
    if (name == epilogue.name) return &epilogue;
  }
  return nullptr;
}

std::string known_epilogues() {
  std::string names;
  for (const Epilogue& epilogue : epilogues) names += (names.empty() ? "" : ", ") + std::string(epilogue.name);
  return names;
}

const FactorScales* find_factor_scales(const std::string& name) {
  for (const FactorScales& scales : factor_scales) {
    if (name == scales.name) return &scales;
  }
  return nullptr;
}

int64_t FactorScales::count(int64_t rows, int64_t k) const {
  const int64_t blocks = (k + 127) / 128;
  if (is_one()) return 1;
  return block == 1 ? blocks * rows : (blocks + 3) / 4 * 4 * ((rows + block - 1) / block);
}

int product_type(const DType& dtype) {
  const std::string name = dtype.name;
  if (name == "float32") return Lt::r_32f;
  if (name == "bfloat16") return Lt::r_16bf;
  if (name == "float8_e4m3fn") return Lt::r_8f_e4m3;
  if (name == "float8_e5m2") return Lt::r_8f_e5m2;
  return name == "float16" ? Lt::r_16f : -1;
}

bool MatmulKey::operator==(const MatmulKey& other) const {
  return m == other.m && n == other.n && k == other.k && lda == other.lda && ldb == other.ldb && ldout == other.ldout &&
         ldc == other.ldc && ldaux == other.ldaux && flags == other.flags;
}

size_t MatmulKeyHash::operator()(const MatmulKey& key) const {
  uint64_t hash = 1469598103934665603u;  // FNV-1a, a number at a time
  for (const int64_t number : {key.m, key.n, key.k, key.lda, key.ldb, key.ldout, key.ldc, key.ldaux,
                               static_cast<int64_t>(key.flags)}) {
    hash = (hash ^ static_cast<uint64_t>(number)) * 1099511628211u;
  }
  return static_cast<size_t>(hash ^ (hash >> 32));
}

// ---- one problem -----------------------------------------------------------------------------------------------

MatmulProblem::~MatmulProblem() {
  const Lt& lt = *on_.library;
  for (Lt::Layout layout : {a_, b_, c_, out_}) {
    if (layout != nullptr) lt.layout_destroy(layout);
  }
  if (description_ != nullptr) lt.description_destroy(description_);
}

Lt::Status MatmulProblem::describe(const MatmulForm& form, const MatmulKey& key, const MatmulCall& call) {
  const Lt& lt = *on_.library;
  const int compute = call.tf32 ? Lt::compute_32f_fast_tf32 : Lt::compute_32f;
  const int in_a = product_type(form.dtype), in_b = product_type(form.b_dtype), out = product_type(form.out_dtype);
  const int op_a = form.transpose_b != call.b.flipped ? Lt::op_t : Lt::op_n;
  const int op_b = form.transpose_a != call.a.flipped ? Lt::op_t : Lt::op_n;
  Lt::Status status = lt.description_create(&description_, compute, Lt::r_32f);
  if (status == Lt::success) status = set(lt, description_, Lt::desc_transa, op_a);
  if (status == Lt::success) status = set(lt, description_, Lt::desc_transb, op_b);
  if (status == Lt::success) status = set(lt, description_, Lt::desc_epilogue, form.epilogue->number);
  if (status == Lt::success && form.epilogue->aux != Use::none) {
    status = set(lt, description_, Lt::desc_aux_ld, key.ldaux);
  }
  if (status == Lt::success && form.is_scaled()) {
    status = set(lt, description_, Lt::desc_fast_accum, static_cast<int8_t>(form.fast_accumulation));
  }
  if (status == Lt::success && !form.scales_a->is_one()) {
    status = set(lt, description_, Lt::desc_b_scale_mode, form.scales_a->mode);
  }
  if (status == Lt::success && !form.scales_b->is_one()) {
    status = set(lt, description_, Lt::desc_a_scale_mode, form.scales_b->mode);
  }
  if (status == Lt::success) status = set_pointers(form, call);
  if (status == Lt::success) status = make_layout(lt, &a_, in_b, call.b);
  if (status == Lt::success) status = make_layout(lt, &b_, in_a, call.a);
  if (status == Lt::success) status = make_layout(lt, &c_, out, addend_of(form, call));
  if (status == Lt::success) status = make_layout(lt, &out_, out, call.out);
  return status;
}

Lt::Status MatmulProblem::set_pointers(const MatmulForm& form, const MatmulCall& call) {
  const Lt& lt = *on_.library;
  Lt::Status status = Lt::success;
  if (form.epilogue->bias != Use::none) status = set(lt, description_, Lt::desc_bias_pointer, call.bias);
  if (status == Lt::success && form.epilogue->aux != Use::none) {
    status = set(lt, description_, Lt::desc_aux_pointer, call.aux.data);
  }
  if (status == Lt::success && form.is_scaled()) {
    status = set(lt, description_, Lt::desc_a_scale_pointer, call.scale_b);
    if (status == Lt::success) status = set(lt, description_, Lt::desc_b_scale_pointer, call.scale_a);
  }
  return status;
}

Lt::Status MatmulProblem::list(const MatmulKey& key, int most, std::vector<Lt::Candidate>& found) {
  const Lt& lt = *on_.library;
  Preference preference(lt, on_.most_workspace);
  preference.align(Lt::pref_min_alignment_a_bytes, key, shift_b);
  preference.align(Lt::pref_min_alignment_b_bytes, key, shift_a);
  preference.align(Lt::pref_min_alignment_c_bytes, key, shift_c);
  preference.align(Lt::pref_min_alignment_d_bytes, key, shift_out);
  if (preference.status() != Lt::success) return preference.status();
  found.resize(static_cast<size_t>(most));
  int count = 0;
  const std::lock_guard<std::mutex> lock(mutex_);
  const Lt::Status status = lt.get_heuristic(on_.handle, description_, a_, b_, c_, out_, preference.get(), most,
                                             found.data(), &count);
  found.resize(status == Lt::success ? static_cast<size_t>(count) : 0);
  found.erase(std::remove_if(found.begin(), found.end(), [](const auto& c) { return c.state != Lt::success; }),
              found.end());
  return status == Lt::success && found.empty() ? Lt::not_supported : status;
}

Lt::Status MatmulProblem::choose(const Lt::Algorithm& algorithm) {
  Lt::Candidate checked{};
  const std::lock_guard<std::mutex> lock(mutex_);
  Lt::Status status = on_.library->check_algorithm(on_.handle, description_, a_, b_, c_, out_, &algorithm, &checked);
  if (status == Lt::success) status = checked.state;
  if (status == Lt::success && checked.workspace > on_.most_workspace) status = Lt::not_supported;
  if (status != Lt::success) return status;
  algorithm_ = algorithm;
  workspace_ = checked.workspace;
  return status;
}

bool MatmulProblem::run(const MatmulForm& form, const MatmulCall& call, Workspace& workspace, Failure& failure) {
  const float alpha = 1.0f, beta = form.addend == Addend::none ? 0.0f : 1.0f;
  const std::lock_guard<std::mutex> lock(mutex_);
  char* scratch = workspace.take(static_cast<int64_t>(workspace_), call.device, call.stream, failure.text);
  if (workspace_ > 0 && scratch == nullptr) {
    failure.kind = Failure::Kind::memory;
    return false;
  }
  Lt::Status status = set_pointers(form, call);
  if (status == Lt::success) {
    status = on_.library->matmul(on_.handle, description_, &alpha, call.b.data, a_, call.a.data, b_, &beta,
                                 addend_of(form, call).data, c_, call.out.data, out_, &algorithm_, scratch, workspace_,
                                 call.stream);
  }
  if (status != Lt::success) {
    failure.text = "cuBLASLt did not run it (perhaps for what an earlier kernel did): " +
                   cublaslt_error_text(*on_.library, status);
    return false;
  }
  ++runs_;
  return true;
}

// ---- all problems of a product ---------------------------------------------------------------------------------

MatmulKey Matmul::key_of(const MatmulCall& call) const {
  const Matrix& c = addend_of(form, call);
  const bool flipped_a = call.a.flipped, flipped_b = call.b.flipped;
  uint64_t flags = static_cast<uint64_t>(call.device) << MatmulKey::layout_bits | (flipped_a ? 1u : 0u) |
                   (flipped_b ? 2u : 0u) | (call.tf32 ? 4u : 0u);
  flags |= alignment_bits(call.a.data) << shift_a | alignment_bits(call.b.data) << shift_b;
  flags |= alignment_bits(c.data) << shift_c | alignment_bits(call.out.data) << shift_out;
  return {call.out.rows,  call.out.columns, form.transpose_a ? call.a.rows : call.a.columns,
          call.a.stride,  call.b.stride,    call.out.stride,
          c.stride,       call.aux.stride,  flags};
}

std::string Matmul::describe(int64_t m, int64_t k, int64_t inner, int64_t n) const {
  const auto size = [](int64_t rows, int64_t columns) {
    return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
  };
  std::string text = "product '" + form.name + "': a " + size(m, k) + " times b " + size(inner, n) + " in " +
                     form.dtype.name + (form.is_scaled() ? std::string(" and ") + form.b_dtype.name : "") + " to " +
                     form.out_dtype.name;
  if (std::string(form.epilogue->name) != "none") text += ", epilogue " + std::string(form.epilogue->name);
  return text;
}

bool Matmul::refuse(const MatmulCall& call, const std::string& what, Failure& failure) const {
  const auto rows = [](const Matrix& matrix, bool transposed) { return transposed ? matrix.columns : matrix.rows; };
  failure.text = describe(rows(call.a, form.transpose_a), rows(call.a, !form.transpose_a),
                          rows(call.b, form.transpose_b), rows(call.b, !form.transpose_b)) +
                 ": " + what;
  return false;
}

bool Matmul::refuse(const MatmulKey& key, const std::string& what, Failure& failure) const {
  failure.text = describe(key.m, key.k, key.k, key.n) + ": " + what;
  return false;
}

bool Matmul::sizes(const MatmulCall& call, MatmulSizes& sizes, Failure& failure) const {
  const int64_t inner = form.transpose_b ? call.b.columns : call.b.rows;
  sizes.m = form.transpose_a ? call.a.columns : call.a.rows;
  sizes.n = form.transpose_b ? call.b.rows : call.b.columns;
  sizes.k = form.transpose_a ? call.a.rows : call.a.columns;
  failure.kind = Failure::Kind::value;
  const auto is_result = [&](const Matrix& matrix) { return matrix.rows == sizes.m && matrix.columns == sizes.n; };
  if (inner != sizes.k) return refuse(call, "the sizes do not fit", failure);
  const auto wrong = [&](const char* what, const Matrix& matrix) {
    return refuse(call, std::string(what) + " is [" + std::to_string(matrix.rows) + ", " +
                            std::to_string(matrix.columns) + "] and must be [" + std::to_string(sizes.m) + ", " +
                            std::to_string(sizes.n) + "]",
                  failure);
  };
  if (!is_result(call.out)) return wrong("out", call.out);
  const auto wrong_scales = [&](const char* what, int64_t got, int64_t wanted) {
    return refuse(call, std::string(what) + " has " + std::to_string(got) + " numbers and must have " +
                            std::to_string(wanted),
                  failure);
  };
  if (form.is_scaled()) {
    const int64_t of_a = form.scales_a->count(sizes.m, sizes.k), of_b = form.scales_b->count(sizes.n, sizes.k);
    if (call.scales_a != of_a) return wrong_scales("scale_a", call.scales_a, of_a);
    if (call.scales_b != of_b) return wrong_scales("scale_b", call.scales_b, of_b);
  }
  if (form.addend == Addend::c && !is_result(call.c)) return wrong("c", call.c);
  if (form.epilogue->aux != Use::none && !is_result(call.aux)) return wrong("aux", call.aux);
  failure.kind = Failure::Kind::runtime;
  return true;
}

std::shared_ptr<MatmulProblem> Matmul::prepare(const CublasLtDevice& on, const MatmulKey& key, const MatmulCall& call,
                                               Failure& failure) const {
  auto made = std::make_shared<MatmulProblem>(on);
  std::vector<Lt::Candidate> found;
  Lt::Status status = made->describe(form, key, call);
  if (status == Lt::success) status = made->list(key, 1, found);
  if (status == Lt::success) status = made->choose(found[0].algorithm);
  if (status != Lt::success) {
    refuse(key, "cuBLASLt has no algorithm for it: " + cublaslt_error_text(*on.library, status), failure);
    return nullptr;
  }
  take_tuned(*made, key);
  return made;
}

// What was measured before, where the library still takes it.
void Matmul::take_tuned(MatmulProblem& problem, const MatmulKey& key) const {
  Lt::Algorithm algorithm;
  if (!tuned.find || !tuned.find(key, algorithm)) return;
  const Lt::Status status = problem.choose(algorithm);
  if (status != Lt::success) tuned.drop(key, cublaslt_error_text(*problem.on().library, status));
}

std::shared_ptr<MatmulProblem> Matmul::find(const MatmulKey& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto place = problems_.find(key);
  return place != problems_.end() ? place->second : nullptr;
}

std::shared_ptr<MatmulProblem> Matmul::known(const MatmulKey& key, Failure& failure) {
  std::shared_ptr<MatmulProblem> found = find(key);
  if (found == nullptr) refuse(key, "it never met such a problem", failure);
  return found;
}

std::shared_ptr<MatmulProblem> Matmul::problem(const MatmulCall& call, bool for_run, Failure& failure) {
  const MatmulKey key = key_of(call);
  std::shared_ptr<MatmulProblem> found = find(key);
  if (found != nullptr && (found->runs() > 0 || !for_run)) return found;
  std::string why;
  const CublasLtDevice* on = cublaslt_on(call.device, why);
  if (on == nullptr) {
    refuse(call, why, failure);
    return nullptr;
  }
  // Threads of the autograd engine may have no context yet, and then a stream will not even say what it is.
  const CurrentContext current(*on->driver, on->context);
  if (for_run && is_capturing(*on->driver, call.stream)) {
    refuse(call, "its stream is being captured, and this problem never ran: run the model once with inputs like these "
                 "before the capture",
           failure);
    return nullptr;
  }
  if (found != nullptr) return found;
  found = prepare(*on, key, call, failure);
  if (found == nullptr) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (problems_.size() >= most_problems) problems_.clear();
  return problems_.emplace(key, found).first->second;
}

bool Matmul::run(const MatmulCall& call, Workspace& workspace, Failure& failure) {
  const std::shared_ptr<MatmulProblem> found = problem(call, true, failure);
  if (found == nullptr) return false;
  const CurrentContext current(*found->on().driver, found->on().context);
  return found->run(form, call, workspace, failure) || refuse(call, std::string(failure.text), failure);
}

bool Matmul::meet(const MatmulCall& call, MatmulKey& key, Failure& failure) {
  key = key_of(call);
  return problem(call, false, failure) != nullptr;
}

std::vector<std::pair<MatmulKey, uint64_t>> Matmul::problems() {
  std::vector<std::pair<MatmulKey, uint64_t>> met;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [key, problem] : problems_) met.emplace_back(key, problem->runs());
  return met;
}

bool Matmul::list(const MatmulKey& key, int most, std::vector<Lt::Candidate>& candidates, Failure& failure) {
  const std::shared_ptr<MatmulProblem> found = known(key, failure);
  if (found == nullptr) return false;
  const CurrentContext current(*found->on().driver, found->on().context);
  const Lt::Status status = found->list(key, most, candidates);
  return status == Lt::success || refuse(key, cublaslt_error_text(*found->on().library, status), failure);
}

bool Matmul::choose(const MatmulKey& key, const Lt::Algorithm& algorithm, Failure& failure) {
  const std::shared_ptr<MatmulProblem> found = known(key, failure);
  if (found == nullptr) return false;
  const CurrentContext current(*found->on().driver, found->on().context);
  const Lt::Status status = found->choose(algorithm);
  return status == Lt::success ||
         refuse(key, "the algorithm does not suit it: " + cublaslt_error_text(*found->on().library, status), failure);
}

}  // namespace te
