// The weights that one launch of te_fuser/kernels/quantize_weights.cu quantizes: its parameter, for the kernel and for
// the native runtime that fills it.
#ifndef TE_QUANTIZE_WEIGHTS_H
#define TE_QUANTIZE_WEIGHTS_H

namespace te {

// Where a weight lies, and where it goes.
struct WeightPlaces {
  const void* elements;  // [height, width]
  const float* scale;
  float* amax;  // none: nobody asks
  void* rows;   // 8 bits as the weight lies; none: not made
  void* turned; // the same [width, height]; none: not made
  int height, width;
  int first_tile;  // of those of all weights
  int kind;        // of elements: 0 float, 1 bfloat16, 2 float16
};

struct WeightList {
  static constexpr int most = 72;  // a launch takes 4096 bytes of parameters
  WeightPlaces weights[most];
};

}  // namespace te

#endif
