// The end of a flush: pending tensors become ordinary ones.
#pragma once

#include "autobatch/backward.h"
#include "autobatch/pending_tensor.h"

#include <c10/util/intrusive_ptr.h>

#include <exception>
#include <memory>
#include <vector>

namespace autobatch {

// The pending tensors that somebody can still reach, kept alive for the duration of a flush.
class HeldTensors {
 public:
  // Those of the part; its exports get a tensor if they have none.
  HeldTensors(Graph& graph, Split& part);

  bool empty() const { return tensors_.empty(); }
  // Gives each tensor storage of its own (shared with the views of it that are held, as in eager)
  // and its gradient edge. Those that were not computed because of `failure` become lost. Returns
  // the exports' tensors, undefined where lost.
  std::vector<at::Tensor> materialize(const std::shared_ptr<FlushRecord>& record,
                                      std::exception_ptr failure);
  // After materialize failed: what is still pending becomes lost. Returns the exports' tensors.
  std::vector<at::Tensor> lose_rest(std::exception_ptr failure);

 private:
  std::vector<at::Tensor> take_exports();

  std::vector<c10::intrusive_ptr<PendingTensor>> tensors_;
  std::vector<c10::intrusive_ptr<PendingTensor>> exports_;
};

// What to tell the user of a failure, later.
std::shared_ptr<const std::string> reason_of(const std::exception_ptr& failure);

}  // namespace autobatch
