#include "autobatch/placement.h"

#include "autobatch/rules.h"

#include <algorithm>
#include <utility>

namespace autobatch {
namespace {

// Where a batch's results are smaller than this, memory of their own costs more than it saves.
constexpr int64_t kLeastPiece = int64_t{1} << 12;  // bytes

// Output k of one signature, in all of its batches.
struct Output {
  const Value* first = nullptr;  // whose type and device are those of all
  int64_t length = 0;            // elements
  uint32_t batches = 0;
  uint32_t last_reader = kNone;  // the batch that read it last, and of which batch that was
  uint32_t last_source = kNone;
  uint32_t last_saver = kNone;  // the last batch whose backward reads it
  uint32_t slab = kNone;
  uint32_t grad = kNone;
  bool saved = false;         // a rule's backward reads it
  bool spanning = false;      // a batch reads the results of several batches, perhaps as one range
  std::vector<ValueId> held;  // what of it the user holds, or is read later
};

// Output k of one batch.
struct Piece {
  uint32_t output = 0;
  uint32_t last_use = 0;  // the last batch that writes or reads it
};

class Placer {
 public:
  Placer(FlushRecord& record, const PlacementNeeds& needs)
      : record_(record),
        tape_(record.tape),
        needs_(needs),
        batches_(std::span(record.batches).subspan(needs.first_batch)),
        first_output_(needs.num_signatures, kNone) {}

  void run() {
    add_outputs();
    find_held();
    find_uses();
    place();
  }

 private:
  const Node& first_node(const BatchRecord& batch) const {
    return tape_.nodes[record_.order[batch.first]];
  }

  void add_outputs() {
    batch_of_.resize(tape_.nodes.size(), kNone);
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const BatchRecord& batch = batches_[b];
      const Node& node = first_node(batch);
      uint32_t& first = first_output_[node.signature->local];
      if (first == kNone) {
        first = static_cast<uint32_t>(outputs_.size());
        for (uint32_t k = 0; k < node.num_values; ++k) {
          outputs_.emplace_back().first = &tape_.values[node.first_value + k];
        }
      }
      first_piece_.push_back(static_cast<uint32_t>(pieces_.size()));
      for (uint32_t k = 0; k < node.num_values; ++k) {
        ++outputs_[first + k].batches;
        pieces_.push_back({first + k, b});
      }
      for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
        batch_of_[record_.order[i]] = b;
        for (uint32_t k = 0; k < node.num_values; ++k) {
          outputs_[first + k].length += needs_.reads.extent(record_.order[i], k);
        }
      }
    }
  }

  // Of a result that is computed: which output it is of.
  uint32_t output_of(const Value& base) const {
    return pieces_[first_piece_[batch_of_[base.node]] + base.index].output;
  }

  void note_saved(uint32_t b, uint32_t number) {
    Output& output = outputs_[number];
    if (std::exchange(output.last_saver, b) == b) return;
    output.saved = true;
    saved_.emplace_back(b, number);
  }

  // Whether something will read the result after these batches.
  bool is_read_later(ValueId base) const {
    if (!needs_.read_later.empty() && needs_.read_later[base] != 0) return true;
    return tape_.is_looked_at(base);
  }

  // Of a result that was computed before these batches.
  void note_saved_earlier(uint32_t b, ValueId base) {
    const uint32_t slab = record_.store.places[base].slab;
    saver_of_earlier_.resize(record_.store.slabs.size(), kNone);
    if (std::exchange(saver_of_earlier_[slab], b) == b) return;
    batches_[b].saved.push_back(slab);
    ++record_.store.savers[slab];
  }

