// Gradients of queries, keys and values in 8 bits, packed by rows and turned, from one reading; their columns added up.
//
// packed_tiles.py writes the constants that this text reads in front of it:
//   Element, SumElement, OutElement    storage types: what is read, the sums, the result
//   kQueries, kGroups, kHeadDim        query heads, key/value heads, features of a head
//   kBlocked                           [all queries | all keys | all values], else [queries..., key, value] of each group
//   kSamplesFirst                      tokens are counted sample by sample, else position by position
//   kSums                              whether columns are added up
//   kInBlocks                          whether 128 numbers have a scale of their own, else all have one that is given
//   kBlocks, kTiles                    blocks of a multiprocessor, blocks side by side in a row
//
// A block has kColumns features and walks down tiles of 128 tokens, as TileText has it. Sums and the largest magnitude are
// those of what is neither scaled nor rounded.

constexpr int kThreads = 256, kVector = 16 / sizeof(Element), kLanes = kInBlocks ? te::kTileColumns / kVector : 8;
constexpr int kSlots = kThreads / kLanes;
constexpr int kHeads = kQueries + 2 * kGroups, kPerGroup = kQueries / kGroups, kFeatures = kHeads * kHeadDim;
constexpr int kColumns = kLanes * kVector, kAhead = 4, kTurns = te::kTileRows / (kSlots * kAhead);
static_assert(kHeadDim % kVector == 0, "vectors do not cross heads");
static_assert(kInBlocks || kTurns == 1, "a thread has four rows of a tile, or those of blocks");

// Where the gradient of a head lies, in vectors.
struct Source {
  const Element* from;
  long long by_position, by_sample;
};

