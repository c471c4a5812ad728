#include "autobatch/plan/member_order.h"

#include "autobatch/rules/rule.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace autobatch {
namespace {

class Orderer {
 public:
  Orderer(FlushGraph& graph, bool sorts) : graph_(graph), sorts_(sorts), first_use_(graph.size()) {}

  // Must be called for the batches in reverse order, so that the readers of a result are already
  // ordered.
  void order(const BatchRecord& batch, uint32_t b) {
    const std::span<uint32_t> members = graph_.members(batch);
    size_t first = 0;
    // Members with the same weight are consecutive. In most batches the first and the last member
    // have the same weight, so all members have this weight.
    const bool one = signature(members.front()) == signature(members.back());
    for (size_t i = one ? members.size() : 1; i <= members.size(); ++i) {
      if (i < members.size() && signature(members[i]) == signature(members[first])) continue;
      if (sorts_ && may_order(members[first])) sort(members.subspan(first, i - first));
      first = i;
    }
    note_uses(members, batch, b);
  }

  MemberOrder take() && { return {std::move(first_use_), num_sorted_}; }

 private:
  uint32_t signature(uint32_t number) const { return graph_.signature(number); }

  // Random ops keep capture order, because they draw numbers in this order.
  bool may_order(uint32_t number) const { return !graph_.kind(number).signature->op->random; }

  // Sorts members by the place of their first reader. Members without a reader come last.
  void sort(std::span<uint32_t> members) {
    uses_.clear();
    bool sorted = true;
    uint32_t least = kNone, most = 0, before = 0;
    for (const uint32_t number : members) {
      const uint32_t use = first_use_[number].place;
      sorted = sorted && use >= before;
      before = use;
      least = std::min(least, use);
      if (use != kNone) most = std::max(most, use);
      uses_.push_back(use);
    }
    if (sorted) return;
    ++num_sorted_;
    before_.assign(members.begin(), members.end());
    // In most cases one or two batches read the results, so the range of places is small, and a
    // counting sort is used.
    const size_t places = size_t{most} - least + 1;
    places <= 8 * members.size() ? deal_out(members, least, places) : compare(members);
  }

  void deal_out(std::span<uint32_t> members, uint32_t least, size_t places) {
    const auto at = [&](uint32_t use) { return use == kNone ? places : use - least; };
    // The counts are shifted by one position. The last bucket is for members without a reader.
    next_.assign(places + 2, 0);
    for (const uint32_t use : uses_) ++next_[at(use) + 1];
    std::partial_sum(next_.begin(), next_.end(), next_.begin());
    for (size_t i = 0; i < members.size(); ++i) members[next_[at(uses_[i])]++] = before_[i];
  }

  void compare(std::span<uint32_t> members) {
    keys_.clear();
    for (size_t i = 0; i < members.size(); ++i) {
      keys_.push_back(static_cast<uint64_t>(uses_[i]) << 32 | i);
    }
    std::sort(keys_.begin(), keys_.end());
    for (size_t i = 0; i < members.size(); ++i) {
      members[i] = before_[static_cast<uint32_t>(keys_[i])];
    }
  }

  void note_uses(std::span<const uint32_t> members, const BatchRecord& batch, uint32_t b) {
    const bool copies = batch.rule->copies_regions();  // the rule reads operands at any address
    for (size_t i = members.size(); i-- > 0;) {
      const auto place = batch.first + static_cast<uint32_t>(i);
      for (const uint32_t producer : graph_.producers(members[i])) {
        FirstUse& use = first_use_[producer];
        use = {copies ? use.place : place, b};
      }
    }
  }

  FlushGraph& graph_;
  const bool sorts_;
  size_t num_sorted_ = 0;
  std::vector<FirstUse> first_use_;  // indexed by node number
  // Scratch memory of sort().
  std::vector<uint32_t> uses_, before_, next_;
  std::vector<uint64_t> keys_;
};

}  // namespace

MemberOrder order_members(FlushGraph& graph, std::span<const BatchRecord> batches, bool sort) {
  Orderer orderer(graph, sort);
  for (size_t b = batches.size(); b-- > 0;) orderer.order(batches[b], static_cast<uint32_t>(b));
  return std::move(orderer).take();
}

}  // namespace autobatch
