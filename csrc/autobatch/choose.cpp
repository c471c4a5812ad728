// Which part of a graph a read needs, and what of a graph was computed already.
#include "autobatch/graph.h"

#include <unordered_set>
#include <utility>

namespace autobatch {
namespace {

enum Mark : uint8_t { kNeeded = 1, kLive = 2, kChosen = 4 };

}  // namespace

std::vector<NodeId> Graph::choose(at::ArrayRef<ValueId> targets) {
  const auto count = static_cast<NodeId>(tape_.nodes.size());
  is_computed_.resize(count, 0);
  for (; seen_ < count; ++seen_) waiting_.push_back(seen_);
  std::vector<uint8_t> marks(count, 0);
  for (NodeId id : waiting_) {
    const Node& node = tape_.nodes[id];
    for (uint32_t k = 0; k < node.num_values && marks[id] == 0; ++k) {
      if (tape_.is_looked_at(node.first_value + k)) marks[id] = kLive;
    }
  }
  for (ValueId target : targets) {
    if (!tape_.values[target].is_outside()) marks[tape_.values[target].node] |= kNeeded;
  }
  for (size_t i = waiting_.size(); i-- > 0;) {
    const NodeId id = waiting_[i];
    if (marks[id] == 0) continue;
    for (ValueId operand : tape_.operands_of(tape_.nodes[id])) {
      if (operand == kNone || tape_.values[operand].is_outside()) continue;
      marks[tape_.values[operand].node] |= marks[id];
    }
  }
  std::unordered_set<const Signature*> signatures;
  for (NodeId id : waiting_) {
    if ((marks[id] & kNeeded) != 0) signatures.insert(tape_.nodes[id].signature);
  }
  const auto is_ready = [&](const Node& node) {
    for (ValueId operand : tape_.operands_of(node)) {
      if (operand == kNone || tape_.values[operand].is_outside()) continue;
      const NodeId producer = tape_.values[operand].node;
      if (!is_computed_[producer] && (marks[producer] & kChosen) == 0) return false;
    }
    return true;
  };
  std::vector<NodeId> chosen;
  size_t left = 0;
  for (NodeId id : waiting_) {
    const Node& node = tape_.nodes[id];
    if (marks[id] == 0) continue;
    waiting_[left++] = id;
    if (targets.empty() || (marks[id] & kNeeded) != 0 ||
        (signatures.count(node.signature) != 0 && is_ready(node))) {
      marks[id] |= kChosen;
      chosen.push_back(id);
    }
  }
  waiting_.resize(left);
  return chosen;
}

void Graph::note_computed(at::ArrayRef<NodeId> nodes) {
  for (NodeId id : nodes) is_computed_[id] = 1;
  num_computed_ += nodes.size();
  std::erase_if(waiting_, [&](NodeId id) { return is_computed_[id] != 0; });
}

void Graph::forget_progress() {
  open_record_.reset();
  is_computed_.clear();
  num_computed_ = 0;
  waiting_.clear();
  seen_ = 0;
}

Graph::Loan::Loan(Graph& graph, Tape& to) : graph_(graph) {
  std::swap(graph.tape_, to);
  graph.lent_to_ = &to;
}

Graph::Loan::~Loan() { std::swap(graph_.tape_, *std::exchange(graph_.lent_to_, nullptr)); }

}  // namespace autobatch