// Of the head at this place in the packed row; strides are those of groups and, queries, of heads of a group.
TE_DEVICE Source source_of(int place, const Source& queries, const Source& keys, const Source& values, int query_group,
                           int query_head, int key_group, int value_group) {
  const int other = place - kQueries, inside = place % (kPerGroup + 2);
  const int kind = kBlocked ? (other < 0 ? 0 : 1 + other / kGroups) : inside < kPerGroup ? 0 : inside - kPerGroup + 1;
  const int group = kBlocked ? (kind == 0 ? place / kPerGroup : other % kGroups) : place / (kPerGroup + 2);
  const int head = kBlocked ? place % kPerGroup : inside;
  Source found = kind == 0 ? queries : kind == 1 ? keys : values;
  const long long step = kind == 0   ? static_cast<long long>(group) * query_group + head * query_head
                         : kind == 1 ? static_cast<long long>(group) * key_group
                                     : static_cast<long long>(group) * value_group;
  found.from += step * kVector;
  return found;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) packed_tiles(
    const Element* __restrict__ queries, const Element* __restrict__ keys, const Element* __restrict__ values,
    const float* __restrict__ scale, float* __restrict__ amax, OutElement* __restrict__ out,
    OutElement* __restrict__ turned, SumElement* __restrict__ sums, float* __restrict__ partial,
    long long rows, int samples, int groups, int query_position, int query_sample, int query_group, int query_head,
    int key_position, int key_sample, int key_group, int value_position, int value_sample, int value_group) {
  te::wait_for_earlier();
  if (kSums) te::let_next_start();
  extern __shared__ uint4 shelves[];  // by blocks: the tile as it is read, and what is turned
  __shared__ uint4 tiles[kInBlocks ? 1 : 2][kInBlocks ? 1 : te::kTileRows * kColumns / 16];
  __shared__ te::BlockScales block_scales;
  // As TileText has it: a warp is 8 lanes by four fours.
  const int lane = kLanes == 8 ? threadIdx.x % 8 : threadIdx.x % 8 + threadIdx.x / 32 * 8 % kLanes;
  const int slot = kLanes == 8 ? threadIdx.x / 8 : threadIdx.x / 8 % 4 + threadIdx.x / (4 * kLanes) * 4;
  const int tile = blockIdx.x % kTiles, group = blockIdx.x / kTiles, left = tile * kColumns;
  const int column = left + lane * kVector;
  const bool works = column < kFeatures;
  const Source source = source_of(works ? column / kHeadDim : 0, {queries, query_position, query_sample},
                                  {keys, key_position, key_sample}, {values, value_position, value_sample},
                                  query_group, query_head, key_group, value_group);
  const Element* const from = source.from + column % kHeadDim;
  const unsigned inner = kSamplesFirst ? static_cast<unsigned>(rows / samples) : static_cast<unsigned>(samples);
  const te::Waiting<Element, kVector> waiting(shelves);
  if (kInBlocks) block_scales.begin();
  const float factor = kInBlocks ? 1.0f : scale[0];
  float total[kVector] = {};
  unsigned largest = 0u;
  int phase = 0;
  const long long step = static_cast<long long>(groups) * te::kTileRows;
  for (long long start = static_cast<long long>(group) * te::kTileRows; start < rows; start += step, phase ^= kInBlocks ? 0 : 1) {
    te::Vector<Element, kVector> read[kAhead] = {};
    if (kInBlocks && (start + te::kTileRows > rows || left + kColumns > kFeatures)) waiting.clear();
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
      for (int ahead = 0; ahead < kAhead; ++ahead) {
        const long long row = start + (turn * kSlots + slot) * kAhead + ahead;
        if (works && row < rows) {
          const unsigned outer = static_cast<unsigned>(row) / inner, within = static_cast<unsigned>(row) % inner;
          const long long position = kSamplesFirst ? within : outer, sample = kSamplesFirst ? outer : within;
          const Element* const at = from + (position * source.by_position + sample * source.by_sample) * kVector;
          if constexpr (kInBlocks) te::fetch<kVector>(&waiting.at(turn, ahead), at);
          else read[ahead] = te::load<kVector>(at);
        }
      }
    if constexpr (kInBlocks) {
      te::depart();
      te::arrived<0>();
      if constexpr (kSums)
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
          for (int ahead = 0; ahead < kAhead; ++ahead)
#pragma unroll
            for (int i = 0; i < kVector; ++i) total[i] += te::get(waiting.at(turn, ahead), i);
      unsigned* const words = reinterpret_cast<unsigned*>(shelves + te::kTileRows * kColumns * sizeof(Element) / 16);
      te::store_blocks<true, true>(waiting, block_scales, words, lane, slot, out, turned, left, kFeatures, start, rows);
      continue;
    }
    unsigned* const words = reinterpret_cast<unsigned*>(tiles[phase]);
    te::FourRows<kVector> four;
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      float scaled[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float number = te::get(read[ahead], i);
        total[i] += number;
        largest = te::larger(largest, number);
        scaled[i] = number * factor;
      }
      te::put_row<OutElement>(four, ahead, scaled);
      const long long row = start + slot * kAhead + ahead;
      if (works && row < rows)
        te::access::write<kVector / 4>(reinterpret_cast<unsigned*>(out + row * kFeatures + column), four.words[ahead]);
    }
    te::put_columns(words, lane, slot, four);
    __syncthreads();
    te::store_columns<kThreads, kColumns, kVector>(turned, words, left, kFeatures, start, rows);
  }
  if constexpr (kSums) {
    __shared__ float shared_sums[kThreads * kVector / 4];
    te::store_tile_sums<kThreads, kLanes>(groups == 1, sums + left, partial + static_cast<long long>(group) * kFeatures + left,
                                          shared_sums, lane, kFeatures - left, total);
  }
  if constexpr (!kInBlocks) {
    __shared__ float raised[32];
    te::raise<kThreads>(raised, amax, largest);
  }
}

// Adds up what the blocks found, in a fixed order.
extern "C" __global__ void __launch_bounds__(te::kFinishThreads) packed_tiles_finish(
    const float* __restrict__ partial, SumElement* __restrict__ sums, int groups) {
  te::wait_for_earlier();
  __shared__ float found[32][33];
  te::finish(found, partial, sums, 0, groups, blockIdx.x, 0, kFeatures);
}