  void find_held() {
    if (needs_.held != nullptr) {
      for (ValueId base : *needs_.held) {
        const Value& value = tape_.values[base];
        if (batch_of_[value.node] != kNone) outputs_[output_of(value)].held.push_back(base);
      }
      return;
    }
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const BatchRecord& batch = batches_[b];
      const uint32_t num_values = first_node(batch).num_values;
      for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
        const ValueId first = tape_.nodes[record_.order[i]].first_value;
        for (uint32_t k = 0; k < num_values; ++k) {
          if (!is_read_later(first + k)) continue;
          outputs_[pieces_[first_piece_[b] + k].output].held.push_back(first + k);
        }
      }
    }
  }

  void find_uses() {
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const BatchRecord& batch = batches_[b];
      const Rule& rule = *batch.rule;
      const bool saves = batch.needs_grad && rule.saves();
      const Node& first = first_node(batch);
      for (uint32_t k = 0; saves && k < first.num_values; ++k) {
        if (rule.reads_result(k)) note_saved(b, pieces_[first_piece_[b] + k].output);
      }
      for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
        for (const Read& read : needs_.reads.of(record_.order[i])) {
          const uint32_t source = batch_of_[read.node];
          if (source == kNone) {
            const ValueId base = tape_.nodes[read.node].first_value + read.result;
            if (saves && rule.reads(read.slot)) note_saved_earlier(b, base);
            continue;
          }
          Piece& piece = pieces_[first_piece_[source] + read.result];
          Output& output = outputs_[piece.output];
          output.spanning |= output.last_reader == b && output.last_source != source;
          output.last_reader = b;
          output.last_source = source;
          if (saves && output.last_saver != b && rule.reads(read.slot)) note_saved(b, piece.output);
          piece.last_use = b;
        }
      }
    }
  }

  // Whether each batch's part of it gets memory of its own, for as long as it is needed.
  bool is_brief(const Output& output) const {
    return !needs_.keep_all && output.held.empty() && !output.saved && !output.spanning &&
           is_large(output);
  }

  bool is_large(const Output& output) const {
    const auto item = static_cast<int64_t>(c10::elementSize(output.first->dtype));
    return output.length * item >= kLeastPiece * output.batches;
  }

  void place() {
    Store& store = record_.store;
    first_slab_ = static_cast<uint32_t>(store.lengths.size());
    store.places.resize(tape_.values.size());
    store.last_use.assign(batches_.size(), {});
    for (uint32_t b = 0; b < batches_.size(); ++b) {
      const BatchRecord& batch = batches_[b];
      const Node& node = first_node(batch);
      for (uint32_t k = 0; k < node.num_values; ++k) {
        const auto& [number, last_use] = pieces_[first_piece_[b] + k];
        Output& output = outputs_[number];
        const bool brief = is_brief(output);
        if (brief || output.slab == kNone) output.slab = add_slab(last_use);
        // Elsewhere than on a CPU a call for each piece costs more than it saves.
        const bool apart = output.first->device.is_cpu() && is_large(output);
        if (apart || output.grad == kNone) output.grad = add_gradient();
        uint32_t& last = slab_last_use_[output.slab - first_slab_].second;
        const bool stays = !output.held.empty() || output.saved || needs_.keep_all;
        last = stays ? kNone : std::max(last, last_use);
        place_piece(batch, k, output);
      }
    }
    for (const auto& [slab, last] : slab_last_use_) {
      if (last != kNone) store.last_use[last].push_back(slab);
    }
    store.slabs.resize(store.lengths.size());
    store.savers.resize(store.lengths.size(), 0);
    for (const auto& [b, number] : saved_) {
      batches_[b].saved.push_back(outputs_[number].slab);
      ++store.savers[outputs_[number].slab];
    }
    std::erase_if(store.held_only, [&](const auto& held) { return store.savers[held.slab] != 0; });
    for (Output& output : outputs_) {
      if (output.held.empty() || output.saved || needs_.keep_all) continue;
      store.held_only.push_back({output.slab, std::move(output.held)});
    }
  }

  uint32_t add_slab(uint32_t last_use) {
    const auto slab = static_cast<uint32_t>(record_.store.lengths.size());
    record_.store.lengths.push_back(0);
    slab_last_use_.emplace_back(slab, last_use);
    return slab;
  }

  uint32_t add_gradient() {
    record_.store.grad_lengths.push_back(0);
    return static_cast<uint32_t>(record_.store.grad_lengths.size() - 1);
  }

  // In the order of the schedule.
  void place_piece(const BatchRecord& batch, uint32_t k, const Output& output) {
    Store& store = record_.store;
    int64_t& length = store.lengths[output.slab];
    int64_t& grad_length = store.grad_lengths[output.grad];
    for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
      const ValueId value = needs_.reads.first_value(record_.order[i]) + k;
      const int64_t extent = needs_.reads.extent(record_.order[i], k);
      store.places[value] = {output.slab, output.grad, length, grad_length};
      length += extent;
      grad_length += extent;
    }
  }

  FlushRecord& record_;
  const Tape& tape_;
  const PlacementNeeds& needs_;
  std::span<BatchRecord> batches_;      // to be run
  std::vector<uint32_t> first_output_;  // by signature
  std::vector<Output> outputs_;
  std::vector<uint32_t> batch_of_;     // by node
  std::vector<uint32_t> first_piece_;  // by batch
  std::vector<Piece> pieces_;
  std::vector<std::pair<uint32_t, uint32_t>> saved_;  // by a batch, an output
  std::vector<uint32_t>
      saver_of_earlier_;  // by earlier slab: the last batch whose backward reads it
  uint32_t first_slab_ = 0;
  std::vector<std::pair<uint32_t, uint32_t>> slab_last_use_;  // of new slabs; kNone: kept
};

}  // namespace

void place_values(FlushRecord& record, const PlacementNeeds& needs) { Placer(record, needs).run(); }

}  // namespace autobatch
