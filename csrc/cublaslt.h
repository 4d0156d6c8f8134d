// cuBLASLt, opened when it is first needed: the copy that PyTorch has loaded, so that nothing is needed to build and
// nothing is loaded twice. The few functions and numbers that products need are declared here by hand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda_driver.h"

namespace te {

struct CublasLt {
  using Status = int;
  // What nobody looks into.
  using Handle = struct CublasLtHandle*;
  using Description = struct CublasLtDescription*;
  using Layout = struct CublasLtLayout*;
  using Preference = struct CublasLtPreference*;
  using Stream = CudaDriver::Stream;

  struct Algorithm {
    uint64_t data[8];
  };
  struct Candidate {  // cublasLtMatmulHeuristicResult_t
    Algorithm algorithm;
    size_t workspace;
    Status state;
    float waves;
    int reserved[4];
  };

  // Numbers of the library's enumerations.
  static constexpr int success = 0;
  static constexpr int not_supported = 15;
  static constexpr int compute_32f = 68;
  static constexpr int compute_32f_fast_tf32 = 77;
  static constexpr int r_32f = 0;  // cudaDataType_t
  static constexpr int r_16f = 2;
  static constexpr int r_16bf = 14;
  static constexpr int r_8f_e4m3 = 28;
  static constexpr int r_8f_e5m2 = 29;
  enum ScaleMode : int {  // what has one scale; blocks since 12.9
    scale_scalar = 0,
    scale_vec128 = 4,
    scale_blk128x128 = 5,
  };
  static constexpr int op_n = 0;
  static constexpr int op_t = 1;
  enum DescriptionAttribute : int {
    desc_transa = 3,
    desc_transb = 4,
    desc_epilogue = 7,
    desc_bias_pointer = 8,
    desc_aux_pointer = 11,
    desc_aux_ld = 12,
    desc_a_scale_pointer = 17,
    desc_b_scale_pointer = 18,
    desc_fast_accum = 25,
    desc_bias_data_type = 26,
    desc_a_scale_mode = 31,
    desc_b_scale_mode = 32,
  };
  enum PreferenceAttribute : int {
    pref_max_workspace_bytes = 1,
    pref_min_alignment_a_bytes = 5,
    pref_min_alignment_b_bytes = 6,
    pref_min_alignment_c_bytes = 7,
    pref_min_alignment_d_bytes = 8,
  };
  enum Epilogue : int {
    epilogue_default = 1,
    epilogue_bias = 4,
    epilogue_relu_bias = 6,
    epilogue_gelu_bias = 36,
    epilogue_gelu_aux_bias = 164,
    epilogue_dgelu = 192,
    epilogue_bgrada = 256,
    epilogue_bgradb = 512,
  };

  size_t (*get_version)();
  const char* (*get_status_name)(Status status);
  const char* (*get_status_string)(Status status);
  Status (*create)(Handle* handle);
  Status (*description_create)(Description* description, int compute_type, int scale_type);
  Status (*description_destroy)(Description description);
  Status (*description_set)(Description description, int attribute, const void* value, size_t bytes);
  Status (*layout_create)(Layout* layout, int type, uint64_t rows, uint64_t columns, int64_t leading_dimension);
  Status (*layout_destroy)(Layout layout);
  Status (*preference_create)(Preference* preference);
  Status (*preference_destroy)(Preference preference);
  Status (*preference_set)(Preference preference, int attribute, const void* value, size_t bytes);
  Status (*get_heuristic)(Handle handle, Description description, Layout a, Layout b, Layout c, Layout d,
                          Preference preference, int requested, Candidate* candidates, int* found);
  Status (*check_algorithm)(Handle handle, Description description, Layout a, Layout b, Layout c, Layout d,
                            const Algorithm* algorithm, Candidate* candidate);
  Status (*matmul)(Handle handle, Description description, const void* alpha, const void* a, Layout a_layout,
                   const void* b, Layout b_layout, const void* beta, const void* c, Layout c_layout, void* d,
                   Layout d_layout, const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                   Stream stream);
};

// The library on one device.
struct CublasLtDevice {
  const CublasLt* library;
  const CudaDriver* driver;
  CudaDriver::Context context;
  CublasLt::Handle handle;
  size_t most_workspace;  // bytes that a product may use
};

// The library, opened by the first call; nullptr when there is none, and `why` says what is missing. Needs no
// interpreter lock.
const CublasLt* cublaslt(std::string& why);

// The same with its handle on a device, made by the first call there.
const CublasLtDevice* cublaslt_on(int32_t device, std::string& why);

// The library's words for a status: "CUBLAS_STATUS_NOT_SUPPORTED".
std::string cublaslt_error_text(const CublasLt& library, CublasLt::Status status);

// Another file than the one that PyTorch has loaded; "" for that one again. Problems prepared already keep theirs.
void set_cublaslt(const std::string& path);

}  // namespace te
