// PackedSequence: packing a padded tensor, and recurrent networks over packed rows. Both kinds of
// calls are computed by other ops, whose native rules support examples of any length. Lengths are
// input data, so their values are known during capture.
#include "autobatch/common/compat.h"
#include "autobatch/graph/pending_tensor.h"
#include "autobatch/rules/decompositions.h"
#include "autobatch/rules/packed_sequence.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace autobatch {
namespace {

using at::Tensor;
using Arguments = Decomposition::Arguments;
using Numbers = std::vector<int64_t>;

// Whether the value is a tensor [n] of positive numbers in descending order and is not pending.
bool are_lengths(const c10::IValue& value) {
  if (!is_strided(value, 1) || as_pending(value.toTensor()) != nullptr) return false;
  const Tensor& lengths = value.toTensor();
  if (!lengths.is_cpu() || lengths.scalar_type() != at::kLong || lengths.numel() == 0) return false;
  if (!lengths.is_contiguous()) return false;
  const auto* first = lengths.const_data_ptr<int64_t>();
  return std::is_sorted(first, first + lengths.numel(), std::greater<>()) &&
         first[lengths.numel() - 1] > 0;
}

Numbers numbers_of(const c10::IValue& value) {
  const Tensor& tensor = value.toTensor();
  const auto* first = tensor.const_data_ptr<int64_t>();
  return {first, first + tensor.numel()};
}

// Returns a tensor of the numbers. The tensor is not captured, because its content is known.
Tensor constant(const Numbers& numbers, at::Device device) {
  const c10::impl::ExcludeDispatchKeyGuard no_capture(compat::kDeferKey);
  return at::tensor(numbers, at::kLong).to(device);
}

// Returns how many of the sorted numbers are larger than 0, how many are larger than 1, and so on.
// The function converts the sorted lengths of sequences to the number of sequences at each step. It
// also converts these numbers back to the lengths.
Numbers counts_above(const Numbers& sorted) {
  Numbers counts(static_cast<size_t>(sorted.front()));
  for (size_t i = 0; i < counts.size(); ++i) {
    counts[i] = std::ranges::count_if(sorted, [&](int64_t n) { return n > int64_t(i); });
  }
  return counts;
}

// --- _pack_padded_sequence(x [T, B, ..], lengths, batch_first) -> (rows [n, ..], sizes [T]) ---

bool covers_packing(const OpInfo&, Arguments arguments) {
  if (!is_strided(arguments[0]) || !are_lengths(arguments[1])) return false;
  const Tensor &x = arguments[0].toTensor(), &lengths = arguments[1].toTensor();
  if (x.dim() < 2 || x.numel() == 0) return false;
  const bool batch_first = arguments[2].toBool();
  return x.size(batch_first ? 0 : 1) == lengths.numel() &&
         lengths.const_data_ptr<int64_t>()[0] <= x.size(batch_first ? 1 : 0);
}

Decomposition::Results pack(const OpInfo&, Arguments arguments) {
  const Tensor& x = arguments[0].toTensor();
  const Numbers lengths = numbers_of(arguments[1]), sizes = counts_above(lengths);
  const int64_t batch_dim = arguments[2].toBool() ? 0 : 1;
  const Tensor batch_sizes = constant(sizes, at::kCPU);
  if (lengths.size() == 1) {
    const Tensor rows = x.select(batch_dim, 0).narrow(0, 0, lengths[0]);
    return {rows.clone(at::MemoryFormat::Contiguous), batch_sizes};
  }
  const int64_t step = batch_dim == 0 ? 1 : x.size(1), sequence = batch_dim == 0 ? x.size(1) : 1;
  Numbers places;
  for (size_t t = 0; t < sizes.size(); ++t) {
    for (int64_t b = 0; b < sizes[t]; ++b) places.push_back(int64_t(t) * step + b * sequence);
  }
  return {x.flatten(0, 1).index_select(0, constant(places, x.device())), batch_sizes};
}

// --- lstm(rows [n, D], sizes [T], (h, c), weights, ..), gru and rnn ---

// Positions of arguments.
enum { kRows, kSizes, kStates, kWeights, kHasBiases, kLayers, kDropout, kTraining };

const Tensor& state_of(const c10::IValue& states) {
  return states.isTensor() ? states.toTensor() : states.toListRef()[0].toTensor();
}

bool covers_rnn(const OpInfo&, Arguments arguments) {
  if (!is_strided(arguments[kRows], 2) || !are_lengths(arguments[kSizes])) return false;
  const Numbers sizes = numbers_of(arguments[kSizes]);
  const bool drops = arguments[kTraining].toBool() && arguments[kDropout].toDouble() > 0;
  // With dropout between layers, eager draws the random numbers of all sequences together.
  if (drops && arguments[kLayers].toInt() > 1 && sizes[0] > 1) return false;
  const Tensor &rows = arguments[kRows].toTensor(), &state = state_of(arguments[kStates]);
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == rows.size(0) &&
         state.dim() == 3 && state.size(1) == sizes[0];
}

c10::IValue state_of_sequence(const c10::IValue& states, int64_t b) {
  if (states.isTensor()) return states.toTensor().narrow(1, b, 1);
  c10::List<Tensor> list;
  for (const c10::IValue& state : states.toListRef())
    list.push_back(state.toTensor().narrow(1, b, 1));
  return list;
}

// Returns the results for one sequence: its rows [n, 1, H], and its states [L, 1, H].
Decomposition::Results run_sequence(const OpInfo& op, Arguments arguments, const Tensor& x,
                                    int64_t b) {
  torch::jit::Stack stack{x.unsqueeze(1), state_of_sequence(arguments[kStates], b)};
  stack.insert(stack.end(), arguments.begin() + kWeights, arguments.end());
  stack.emplace_back(/*batch_first=*/false);
  const std::string name = op.name.substr(0, op.name.find('.'));
  find_op(name.c_str(), "input").handle.callBoxed(stack);
  Decomposition::Results results;
  for (const c10::IValue& value : stack) results.push_back(value.toTensor());
  return results;
}

Decomposition::Results run_rnn(const OpInfo& op, Arguments arguments) {
  const Tensor& rows = arguments[kRows].toTensor();
  const Packing packing(counts_above(numbers_of(arguments[kSizes])));
  std::vector<Decomposition::Results> found;  // by result, then by sequence
  Numbers order(static_cast<size_t>(packing.rows()));
  int64_t first = 0;
  for (int64_t b = 0; b < packing.sequences(); ++b) {
    Numbers places;
    for (int64_t t = 0; b < packing.count(t); ++t) places.push_back(packing.begin(t) + b);
    for (size_t t = 0; t < places.size(); ++t) order[places[t]] = first + int64_t(t);
    first += static_cast<int64_t>(places.size());
    const bool alone = packing.sequences() == 1;
    const Tensor x = alone ? rows : rows.index_select(0, constant(places, rows.device()));
    const Decomposition::Results results = run_sequence(op, arguments, x, b);
    found.resize(results.size());
    for (size_t k = 0; k < results.size(); ++k) found[k].push_back(results[k]);
  }
  Decomposition::Results results;
  for (size_t k = 0; k < found.size(); ++k) {
    const bool alone = found[k].size() == 1;
    const Tensor all = alone ? found[k][0] : at::cat(found[k], k == 0 ? 0 : 1);
    if (k > 0) {
      results.push_back(all);
      continue;
    }
    const Tensor by_row = at::_unsafe_view(all, {all.size(0), all.size(2)});
    results.push_back(alone ? by_row : by_row.index_select(0, constant(order, rows.device())));
  }
  return results;
}

constexpr Decomposition kRnn{covers_rnn, run_rnn};
constexpr DecompositionEntry kEntries[] = {
    {"aten::_pack_padded_sequence", {covers_packing, pack}},
    {"aten::lstm.data", kRnn},
    {"aten::gru.data", kRnn},
    {"aten::rnn_tanh.data", kRnn},
    {"aten::rnn_relu.data", kRnn},
};

}  // namespace

DecompositionTable packed_decompositions() { return kEntries; }

}  // namespace autobatch
