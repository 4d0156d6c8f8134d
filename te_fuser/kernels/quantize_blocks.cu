// A matrix in E4M3 by a scale for each block of it, by rows or turned or both.
//
// own_scales.py writes the constants that this text reads in front of it:
//   Element, Narrow                 what the matrix is stored as, and the 8 bits
//   kByRows, kTurned                which of them are made
//   kSquare                         whether a block is 128 x 128, else 128 numbers of a row of what is made
//   kMost, kEpsilon, kPowerOfTwo    of the scales

constexpr int kSide = te::kTileRows, kVector = 16 / sizeof(Element), kLanes = kSide / kVector;
constexpr int kSlots = te::kTileThreads / kLanes, kTurns = kSide / 4 / kSlots;
// Of a multiprocessor: what is read waits in shared memory, and in float32 takes twice as much.
constexpr int kBlocks = sizeof(Element) == 4 ? 2 : te::kTileBlocks + 1;
static_assert(te::kTileColumns == kSide && te::kTileThreads >= 2 * kSide);

struct Scale {
  __device__ __forceinline__ float operator()(unsigned amax) const {
    return te::own_scale<kPowerOfTwo>(te::as_float(amax), kMost, kEpsilon);
  }
  static __device__ __forceinline__ float inverse(float scale) { return te::inverse_of<kPowerOfTwo>(scale); }
};

// Starts the copies of a thread's share of a tile, of which so many rows and columns are there.
template <bool kWhole>
TE_DEVICE void fetch_tile(const te::Waiting<Element, kVector>& waiting, const Element* from, int width, int rows,
                          bool works) {
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = 4 * turn * kSlots + r;
      if (kWhole || (row < rows && works))
        te::fetch<kVector>(&waiting.at(turn, r), from + static_cast<long long>(row) * width);
    }
}

extern "C" __global__ void __launch_bounds__(te::kTileThreads, kBlocks)
    quantize_blocks(const Element* elements, Narrow* by_rows, Narrow* by_columns, float* row_inverses,
                    float* column_inverses, long long tiles, int groups, int height, int width, int lead,
                    int turned_lead) {
  te::wait_for_earlier();
  extern __shared__ uint4 shelves[];  // the tile as it is read, and what is transposed
  __shared__ te::BlockScales scales;
  unsigned* const words = reinterpret_cast<unsigned*>(shelves + kSide * kSide * sizeof(Element) / 16);
  const te::Waiting<Element, kVector> waiting(shelves);
  // As TileText has it: a warp is 8 lanes by four fours.
  const int lane = threadIdx.x % 8 + threadIdx.x / 32 * 8 % kLanes;
  const int slot = threadIdx.x / 8 % 4 + threadIdx.x / (4 * kLanes) * 4;
  const unsigned across = (width + kSide - 1) / kSide;
  scales.begin();
  for (long long tile = blockIdx.x; tile < tiles; tile += groups) {
    const int top = static_cast<unsigned>(tile) / across * kSide, left = static_cast<unsigned>(tile) % across * kSide;
    const int column = left + kVector * lane;
    const Element* const from = elements + static_cast<long long>(top + 4 * slot) * width + column;
    if (top + kSide <= height && left + kSide <= width) {
      fetch_tile<true>(waiting, from, width, kSide, true);
    } else {
      waiting.clear();
      fetch_tile<false>(waiting, from, width, height - top - 4 * slot, column < width);
    }
    te::depart();
    te::arrived<0>();
    const te::BlockTile<Element, Narrow, kByRows, kTurned, kSquare, kVector, Scale> tile_of{
        waiting.own, scales, words, lane, slot, Scale{}};
    tile_of.find();
    tile_of.store({by_rows, row_inverses, lead}, {by_columns, column_inverses, turned_lead}, left, width, top, height);
  }
}
