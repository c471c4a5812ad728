#include "autobatch/placement.h"

#include "autobatch/rules.h"

#include <algorithm>

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
  bool held = false;      // the user holds some of it
  bool saved = false;     // a rule's backward reads it
  bool spanning = false;  // a batch reads the results of several batches, perhaps as one range
};

// Output k of one batch.
struct Piece {
  uint32_t output = 0;
  uint32_t last_use = 0;  // the last batch that writes or reads it
};

class Placer {
 public:
  Placer(FlushRecord& record, size_t num_signatures, bool keep_all)
      : record_(record),
        tape_(record.tape),
        keep_all_(keep_all),
        first_output_(num_signatures, kNone) {}

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
    for (uint32_t b = 0; b < record_.batches.size(); ++b) {
      const BatchRecord& batch = record_.batches[b];
      const Node& node = first_node(batch);
      uint32_t& first = first_output_[node.signature->local];
      if (first == kNone) {
        first = static_cast<uint32_t>(outputs_.size());
        for (uint32_t k = 0; k < node.num_values; ++k) {
          outputs_.push_back({&tape_.values[node.first_value + k]});
        }
      }
      first_piece_.push_back(static_cast<uint32_t>(pieces_.size()));
      for (uint32_t k = 0; k < node.num_values; ++k) {
        ++outputs_[first + k].batches;
        pieces_.push_back({first + k, b});
      }
      for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
        batch_of_[record_.order[i]] = b;
        const ValueId value = tape_.nodes[record_.order[i]].first_value;
        for (uint32_t k = 0; k < node.num_values; ++k) {
          outputs_[first + k].length += tape_.values[value + k].geometry->extent;
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

  void find_held() {
    for (const Value& value : tape_.values) {
      if (value.tensor == nullptr || value.is_outside()) continue;
      if (batch_of_[value.node] == kNone) continue;
      outputs_[output_of(tape_.values[value.base])].held = true;
    }
  }

  void find_uses() {
    for (uint32_t b = 0; b < record_.batches.size(); ++b) {
      const BatchRecord& batch = record_.batches[b];
      const Rule& rule = *batch.rule;
      const bool saves = batch.needs_grad && rule.saves();
      const Node& first = first_node(batch);
      for (uint32_t k = 0; saves && k < first.num_values; ++k) {
        if (rule.reads_result(k)) note_saved(b, pieces_[first_piece_[b] + k].output);
      }
      for (uint32_t i = batch.first; i < batch.first + batch.count; ++i) {
        const auto operands = tape_.operands_of(tape_.nodes[record_.order[i]]);
        for (size_t slot = 0; slot < operands.size(); ++slot) {
          if (operands[slot] == kNone) continue;
          const Value& base = tape_.values[tape_.values[operands[slot]].base];
          if (base.is_outside()) continue;
          const uint32_t source = batch_of_[base.node];
          Piece& piece = pieces_[first_piece_[source] + base.index];
          Output& output = outputs_[piece.output];
          output.spanning |= output.last_reader == b && output.last_source != source;
          output.last_reader = b;
          output.last_source = source;
          if (saves && output.last_saver != b && rule.reads(slot)) note_saved(b, piece.output);
          piece.last_use = b;
        }
      }
    }
  }

  // Whether each batch's part of it gets memory of its own, for as long as it is needed.
  bool is_brief(const Output& output) const {
    return !keep_all_ && !output.held && !output.saved && !output.spanning && is_large(output);
  }

  bool is_large(const Output& output) const {
    const auto item = static_cast<int64_t>(c10::elementSize(output.first->dtype));
    return output.length * item >= kLeastPiece * output.batches;
  }

  void place() {
    Store& store = record_.store;
    store.places.resize(tape_.values.size());
    store.last_use.resize(record_.batches.size());
    for (uint32_t b = 0; b < record_.batches.size(); ++b) {
      const BatchRecord& batch = record_.batches[b];
      const Node& node = first_node(batch);
      for (uint32_t k = 0; k < node.num_values; ++k) {
        const auto& [number, last_use] = pieces_[first_piece_[b] + k];
        Output& output = outputs_[number];
        const bool brief = is_brief(output);
        if (brief || output.slab == kNone) output.slab = add_slab(last_use);
        // Elsewhere than on a CPU a call for each piece costs more than it saves.
        const bool apart = output.first->device.is_cpu() && is_large(output);
        if (apart || output.grad == kNone) output.grad = add_gradient();
        uint32_t& last = slab_last_use_[output.slab];
        last = output.held || output.saved || keep_all_ ? kNone : std::max(last, last_use);
        place_piece(batch, k, output);
      }
    }
    for (uint32_t s = 0; s < slab_last_use_.size(); ++s) {
      if (slab_last_use_[s] != kNone) store.last_use[slab_last_use_[s]].push_back(s);
    }
    store.slabs.resize(store.lengths.size());
    store.savers.resize(store.lengths.size(), 0);
    for (const auto& [b, number] : saved_) {
      record_.batches[b].saved.push_back(outputs_[number].slab);
      ++store.savers[outputs_[number].slab];
    }
    for (const Output& output : outputs_) {
      if (output.held && !output.saved && !keep_all_) store.held_only.push_back(output.slab);
    }
  }

  uint32_t add_slab(uint32_t last_use) {
    record_.store.lengths.push_back(0);
    slab_last_use_.push_back(last_use);
    return static_cast<uint32_t>(slab_last_use_.size() - 1);
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
      const ValueId value = tape_.nodes[record_.order[i]].first_value + k;
      store.places[value] = {output.slab, output.grad, length, grad_length};
      length += tape_.values[value].geometry->extent;
      grad_length += tape_.values[value].geometry->extent;
    }
  }

  FlushRecord& record_;
  const Tape& tape_;
  bool keep_all_;
  std::vector<uint32_t> first_output_;  // by signature
  std::vector<Output> outputs_;
  std::vector<uint32_t> batch_of_;     // by node
  std::vector<uint32_t> first_piece_;  // by batch
  std::vector<Piece> pieces_;
  std::vector<std::pair<uint32_t, uint32_t>> saved_;  // by a batch, an output
  std::vector<uint32_t> slab_last_use_;               // kNone: kept
};

}  // namespace

void place_values(FlushRecord& record, size_t num_signatures, bool keep_all) {
  Placer(record, num_signatures, keep_all).run();
}

}  // namespace autobatch
